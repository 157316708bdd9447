//! The mappings of all parts of a memory in this process, at adjacent addresses.

use std::os::fd::OwnedFd;

use wholemem_comm::Rank;
use wholemem_hal::{Allocation, Device, Error as HalError, Grant, Mapping, Registration, Reservation, Span};

use super::plan::Plan;
use crate::{Extent, Result};

/// The mappings of a memory: one for each rank that stores bytes of it. Clones refer to the same mappings.
#[derive(Debug, Clone, Default)]
pub(crate) struct Maps {
    pieces: Vec<Piece>,
}

/// The mapping of what one rank stores.
#[derive(Debug, Clone)]
struct Piece {
    extent: Extent,
    map: Mapping,
    /// The memory as the ranks' devices access it: the mapping, or the mapping registered with the device.
    span: Span,
}

impl Maps {
    /// Maps every rank's part into `reservation`, in the order of ranks, for the devices of `grants`.
    ///
    /// `parts` are the allocations of the ranks, by rank. If `home.memory` has another backend than `home.device`, each mapping is
    /// registered with that device.
    pub(super) fn create(
        plan: &Plan,
        reservation: &Reservation,
        parts: &mut [Option<Part>],
        home: &Home<'_>,
    ) -> Result<Self> {
        let mut pieces = Vec::new();
        let mut offset = 0;
        for extent in plan.placement.extents() {
            let rank = extent.rank;
            let Some(part) = parts.get_mut(rank.index()).and_then(Option::take) else {
                let what = "it has sent no handle of its part of the memory";
                return Err(wholemem_comm::Error::Protocol { rank, what }.into());
            };
            let allocation = match part {
                Part::Own(allocation) => allocation,
                Part::Handle(fd) => Allocation::import(home.memory, fd.into(), extent.allocated)?,
            };
            let map = Mapping::create(reservation, offset, &allocation, home.grants)?;
            let span = if home.memory.backend() == home.device.backend() {
                map.all()
            } else {
                Registration::create(home.device, &map)?.all()
            };
            pieces.push(Piece { extent: *extent, map, span });
            offset += extent.allocated;
        }
        Ok(Self { pieces })
    }

    /// All bytes, as one range of addresses; `None` if there are none.
    pub(super) fn all(&self) -> Result<Option<Span>> {
        if self.pieces.is_empty() {
            return Ok(None);
        }
        let spans: Vec<_> = self.pieces.iter().map(|piece| piece.span.clone()).collect();
        Ok(Some(Span::join(&spans)?))
    }

    /// The address at which the devices access what a rank stores; zero if it stores nothing.
    pub(super) fn address_of(&self, rank: Rank) -> u64 {
        let piece = self.pieces.iter().find(|piece| piece.extent.rank == rank);
        piece.map_or(0, |piece| piece.span.address())
    }

    /// The bytes of a range of a memory of `size` bytes, divided at the ends of mappings.
    pub(super) fn spans(&self, offset: usize, len: usize, size: usize) -> Result<Vec<Span>> {
        let Some(end) = offset.checked_add(len).filter(|end| *end <= size) else {
            return Err(HalError::OutOfRange { offset, len, size }.into());
        };
        let mut spans = Vec::new();
        for Piece { extent, span, .. } in &self.pieces {
            let from = offset.max(extent.offset);
            let to = end.min(extent.offset + extent.len);
            if from < to {
                spans.push(span.part(from - extent.offset, to - from)?);
            }
        }
        Ok(spans)
    }

    pub(super) fn populate(&self) -> Result<()> {
        for piece in &self.pieces {
            if let Err(error) = piece.map.enlarge_pages() {
                tracing::debug!(%error, "gathering goes on with small pages");
            }
            piece.map.populate()?;
        }
        Ok(())
    }
}

/// A rank's part of a memory.
#[derive(Debug)]
pub(super) enum Part {
    /// The allocation of this rank.
    Own(Allocation),
    /// The handle of another rank's allocation.
    Handle(OwnedFd),
}

/// The devices of a mapping.
#[derive(Debug)]
pub(super) struct Home<'a> {
    /// The device that allocated the parts.
    pub(super) memory: &'a Device,
    /// This rank's device.
    pub(super) device: &'a Device,
    /// The devices of this process that get access, if they have the backend of the memory.
    pub(super) grants: &'a [Grant],
}
