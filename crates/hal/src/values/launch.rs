//! The inputs of a kernel launch: the kernel image of each backend, the shape of the grid and the arguments.

use std::fmt;

use smallvec::SmallVec;
use zerocopy::{Immutable, IntoBytes, TryFromBytes};

/// A kernel of the host backend: one call computes the whole grid.
///
/// It is `unsafe` because only the caller knows which memory the kernel accesses. Like a callback of a driver, it must not call
/// this crate: the stream that runs it is locked, so the call would deadlock.
pub type HostFunction = unsafe fn(&LaunchShape, &Args);

/// A set of kernels, as PTX for CUDA and as Rust functions for the host backend.
#[derive(Clone, Copy)]
pub struct KernelImage {
    /// The kernels as PTX for CUDA devices, if the image has any.
    pub ptx: Option<&'static str>,
    /// The kernels as functions for host devices, with their names.
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

/// The grid and block dimensions of a kernel launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchShape {
    /// The number of blocks of the grid in x, y and z.
    pub grid: [u32; 3],
    /// The number of threads per block in x, y and z.
    pub block: [u32; 3],
    /// The number of bytes of dynamic shared memory per block.
    pub shared_len: u32,
    /// True if the launch uses programmatic stream serialization: the kernel may start before the preceding kernel of the stream
    /// ends.
    pub programmatic: bool,
}

impl LaunchShape {
    /// Describes a one-dimensional grid of `blocks` blocks of `threads` threads.
    #[must_use]
    pub fn linear(blocks: u32, threads: u32) -> Self {
        Self { grid: [blocks, 1, 1], block: [threads, 1, 1], shared_len: 0, programmatic: false }
    }

    /// Enables programmatic dependent launch: the kernel may start before the preceding kernel of the stream ends.
    ///
    /// The kernel must execute `griddepcontrol.wait` before it accesses memory, which needs [compute
    /// capability](crate::DeviceInfo::compute) 9.0 or newer. This hides more than a microsecond of launch latency, because the
    /// blocks are already resident when the preceding kernel ends.
    #[must_use]
    #[doc(alias = "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION")]
    pub fn programmatic(self) -> Self {
        Self { programmatic: true, ..self }
    }
}

/// The arguments of a kernel launch, in order. Lists of at most four arguments and [`Args::INLINE_LEN`] bytes need no heap
/// allocation, which would take longer than the rest of a list.
///
/// ```
/// use wholemem_hal::Args;
///
/// let args = Args::new().u64(0x1000).u32(42);
/// assert_eq!(args.read_u32(1), Some(42));
/// assert_eq!(args.read_u32(0), None); // the first argument has eight bytes
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Args {
    bytes: SmallVec<[u8; Args::INLINE_LEN]>,
    /// The offset and the length of each kernel argument in `bytes`; offsets are aligned to the argument's alignment.
    places: SmallVec<[(usize, usize); 4]>,
}

impl Args {
    /// The number of bytes of arguments that need no heap allocation.
    pub const INLINE_LEN: usize = 256;

    /// Creates an empty list of kernel arguments.
    #[must_use]
    #[inline]
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a `u32` to the kernel arguments.
    #[must_use]
    #[inline]
    pub fn u32(self, value: u32) -> Self {
        self.value(&value)
    }

    /// Appends a `u64` or an address to the kernel arguments.
    #[must_use]
    #[inline]
    pub fn u64(self, value: u64) -> Self {
        self.value(&value)
    }

    /// Appends a number or a structure to the kernel arguments, by its in-memory representation.
    #[must_use]
    #[inline]
    pub fn value<T: IntoBytes + Immutable>(self, value: &T) -> Self {
        self.bytes(value.as_bytes(), align_of::<T>())
    }

    /// Appends a structure to the kernel arguments as raw bytes; `align` is the alignment of the structure, a power of two.
    #[must_use]
    #[inline]
    pub fn bytes(mut self, value: &[u8], align: usize) -> Self {
        // No kernel argument needs more than page alignment; other values are rounded up to a power of two.
        let align = align.clamp(1, 4096).next_power_of_two();
        let start = self.bytes.len().next_multiple_of(align);
        self.bytes.resize(start, 0);
        self.bytes.extend_from_slice(value);
        self.places.push((start, value.len()));
        self
    }

    /// Returns the number of kernel arguments.
    #[must_use]
    pub fn count(&self) -> usize {
        self.places.len()
    }

    /// Returns the bytes of one kernel argument.
    #[must_use]
    #[inline]
    pub fn read(&self, index: usize) -> Option<&[u8]> {
        let &(start, len) = self.places.get(index)?;
        self.bytes.get(start..start + len)
    }

    /// Returns pointers to the bytes of each kernel argument.
    pub(crate) fn pointers(&self) -> impl Iterator<Item = *const u8> {
        self.places.iter().map(|&(start, _)| self.bytes[start..].as_ptr())
    }

    /// Copies one kernel argument to a value; `None` if its length differs from the type's, or its bytes are invalid for the
    /// type.
    #[must_use]
    #[inline]
    pub fn read_value<T: TryFromBytes>(&self, index: usize) -> Option<T> {
        T::try_read_from_bytes(self.read(index)?).ok()
    }

    /// Returns one kernel argument as a `u32`; `None` if the argument has another length.
    #[must_use]
    pub fn read_u32(&self, index: usize) -> Option<u32> {
        self.read_value(index)
    }

    /// Returns one kernel argument as a `u64`; `None` if the argument has another length.
    #[must_use]
    pub fn read_u64(&self, index: usize) -> Option<u64> {
        self.read_value(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_aligned_to_their_types() {
        let args = Args::new().u32(1).u64(2).bytes(&[3; 5], 1).bytes(&[4; 16], 16);
        assert_eq!(args.places[..], [(0, 4), (8, 8), (16, 5), (32, 16)]);
        assert_eq!(args.count(), 4);
        assert_eq!(Args::new().u32(1).bytes(&[2], usize::MAX).places[..], [(0, 4), (4096, 1)]);
        assert_eq!(args.read(2), Some(&[3; 5][..]));
        assert_eq!(args.read(4), None);
        assert_eq!((args.read_u32(0), args.read_u64(1), args.read_u64(2)), (Some(1), Some(2), None));
    }

    #[test]
    fn read_value_rejects_a_type_of_another_layout() {
        let args = Args::new().u32(1).value(&[7_u64, 8, 9]).value(&true);
        assert_eq!(args.places[..], [(0, 4), (8, 24), (32, 1)]);
        assert_eq!(args.read_value(1), Some([7_u64, 8, 9]));
        assert_eq!(args.read_value::<[u64; 2]>(1), None);
        assert_eq!(args.read_value(2), Some(true));
        assert_eq!(Args::new().value(&2_u8).read_value::<bool>(0), None);
    }
}
