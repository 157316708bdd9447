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

impl NamedVersion {
    /// Returns the kind of event that reports the publication of this object.
    fn publication(&self, previous: Option<u64>) -> EventKind {
        match previous {
            Some(previous) => EventKind::Replaced { version: self.version, previous },
            None => EventKind::Published { version: self.version },
        }
    }

    fn into_event(self, objects: usize, kind: EventKind) -> Event {
        Event { revision: 0, name: self.name, object: self.object, objects: objects as u64, kind }
    }
}

/// Returns the sorted names of objects, or an empty list if they all have the same name.
fn several_names<'a>(all: impl Iterator<Item = &'a NamedVersion> + Clone) -> Vec<String> {
    let first = all.clone().next();
    if all.clone().all(|named| first.is_some_and(|first| named.name == first.name)) {
        return Vec::new();
    }
    let mut names: Vec<_> = all.map(|named| named.name.clone()).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// Passes the events of the objects of packs without a name to `visit`: each object is reported by its own.
fn visit_each(
    published: &[NamedVersion],
    deleted: &[NamedVersion],
    mut visit: impl FnMut(Event, Vec<String>),
) {
    let versions: BTreeMap<_, _> = deleted.iter().map(|old| (&old.name, old.version)).collect();
    let names: BTreeSet<_> = published.iter().map(|new| &new.name).collect();
    for new in published {
        let kind = new.publication(versions.get(&new.name).copied());
        visit(new.clone().into_event(1, kind), Vec::new());
    }
    for old in deleted.iter().filter(|old| !names.contains(&old.name)) {
        visit(old.clone().into_event(1, EventKind::Deleted { version: old.version }), Vec::new());
    }
}

impl Change {
    /// Passes the events of the change to `visit`, without their revisions. Each is passed with the sorted names of all objects
    /// that it concerns, or with an empty list if they all have the name of the event. A change of one name is not copied.
    pub(crate) fn for_each_event(self, mut visit: impl FnMut(Event, Vec<String>)) {
        let Self { published, deleted, is_pack } = self;
        let is_one = is_pack || published.len() == 1 || published.is_empty() && deleted.len() == 1;
        if !is_one {
            return visit_each(&published, &deleted, visit);
        }
        let names = several_names(published.iter().chain(&deleted));
        let objects = if published.is_empty() { deleted.len() } else { published.len() };
        if let Some(new) = published.into_iter().next() {
            let previous = deleted.iter().find(|old| old.name == new.name).map(|old| old.version);
            let kind = new.publication(previous);
            visit(new.into_event(objects, kind), names);
        } else if let Some(old) = deleted.into_iter().next() {
            let kind = EventKind::Deleted { version: old.version };
            visit(old.into_event(objects, kind), names);
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

    fn events(change: Change) -> Vec<(Event, Vec<String>)> {
        let mut events = Vec::new();
        change.for_each_event(|event, names| events.push((event, names)));
        events
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn a_replaced_object_is_one_event_with_both_versions() {
        let change =
            Change { published: vec![named("a", 2, 4)], deleted: vec![named("a", 1, 3)], is_pack: false };
        let replaced = EventKind::Replaced { version: 4, previous: 3 };
        let old: Vec<_> = change.name_events().map(|event| (event.name, event.kind)).collect();
        assert_eq!(events(change), [(event("a", 2, 1, replaced), vec![])]);
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
        assert_eq!(events(change), [(event("p", 5, 3, replaced), all)]);
        let change = Change { published: vec![], deleted, is_pack: true };
        let gone = EventKind::Deleted { version: 1 };
        assert_eq!(events(change), [(event("p", 1, 3, gone), names(&["p", "p/a", "p/b"]))]);
    }

    #[test]
    fn objects_of_a_pack_without_a_name_are_events_of_their_own() {
        let published = vec![named("a", 5, 2), named("c", 6, 1)];
        let deleted = vec![named("a", 1, 1), named("b", 2, 7)];
        let change = Change { published, deleted, is_pack: false };
        let expected = [
            (event("a", 5, 1, EventKind::Replaced { version: 2, previous: 1 }), vec![]),
            (event("c", 6, 1, EventKind::Published { version: 1 }), vec![]),
            (event("b", 2, 1, EventKind::Deleted { version: 7 }), vec![]),
        ];
        assert_eq!(events(change), expected);
    }
}
