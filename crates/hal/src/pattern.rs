//! A fill pattern for memory of any device that differs in every word, and a checksum that depends on every bit.
//!
//! Tests and benchmarks use it to fill and check memory without copying it: the checksum of a filled range
//! can be computed without reading the range. The kernels are in `kernels/memory.cu`; the host functions here compute
//! the same.

use wholemem_os::width::to_usize;
use wholemem_os::{Deadline, SharedSlice};

use crate::raw::Address;
use crate::{
    Args, Attempt, Device, Error, Function, KernelImage, LaunchShape, Module, PinnedBuffer, Result, Rights,
    Span, Stream,
};

const IMAGE: KernelImage = KernelImage {
    ptx: Some(include_str!("../kernels/ptx/memory.ptx")),
    host: &[("fill_pattern", fill_on_host), ("checksum", sum_on_host)],
};

const WORD: usize = size_of::<u64>();

/// The number of threads per block and the maximum number of blocks of the pattern kernels: enough to occupy any GPU.
const THREADS: u32 = 256;
const MAX_BLOCKS: u32 = 4096;

/// The number of words that a pattern kernel on the host processes at a time.
const CHUNK: usize = 4096;

/// Returns word `index` of the fill pattern with the given seed.
#[must_use]
pub fn word(seed: u64, index: u64) -> u64 {
    let mut x = seed.wrapping_add(index).wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Returns the term that word `index` adds to the checksum.
#[must_use]
pub fn checksum_term(word: u64, index: u64) -> u64 {
    word.wrapping_mul(index.wrapping_mul(2).wrapping_add(1))
}

/// Returns the checksum of `len` bytes of the fill pattern, computed without memory.
#[must_use]
pub fn expected(seed: u64, len: usize) -> u64 {
    (0..(len / WORD) as u64).fold(0, |sum, index| sum.wrapping_add(checksum_term(word(seed, index), index)))
}

/// The kernels that fill memory with the pattern and compute the checksum, loaded on a device.
#[derive(Debug)]
pub struct Pattern {
    fill: Function,
    sum: Function,
    result: PinnedBuffer,
}

impl Pattern {
    /// Loads the pattern kernels on a device.
    ///
    /// # Errors
    /// As [`Module::load`].
    pub fn load(device: &Device) -> Result<Self> {
        // SAFETY: `fill_pattern` takes an address, a count and a seed, and `checksum` takes an address, a count and an address;
        // the launches below pass these.
        let module = unsafe { Module::load(device, &IMAGE) }?;
        let result = PinnedBuffer::create(device, WORD)?;
        Ok(Self { fill: module.function("fill_pattern")?, sum: module.function("checksum")?, result })
    }

    /// Enqueues filling a span with the pattern. The length and the address of the span must be multiples of 8.
    ///
    /// # Errors
    /// [`Error::UnalignedLength`], [`Error::UnalignedOffset`], [`Error::Denied`]; [`Error::Failed`].
    pub fn fill(&self, stream: &Stream, to: &Span, seed: u64) -> Result<()> {
        let count = words(stream, to, Rights::ReadWrite)?;
        let args = Args::new().u64(to.address()).u64(count).u64(seed);
        // SAFETY: the arguments match the parameters of `fill_pattern`; the span is writable and stays mapped until the kernel
        // has run.
        unsafe { stream.launch(&self.fill, &shape(count), &args, std::slice::from_ref(to)) }
    }

    /// Computes the checksum of a span, and waits for it. The length and the address of the span must be multiples of 8.
    ///
    /// # Errors
    /// As [`Pattern::fill`], and as [`Stream::synchronize`].
    pub fn checksum(&self, stream: &Stream, from: &Span) -> Result<u64> {
        let count = words(stream, from, Rights::Read)?;
        let result = self.result.all();
        stream.write(&result, &[0; WORD])?;
        let args = Args::new().u64(from.address()).u64(count).u64(result.address());
        // SAFETY: the arguments match the parameters of `checksum`; both spans are accessible, and the stream holds them.
        unsafe { stream.launch(&self.sum, &shape(count), &args, [from, &result]) }?;
        stream.synchronize(Deadline::NEVER)?;
        let mut sum = [0; WORD];
        stream.read(&result, &mut sum)?;
        Ok(u64::from_ne_bytes(sum))
    }
}

fn words(stream: &Stream, span: &Span, needed: Rights) -> Result<u64> {
    let attempt = || Attempt::Fill { len: span.len() };
    span.check(stream.device(), needed, attempt)?;
    if !span.len().is_multiple_of(WORD) {
        return Err(Error::UnalignedLength { attempt: attempt(), granule: WORD });
    }
    if !span.address().is_multiple_of(WORD as u64) {
        return Err(Error::UnalignedOffset { attempt: attempt(), granule: WORD });
    }
    if span.is_empty() {
        return Err(Error::ZeroLength { attempt: attempt() });
    }
    Ok((span.len() / WORD) as u64)
}

fn shape(count: u64) -> LaunchShape {
    let blocks = count.div_ceil(u64::from(THREADS)).min(u64::from(MAX_BLOCKS));
    LaunchShape::linear(u32::try_from(blocks).expect("at most `MAX_BLOCKS`"), THREADS)
}

/// Returns a view of the memory that the first two arguments of a pattern kernel describe.
///
/// # Safety
/// The first two arguments are the address and the number of words of memory that stays mapped while the view is used.
unsafe fn memory<'a>(args: &Args, writable: bool) -> SharedSlice<'a> {
    let (at, count) = (args.read_u64(0).expect("an address"), args.read_u64(1).expect("a count"));
    let at = Address(at).to_host().expect("mapped memory is not at null");
    let len = to_usize(count) * WORD;
    // SAFETY: the caller of `memory` guarantees that the range stays mapped while the view is used.
    unsafe { SharedSlice::new(at, len, writable) }
}

unsafe fn fill_on_host(_: &LaunchShape, args: &Args) {
    // SAFETY: `Pattern::fill` launches this kernel with the address and the number of words of a writable span.
    let memory = unsafe { memory(args, true) };
    let seed = args.read_u64(2).expect("a seed");
    let mut bytes = Vec::with_capacity(CHUNK * WORD);
    for start in (0..memory.len() / WORD).step_by(CHUNK) {
        let end = (start + CHUNK).min(memory.len() / WORD);
        bytes.clear();
        (start..end).for_each(|index| bytes.extend_from_slice(&word(seed, index as u64).to_ne_bytes()));
        memory.write_at(start * WORD, &bytes).expect("within the span");
    }
}

unsafe fn sum_on_host(_: &LaunchShape, args: &Args) {
    // SAFETY: `Pattern::checksum` launches this kernel with the address and the number of words of a readable span.
    let memory = unsafe { memory(args, false) };
    let mut bytes = vec![0; CHUNK * WORD];
    let mut sum = 0_u64;
    for start in (0..memory.len() / WORD).step_by(CHUNK) {
        let count = CHUNK.min(memory.len() / WORD - start);
        memory.read_at(start * WORD, &mut bytes[..count * WORD]).expect("within the span");
        for (index, word) in (start as u64..).zip(bytes[..count * WORD].chunks_exact(WORD)) {
            sum = sum.wrapping_add(checksum_term(
                u64::from_ne_bytes(word.try_into().expect("eight bytes")),
                index,
            ));
        }
    }
    let at = Address(args.read_u64(2).expect("an address")).to_host().expect("not null");
    // SAFETY: the third argument from `Pattern::checksum` is the address of a word that it owns.
    let result = unsafe { SharedSlice::new(at, WORD, true) };
    result.write_at(0, &sum.to_ne_bytes()).expect("one word");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backend, HostConfig};

    #[test]
    fn the_checksum_of_filled_memory_equals_the_computed_one() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let map = device.allocate(128 << 10).unwrap().map(Rights::ReadWrite).unwrap();
        let (stream, pattern) = (device.stream().unwrap(), Pattern::load(&device).unwrap());
        for len in [8, 4096, 100_000, 128 << 10] {
            let span = map.span(0, len).unwrap();
            pattern.fill(&stream, &span, 42).unwrap();
            assert_eq!(pattern.checksum(&stream, &span).unwrap(), expected(42, len));
            assert_ne!(expected(42, len), expected(43, len));
        }
    }

    #[test]
    fn the_checksum_detects_flipped_bits_and_swapped_words() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let map = device.allocate(64 << 10).unwrap().map(Rights::ReadWrite).unwrap();
        let (stream, pattern) = (device.stream().unwrap(), Pattern::load(&device).unwrap());
        pattern.fill(&stream, &map.all(), 7).unwrap();
        let mut words = [0; 16];
        stream.read(&map.span(800, 16).unwrap(), &mut words).unwrap();
        let mut swapped = words;
        swapped.rotate_left(8);
        let mut flipped = words;
        flipped[15] ^= 0x80;
        for changed in [swapped, flipped] {
            stream.write(&map.span(800, 16).unwrap(), &changed).unwrap();
            assert_ne!(pattern.checksum(&stream, &map.all()).unwrap(), expected(7, map.len()));
        }
        stream.write(&map.span(800, 16).unwrap(), &words).unwrap();
        assert_eq!(pattern.checksum(&stream, &map.all()).unwrap(), expected(7, map.len()));
    }

    #[test]
    fn spans_that_are_not_multiples_of_a_word_are_rejected() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let map = device.allocate(64 << 10).unwrap().map(Rights::ReadWrite).unwrap();
        let (stream, pattern) = (device.stream().unwrap(), Pattern::load(&device).unwrap());
        let refused = |offset, len| pattern.fill(&stream, &map.span(offset, len).unwrap(), 1).unwrap_err();
        let attempt = |len| Attempt::Fill { len };
        assert_eq!(refused(0, 12), Error::UnalignedLength { attempt: attempt(12), granule: 8 });
        assert_eq!(refused(4, 8), Error::UnalignedOffset { attempt: attempt(8), granule: 8 });
        assert_eq!(refused(0, 0), Error::ZeroLength { attempt: attempt(0) });
    }
}
