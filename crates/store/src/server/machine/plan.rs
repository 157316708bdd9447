//! A request to create an object or a pack, after validation: names, lengths and offsets of all objects.

use crate::protocol::{Label, MemberSpec, Refusal, RequestKind, check_labels, pack_layout};

/// What is to be created.
#[derive(Debug)]
pub(super) struct Plan<'a> {
    /// The name and description of the object, or of the pack as a whole.
    pub(super) label: &'a Label,
    /// The objects of a pack besides its first; empty for a single object.
    pub(super) members: &'a [MemberSpec],
    /// Where the bytes of each member begin.
    pub(super) offsets: Vec<u64>,
    /// How long the memory is that holds all bytes.
    pub(super) len: u64,
    pub(super) place: u32,
}

impl<'a> Plan<'a> {
    pub(super) fn new(kind: &'a RequestKind) -> Result<Self, Refusal> {
        let RequestKind::Create { label, len, members, place } = kind else {
            return Err(Refusal::malformed("only creation is planned"));
        };
        check_labels(label, members)?;
        let too_long = || Refusal::malformed("a pack is longer than there are numbers");
        let (offsets, total) = pack_layout(members.iter().map(|member| member.len)).ok_or_else(too_long)?;
        let len = if members.is_empty() { *len } else { total };
        Ok(Self { label, members, offsets, len, place: *place })
    }

    /// How many objects there are, the first of a pack included.
    pub(super) fn count(&self) -> usize {
        1 + self.members.len()
    }

    /// The names of all objects.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        let labels = self.members.iter().map(|member| &member.label).chain([self.label]);
        labels.map(|label| &label.name[..])
    }
}

#[cfg(test)]
mod tests {
    use super::super::simulation::create;
    use super::*;

    #[test]
    fn the_members_of_a_pack_follow_each_other_in_its_memory() {
        let kind = create("p", 7, &[("p/a", 100), ("p/b", 0), ("p/c", 5000)], 1);
        let plan = Plan::new(&kind).unwrap();
        assert_eq!((plan.count(), plan.place), (4, 1));
        assert_eq!(plan.names().collect::<Vec<_>>(), ["p/a", "p/b", "p/c", "p"]);
        assert!(plan.offsets.is_sorted() && plan.offsets[0] == 0, "{:?}", plan.offsets);
        assert_eq!(plan.len, plan.offsets[2] + 5000, "the length of a pack is that of its members");
    }

    #[test]
    fn a_single_object_has_the_length_that_was_asked_for() {
        let kind = create("x", 7, &[], 0);
        let plan = Plan::new(&kind).unwrap();
        assert_eq!((plan.count(), plan.len, plan.offsets.len()), (1, 7, 0));
    }

    #[test]
    fn what_creates_nothing_has_no_plan() {
        assert_eq!(
            Plan::new(&RequestKind::Status).unwrap_err(),
            Refusal::malformed("only creation is planned")
        );
        let endless = create("p", 0, &[("p/a", u64::MAX), ("p/b", 1)], 0);
        let refused = Refusal::malformed("a pack is longer than there are numbers");
        assert_eq!(Plan::new(&endless).unwrap_err(), refused);
    }
}
