//! A lane: a sequence of collective calls, with its memory on all ranks and the report of its errors.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use wholemem_comm::{Error as CommError, FailureWatch};
use wholemem_hal::{BackendKind, Event, EventKind, Mapping, Span, Stream};
use wholemem_os::futex;
use zerocopy::IntoBytes;

use super::address_index::AddressIndex;
use super::address_space::RankMappings;
use super::call_log::CallLog;
use super::hooks;
#[cfg(feature = "test-hooks")]
use super::hooks::LaneHooks;
use super::kernel::CollectiveKernels;
use super::recorder::CaptureRecorder;
use super::report::LaneReport;
use super::slices::SliceStaging;
use super::tuning::{DeviceLimits, Tuning};
use super::window::{DroppedWindows, WindowCore};
use crate::abi::{CollectiveRequest, ControlWord, LaneLayout, LaneRef, MAX_BLOCKS, SIGNAL_STRIDE};
use crate::{Communicator, Result, cpu};
use wholemem_os::width::to_usize;

/// The length of the memory of a lane that only its own rank accesses: the control words, and the debug words with the feature
/// `test-hooks`.
pub(super) const PRIVATE_LEN: usize = CONTROL_LEN + hooks::DEBUG_LEN;
pub(super) const CONTROL_LEN: usize = 4 << 10;

const _: () = assert!(8 * (ControlWord::Sequence as u32 + MAX_BLOCKS) as usize <= CONTROL_LEN);

/// A sequence of collective calls, which run one after the other, on any streams. Calls that should overlap need separate lanes.
///
/// On devices that support it, a call is a programmatic launch: it starts while the previous kernel of its stream runs, and permits
/// the next one to start. If ranks share a device, a user's kernels with programmatic launch must leave enough
/// resources of the device for the calls of the other ranks. Otherwise these calls cannot start, and time out.
#[derive(Debug)]
pub struct Lane {
    pub(super) group: Communicator,
    pub(super) kernels: Arc<CollectiveKernels>,
    pub(super) limits: DeviceLimits,
    pub(super) tuning: Tuning,
    pub(super) timeout: Duration,
    pub(super) reference: LaneRef,
    pub(super) report: LaneReport,
    /// Keeps all memory alive that calls of this lane access.
    pub(super) operand: Span,
    /// The list of dropped windows, which all windows of this group share. A window with another list is of another group.
    pub(super) dropped: DroppedWindows,
    /// Finds the window in which memory of this rank lies.
    pub(super) index: Arc<AddressIndex<WindowCore>>,
    pub(super) recorder: Arc<CaptureRecorder>,
    /// The number of calls that staged their data.
    pub(super) staged_calls: AtomicU64,
    #[cfg(feature = "test-hooks")]
    pub(super) hooks: LaneHooks,
    /// The kinds of calls that have been logged.
    pub(super) call_log: CallLog,
    /// The stream of the last call of this lane.
    last_stream: Mutex<Option<Stream>>,
    /// The stream and staging buffer for calls on slices of host memory; `None` if work runs inline.
    pub(super) slice_staging: Option<SliceStaging>,
    _watch: FailureWatch,
}

/// The settings that all lanes of a rank share.
#[derive(Debug, Clone)]
pub(super) struct LaneContext {
    pub(super) group: Communicator,
    pub(super) kernels: Arc<CollectiveKernels>,
    pub(super) limits: DeviceLimits,
    pub(super) tuning: Tuning,
    pub(super) timeout: Duration,
    pub(super) layout: LaneLayout,
    pub(super) dropped: DroppedWindows,
    pub(super) index: Arc<AddressIndex<WindowCore>>,
    pub(super) recorder: Arc<CaptureRecorder>,
    /// True if the group has more CPU ranks than cores.
    pub(super) share_cores: bool,
}

impl Lane {
    /// Creates one lane. Its memory is at `offset` in each rank's memory of all lanes, which is at `base` on rank 0 and `stride`
    /// bytes further on each next rank.
    pub(super) fn create(
        context: &LaneContext,
        memory: &[RankMappings],
        (base, stride): (u64, u64),
        offset: usize,
        private: Span,
    ) -> Result<Self> {
        let LaneContext {
            group,
            kernels,
            limits,
            tuning,
            timeout,
            layout,
            dropped,
            index,
            recorder,
            share_cores,
        } = context.clone();
        let device = group.device();
        let report = LaneReport::create(device, group.size())?;
        let mut control = vec![0_u64; CONTROL_LEN / 8];
        // A timeout of zero would mean no limit, so the minimum is 1 ns. Timeouts of more than 584 years saturate.
        control[ControlWord::Timeout as usize] = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX).max(1);
        control[ControlWord::Spins as usize] = cpu::spins(share_cores);
        control[ControlWord::Sequence as usize..][..MAX_BLOCKS as usize].fill(1);
        let reference = LaneRef {
            base: base + offset as u64,
            stride,
            control: private.address(),
            report: report.span().address(),
            debug: 0,
            notices_at: layout.notices_at,
            terms_at: layout.terms_at,
            ll_at: layout.ll_at,
            ll_len: layout.ll_len,
            staging_at: layout.staging_at,
            staging_len: layout.staging_len,
            result_at: layout.result_at,
            rank: group.rank().0,
            ranks: group.size(),
            near: u32::from(limits.near),
            reserved: 0,
        };
        let maps: Vec<_> = memory.iter().flatten().cloned().collect();
        let accessed: Vec<_> =
            maps.iter().map(Mapping::all).chain([private.clone(), report.span()]).collect();
        let operand = Span::keep_alive(&accessed)?.unwrap_or_else(|| private.clone());
        let stream = device.stream()?;
        // A nonzero byte pattern poisons the lane, so that the warm-up launches do nothing.
        stream.fill(&private, 1)?;
        let mut request = CollectiveRequest::without_data(reference);
        kernels.warm_up(&stream, &mut request, &operand)?;
        stream.write(&private.part(0, CONTROL_LEN)?, control.as_bytes())?;
        #[cfg(feature = "test-hooks")]
        let hooks = LaneHooks::create(&stream, private, &maps, offset)?;
        let watch = watch(&group, report.clone(), maps, offset);
        let slice_staging = SliceStaging::create(&stream)?;
        Ok(Self {
            group,
            kernels,
            limits,
            tuning,
            timeout,
            reference,
            report,
            operand,
            dropped,
            index,
            recorder,
            staged_calls: AtomicU64::new(0),
            #[cfg(feature = "test-hooks")]
            hooks,
            call_log: CallLog::default(),
            last_stream: Mutex::default(),
            slice_staging,
            _watch: watch,
        })
    }

    /// Returns the error of a collective call of this lane that has failed, if any, without waiting. Synchronize the stream first
    /// to include all enqueued calls.
    ///
    /// # Errors
    /// [`Error::Comm`](crate::Error::Comm) with the ranks that were lost or did not arrive before the timeout. Later calls of the
    /// lane, and graphs that use it, do nothing; create a new group to continue.
    pub fn check(&self) -> Result<()> {
        self.report.check(self.group.bootstrap(), self.timeout)
    }

    /// Returns the number of calls of this lane whose data were staged because their memory is not in a window: copied to a buffer
    /// of the lane, or from one. Captured calls count once.
    #[must_use]
    pub fn staged_calls(&self) -> u64 {
        self.staged_calls.load(Ordering::Relaxed)
    }

    /// Returns the description of this lane for a user's kernels, which pass it to `Call` in `barrier.cuh`.
    #[must_use]
    pub fn lane_ref(&self) -> LaneRef {
        self.reference
    }

    /// Enqueues a collective call, on any stream, so that it runs after the previous call of this lane.
    pub(super) fn after_previous_call(
        &self,
        stream: &Stream,
        enqueue: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if stream.runs_inline() {
            // Inline work acquires the lane's call lock itself, also when a CUDA graph replays the work.
            return enqueue();
        }
        let mut last = self.last_stream();
        // Captured work is ordered by the launch of its graph, so no event is needed.
        if last.as_ref() != Some(stream) && !stream.is_capturing() {
            if let Some(previous) = last.as_ref() {
                let event = Event::create(previous.device(), EventKind::Order)?;
                previous.record(&event)?;
                stream.await_event(&event)?;
            }
            *last = Some(stream.clone());
        }
        enqueue()
    }

    fn last_stream(&self) -> MutexGuard<'_, Option<Stream>> {
        self.last_stream.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Watches the group and aborts the kernels of a lane if the group fails. CPU kernels are aborted also if a rank leaves. No call
/// that the leaving rank has completed is aborted: a rank completes a call only after all ranks have arrived in it, so no rank
/// still waits for the leaving rank in that call.
fn watch(group: &Communicator, report: LaneReport, maps: Vec<Mapping>, offset: usize) -> FailureWatch {
    let (own, on_host) = (group.rank(), group.device().backend().kind() == BackendKind::Host);
    group.bootstrap().watch(move |error| {
        // A GPU may still run calls that the leaving rank enqueued before it left, so GPU kernels wait until their timeout.
        if !on_host && matches!(error, CommError::PeerLeft { .. } | CommError::Closed) {
            return;
        }
        // `abort` fails only in a forked child, which has no kernels.
        let _ = report.abort(own, error);
        // A thread of this rank that read the abort word before the abort request was stored may be about to sleep and miss one
        // wake-up, so wake it repeatedly.
        while report.is_asleep() {
            for (rank, map) in maps.iter().enumerate() {
                if let Ok(bytes) = map.bytes()
                    && let Ok(word) = bytes.atomic_u32(offset + rank * to_usize(SIGNAL_STRIDE))
                {
                    let _ = futex::wake_all(word);
                }
            }
            std::thread::yield_now();
        }
    })
}
