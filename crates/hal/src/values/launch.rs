//! What a launch takes: the kernels of each backend, the shape of the grid and the arguments.

use std::fmt;

use smallvec::SmallVec;
use zerocopy::{Immutable, IntoBytes, TryFromBytes};

/// A kernel as the host backend runs it: the whole grid in one call.
///
/// It is `unsafe` because a launch is: only the caller knows what the kernel touches. Like a callback of a driver, it must
/// not use this crate: the stream it runs on is locked, so it would deadlock.
pub type HostFunction = unsafe fn(&LaunchShape, &Args);

/// The same kernels for each backend.
#[derive(Clone, Copy)]
pub struct KernelImage {
    /// Text for CUDA devices.
    pub ptx: Option<&'static str>,
    /// Functions for host devices, by name.
    pub host: &'static [(&'static str, HostFunction)],
}

impl fmt::Debug for KernelImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.host.iter().map(|(name, _)| name);
        f.debug_struct("KernelImage")
            .field("ptx", &self.ptx.map(str::len))
            .field("host", &Names(names))
            .finish()
    }
}

struct Names<I>(I);

impl<I: Iterator<Item: fmt::Debug> + Clone> fmt::Debug for Names<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.clone()).finish()
    }
}

/// How many threads run a kernel, and how they are grouped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchShape {
    /// Blocks in each direction.
    pub grid: [u32; 3],
    /// Threads of a block in each direction.
    pub block: [u32; 3],
    /// Bytes of memory that the threads of a block share, beyond what the kernel declares.
    pub shared_len: u32,
    /// Whether it may be set up while what is before it on the stream still runs.
    pub early: bool,
}

impl LaunchShape {
    /// A line of `blocks` blocks of `threads` threads.
    #[must_use]
    pub fn line(blocks: u32, threads: u32) -> Self {
        Self { grid: [blocks, 1, 1], block: [threads, 1, 1], shared_len: 0, early: false }
    }

    /// The same, but it may be set up while what is before it on the stream still runs.
    ///
    /// For kernels that wait for the end of that themselves, by `griddepcontrol.wait`, before they touch anything, on devices
    /// that have it: those of [compute capability](crate::DeviceInfo::compute) 9.0 and on. Setting up costs more than a
    /// microsecond, and the blocks have their places on the device meanwhile.
    #[must_use]
    #[doc(alias = "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION")]
    pub fn early(self) -> Self {
        Self { early: true, ..self }
    }
}

/// The arguments of a launch, in order. A few short ones take no memory but their own.
///
/// ```
/// use wholemem_hal::Args;
///
/// let args = Args::new().u64(0x1000).u32(42);
/// assert_eq!(args.read_u32(1), Some(42));
/// assert_eq!(args.read_u32(0), None); // that one is eight bytes long
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Args {
    bytes: SmallVec<[u8; 192]>,
    /// Where each argument lies in `bytes`, aligned to the argument's own alignment.
    places: SmallVec<[(usize, usize); 4]>,
}

impl Args {
    /// No arguments yet.
    #[must_use]
    #[inline]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a four-byte number.
    #[must_use]
    #[inline]
    pub fn u32(self, value: u32) -> Self {
        self.value(&value)
    }

    /// Adds an eight-byte number, or an address.
    #[must_use]
    #[inline]
    pub fn u64(self, value: u64) -> Self {
        self.value(&value)
    }

    /// Adds a number or a structure as it is in memory.
    #[must_use]
    #[inline]
    pub fn value<T: IntoBytes + Immutable>(self, value: &T) -> Self {
        self.bytes(value.as_bytes(), align_of::<T>())
    }

    /// Adds a structure by its bytes; `align` is its alignment, a power of two.
    #[must_use]
    #[inline]
    pub fn bytes(mut self, value: &[u8], align: usize) -> Self {
        // No argument needs more than a page's alignment; what is no power of two means the next one.
        let align = align.clamp(1, 4096).next_power_of_two();
        let start = self.bytes.len().next_multiple_of(align);
        self.bytes.resize(start, 0);
        self.bytes.extend_from_slice(value);
        self.places.push((start, value.len()));
        self
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.places.len()
    }

    /// The bytes of one argument.
    #[must_use]
    #[inline]
    pub fn read(&self, index: usize) -> Option<&[u8]> {
        let &(start, len) = self.places.get(index)?;
        self.bytes.get(start..start + len)
    }

    /// Where the bytes of each argument begin.
    pub(crate) fn pointers(&self) -> impl Iterator<Item = *const u8> {
        self.places.iter().map(|&(start, _)| self.bytes[start..].as_ptr())
    }

    /// A copy of one argument; `None` if it has another length, or bytes that no value of the type has.
    #[must_use]
    #[inline]
    pub fn read_value<T: TryFromBytes>(&self, index: usize) -> Option<T> {
        T::try_read_from_bytes(self.read(index)?).ok()
    }

    /// One argument as a four-byte number, if it is that long.
    #[must_use]
    pub fn read_u32(&self, index: usize) -> Option<u32> {
        self.read_value(index)
    }

    /// One argument as an eight-byte number, if it is that long.
    #[must_use]
    pub fn read_u64(&self, index: usize) -> Option<u64> {
        self.read_value(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_aligned_as_their_types_are() {
        let args = Args::new().u32(1).u64(2).bytes(&[3; 5], 1).bytes(&[4; 16], 16);
        assert_eq!(args.places[..], [(0, 4), (8, 8), (16, 5), (32, 16)]);
        assert_eq!(args.count(), 4);
        assert_eq!(Args::new().u32(1).bytes(&[2], usize::MAX).places[..], [(0, 4), (4096, 1)]);
        assert_eq!(args.read(2), Some(&[3; 5][..]));
        assert_eq!(args.read(4), None);
        assert_eq!((args.read_u32(0), args.read_u64(1), args.read_u64(2)), (Some(1), Some(2), None));
    }

    #[test]
    fn a_structure_is_read_back_and_no_other_type_is() {
        let args = Args::new().u32(1).value(&[7_u64, 8, 9]).value(&true);
        assert_eq!(args.places[..], [(0, 4), (8, 24), (32, 1)]);
        assert_eq!(args.read_value(1), Some([7_u64, 8, 9]));
        assert_eq!(args.read_value::<[u64; 2]>(1), None);
        assert_eq!(args.read_value(2), Some(true));
        assert_eq!(Args::new().value(&2_u8).read_value::<bool>(0), None);
    }
}
