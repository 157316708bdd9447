//! The mappings of all parts of a shared memory in this process, at adjacent addresses.

use std::os::fd::OwnedFd;

use wholemem_comm::Rank;
use wholemem_hal::{Allocation, Device, Error as HalError, Grant, Mapping, Registration, Reservation, Span};

use super::plan::MemoryPlan;
use crate::{Extent, Result};

/// The mappings of a shared memory: one for each rank that stores bytes of the memory. Clones refer to the same mappings.
#[derive(Debug, Clone, Default)]
pub(crate) struct MemoryMappings {
    mappings: Vec<RankMapping>,
}

/// The mapping of one rank's allocation of a shared memory.
#[derive(Debug, Clone)]
struct RankMapping {
    extent: Extent,
    map: Mapping,
    /// The memory of the mapping as the ranks' devices access it: directly, or through a registration with the device.
    span: Span,
}

impl MemoryMappings {
    /// Maps the part of every rank into `reservation`, in the order of ranks, for the devices of `grants`.
    ///
    /// `parts` are the allocations of the ranks, by rank. If `devices.memory` has another backend than `devices.device`, each
    /// mapping is registered with `devices.device`.
    pub(super) fn create(
        plan: &MemoryPlan,
        reservation: &Reservation,
        parts: &mut [Option<PartSource>],
        devices: &MappingDevices<'_>,
    ) -> Result<Self> {
        let mut mappings = Vec::new();
        let mut offset = 0;
        for extent in plan.placement.extents() {
            let rank = extent.rank;
            let Some(part) = parts.get_mut(rank.index()).and_then(Option::take) else {
                let what = "it sent no handle of its part of the memory";
                return Err(wholemem_comm::Error::Protocol { rank, what }.into());
            };
            let allocation = match part {
                PartSource::Own(allocation) => allocation,
                PartSource::Handle(fd) => Allocation::import(devices.memory, fd.into(), extent.allocated)?,
            };
            let map = Mapping::create(reservation, offset, &allocation, devices.grants)?;
            let span = if devices.memory.backend() == devices.device.backend() {
                map.all()
            } else {
                Registration::create(devices.device, &map)?.all()
            };
            mappings.push(RankMapping { extent: *extent, map, span });
            offset += extent.allocated;
        }
        Ok(Self { mappings })
    }

    /// Returns all mappings as one range of addresses; `None` if the memory is empty.
    pub(super) fn all(&self) -> Result<Option<Span>> {
        if self.mappings.is_empty() {
            return Ok(None);
        }
        let spans: Vec<_> = self.mappings.iter().map(|mapping| mapping.span.clone()).collect();
        Ok(Some(Span::join(&spans)?))
    }

    /// Returns the address at which devices access the allocation of a rank; zero if the rank has none.
    pub(super) fn address_of(&self, rank: Rank) -> u64 {
        let mapping = self.mappings.iter().find(|mapping| mapping.extent.rank == rank);
        mapping.map_or(0, |mapping| mapping.span.address())
    }

    /// Returns `len` bytes at `offset` of a memory of `size` bytes, divided at the ends of mappings.
    pub(super) fn spans(&self, offset: usize, len: usize, size: usize) -> Result<Vec<Span>> {
        let Some(end) = offset.checked_add(len).filter(|end| *end <= size) else {
            return Err(HalError::OutOfRange { offset, len, size }.into());
        };
        let mut spans = Vec::new();
        for RankMapping { extent, span, .. } in &self.mappings {
            let from = offset.max(extent.offset);
            let to = end.min(extent.offset + extent.len);
            if from < to {
                spans.push(span.part(from - extent.offset, to - from)?);
            }
        }
        Ok(spans)
    }

    pub(super) fn populate(&self) -> Result<()> {
        for mapping in &self.mappings {
            if let Err(error) = mapping.map.enlarge_pages() {
                tracing::debug!(%error, "cannot use huge pages");
            }
            mapping.map.populate()?;
        }
        Ok(())
    }
}

/// The source from which a rank's part of a shared memory is mapped.
#[derive(Debug)]
pub(super) enum PartSource {
    /// The part is this rank's own allocation.
    Own(Allocation),
    /// The part is another rank's allocation, given as a file descriptor.
    Handle(OwnedFd),
}

/// The devices for which a shared memory is mapped.
#[derive(Debug)]
pub(super) struct MappingDevices<'a> {
    /// The device that allocated the parts of the memory.
    pub(super) memory: &'a Device,
    /// The device of this rank.
    pub(super) device: &'a Device,
    /// Grants of access for the devices of this process, if they have the backend of the memory.
    pub(super) grants: &'a [Grant],
}
