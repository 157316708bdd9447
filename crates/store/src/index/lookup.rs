//! The hash table from names to objects in the index of a store: the server writes the table, and many processes read it.
//!
//! Open addressing with at most [`PROBES`] probes. A hit is final. A miss is not: a reader may miss a name while the table
//! changes, and a name whose buckets are full is not in the table. After a miss the client asks the server.

use crate::cells::Cells;
use crate::convert::to_usize;
use crate::id::ObjectId;

use super::layout::ObjectIndex;

/// The maximum number of hash table buckets that a lookup of a name probes.
const PROBES: usize = 32;

/// Marks a bucket of the hash table whose entry was removed. A probe continues behind such a bucket.
const TOMBSTONE: u64 = u64::MAX;

/// An object that may have the name that is looked up, and the bucket of the hash table that contains its id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NameCandidate {
    pub(crate) id: ObjectId,
    bucket: usize,
}

impl<C: Cells> ObjectIndex<C> {
    /// Returns the objects that may have a name. The caller compares the name with the record of each object.
    pub(crate) fn candidates(&self, name: &str) -> impl Iterator<Item = NameCandidate> {
        let buckets = self.buckets(name);
        buckets
            .map(|bucket| (bucket, self.cells().load_acquire(bucket)))
            .take_while(|(_, value)| *value != 0)
            .filter_map(|(bucket, value)| {
                let id = ObjectId::from_u64(value)?;
                (id.slot() < self.geometry().slots).then_some(NameCandidate { id, bucket })
            })
    }

    /// Sets the object of a name to `id` by one store, which replaces the former object `before` if the hash table contains it.
    pub(crate) fn set_name(&self, name: &str, before: Option<ObjectId>, id: ObjectId) {
        let existing = before.and_then(|before| self.candidates(name).find(|found| found.id == before));
        let free = || {
            let is_free = |bucket: &usize| [0, TOMBSTONE].contains(&self.cells().load(*bucket));
            self.buckets(name).find(is_free)
        };
        // If no bucket is free, the name is not in the hash table, and clients ask the server for it.
        if let Some(bucket) = existing.map(|found| found.bucket).or_else(free) {
            self.cells().store_release(bucket, id.as_u64());
        }
    }

    /// Removes a name from the hash table if the object of the name is `id`.
    pub(crate) fn remove_name(&self, name: &str, id: ObjectId) {
        if let Some(found) = self.candidates(name).find(|found| found.id == id) {
            // A probe ends at an empty bucket, so the removed bucket becomes empty only if the next bucket is empty, and a
            // tombstone otherwise.
            let next = self.next_bucket(found.bucket);
            let empty = if self.cells().load(next) == 0 { 0 } else { TOMBSTONE };
            self.cells().store_release(found.bucket, empty);
        }
    }

    /// Empties the hash table of names. Recovery fills the table again.
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

/// Hashes a name by FNV-1a and one more multiplication, which mixes the low bits that the hash table uses. If many names collide,
/// clients ask the server for some of them; lookups do not become slower.
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

    fn index(slots: usize) -> ObjectIndex<RecordedCells> {
        let geometry = Geometry { slots, allocations: 1 };
        ObjectIndex::format(RecordedCells::new(geometry.cells()), geometry)
    }

    proptest! {
        #[test]
        fn a_name_has_the_object_that_was_set_last(
            steps in proptest::collection::vec((0_usize..12, any::<bool>()), 0..200)
        ) {
            let index = index(16);
            let mut model: BTreeMap<usize, ObjectId> = BTreeMap::new();
            for (generation, (name, point)) in steps.into_iter().enumerate() {
                let text = format!("name-{name}");
                let id = ObjectId::new(name, generation as u64);
                let before = model.remove(&name);
                if point {
                    index.set_name(&text, before, id);
                    model.insert(name, id);
                } else if let Some(before) = before {
                    index.remove_name(&text, before);
                }
                // The hash table has 32 buckets, all of which are probed, so no name is missed.
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
    fn a_new_version_replaces_the_old_one_by_one_store() {
        let index = index(16);
        let (old, new) = (ObjectId::new(1, 0), ObjectId::new(2, 0));
        index.set_name("name", None, old);
        index.cells().take();
        index.set_name("name", Some(old), new);
        assert_eq!(index.cells().take().stores.len(), 1);
        assert_eq!(index.candidates("name").map(|found| found.id).collect::<Vec<_>>(), [new]);
    }

    #[test]
    fn a_full_table_keeps_its_entries() {
        let index = index(256);
        // The test adds more entries than one lookup probes, all with the same hash.
        for slot in 0..200 {
            index.set_name("name", None, ObjectId::new(slot, 0));
        }
        assert_eq!(index.candidates("name").count(), PROBES);
    }

    #[test]
    fn short_names_are_distributed_over_the_table() {
        let used: std::collections::BTreeSet<_> = (0..4096).map(|n| hash(&format!("n{n}")) & 0xfff).collect();
        // 4096 uniformly distributed names occupy 63 % of 4096 buckets.
        assert!(used.len() > 2400, "{} of 4096 buckets", used.len());
    }
}
