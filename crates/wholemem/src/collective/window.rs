//! Windows: memory of which every rank has a part, and which every rank maps.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use wholemem_comm::Rank;
use wholemem_hal::Span;

use super::memory_watch::MemoryWatch;
use super::window_table::WindowId;
use crate::{Error, Result, WindowRef};

/// The ids of the windows that this rank has dropped and not yet reported to the other ranks.
pub(super) type DroppedWindows = Arc<Mutex<Vec<WindowId>>>;

/// A window: memory of which every rank has a part, and which every rank has mapped. Clones refer to the same window.
///
/// Dropping the last clone releases this rank's mappings, without communication. After all ranks have dropped the window, its
/// addresses are reused, so finish the work that uses it first.
///
/// ```
/// use wholemem::{Backend, Communicator, HostConfig, Rank, SymmetricMemory, SymmetricSpec};
///
/// let device = Backend::host(HostConfig::default())?.device(0)?;
/// let groups = Communicator::local(&[device.clone(), device])?;
/// let seen = Communicator::on_each(&groups, |group| {
///     let symmetric = SymmetricMemory::create(group, &SymmetricSpec::default())?;
///     let window = symmetric.mem_alloc(1 << 20)?;
///     let stream = group.device().stream()?;
///
///     // Each rank writes into the other's part.
///     let peer = Rank(1 - group.rank().0);
///     stream.write(&window.part_of(peer, 0, 5)?, b"hello")?;
///     symmetric.barrier(&stream)?;
///     let mut seen = [0; 5];
///     stream.read(&window.part_of(group.rank(), 0, 5)?, &mut seen)?;
///     Ok(seen)
/// })?;
/// assert_eq!(&seen, &[*b"hello"; 2]);
/// # Ok::<(), wholemem::Error>(())
/// ```
#[derive(Debug, Clone)]
#[doc(alias = "ncclWindow_t")]
pub struct Window {
    core: Arc<WindowCore>,
}

/// On drop, records that this rank has dropped a window. The memory of a registered window holds the notice, so that a rank
/// reports the drop only after it has unmapped the other ranks' memory.
#[derive(Debug)]
pub(super) struct DropNotice {
    id: WindowId,
    dropped: DroppedWindows,
}

impl DropNotice {
    pub(super) fn new(id: WindowId, dropped: &DroppedWindows) -> Self {
        Self { id, dropped: Arc::clone(dropped) }
    }

    pub(super) fn id(&self) -> WindowId {
        self.id
    }
}

impl Drop for DropNotice {
    fn drop(&mut self) {
        // Code that holds this lock only adds to the list of dropped windows or takes all of it, so the list is consistent after
        // a panic.
        self.dropped.lock().unwrap_or_else(PoisonError::into_inner).push(self.id);
    }
}

#[derive(Debug)]
pub(super) struct WindowCore {
    pub(super) id: WindowId,
    /// The list of the group's dropped windows. Two windows of the same group share the list, so it also identifies the group.
    pub(super) dropped: DroppedWindows,
    pub(super) own: Rank,
    /// The memory of each rank's part of the window; `None` for a rank without bytes.
    pub(super) spans: Vec<Option<Span>>,
    /// Keeps the parts of all ranks alive, and the table of their addresses if the window needs one.
    pub(super) keep: Option<Span>,
    pub(super) reference: WindowRef,
    /// Detects that this rank's part was freed; `None` if the memory cannot be freed while the window exists.
    pub(super) memory: Option<Arc<MemoryWatch>>,
    /// True if the memory existed before the window: a framework or the caller allocated it.
    pub(super) is_registered: bool,
    /// True if the other ranks' parts are known only after the capture in which the memory was recorded.
    pub(super) is_recorded: bool,
    /// Reports on drop that this rank has dropped the window; dropped after all memory of the window.
    pub(super) _notice: Arc<DropNotice>,
}

impl WindowCore {
    /// Returns the number of bytes that every rank has.
    pub(super) fn common_len(&self) -> usize {
        self.spans.iter().map(|span| span.as_ref().map_or(0, Span::len)).min().unwrap_or(0)
    }
}

impl Window {
    pub(super) fn of(core: Arc<WindowCore>) -> Self {
        Self { core }
    }

    /// Returns the length in bytes of this rank's part of the window.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len_of(self.core.own)
    }

    /// Returns true if this rank's part of the window has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the length in bytes of a rank's part of the window; zero for a rank that does not exist.
    #[must_use]
    pub fn len_of(&self, rank: Rank) -> usize {
        self.span_of(rank).map_or(0, Span::len)
    }

    /// Returns this rank's part of the window; `None` if the part is [empty](Self::is_empty).
    #[must_use]
    pub fn local(&self) -> Option<&Span> {
        self.span_of(self.core.own)
    }

    /// Returns `len` bytes at `offset` of a rank's part of the window.
    ///
    /// # Errors
    /// [`Error::NoPart`] for bytes outside the rank's part.
    #[doc(alias = "ncclGetPeerPointer")]
    pub fn part_of(&self, rank: Rank, offset: usize, len: usize) -> Result<Span> {
        let part = self.span_of(rank).map(|span| span.part(offset, len));
        match part {
            Some(Ok(part)) => Ok(part),
            _ => {
                let available = self.len_of(rank).saturating_sub(offset);
                Err(Error::NoPart { rank, offset, len, available })
            }
        }
    }

    /// Returns the addresses at which this rank has mapped all parts of the window, for kernels.
    #[must_use]
    pub fn window_ref(&self) -> WindowRef {
        self.core.reference
    }

    /// Returns the bytes from `range.start` to `range.end` of every rank's part of the window, as a buffer of a collective call.
    #[must_use]
    pub fn range(&self, range: Range<usize>) -> Buffer<'_> {
        Buffer::Window { window: self, range }
    }

    pub(super) fn core(&self) -> &WindowCore {
        &self.core
    }

    fn span_of(&self, rank: Rank) -> Option<&Span> {
        self.core.spans.get(rank.index())?.as_ref()
    }
}

/// The input or output of a collective call: memory of this rank, or a range of a window, which other ranks access directly. All
/// ranks pass the same kind of buffer, and the same range of a window.
#[derive(Debug, Clone)]
pub enum Buffer<'a> {
    /// Memory of this rank. If it is in a window or registered on every rank, it is used like a range of that window; otherwise the
    /// call stages it.
    Own(&'a Span),
    /// A range of every rank's part of a window.
    Window {
        /// The window in which the buffer is.
        window: &'a Window,
        /// The bytes of the buffer, as a range of every rank's part of the window.
        range: Range<usize>,
    },
}

impl<'a> From<&'a Span> for Buffer<'a> {
    fn from(span: &'a Span) -> Self {
        Self::Own(span)
    }
}

/// Converts a window to a buffer of a collective call: all of this rank's part. The part of every other rank must be at least as
/// long.
impl<'a> From<&'a Window> for Buffer<'a> {
    fn from(window: &'a Window) -> Self {
        window.range(0..window.len())
    }
}

impl Buffer<'_> {
    /// Returns true if this buffer lies within the other one, and both are [`Buffer::Own`]. For a range of a window the
    /// result is false.
    pub(super) fn is_part_of(&self, other: &Self) -> bool {
        let (Self::Own(part), Self::Own(all)) = (self, other) else { return false };
        part.address() >= all.address()
            && part.address() + part.len() as u64 <= all.address() + all.len() as u64
    }

    /// Returns the length of this buffer in bytes.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Own(span) => span.len(),
            Self::Window { range, .. } => range.len(),
        }
    }
}
