//! Events of a watch: changes of the objects that have watched names, in the current form and in that of protocol 5.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::id::ObjectId;

/// A change of the object that has a watched name. All objects of a pack (several objects in one memory) change in one event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Event {
    /// The number of the event in its store, which is larger than that of every earlier event.
    pub revision: u64,
    /// The name of the changed object; for a pack, that of the pack.
    pub name: String,
    /// The id of the changed object; for a pack, that of its first object.
    pub object: ObjectId,
    /// The number of changed objects: 1, or for a pack one more than the objects that it contains.
    pub objects: u64,
    /// The kind of change.
    pub kind: EventKind,
}

/// The kinds of change of an object that an [`Event`] reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum EventKind {
    /// The object was sealed, and has the name now; no object had the name before.
    Published {
        /// The version of the object, which is 1 unless an earlier object of the name was deleted in between.
        version: u64,
    },
    /// The object was sealed, and has the name now. The object that had the name before is deleted.
    Replaced {
        /// The version of the new object.
        version: u64,
        /// The version of the object that had the name before.
        previous: u64,
    },
    /// The object was deleted. No object has its name now.
    Deleted {
        /// The version of the deleted object.
        version: u64,
    },
}

/// An event in the form of protocol 5: each name of a pack has its own, and a replaced object is deleted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NameEvent {
    pub(crate) name: String,
    pub(crate) object: ObjectId,
    pub(crate) kind: NameEventKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum NameEventKind {
    Published { version: u64 },
    Deleted,
}

/// An object whose name is given or removed by a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NamedVersion {
    pub(crate) name: String,
    pub(crate) object: ObjectId,
    pub(crate) version: u64,
}

/// One change of a store, from which the events of all protocols are derived: objects that are published together, and objects
/// that are deleted with it. The first of each is the first object of a pack.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) published: Vec<NamedVersion>,
    pub(crate) deleted: Vec<NamedVersion>,
    /// True if the first published or, if none is, the first deleted object is a pack with a name.
    pub(crate) is_pack: bool,
}

impl Change {
    /// Returns the events of the change without their revisions, each with the sorted names of all objects that it concerns.
    pub(crate) fn events(&self) -> Vec<(Event, Vec<String>)> {
        let event = |new: &NamedVersion, objects: usize, kind| Event {
            revision: 0,
            name: new.name.clone(),
            object: new.object,
            objects: objects as u64,
            kind,
        };
        let kind = |new: &NamedVersion, previous: Option<u64>| match previous {
            Some(previous) => EventKind::Replaced { version: new.version, previous },
            None => EventKind::Published { version: new.version },
        };
        let sorted = |names: &mut dyn Iterator<Item = &NamedVersion>| {
            let mut names: Vec<_> = names.map(|named| named.name.clone()).collect();
            names.sort_unstable();
            names.dedup();
            names
        };
        let deleted = |old: &NamedVersion| EventKind::Deleted { version: old.version };
        match (&self.published[..], &self.deleted[..]) {
            ([first, ..], _) if self.is_pack || self.published.len() == 1 => {
                let names = sorted(&mut self.published.iter().chain(&self.deleted));
                let previous = self.deleted.iter().find(|old| old.name == first.name).map(|old| old.version);
                vec![(event(first, self.published.len(), kind(first, previous)), names)]
            }
            ([], [first, ..]) if self.is_pack || self.deleted.len() == 1 => {
                let names = sorted(&mut self.deleted.iter());
                vec![(event(first, self.deleted.len(), deleted(first)), names)]
            }
            // The objects of a pack without a name are reported each by its own.
            (published, removed) => {
                let versions: BTreeMap<_, _> = removed.iter().map(|old| (&old.name, old.version)).collect();
                let names: BTreeSet<_> = published.iter().map(|new| &new.name).collect();
                let new = published.iter().map(|new| {
                    let kind = kind(new, versions.get(&new.name).copied());
                    (event(new, 1, kind), vec![new.name.clone()])
                });
                let left = removed.iter().filter(|old| !names.contains(&old.name));
                new.chain(left.map(|old| (event(old, 1, deleted(old)), vec![old.name.clone()]))).collect()
            }
        }
    }

    /// Returns the events of the change in the form of protocol 5.
    pub(crate) fn name_events(&self) -> impl Iterator<Item = NameEvent> {
        let event = |of: &NamedVersion, kind| NameEvent { name: of.name.clone(), object: of.object, kind };
        let published = self.published.iter();
        let published =
            published.map(move |new| event(new, NameEventKind::Published { version: new.version }));
        published.chain(self.deleted.iter().map(move |old| event(old, NameEventKind::Deleted)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str, slot: usize, version: u64) -> NamedVersion {
        NamedVersion { name: name.to_owned(), object: ObjectId::new(slot, 0), version }
    }

    fn event(name: &str, slot: usize, objects: u64, kind: EventKind) -> Event {
        Event { revision: 0, name: name.to_owned(), object: ObjectId::new(slot, 0), objects, kind }
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn a_replaced_object_is_one_event_with_both_versions() {
        let change =
            Change { published: vec![named("a", 2, 4)], deleted: vec![named("a", 1, 3)], is_pack: false };
        let replaced = EventKind::Replaced { version: 4, previous: 3 };
        assert_eq!(change.events(), [(event("a", 2, 1, replaced), names(&["a"]))]);
        let old: Vec<_> = change.name_events().map(|event| (event.name, event.kind)).collect();
        let published = NameEventKind::Published { version: 4 };
        assert_eq!(old, [("a".to_owned(), published), ("a".to_owned(), NameEventKind::Deleted)]);
    }

    #[test]
    fn a_pack_is_one_event_that_concerns_all_old_and_new_names() {
        let published = vec![named("p", 5, 2), named("p/a", 6, 2), named("p/c", 7, 1)];
        let deleted = vec![named("p", 1, 1), named("p/a", 2, 1), named("p/b", 3, 1)];
        let all = names(&["p", "p/a", "p/b", "p/c"]);
        let replaced = EventKind::Replaced { version: 2, previous: 1 };
        let change = Change { published, deleted: deleted.clone(), is_pack: true };
        assert_eq!(change.events(), [(event("p", 5, 3, replaced), all)]);
        let change = Change { published: vec![], deleted, is_pack: true };
        let gone = EventKind::Deleted { version: 1 };
        assert_eq!(change.events(), [(event("p", 1, 3, gone), names(&["p", "p/a", "p/b"]))]);
    }

    #[test]
    fn objects_of_a_pack_without_a_name_are_events_of_their_own() {
        let published = vec![named("a", 5, 2), named("c", 6, 1)];
        let deleted = vec![named("a", 1, 1), named("b", 2, 7)];
        let change = Change { published, deleted, is_pack: false };
        let expected = [
            (event("a", 5, 1, EventKind::Replaced { version: 2, previous: 1 }), names(&["a"])),
            (event("c", 6, 1, EventKind::Published { version: 1 }), names(&["c"])),
            (event("b", 2, 1, EventKind::Deleted { version: 7 }), names(&["b"])),
        ];
        assert_eq!(change.events(), expected);
    }
}
