//! A validated request to create an object or a pack: names, lengths and offsets of all objects.

use crate::protocol::{Label, MemberSpec, Refusal, RequestKind, check_labels, pack_layout};

/// The objects that a request is going to create, with their names and their offsets in the memory of the pack.
#[derive(Debug)]
pub(super) struct CreatePlan<'a> {
    /// The name and metadata of the object, or of the pack as a whole.
    pub(super) label: &'a Label,
    /// The objects of a pack besides its first object; empty for a single object.
    pub(super) members: &'a [MemberSpec],
    /// The offset of each of the `members` in the memory of the pack, in bytes.
    pub(super) offsets: Vec<u64>,
    /// The length of the memory that holds all objects, in bytes.
    pub(super) len: u64,
    pub(super) place: u32,
}

impl<'a> CreatePlan<'a> {
    pub(super) fn new(kind: &'a RequestKind) -> Result<Self, Refusal> {
        let RequestKind::Create { label, len, members, place } = kind else {
            return Err(Refusal::malformed("the request creates no object"));
        };
        check_labels(label, members)?;
        let too_long = || Refusal::malformed("the length of a pack does not fit 64 bits");
        let (offsets, total) = pack_layout(members.iter().map(|member| member.len)).ok_or_else(too_long)?;
        let len = if members.is_empty() { *len } else { total };
        Ok(Self { label, members, offsets, len, place: *place })
    }

    /// Returns the number of objects that a request creates, including the first object of a pack.
    pub(super) fn count(&self) -> usize {
        1 + self.members.len()
    }

    /// Returns the names of all objects that a request creates.
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
    fn members_of_a_pack_are_consecutive() {
        let kind = create("p", 7, &[("p/a", 100), ("p/b", 0), ("p/c", 5000)], 1);
        let plan = CreatePlan::new(&kind).unwrap();
        assert_eq!((plan.count(), plan.place), (4, 1));
        assert_eq!(plan.names().collect::<Vec<_>>(), ["p/a", "p/b", "p/c", "p"]);
        assert!(plan.offsets.is_sorted() && plan.offsets[0] == 0, "{:?}", plan.offsets);
        assert_eq!(plan.len, plan.offsets[2] + 5000, "the length of a pack follows from its members");
    }

    #[test]
    fn a_single_object_has_the_requested_length() {
        let kind = create("x", 7, &[], 0);
        let plan = CreatePlan::new(&kind).unwrap();
        assert_eq!((plan.count(), plan.len, plan.offsets.len()), (1, 7, 0));
    }

    #[test]
    fn a_request_that_creates_nothing_has_no_plan() {
        assert_eq!(
            CreatePlan::new(&RequestKind::Status).unwrap_err(),
            Refusal::malformed("the request creates no object")
        );
        let endless = create("p", 0, &[("p/a", u64::MAX), ("p/b", 1)], 0);
        let refused = Refusal::malformed("the length of a pack does not fit 64 bits");
        assert_eq!(CreatePlan::new(&endless).unwrap_err(), refused);
    }
}
