//! One rank's part of a window: its length and the allocations that it consists of.

use wholemem_comm::Rank;
use wholemem_hal::{Allocation, Device, Granule};

use crate::{Error, Result};
use wholemem_os::width::to_usize;

/// One rank's part of a window, as the ranks send it to each other when they create the window.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct WindowPart {
    /// The length in bytes of the window part.
    pub(super) len: usize,
    /// The offset in bytes of the window part in its first allocation.
    pub(super) skip: usize,
    /// The lengths of the allocations of the window part, in bytes: whole granules.
    pub(super) allocation_lens: Vec<usize>,
}

impl WindowPart {
    /// Describes a window part of new memory: one allocation.
    ///
    /// # Errors
    /// [`Error::TooLong`] if whole granules of it do not fit in an address space.
    pub(super) fn new(granule: Granule, len: usize) -> Result<Self> {
        let allocation_len = granule.round_up(len).ok_or(Error::TooLong { rows: 1, row_len: len })?;
        Ok(Self { len, skip: 0, allocation_lens: if len == 0 { Vec::new() } else { vec![allocation_len] } })
    }

    /// Describes a window part that is a whole existing allocation.
    pub(super) fn of(memory: &Allocation) -> (Self, Vec<Allocation>) {
        let len = memory.len();
        (Self { len, skip: 0, allocation_lens: vec![len] }, vec![memory.clone()])
    }

    /// Describes a window part of memory that other code has mapped at `address`: all allocations in that range of addresses.
    pub(super) fn adopt(device: &Device, address: u64, len: usize) -> Result<(Self, Vec<Allocation>)> {
        let segments = Allocation::adopt(device, address, len)?;
        let Some(first) = segments.first() else {
            unreachable!("a successful `adopt` returns at least one segment")
        };
        let skip = address.checked_sub(first.address).expect("the first segment contains the address");
        let skip = to_usize(skip);
        let allocation_lens = segments.iter().map(|segment| segment.allocation.len()).collect();
        let memory = segments.iter().map(|segment| segment.allocation.clone()).collect();
        Ok((Self { len, skip, allocation_lens }, memory))
    }

    /// Returns the length in bytes of the address range that the window part needs.
    pub(super) fn address_len(&self) -> usize {
        self.allocation_lens.iter().fold(0, |sum, len| sum.saturating_add(*len))
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let words = [self.len, self.skip].into_iter().chain(self.allocation_lens.iter().copied());
        words.flat_map(|word| (word as u64).to_le_bytes()).collect()
    }

    /// Decodes the description that `rank` sends of its part of a window.
    pub(super) fn from_bytes(rank: Rank, bytes: &[u8]) -> Result<Self> {
        let (words, []) = bytes.as_chunks() else { return Err(malformed(rank)) };
        let word = |word: &[u8; 8]| usize::try_from(u64::from_le_bytes(*word)).map_err(|_| malformed(rank));
        let [len, skip, allocation_lens @ ..] = words else { return Err(malformed(rank)) };
        let allocation_lens = allocation_lens.iter().map(word).collect::<Result<_>>()?;
        Ok(Self { len: word(len)?, skip: word(skip)?, allocation_lens })
    }
}

/// Returns the error for a rank that sends a malformed part of a window.
pub(super) fn malformed(rank: Rank) -> Error {
    wholemem_comm::Error::Protocol { rank, what: "its part of a window is malformed" }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_parts_round_trip() {
        let granule = Granule::new(4096).unwrap();
        let parts = [
            WindowPart::new(granule, 5000).unwrap(),
            WindowPart::new(granule, 0).unwrap(),
            WindowPart { len: 7, skip: 9, allocation_lens: vec![4096; 3] },
        ];
        assert_eq!(parts.each_ref().map(WindowPart::address_len), [8192, 0, 12_288]);
        for part in parts {
            assert_eq!(WindowPart::from_bytes(Rank(1), &part.to_bytes()), Ok(part));
        }
    }

    #[test]
    fn a_part_longer_than_the_address_space_is_rejected() {
        let error = Error::TooLong { rows: 1, row_len: usize::MAX };
        assert_eq!(WindowPart::new(Granule::new(4096).unwrap(), usize::MAX), Err(error));
    }

    #[test]
    fn a_malformed_part_is_an_error_and_not_an_empty_part() {
        let bytes = WindowPart { len: 7, skip: 9, allocation_lens: vec![4096] }.to_bytes();
        for len in [0, 8, 15, 23] {
            assert_eq!(WindowPart::from_bytes(Rank(1), &bytes[..len]), Err(malformed(Rank(1))), "{len}");
        }
    }
}
