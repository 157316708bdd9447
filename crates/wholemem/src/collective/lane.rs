//! A lane: one sequence of collective calls, with its memory on all ranks and its report.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use wholemem_comm::{Error as CommError, FailureWatch};
use wholemem_hal::{BackendKind, Event, EventKind, Mapping, Span, Stream};
use wholemem_os::futex;
use zerocopy::IntoBytes;

use super::hooks;
#[cfg(feature = "test-hooks")]
use super::hooks::LaneHooks;
use super::kernel::Kernels;
use super::report::Report;
use super::slices::SliceStaging;
use super::space::Pieces;
use super::tuning::{Limits, Tuning};
use super::window::Dropped;
use crate::abi::{CollectiveRequest, ControlWord, LaneLayout, LaneRef, MAX_BLOCKS, SIGNAL_STRIDE};
use crate::{Communicator, Result, cpu};
use wholemem_os::width::to_usize;

/// The length of a lane's private memory: its control words, and with test hooks its debug words.
pub(super) const PRIVATE_LEN: usize = CONTROL_LEN + hooks::DEBUG_LEN;
pub(super) const CONTROL_LEN: usize = 4 << 10;

const _: () = assert!(8 * (ControlWord::Sequence as u32 + MAX_BLOCKS) as usize <= CONTROL_LEN);

/// One sequence of collective calls: they run one after the other, on any streams. Calls that should overlap need lanes of their
/// own.
///
/// On devices that support it, a call is a programmatic launch: it starts while the previous kernel of its stream runs, and permits
/// the next one to start. If ranks share a device, a user's kernels that are launched so must leave room for the calls of the other
/// ranks. Otherwise these wait until their timeout.
#[derive(Debug)]
pub struct Lane {
    pub(super) group: Communicator,
    pub(super) kernels: Arc<Kernels>,
    pub(super) limits: Limits,
    pub(super) tuning: Tuning,
    pub(super) timeout: Duration,
    pub(super) reference: LaneRef,
    pub(super) report: Report,
    /// Keeps all memory that calls access.
    pub(super) operand: Span,
    /// Identifies the windows of this group.
    pub(super) dropped: Dropped,
    #[cfg(feature = "test-hooks")]
    pub(super) hooks: LaneHooks,
    /// The stream of the last call.
    last: Mutex<Option<Stream>>,
    /// For calls on slices of host memory; none if work runs inline.
    pub(super) slice_staging: Option<SliceStaging>,
    _watch: FailureWatch,
}

/// What all lanes of a rank share.
#[derive(Debug, Clone)]
pub(super) struct Common {
    pub(super) group: Communicator,
    pub(super) kernels: Arc<Kernels>,
    pub(super) limits: Limits,
    pub(super) tuning: Tuning,
    pub(super) timeout: Duration,
    pub(super) layout: LaneLayout,
    pub(super) dropped: Dropped,
    /// Whether CPU ranks share cores.
    pub(super) share_cores: bool,
}

impl Lane {
    /// Creates the lane whose memory is at `offset` of every rank's memory, which begins at `base` for rank 0.
    pub(super) fn create(
        common: &Common,
        memory: &[Pieces],
        (base, stride): (u64, u64),
        offset: usize,
        private: Span,
    ) -> Result<Self> {
        let Common { group, kernels, limits, tuning, timeout, layout, dropped, share_cores } = common.clone();
        let device = group.device();
        let report = Report::create(device, group.size())?;
        let mut control = vec![0_u64; CONTROL_LEN / 8];
        // Zero would mean no limit. 584 years and more saturate.
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
        let touched: Vec<_> = maps.iter().map(Mapping::all).chain([private.clone(), report.span()]).collect();
        let operand = Span::keep_alive(&touched)?.unwrap_or_else(|| private.clone());
        let stream = device.stream()?;
        // Poisoned while the kernels run once to be loaded, so that they do nothing.
        stream.fill(&private, 1)?;
        let request = CollectiveRequest::without_data(reference);
        kernels.warm_up(&stream, &request, &operand)?;
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
            #[cfg(feature = "test-hooks")]
            hooks,
            last: Mutex::default(),
            slice_staging,
            _watch: watch,
        })
    }

    /// Reports whether a call has failed, without waiting. Synchronize the stream first to include all enqueued calls.
    ///
    /// # Errors
    /// [`Error::Comm`](crate::Error::Comm) with the ranks that were lost or did not arrive before the timeout. Later calls of the lane,
    /// and graphs that use it, do nothing; create a new group to continue.
    pub fn check(&self) -> Result<()> {
        self.report.check(self.group.bootstrap(), self.timeout)
    }

    /// The lane for a user's kernels: a `Call` of `barrier.cuh` takes it.
    #[must_use]
    pub fn lane_ref(&self) -> LaneRef {
        self.reference
    }

    /// Enqueues a call after the previous call of the lane, on any stream.
    pub(super) fn in_turn(&self, stream: &Stream, enqueue: impl FnOnce() -> Result<()>) -> Result<()> {
        if stream.runs_inline() {
            // Inline work takes the call lock itself, captured or not.
            return enqueue();
        }
        let mut last = self.last();
        // Captured work is ordered by the launch of the graph.
        if last.as_ref() != Some(stream) && !stream.is_capturing() {
            if let Some(before) = last.as_ref() {
                let event = Event::create(before.device(), EventKind::Order)?;
                before.record(&event)?;
                stream.await_event(&event)?;
            }
            *last = Some(stream.clone());
        }
        enqueue()
    }

    fn last(&self) -> MutexGuard<'_, Option<Stream>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Aborts kernels if the group fails, and CPU kernels also if a rank leaves: a rank that has finished a call has seen all ranks
/// arrive, so no call that the rank has finished still waits for it.
fn watch(group: &Communicator, report: Report, maps: Vec<Mapping>, offset: usize) -> FailureWatch {
    let (own, on_host) = (group.rank(), group.device().backend().kind() == BackendKind::Host);
    group.bootstrap().watch(move |error| {
        // A device may still run calls that the rank enqueued before it left, so kernels wait until their timeout.
        if !on_host && matches!(error, CommError::PeerLeft { .. } | CommError::Closed) {
            return;
        }
        // It fails only in a forked child, which has no kernels.
        let _ = report.abort(own, error);
        // A thread that checked for the request just before may be about to sleep: wake it until it is awake.
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
