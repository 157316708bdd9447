//! One suite for all backends: what each must do, what each must refuse, and the paths that are walked with failures.
//!
//! A case takes an open backend and uses the safe types as a user would, reaching bytes through streams, so that it
//! holds for memory the processor cannot see too. [`conformance!`](crate::conformance!) makes a test of each case for
//! one backend, or for none where there is none: opening it says so.

#[expect(
    missing_docs,
    clippy::unwrap_used,
    reason = "a case is a test: its name says it, and it fails by panic"
)]
pub mod memory;
pub mod paths;
#[expect(
    missing_docs,
    clippy::unwrap_used,
    reason = "a case is a test: its name says it, and it fails by panic"
)]
pub mod queue;
#[expect(
    missing_docs,
    clippy::unwrap_used,
    reason = "a case is a test: its name says it, and it fails by panic"
)]
pub mod refusals;

use wholemem_hal::{Backend, Device, Mapping, Rights, Span, Stream};

/// Makes a module of tests, one for each case, that open their backend with `$open`.
#[macro_export]
macro_rules! conformance {
    ($suite:ident, $open:expr) => {
        mod $suite {
            #[allow(unused_imports, reason = "`$open` may need nothing from above")]
            use super::*;

            $crate::conformance!(@cases memory, $open,
                fresh_memory_is_zero_and_keeps_what_is_written,
                two_maps_of_one_allocation_show_the_same_bytes,
                an_imported_handle_is_the_same_memory,
                a_read_only_handle_gives_no_writable_map,
                allocations_side_by_side_are_one_memory,
                any_order_of_dropping_is_right,
                a_place_can_be_used_again,
                rights_are_kept_for_each_device,
                addresses_can_be_chosen,
                giving_back_answers,
                the_backend_knows_its_own_memory,
            );
            $crate::conformance!(@cases refusals, $open,
                lengths_of_nothing,
                lengths_that_are_not_granules,
                offsets_that_are_not_granules,
                places_beyond_the_reservation,
                places_that_are_taken,
                devices_that_do_not_exist,
                memory_of_another_backend,
                things_of_another_device,
                copies_that_make_no_sense,
                devices_without_rights,
                work_that_cannot_be_captured,
                alignments_and_addresses_that_cannot_be,
                handles_of_another_kind,
            );
            $crate::conformance!(@cases queue, $open,
                work_of_one_stream_runs_in_order,
                an_event_orders_two_streams,
                a_wait_is_for_the_record_it_was_made_for,
                dropped_memory_stays_until_its_work_is_done,
                a_dropped_stream_still_does_its_work,
                a_graph_repeats_its_work,
                a_failed_capture_leaves_the_stream_usable,
                long_reads_and_writes_arrive_whole,
                a_kernel_gets_its_arguments,
                timed_events_tell_the_time_between_them,
                a_shared_event_is_seen_through_its_handle,
                pinned_memory_is_copied_from_and_to,
            );
        }
    };
    (@cases $room:ident, $open:expr, $($case:ident,)*) => {$(
        #[test]
        fn $case() {
            let open = $open;
            let backend: Option<::wholemem_hal::Backend> = open().into();
            if let Some(backend) = backend {
                $crate::conformance::$room::$case(&backend);
            }
        }
    )*};
}

fn first(backend: &Backend) -> Device {
    backend.device(0).expect("a backend has a device")
}

/// The device for the second of two things: another one where there is one.
fn second(backend: &Backend) -> Device {
    backend.device(1).unwrap_or_else(|_| first(backend))
}

fn granule(device: &Device) -> usize {
    device.granularity().expect("a device has a granule").minimum.len()
}

fn mapped(device: &Device, granules: usize) -> Mapping {
    let memory = device.allocate(granules * granule(device)).expect("memory can be had");
    memory.map(Rights::ReadWrite).expect("it can be mapped")
}

fn stream(device: &Device) -> Stream {
    device.stream().expect("a stream can be had")
}

/// What a stream of the device reads there.
fn seen(device: &Device, span: &Span) -> Vec<u8> {
    let mut bytes = vec![0xEE; span.len()];
    stream(device).read(span, &mut bytes).expect("the span can be read");
    bytes
}

/// Bytes that differ from place to place and from seed to seed.
fn pattern(seed: u8, len: usize) -> Vec<u8> {
    let mut state = u32::from(seed).wrapping_mul(2_654_435_769) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state.to_le_bytes()[1]
    };
    (0..len).map(next).collect()
}
