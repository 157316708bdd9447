//! Reads the elements of an array with any strides in host memory, in C order.

use wholemem_os::SharedSlice;

use super::view::View;
use crate::error::Exception;

/// The length of a run of contiguous bytes from which on the run is passed on by itself. Shorter runs are collected in a buffer.
const LONG_RUN: usize = 512;

/// The length of the buffer in which short runs are collected.
const BUFFER: usize = 64 << 10;

/// A dimension of an array: its length, and its stride in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Dimension {
    len: usize,
    stride: isize,
}

/// The order in which an array is read: runs of contiguous bytes of equal length, whose positions the dimensions describe.
#[derive(Debug, PartialEq, Eq)]
struct ReadPlan {
    run: usize,
    dimensions: Vec<Dimension>,
}

impl ReadPlan {
    /// Merges dimensions that are contiguous with each other. `element` is the length of an element in bytes.
    fn new(element: usize, shape: &[i64], strides: &[i64]) -> Result<Self, Exception> {
        let too_large = || Exception::new("WrongValue", "an array cannot be larger than the address space");
        let mut dimensions: Vec<Dimension> = Vec::with_capacity(shape.len());
        for (len, stride) in shape.iter().zip(strides) {
            let len = usize::try_from(*len).map_err(|_| too_large())?;
            let bytes = isize::try_from(*stride).ok().zip(isize::try_from(element).ok());
            let stride =
                bytes.and_then(|(stride, element)| stride.checked_mul(element)).ok_or_else(too_large)?;
            if len == 1 {
                continue;
            }
            let extent = isize::try_from(len).ok().and_then(|len| len.checked_mul(stride));
            match dimensions.last_mut() {
                Some(outer) if Some(outer.stride) == extent => {
                    *outer = Dimension { len: outer.len * len, stride };
                }
                _ => dimensions.push(Dimension { len, stride }),
            }
        }
        let is_dense = |inner: &Dimension| isize::try_from(element) == Ok(inner.stride);
        let run = dimensions.pop_if(|inner| is_dense(inner)).map_or(element, |inner| inner.len * element);
        Ok(Self { run, dimensions })
    }

    /// Calls `read` with the position of every run in order, relative to the first element.
    fn for_each(&self, mut read: impl FnMut(isize) -> Result<(), Exception>) -> Result<(), Exception> {
        let Some((inner, outer)) = self.dimensions.split_last() else { return read(0) };
        let mut counters = vec![0; outer.len()];
        let mut start = 0_isize;
        loop {
            let mut at = start;
            for _ in 0..inner.len {
                read(at)?;
                at += inner.stride;
            }
            // Advances the outer dimensions like the digits of a number.
            let mut digits = counters.iter_mut().zip(outer).rev();
            loop {
                let Some((counter, dimension)) = digits.next() else { return Ok(()) };
                *counter += 1;
                start += dimension.stride;
                if *counter < dimension.len {
                    break;
                }
                start -= dimension.stride * isize::try_from(dimension.len).unwrap_or(0);
                *counter = 0;
            }
        }
    }
}

impl View {
    /// Reads the elements of an array in host memory in C order, whatever its strides are. `write` gets consecutive pieces of their
    /// bytes, each with its offset.
    pub(crate) fn read_in_order(
        &self,
        mut write: impl FnMut(usize, SharedSlice<'_>) -> Result<(), Exception>,
    ) -> Result<(), Exception> {
        let memory = self.host_bytes()?;
        if self.layout.count() == 0 {
            return write(0, memory);
        }
        let (before, _) = self.layout.extent()?;
        let plan = ReadPlan::new(self.layout.element.len(), &self.layout.shape, &self.layout.strides)?;
        let mut written = 0;
        if plan.run >= LONG_RUN || plan.dimensions.is_empty() {
            return plan.for_each(|at| {
                write(written, memory.part(before.wrapping_add_signed(at), plan.run)?)?;
                written += plan.run;
                Ok(())
            });
        }
        let (mut buffer, mut used) = (vec![0; BUFFER], 0);
        plan.for_each(|at| {
            if buffer.len() - used < plan.run {
                write(written, buffer[..used].into())?;
                written += used;
                used = 0;
            }
            read_run(&memory, before.wrapping_add_signed(at), &mut buffer[used..used + plan.run])?;
            used += plan.run;
            Ok(())
        })?;
        write(written, buffer[..used].into())
    }
}

/// Copies a short run of bytes. An aligned run of the length of a number is read at once, which is several times faster.
fn read_run(memory: &SharedSlice<'_>, offset: usize, target: &mut [u8]) -> Result<(), Exception> {
    let at = memory.part(offset, target.len())?.as_ptr();
    macro_rules! read {
        ($number:ty) => {{
            // SAFETY: `part` has checked that the bytes are in memory that this process may read, and the guard of the match arm that
            // the address is aligned. A volatile read is one access, which the compiler neither repeats nor splits, so concurrent
            // writes yield old or new bytes.
            let number = unsafe { at.cast::<$number>().read_volatile() };
            target.copy_from_slice(&number.to_ne_bytes());
        }};
    }
    match target.len() {
        1 => read!(u8),
        2 if at.cast::<u16>().is_aligned() => read!(u16),
        4 if at.cast::<u32>().is_aligned() => read!(u32),
        8 if at.cast::<u64>().is_aligned() => read!(u64),
        _ => memory.read_at(offset, target)?,
    }
    Ok(())
}
