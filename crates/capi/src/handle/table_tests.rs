//! Tests of the handle table: invalid handles, reuse of slots, and threads that free objects which others use.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::thread;

use super::*;

/// An object that counts how many of its kind exist, and whose content changes when it is dropped.
struct Counted {
    value: u64,
    alive: Arc<AtomicUsize>,
}

impl Counted {
    fn new(number: u64, alive: &Arc<AtomicUsize>) -> Self {
        alive.fetch_add(1, Ordering::Relaxed);
        Self { value: number, alive: Arc::clone(alive) }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.value = u64::MAX;
        self.alive.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Object for Counted {
    const KIND: Kind = Kind::Window;
}

impl Object for String {
    const KIND: Kind = Kind::Tensor;
}

fn error<T>(result: Result<Used<'_, T>, HandleError>) -> HandleError {
    result.map(drop).unwrap_err()
}

#[test]
fn handles_that_are_zero_foreign_freed_or_of_another_kind_are_errors() {
    let table = HandleTable::new();
    let handle = table.add("text".to_owned()).unwrap();
    assert_eq!(*table.get::<String>(handle).unwrap(), "text");

    assert_eq!(error(table.get::<String>(0)), HandleError::Zero { expected: Kind::Tensor });
    let (found, expected) = (Kind::Tensor, Kind::Window);
    assert_eq!(error(table.get::<Counted>(handle)), HandleError::OtherKind { handle, found, expected });
    assert_eq!(table.free(handle, Kind::Window), Err(HandleError::OtherKind { handle, found, expected }));
    let odd = 255 << KEY_SHIFT;
    let expected = Kind::Tensor;
    assert_eq!(error(table.get::<String>(odd)), HandleError::NotAHandle { handle: odd, expected });
    for other in [handle ^ 1, handle ^ 0xff_0000, handle ^ (1 << 63), handle ^ (1 << 32)] {
        assert_eq!(error(table.get::<String>(other)), HandleError::Unknown { handle: other });
        assert_eq!(table.free(other, Kind::Tensor), Err(HandleError::Unknown { handle: other }));
    }

    table.free(handle, Kind::Tensor).unwrap();
    assert_eq!(error(table.get::<String>(handle)), HandleError::Unknown { handle });
    assert_eq!(table.free(handle, Kind::Tensor), Err(HandleError::Unknown { handle }));
}

#[test]
fn a_handle_of_another_table_is_unknown() {
    let handles = || {
        let table = HandleTable::new();
        let handles: Vec<_> = (0..100).map(|n| table.add(n.to_string()).unwrap()).collect();
        (table, handles)
    };
    let ((_first, of_first), (second, of_second)) = (handles(), handles());
    // Two random first generations are equal in one of 2^32 slots.
    assert_ne!(of_first, of_second);
    let known = of_first.iter().filter(|handle| second.get::<String>(**handle).is_ok()).count();
    assert!(known <= 1, "{known} of 100 handles of one table are valid in the other");
}

#[test]
fn a_slot_is_used_again_with_another_handle_and_retired_after_its_last_generation() {
    let table = HandleTable::with_generations(3);
    let mut handles = Vec::new();
    for n in 0..7 {
        let handle = table.add(n.to_string()).unwrap();
        assert_eq!(*table.get::<String>(handle).unwrap(), n.to_string());
        table.free(handle, Kind::Tensor).unwrap();
        handles.push(handle);
    }
    let slots: Vec<_> = handles.iter().map(|handle| handle & u64::from(MAX_SLOTS - 1)).collect();
    assert_eq!(slots, [0, 0, 0, 1, 1, 1, 2]);
    for handle in &handles {
        assert_eq!(error(table.get::<String>(*handle)), HandleError::Unknown { handle: *handle });
    }
    handles.sort_unstable();
    handles.dedup();
    assert_eq!(handles.len(), 7);
}

#[test]
fn a_freed_object_lives_until_the_last_call_that_uses_it_ends() {
    let (table, alive) = (HandleTable::new(), Arc::default());
    let handle = table.add(Counted::new(7, &alive)).unwrap();
    let (first, second) = (table.get::<Counted>(handle).unwrap(), table.get::<Counted>(handle).unwrap());
    table.free(handle, Kind::Window).unwrap();
    assert_eq!(error(table.get::<Counted>(handle)), HandleError::Unknown { handle });
    drop(first);
    assert_eq!((second.value, alive.load(Ordering::Relaxed)), (7, 1));
    drop(second);
    assert_eq!(alive.load(Ordering::Relaxed), 0);
    assert_eq!(table.add("next".to_owned()).unwrap() & u64::from(MAX_SLOTS - 1), 0, "the slot is free");
}

#[test]
fn more_objects_than_the_first_segments_have_slots_are_found() {
    let table = HandleTable::new();
    let handles: Vec<_> = (0..1000).map(|n| table.add(n.to_string()).unwrap()).collect();
    for (n, handle) in handles.iter().enumerate() {
        assert_eq!(*table.get::<String>(*handle).unwrap(), n.to_string());
    }
    assert_eq!(position(63), (0, 63));
    assert_eq!(position(64), (1, 0));
    assert_eq!(position(191), (1, 127));
    assert_eq!(position(192), (2, 0));
    assert_eq!(position(MAX_SLOTS - 1).0, SEGMENTS - 1);
}

#[test]
fn objects_that_threads_create_use_and_free_are_never_seen_dropped() {
    let (table, alive) = (HandleTable::with_generations(100), Arc::default());
    let shared: [AtomicU64; 4] = Default::default();
    thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (table, alive, shared) = (&table, &alive, &shared);
            scope.spawn(move || {
                for round in 0..5000_u64 {
                    let place = &shared[((thread + round) % 4) as usize];
                    let new = table.add(Counted::new(round, alive)).unwrap();
                    let old = place.swap(new, Ordering::AcqRel);
                    if old != 0 {
                        let used = table.get::<Counted>(old);
                        table.free(old, Kind::Window).unwrap();
                        if let Ok(used) = used {
                            assert_ne!(used.value, u64::MAX);
                        }
                    }
                    for place in shared {
                        if let Ok(used) = table.get::<Counted>(place.load(Ordering::Acquire)) {
                            assert_ne!(used.value, u64::MAX);
                        }
                    }
                }
            });
        }
    });
    for place in shared {
        table.free(place.into_inner(), Kind::Window).unwrap();
    }
    assert_eq!(alive.load(Ordering::Relaxed), 0);
}
