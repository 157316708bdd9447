//! A conformance suite for all backends: required behaviour, required errors, and code paths for fault sweeps.
//!
//! A case takes an open backend and uses the safe types as a user would. It accesses bytes through streams, so that it
//! also works for memory that the CPU cannot address. [`conformance!`](crate::conformance!) defines a test of each case
//! for one backend; if the backend is not available, the tests report a skip.

#[expect(
    missing_docs,
    clippy::unwrap_used,
    reason = "a case is a test: its name describes it, and it fails by panic"
)]
pub mod memory;
pub mod paths;
#[expect(
    missing_docs,
    clippy::unwrap_used,
    reason = "a case is a test: its name describes it, and it fails by panic"
)]
pub mod queue;
#[expect(
    missing_docs,
    clippy::unwrap_used,
    reason = "a case is a test: its name describes it, and it fails by panic"
)]
pub mod rejections;

use wholemem_hal::{Backend, Device, Mapping, Rights, Span, Stream};

/// Defines a module with one test for each conformance case. Each test opens its backend with `$open`.
#[macro_export]
macro_rules! conformance {
    ($suite:ident, $open:expr) => {
        mod $suite {
            #[allow(unused_imports, reason = "`$open` may need nothing from above")]
            use super::*;

            $crate::conformance!(@cases memory, $open,
                new_memory_is_zeroed_and_stores_bytes,
                two_mappings_of_one_allocation_share_bytes,
                an_imported_handle_refers_to_the_same_memory,
                a_read_only_handle_allows_no_writable_mapping,
                adjacent_mappings_are_contiguous,
                handles_can_be_dropped_in_any_order,
                an_unmapped_range_can_be_mapped_again,
                rights_are_per_device_and_never_shrink,
                reservations_honor_alignment_and_address,
                explicit_release_reports_resources_in_use,
                the_backend_reports_allocation_properties,
            );
            $crate::conformance!(@cases rejections, $open,
                zero_lengths_are_rejected,
                unaligned_lengths_are_rejected,
                unaligned_offsets_are_rejected,
                ranges_out_of_bounds_are_rejected,
                overlapping_mappings_are_rejected,
                unknown_devices_are_rejected,
                operands_of_another_backend_are_rejected,
                events_of_another_device_cannot_be_recorded,
                invalid_copies_are_rejected,
                access_without_rights_is_denied,
                some_operations_cannot_be_captured,
                invalid_alignments_and_sizes_are_rejected,
                unsupported_handle_kinds_are_rejected,
            );
            $crate::conformance!(@cases queue, $open,
                work_of_one_stream_runs_in_order,
                an_event_orders_two_streams,
                a_wait_ignores_later_records,
                dropped_memory_stays_mapped_until_its_work_has_run,
                a_dropped_stream_still_runs_its_work,
                a_graph_can_be_launched_repeatedly,
                a_failed_capture_leaves_the_stream_usable,
                long_reads_and_writes_are_complete,
                a_kernel_receives_its_arguments,
                timed_events_measure_elapsed_time,
                a_shared_event_works_through_its_handle,
                pinned_memory_can_be_copied,
            );
        }
    };
    (@cases $module:ident, $open:expr, $($case:ident,)*) => {$(
        #[test]
        fn $case() {
            let open = $open;
            let backend: Option<::wholemem_hal::Backend> = open().into();
            if let Some(backend) = backend {
                $crate::conformance::$module::$case(&backend);
            }
        }
    )*};
}

fn first(backend: &Backend) -> Device {
    backend.device(0).expect("the backend has no device")
}

/// Returns the backend's second device, or its first device if there is only one.
fn second(backend: &Backend) -> Device {
    backend.device(1).unwrap_or_else(|_| first(backend))
}

fn granule(device: &Device) -> usize {
    device.granularity().expect("the granularity cannot be read").minimum.len()
}

fn mapped(device: &Device, granules: usize) -> Mapping {
    let memory = device.allocate(granules * granule(device)).expect("cannot allocate memory");
    memory.map(Rights::ReadWrite).expect("cannot map memory")
}

fn stream(device: &Device) -> Stream {
    device.stream().expect("cannot create a stream")
}

/// Returns the bytes that a stream of the device reads from a span of memory.
fn seen(device: &Device, span: &Span) -> Vec<u8> {
    let mut bytes = vec![0xEE; span.len()];
    stream(device).read(span, &mut bytes).expect("cannot read the span");
    bytes
}

/// Returns `len` bytes that differ by position and by seed.
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
