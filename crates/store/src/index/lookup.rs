//! From a name to the object that has it now: a table of hashes that one process writes and many read.
//!
//! Open addressing with a short, bounded probe. A reader may miss a name while the table is put in order, and some
//! names may not be in it at all: a hit is final, and a miss is a question for the server.

use crate::cells::Cells;
use crate::convert::to_usize;
use crate::id::ObjectId;

use super::layout::Index;

/// How many buckets are looked at, from where the hash points.
const PROBES: usize = 32;

/// A bucket that was used: a search goes on behind it.
const GONE: u64 = u64::MAX;

/// A bucket that may hold the object of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) id: ObjectId,
    bucket: usize,
}

impl<C: Cells> Index<C> {
    /// The objects that a name may mean; which of them has it is in their records.
    pub(crate) fn candidates(&self, name: &str) -> impl Iterator<Item = Found> {
        let buckets = self.buckets(name);
        buckets
            .map(|bucket| (bucket, self.cells().load_acquire(bucket)))
            .take_while(|(_, value)| *value != 0)
            .filter_map(|(bucket, value)| {
                let id = ObjectId::from_u64(value)?;
                (id.slot() < self.geometry().slots).then_some(Found { id, bucket })
            })
    }

    /// Makes a name mean `id`, instead of `before` where it meant that: by one store.
    pub(crate) fn point(&self, name: &str, before: Option<ObjectId>, id: ObjectId) {
        let known = before.and_then(|before| self.candidates(name).find(|found| found.id == before));
        let free = || {
            let is_free = |bucket: &usize| [0, GONE].contains(&self.cells().load(*bucket));
            self.buckets(name).find(is_free)
        };
        // Where there is no room, the name is found by asking the server.
        if let Some(bucket) = known.map(|found| found.bucket).or_else(free) {
            self.cells().store_release(bucket, id.as_u64());
        }
    }

    /// Makes a name mean nothing, if it means `id`.
    pub(crate) fn forget(&self, name: &str, id: ObjectId) {
        if let Some(found) = self.candidates(name).find(|found| found.id == id) {
            // A search ends at an empty bucket, so this one may be empty only if the next is.
            let next = self.next_bucket(found.bucket);
            let empty = if self.cells().load(next) == 0 { 0 } else { GONE };
            self.cells().store_release(found.bucket, empty);
        }
    }

    /// Empties the table, to be filled anew.
    pub(crate) fn clear_names(&self) {
        let first = self.geometry().first_bucket();
        for bucket in first..first + self.geometry().buckets() {
            if self.cells().load(bucket) != 0 {
                self.cells().store(bucket, 0);
            }
        }
    }

    fn buckets(&self, name: &str) -> impl Iterator<Item = usize> {
        let geometry = self.geometry();
        let mask = geometry.buckets() - 1;
        let start = to_usize(hash(name)) & mask;
        (0..PROBES.min(geometry.buckets())).map(move |step| geometry.first_bucket() + ((start + step) & mask))
    }

    fn next_bucket(&self, bucket: usize) -> usize {
        let geometry = self.geometry();
        geometry.first_bucket() + ((bucket - geometry.first_bucket() + 1) & (geometry.buckets() - 1))
    }
}

/// FNV-1a, mixed once more because the table looks at the low bits only. Names that collide on purpose are found by
/// asking the server: nothing here gets slow.
fn hash(name: &str) -> u64 {
    let mixed = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    (mixed ^ mixed >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::super::layout::Geometry;
    use super::*;
    use crate::cells::recorded::RecordedCells;

    fn index(slots: usize) -> Index<RecordedCells> {
        let geometry = Geometry { slots, allocations: 1 };
        Index::format(RecordedCells::new(geometry.cells()), geometry)
    }

    proptest! {
        #[test]
        fn a_name_means_what_it_was_last_made_to_mean(
            steps in proptest::collection::vec((0_usize..12, any::<bool>()), 0..200)
        ) {
            let index = index(16);
            let mut model: BTreeMap<usize, ObjectId> = BTreeMap::new();
            for (generation, (name, point)) in steps.into_iter().enumerate() {
                let text = format!("name-{name}");
                let id = ObjectId::new(name, generation as u64);
                let before = model.remove(&name);
                if point {
                    index.point(&text, before, id);
                    model.insert(name, id);
                } else if let Some(before) = before {
                    index.forget(&text, before);
                }
                // Sixteen names in thirty-two buckets, all of which are looked at: none is missed.
                for name in 0..12 {
                    let text = format!("name-{name}");
                    let own = index.candidates(&text).filter(|found| found.id.slot() == name);
                    let own: Vec<_> = own.map(|found| found.id).collect();
                    prop_assert_eq!(own, model.get(&name).copied().into_iter().collect::<Vec<_>>());
                }
            }
            index.clear_names();
            for name in 0..12 {
                prop_assert_eq!(index.candidates(&format!("name-{name}")).count(), 0);
            }
        }
    }

    #[test]
    fn a_version_replaces_another_by_one_store() {
        let index = index(16);
        let (old, new) = (ObjectId::new(1, 0), ObjectId::new(2, 0));
        index.point("name", None, old);
        index.cells().take();
        index.point("name", Some(old), new);
        assert_eq!(index.cells().take().stores.len(), 1);
        assert_eq!(index.candidates("name").map(|found| found.id).collect::<Vec<_>>(), [new]);
    }

    #[test]
    fn a_table_without_room_keeps_what_it_has() {
        let index = index(256);
        // More names than a probe is long, all of one hash.
        for slot in 0..200 {
            index.point("name", None, ObjectId::new(slot, 0));
        }
        assert_eq!(index.candidates("name").count(), PROBES);
    }

    #[test]
    fn short_names_spread_over_the_table() {
        let used: std::collections::BTreeSet<_> = (0..4096).map(|n| hash(&format!("n{n}")) & 0xfff).collect();
        // Thrown at random, 4096 names hit 63 of a hundred buckets.
        assert!(used.len() > 2400, "{} of 4096 buckets", used.len());
    }
}
