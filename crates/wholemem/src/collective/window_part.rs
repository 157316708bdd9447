//! What a rank brings along to a window: how long its part is, and the pieces of memory it is made of.

use wholemem_comm::Rank;
use wholemem_hal::{Allocation, Device, Granule, PlainBuffer, ShareHandle};

use crate::{Error, Result};

/// One rank's part of a window that is to be.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Offer {
    /// How many bytes it has.
    pub(super) len: usize,
    /// How many bytes of the pieces come before it.
    pub(super) skip: usize,
    /// The lengths of the pieces, in whole granules.
    pub(super) pieces: Vec<usize>,
}

/// One rank's part of a window of the driver's older memory: a token instead of pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PlainOffer {
    /// How many bytes it has.
    pub(super) len: usize,
    /// Where it begins behind the token.
    pub(super) offset: usize,
    pub(super) token: [u8; 64],
}

impl PlainOffer {
    /// What other processes open a buffer by.
    pub(super) fn of(buffer: &PlainBuffer) -> Result<Self> {
        match buffer.export()? {
            ShareHandle::CudaIpc { token, offset } => Ok(Self { len: buffer.len(), offset, token }),
            handle => unreachable!("a plain buffer has a CUDA IPC handle, and not {}", handle.kind()),
        }
    }

    /// Opens another process's buffer.
    pub(super) fn open(&self, device: &Device) -> Result<PlainBuffer> {
        let handle = ShareHandle::CudaIpc { token: self.token, offset: self.offset };
        Ok(PlainBuffer::import(device, &handle, self.len)?)
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let words = [self.len, self.offset].map(|word| (word as u64).to_le_bytes());
        [&words.concat()[..], &self.token].concat()
    }

    /// What a rank has told of its part.
    pub(super) fn from_bytes(rank: Rank, bytes: &[u8]) -> Result<Self> {
        let (words, token) = bytes.split_at_checked(16).ok_or_else(|| malformed(rank))?;
        let Offer { len, skip: offset, .. } = Offer::from_bytes(rank, words)?;
        Ok(Self { len, offset, token: token.try_into().map_err(|_| malformed(rank))? })
    }
}

impl Offer {
    /// New memory, in one piece.
    pub(super) fn new(granule: Granule, len: usize) -> Self {
        let piece = granule.round_up(len).unwrap_or(usize::MAX);
        Self { len, skip: 0, pieces: if len == 0 { Vec::new() } else { vec![piece] } }
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
        let skip = usize::try_from(address.saturating_sub(first.address)).unwrap_or(usize::MAX);
        let pieces = segments.iter().map(|segment| segment.allocation.len()).collect();
        let memory = segments.iter().map(|segment| segment.allocation.clone()).collect();
        Ok((Self { len, skip, pieces }, memory))
    }

    /// How many addresses it takes.
    pub(super) fn address_len(&self) -> usize {
        self.pieces.iter().fold(0, |sum, len| sum.saturating_add(*len))
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let words = [self.len, self.skip].into_iter().chain(self.pieces.iter().copied());
        words.flat_map(|word| (word as u64).to_le_bytes()).collect()
    }

    /// What a rank has told of its part.
    pub(super) fn from_bytes(rank: Rank, bytes: &[u8]) -> Result<Self> {
        let (words, []) = bytes.as_chunks() else { return Err(malformed(rank)) };
        let word = |word: &[u8; 8]| usize::try_from(u64::from_le_bytes(*word)).map_err(|_| malformed(rank));
        let [len, skip, pieces @ ..] = words else { return Err(malformed(rank)) };
        let pieces = pieces.iter().map(word).collect::<Result<_>>()?;
        Ok(Self { len: word(len)?, skip: word(skip)?, pieces })
    }
}

fn malformed(rank: Rank) -> Error {
    wholemem_comm::Error::Protocol { rank, what: "its part of a window has another form" }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offers_are_read_as_they_were_written() {
        let granule = Granule::new(4096).unwrap();
        let offers = [
            Offer::new(granule, 5000),
            Offer::new(granule, 0),
            Offer { len: 7, skip: 9, pieces: vec![4096; 3] },
        ];
        assert_eq!(offers.each_ref().map(Offer::address_len), [8192, 0, 12_288]);
        for offer in offers {
            assert_eq!(Offer::from_bytes(Rank(1), &offer.to_bytes()), Ok(offer));
        }
        let plain = PlainOffer { len: 5, offset: 6, token: [7; 64] };
        assert_eq!(PlainOffer::from_bytes(Rank(1), &plain.to_bytes()), Ok(plain));
    }

    #[test]
    fn an_offer_of_another_form_is_an_error_and_not_an_empty_one() {
        let bytes = Offer { len: 7, skip: 9, pieces: vec![4096] }.to_bytes();
        for len in [0, 8, 15, 23] {
            assert_eq!(Offer::from_bytes(Rank(1), &bytes[..len]), Err(malformed(Rank(1))), "{len}");
        }
        let bytes = PlainOffer { len: 5, offset: 6, token: [7; 64] }.to_bytes();
        for len in [0, 15, 16, 79] {
            assert_eq!(PlainOffer::from_bytes(Rank(1), &bytes[..len]), Err(malformed(Rank(1))), "{len}");
        }
    }
}
