//! One rank's part of a window: its length and the pieces of memory that it consists of.

use wholemem_comm::Rank;
use wholemem_hal::{Allocation, CudaMallocBuffer, Device, Granule, ShareHandle};

use crate::{Error, Result};
use wholemem_os::width::to_usize;

/// One rank's part of a window, as ranks exchange it when they create the window.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct WindowPart {
    /// Its length in bytes.
    pub(super) len: usize,
    /// The number of bytes of the pieces before it.
    pub(super) skip: usize,
    /// The lengths of the pieces, in whole granules.
    pub(super) pieces: Vec<usize>,
}

/// One rank's part of a window of memory with a CUDA IPC handle: a token instead of pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PlainWindowPart {
    /// Its length in bytes.
    pub(super) len: usize,
    /// Its offset in the memory of the token.
    pub(super) offset: usize,
    pub(super) token: [u8; 64],
}

impl PlainWindowPart {
    /// Exports a buffer for other processes.
    pub(super) fn of(buffer: &CudaMallocBuffer) -> Result<Self> {
        match buffer.export()? {
            ShareHandle::CudaIpc { token, offset } => Ok(Self { len: buffer.len(), offset, token }),
            handle => unreachable!("a plain buffer has a CUDA IPC handle, and not {}", handle.kind()),
        }
    }

    /// Opens another process's buffer.
    pub(super) fn open(&self, device: &Device) -> Result<CudaMallocBuffer> {
        let handle = ShareHandle::CudaIpc { token: self.token, offset: self.offset };
        Ok(CudaMallocBuffer::import(device, &handle, self.len)?)
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let words = [self.len, self.offset].map(|word| (word as u64).to_le_bytes());
        [&words.concat()[..], &self.token].concat()
    }

    /// Decodes the part of a rank.
    pub(super) fn from_bytes(rank: Rank, bytes: &[u8]) -> Result<Self> {
        let (words, token) = bytes.split_at_checked(16).ok_or_else(|| malformed(rank))?;
        let WindowPart { len, skip: offset, .. } = WindowPart::from_bytes(rank, words)?;
        Ok(Self { len, offset, token: token.try_into().map_err(|_| malformed(rank))? })
    }
}

impl WindowPart {
    /// New memory, in one piece.
    ///
    /// # Errors
    /// [`Error::TooLong`] if whole granules of it do not fit in an address space.
    pub(super) fn new(granule: Granule, len: usize) -> Result<Self> {
        let piece = granule.round_up(len).ok_or(Error::TooLong { rows: 1, row_len: len })?;
        Ok(Self { len, skip: 0, pieces: if len == 0 { Vec::new() } else { vec![piece] } })
    }

    /// A whole allocation.
    pub(super) fn of(memory: &Allocation) -> (Self, Vec<Allocation>) {
        let len = memory.len();
        (Self { len, skip: 0, pieces: vec![len] }, vec![memory.clone()])
    }

    /// Memory that something else has mapped at `address`: all allocations that it touches.
    pub(super) fn adopt(device: &Device, address: u64, len: usize) -> Result<(Self, Vec<Allocation>)> {
        let segments = Allocation::adopt(device, address, len)?;
        let Some(first) = segments.first() else {
            unreachable!("at least one segment is at an address, or adopting it fails")
        };
        let skip = address.checked_sub(first.address).expect("the first segment contains the address");
        let skip = to_usize(skip);
        let pieces = segments.iter().map(|segment| segment.allocation.len()).collect();
        let memory = segments.iter().map(|segment| segment.allocation.clone()).collect();
        Ok((Self { len, skip, pieces }, memory))
    }

    /// The length of the addresses that it needs.
    pub(super) fn address_len(&self) -> usize {
        self.pieces.iter().fold(0, |sum, len| sum.saturating_add(*len))
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let words = [self.len, self.skip].into_iter().chain(self.pieces.iter().copied());
        words.flat_map(|word| (word as u64).to_le_bytes()).collect()
    }

    /// Decodes the part of a rank.
    pub(super) fn from_bytes(rank: Rank, bytes: &[u8]) -> Result<Self> {
        let (words, []) = bytes.as_chunks() else { return Err(malformed(rank)) };
        let word = |word: &[u8; 8]| usize::try_from(u64::from_le_bytes(*word)).map_err(|_| malformed(rank));
        let [len, skip, pieces @ ..] = words else { return Err(malformed(rank)) };
        let pieces = pieces.iter().map(word).collect::<Result<_>>()?;
        Ok(Self { len: word(len)?, skip: word(skip)?, pieces })
    }
}

/// The error for a rank that sends a part of another form.
pub(super) fn malformed(rank: Rank) -> Error {
    wholemem_comm::Error::Protocol { rank, what: "its part of a window has another form" }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_read_as_they_were_written() {
        let granule = Granule::new(4096).unwrap();
        let parts = [
            WindowPart::new(granule, 5000).unwrap(),
            WindowPart::new(granule, 0).unwrap(),
            WindowPart { len: 7, skip: 9, pieces: vec![4096; 3] },
        ];
        assert_eq!(parts.each_ref().map(WindowPart::address_len), [8192, 0, 12_288]);
        for part in parts {
            assert_eq!(WindowPart::from_bytes(Rank(1), &part.to_bytes()), Ok(part));
        }
        let plain = PlainWindowPart { len: 5, offset: 6, token: [7; 64] };
        assert_eq!(PlainWindowPart::from_bytes(Rank(1), &plain.to_bytes()), Ok(plain));
    }

    #[test]
    fn a_part_longer_than_the_address_space_is_refused() {
        let error = Error::TooLong { rows: 1, row_len: usize::MAX };
        assert_eq!(WindowPart::new(Granule::new(4096).unwrap(), usize::MAX), Err(error));
    }

    #[test]
    fn a_part_of_another_form_is_an_error_and_not_an_empty_one() {
        let bytes = WindowPart { len: 7, skip: 9, pieces: vec![4096] }.to_bytes();
        for len in [0, 8, 15, 23] {
            assert_eq!(WindowPart::from_bytes(Rank(1), &bytes[..len]), Err(malformed(Rank(1))), "{len}");
        }
        let bytes = PlainWindowPart { len: 5, offset: 6, token: [7; 64] }.to_bytes();
        for len in [0, 15, 16, 79] {
            assert_eq!(PlainWindowPart::from_bytes(Rank(1), &bytes[..len]), Err(malformed(Rank(1))), "{len}");
        }
    }
}
