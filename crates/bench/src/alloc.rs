//! `wholemem bench alloc`: measures allocation and mapping of memory, compared with raw system or driver calls.

use std::time::Instant;

use anyhow::{Result, anyhow};
use wholemem_hal::limits::{RawDevice, RawError};
use wholemem_hal::{Allocation, Device, HandleKind, Mapping, Rights, Stream};

use super::comparison::Comparison;
use super::sample::Implementation;
use super::sample::TimedRun;

/// The operation of `bench alloc`: allocates and maps memory, with wholemem and with raw system or driver calls.
#[derive(Debug)]
pub(super) struct AllocComparison {
    device: Device,
    stream: Stream,
    raw: RawDevice,
    /// The value that is written to new memory and read back, incremented before each use.
    stamp: u64,
}

impl AllocComparison {
    pub(super) fn new(device: Device) -> Result<Self> {
        let (stream, raw) = (device.stream()?, RawDevice::of(&device).map_err(raw_error)?);
        Ok(Self { device, stream, raw, stamp: 0 })
    }

    fn run_wholemem(&mut self, len: usize) -> Result<TimedRun> {
        let start = Instant::now();
        let memory = self.device.allocate(len)?;
        let map = memory.map(Rights::ReadWrite)?;
        let took = start.elapsed();
        Ok(TimedRun { took, mismatch: self.mismatch(&memory, &map)? })
    }

    fn run_raw(&mut self, len: usize) -> Result<TimedRun> {
        let start = Instant::now();
        let made = self.raw.create(len).map_err(raw_error)?;
        let map = self.raw.map(&made, len).map_err(raw_error)?;
        let took = start.elapsed();
        self.stamp += 1;
        let [first, last, ..] = self.stamp.to_le_bytes();
        self.raw.set_ends(&map, [first, last]).map_err(raw_error)?;
        let seen = self.raw.ends(&map).map_err(raw_error)?;
        let mismatch = (seen != [first, last]).then(|| format!("raw memory contains {seen:?} after a write"));
        Ok(TimedRun { took, mismatch })
    }

    /// Checks that new memory is zero, and that bytes written through `map` are read through a second mapping of the exported
    /// memory, as another process would map it.
    fn mismatch(&mut self, memory: &Allocation, map: &Mapping) -> Result<Option<String>> {
        let handle = memory.export(HandleKind::Fd, Rights::ReadWrite)?;
        let received = Allocation::import(&self.device, handle, memory.len())?;
        let other = received.map(Rights::Read)?;
        const WORD: usize = size_of::<u64>();
        let last = memory.len() - WORD;
        for offset in [0, last / 2, last] {
            self.stamp += 1;
            let written = self.stamp.to_le_bytes();
            let mut seen = [0; WORD];
            self.stream.read(&other.span(offset, WORD)?, &mut seen)?;
            if seen != [0; WORD] {
                return Ok(Some(format!("new memory contains {seen:02x?} at offset {offset}")));
            }
            self.stream.write(&map.span(offset, WORD)?, &written)?;
            self.stream.read(&other.span(offset, WORD)?, &mut seen)?;
            if seen != written {
                let text =
                    format!("{seen:02x?} was read at offset {offset}, where {written:02x?} was written");
                return Ok(Some(text));
            }
        }
        Ok(None)
    }
}

/// Converts the error of a raw system or driver call to an `anyhow` error that keeps its source.
pub(super) fn raw_error(failure: RawError) -> anyhow::Error {
    anyhow!(failure)
}

impl Comparison for AllocComparison {
    const NAME: &'static str = "alloc";
    const TITLE: &'static str = "allocation and mapping";
    const RANKS: usize = 1;

    fn device(&self) -> &Device {
        &self.device
    }

    fn pinned(&self) -> Option<&'static str> {
        None
    }

    fn once(&mut self, implementation: Implementation, len: usize) -> Result<TimedRun> {
        match implementation {
            Implementation::Wholemem => self.run_wholemem(len),
            Implementation::Raw => self.run_raw(len),
        }
    }
}

#[cfg(test)]
mod tests {
    use wholemem_hal::{Backend, HostConfig};

    use super::*;

    const LEN: usize = 64 << 10;

    fn comparison() -> AllocComparison {
        AllocComparison::new(Backend::host(HostConfig::default()).unwrap().device(0).unwrap()).unwrap()
    }

    #[test]
    fn memory_of_both_implementations_can_be_written() {
        let mut comparison = comparison();
        for implementation in [Implementation::Wholemem, Implementation::Raw] {
            assert_eq!(comparison.once(implementation, LEN).unwrap().mismatch, None);
        }
    }

    #[test]
    fn a_mapping_of_other_memory_is_detected() {
        let mut comparison = comparison();
        let memory = comparison.device.allocate(LEN).unwrap();
        let other = comparison.device.allocate(LEN).unwrap().map(Rights::ReadWrite).unwrap();
        let mismatch = comparison.mismatch(&memory, &other).unwrap().unwrap();
        assert!(mismatch.starts_with("[00, 00, 00, 00, 00, 00, 00, 00] was read at offset 0"), "{mismatch}");
    }

    #[test]
    fn new_memory_that_is_not_zero_is_detected() {
        let mut comparison = comparison();
        let memory = comparison.device.allocate(LEN).unwrap();
        let map = memory.map(Rights::ReadWrite).unwrap();
        map.bytes().unwrap().write_at(LEN - 1, &[9]).unwrap();
        let mismatch = comparison.mismatch(&memory, &map).unwrap().unwrap();
        assert_eq!(
            mismatch,
            format!("new memory contains [00, 00, 00, 00, 00, 00, 00, 09] at offset {}", LEN - 8)
        );
    }
}
