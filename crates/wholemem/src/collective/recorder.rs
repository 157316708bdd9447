//! Records the memory of captured calls that is not registered, so that the calls of the graph are not staged.
//!
//! ```text
//!   record_captures()     capture: each call gets a window with an empty table     finish(): all ranks register the memory
//!   ------|------------------------|----------------|------------------------------------|-----------------------------> time
//!                               window 5         window 6                        the tables of 5 and 6 are written
//! ```
//!
//! While a stream is captured, no memory can be exchanged or written. But a captured kernel reads the table of its window only when
//! the graph is launched, so the table is written after the capture.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use wholemem_hal::Span;

use super::address_space::{WindowAddressSpace, WindowCall};
use super::address_tables::AddressTables;
use super::memory_watch::MemoryWatch;
use super::registration::PeerSpans;
use super::shared_block::OwnMemory;
use super::window::{DropNotice, DroppedWindows, Window, WindowCore};
use super::window_table::WindowTable;
use crate::communicator::agree;
use crate::{Communicator, Error, Result, WindowRef};
use wholemem_comm::Rank;

/// The maximum number of buffers that one recording records. Further calls are staged; all ranks begin to stage with the same
/// call.
const CAPACITY: usize = 1 << 16;

/// Records the memory of captured calls of all lanes of a rank.
#[derive(Debug)]
pub(super) struct CaptureRecorder {
    group: Communicator,
    is_active: AtomicBool,
    tables: Arc<AddressTables>,
    window_table: Arc<Mutex<WindowTable>>,
    dropped: DroppedWindows,
    /// Detects that memory of the current recording was freed. The memory is known when the recording is finished.
    watch: Mutex<Arc<MemoryWatch>>,
    recorded: Mutex<Recorded>,
}

/// The buffers of a recording.
#[derive(Debug, Default)]
struct Recorded {
    buffers: Vec<RecordedBuffer>,
    /// The number of tables that the recording has used.
    used: usize,
    /// The memory of all tables of the recording. It is allocated before the capture, and has the same length on all ranks.
    tables: Option<Span>,
}

/// Memory of a captured call, whose window is not complete.
#[derive(Debug)]
pub(super) struct RecordedBuffer {
    span: Span,
    table: Span,
    window: Window,
    /// The memory of all ranks, which the window keeps after the recording is finished.
    memory: Arc<RecordedMemory>,
}

#[derive(Debug)]
struct RecordedMemory {
    peers: OnceLock<PeerSpans>,
    /// Reports on drop that this rank has dropped the window; dropped after the memory of the window.
    _notice: Arc<DropNotice>,
}

impl CaptureRecorder {
    pub(super) fn new(address_space: &WindowAddressSpace) -> Self {
        Self {
            group: address_space.group().clone(),
            is_active: AtomicBool::new(false),
            tables: Arc::clone(address_space.tables()),
            window_table: address_space.shared_window_table(),
            dropped: Arc::clone(address_space.dropped()),
            watch: Mutex::new(Arc::new(MemoryWatch::new(address_space.group().device().backend()))),
            recorded: Mutex::default(),
        }
    }

    #[inline]
    pub(super) fn is_active(&self) -> bool {
        self.is_active.load(Ordering::Relaxed)
    }

    /// Allocates memory for the tables, which is impossible during a capture, and starts to record.
    ///
    /// # Errors
    /// [`Error::Recording`] if it records already.
    pub(super) fn start(&self) -> Result<()> {
        let tables = self.tables.allocate(CAPACITY * self.group.size() as usize)?;
        if self.is_active.swap(true, Ordering::Relaxed) {
            return Err(Error::Recording);
        }
        *self.watch() = Arc::new(MemoryWatch::new(self.group.device().backend()));
        *self.recorded() = Recorded { tables: Some(tables), ..Recorded::default() };
        Ok(())
    }

    /// Stops recording, and returns the memory that was recorded.
    pub(super) fn stop(&self) -> Vec<RecordedBuffer> {
        self.is_active.store(false, Ordering::Relaxed);
        std::mem::take(&mut *self.recorded()).buffers
    }

    /// Records memory of a captured call. Returns its window, or `None` if there is no space for its table.
    pub(super) fn record(&self, span: &Span) -> Option<Window> {
        let (ranks, own) = (self.group.size() as usize, self.group.rank());
        let table = self.next_table(ranks)?;
        let id = self.window_table.lock().unwrap_or_else(PoisonError::into_inner).insert_unmapped();
        let notice = Arc::new(DropNotice::new(id, &self.dropped));
        let memory = Arc::new(RecordedMemory { peers: OnceLock::new(), _notice: Arc::clone(&notice) });
        let mut spans = vec![None; ranks];
        spans[own.index()] = Some(span.clone());
        let keep = Span::keep_alive([span, &table]).ok()??.with_owner(Arc::<RecordedMemory>::clone(&memory));
        let reference = WindowRef { base: 0, stride: 0, table: table.address() };
        let window = Window::of(Arc::new(WindowCore {
            id,
            dropped: Arc::clone(&self.dropped),
            own,
            spans,
            keep: Some(keep),
            reference,
            memory: Some(Arc::clone(&self.watch())),
            is_registered: true,
            is_recorded: true,
            _notice: notice,
        }));
        let recorded = RecordedBuffer { span: span.clone(), table, window: window.clone(), memory };
        self.recorded().buffers.push(recorded);
        Some(window)
    }

    /// Returns the next table of the recording; `None` if all are used.
    fn next_table(&self, ranks: usize) -> Option<Span> {
        let len = ranks * size_of::<u64>();
        let mut recorded = self.recorded();
        let table = recorded.tables.as_ref()?.part(recorded.used * len, len).ok()?;
        recorded.used += 1;
        Some(table)
    }

    /// Returns the watch of the memory that is being recorded. All calls of a recording share it, so that the launch of their graph
    /// checks each block of memory once.
    fn watch(&self) -> MutexGuard<'_, Arc<MemoryWatch>> {
        // Code that holds this lock only replaces or clones the reference, so it is consistent after a panic.
        self.watch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn recorded(&self) -> MutexGuard<'_, Recorded> {
        // Each change under this lock is a single operation, so the value is consistent after a panic.
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WindowAddressSpace {
    /// Registers recorded memory: writes the tables of its windows. Collective.
    pub(super) fn register_recorded(&self, recorded: &[RecordedBuffer]) -> Result<()> {
        let spans: Vec<_> = recorded.iter().map(|buffer| buffer.span.clone()).collect();
        let own = OwnMemory::of(self.group().device(), &spans);
        let (memory, windows) = self.share(WindowCall::FinishRecording, &spans, own)?;
        let mut tables = Vec::new();
        for peers in &windows {
            let part = |peer: &Option<(Span, _)>| {
                peer.as_ref().map_or((0, 0), |(span, _)| (span.address(), span.len()))
            };
            let parts: Vec<_> = peers.iter().map(part).collect();
            // Every rank has the lengths of all ranks, so all ranks fail together, with the same error, if they differ.
            if let Some((rank, _)) = (0..).map(Rank).zip(&parts).find(|(_, (_, len))| *len != parts[0].1) {
                return Err(Error::RanksDisagree { rank });
            }
            tables.push(parts.into_iter().map(|(address, _)| address).collect::<Vec<_>>());
        }
        let all = recorded.iter().map(|buffer| &buffer.table).zip(tables.iter().map(Vec::as_slice));
        agree(self.group().bootstrap(), self.tables().write(all))?;
        // Without a watch (on the host backend) nothing is watched: only the owners of the spans, which are kept, can free the
        // memory.
        let watched: BTreeSet<_> = match self.watch() {
            Some(_) => memory.into_iter().flatten().collect(),
            None => BTreeSet::new(),
        };
        if let Some(watch) = recorded.first().and_then(|buffer| buffer.window.core().memory.as_ref()) {
            watch.set(watched.into_iter().collect());
        }
        for (buffer, peers) in recorded.iter().zip(windows) {
            self.owners().insert(buffer.window.core().id, buffer.span.clone());
            // `set` cannot fail: only this method sets `peers`, once for each recorded buffer.
            let _ = buffer.memory.peers.set(peers);
        }
        Ok(())
    }

    /// Writes this rank's own addresses to the tables of recorded memory that cannot be registered: a graph that is launched all the
    /// same then reads memory that exists.
    pub(super) fn close_recorded(&self, recorded: &[RecordedBuffer]) -> Result<()> {
        let ranks = self.group().size() as usize;
        let own: Vec<_> = recorded.iter().map(|buffer| vec![buffer.span.address(); ranks]).collect();
        self.tables().write(recorded.iter().map(|buffer| &buffer.table).zip(own.iter().map(Vec::as_slice)))
    }
}

/// A recording of the memory of captured calls, by [`SymmetricMemory::record_captures`](super::SymmetricMemory::record_captures).
#[derive(Debug)]
pub struct CaptureRecording {
    pub(super) symmetric: super::SymmetricMemory,
    pub(super) is_finished: bool,
}

impl CaptureRecording {
    /// Ends the recording: registers the memory of all captured calls of this rank. Collective: all ranks have captured the same
    /// calls. Graphs may be launched afterwards.
    ///
    /// Keep the result while a graph can be launched whose library does not keep operands of its work; this library's graphs and
    /// those of CUDA do.
    ///
    /// # Errors
    /// [`Error::RanksDisagree`] if ranks have captured different calls; [`Error::Hal`] and [`Error::OnRank`] if memory of a rank cannot be
    /// shared. The group is then aborted, so that the captured graphs cannot be used; [`Error::Comm`].
    pub fn finish(mut self) -> Result<RecordedWindows> {
        self.is_finished = true;
        let recorded = self.symmetric.recorder().stop();
        let address_space = self.symmetric.address_space();
        if let Err(error) = address_space.register_recorded(&recorded) {
            self.symmetric.group().bootstrap().abort();
            // The error of the registration is returned, and an error of this call is ignored: it writes the tables only so that
            // a graph that is launched all the same does not access unmapped memory.
            let _ = address_space.close_recorded(&recorded);
            return Err(error);
        }
        Ok(RecordedWindows { windows: recorded.into_iter().map(|buffer| buffer.window).collect() })
    }
}

impl Drop for CaptureRecording {
    /// Aborts the group if memory was recorded and is not registered, because the captured graphs cannot be used.
    fn drop(&mut self) {
        if self.is_finished {
            return;
        }
        let recorded = self.symmetric.recorder().stop();
        if !recorded.is_empty() {
            self.symmetric.group().bootstrap().abort();
            // A drop cannot return the error.
            let _ = self.symmetric.address_space().close_recorded(&recorded);
        }
    }
}

/// The windows of captured calls. They keep the memory of all ranks mapped.
#[derive(Debug, Clone)]
pub struct RecordedWindows {
    windows: Vec<Window>,
}

impl RecordedWindows {
    /// Returns the number of buffers that were recorded.
    #[must_use]
    pub fn len(&self) -> usize {
        self.windows.len()
    }

    /// Returns true if no buffer was recorded, because all were registered already.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.windows.is_empty()
    }
}
