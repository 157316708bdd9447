//! Creates a shared memory: each rank allocates its part and maps all parts, and either all ranks succeed or all fail.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use wholemem_comm::Rank;
use wholemem_hal::{Allocation, Device, Granularity, Granule, HandleKind, Mapping, Rights, Span};

use super::address::{reserve, reserve_common};
use super::bad_index::{BadIndexFlag, BadIndexFlags};
use super::maps::{MappingDevices, MemoryMappings, PartSource};
use super::plan::MemoryPlan;
use super::{MemoryCore, MemorySpec, WholeMemory};
use crate::communicator::{CallTerms, agree, bytes_of, exchange_terms};
use crate::{Communicator, GlobalRef, Kind, Result};
use wholemem_os::width::to_usize;

impl WholeMemory {
    /// Creates a shared memory of zeros. Collective: all ranks of the group call it with the same specification.
    ///
    /// If the ranks' devices are GPUs, memory of `Location::Host` is registered with their driver.
    ///
    /// # Errors
    /// [`Error::RanksDisagree`](crate::Error::RanksDisagree); [`Error::OnRank`](crate::Error::OnRank) if a rank fails, for example for lack of
    /// memory; the errors of an invalid specification;
    /// [`Error::NoCommonAddress`](crate::Error::NoCommonAddress); [`Error::Comm`](crate::Error::Comm) if a rank is lost, or
    /// if the ranks are on several nodes.
    /// The error is the same on all ranks, and nothing stays allocated.
    pub fn create(group: &Communicator, spec: &MemorySpec) -> Result<Self> {
        Self::create_if(group, Ok(spec.clone()), &[])
    }

    /// Creates a shared memory if all ranks pass a specification. A rank that passes an error takes part until all ranks have
    /// received the error. `content` describes the type of the memory's content, and must also be equal on all ranks.
    pub(crate) fn create_if(group: &Communicator, spec: Result<MemorySpec>, content: &[u64]) -> Result<Self> {
        let comm = group.bootstrap();
        comm.require_one_node("create a table")?;
        let exchanged = exchange_spec(group, &spec, content);
        let (plan, number) = spec.and_then(|spec| {
            let (granularity, number) = exchanged?;
            Ok((MemoryPlan::new(&spec, group.size(), granularity)?, number))
        })?;
        let memory = plan.location.device(group);
        let own = agree(comm, allocate(&plan, memory, group.rank()))?;
        let handles: Vec<_> = own.iter().map(|(_, fd)| fd.as_fd()).collect();
        let handles = comm.all_gather_fds(&handles)?;
        let maps = map(group, &plan, memory, own.map(|(allocation, _)| allocation), handles)?;
        let (table, directory, operands) = agree(comm, kernel_table(group.device(), &plan, &maps))?;
        let bad_index_flag = agree(comm, BadIndexFlag::create(group.device()))?;
        let (group, bad_index_flags) = (group.clone(), BadIndexFlags::default());
        let core = MemoryCore {
            group,
            number,
            plan,
            maps,
            _directory: directory,
            table,
            operands,
            bad_index_flag,
            bad_index_flags,
        };
        Ok(Self { core: Arc::new(core) })
    }
}

/// Checks that the specification and the content of a memory are equal on all ranks. Returns a granularity that all ranks
/// support, and rank 0's number for the memory. Collective.
fn exchange_spec(
    group: &Communicator,
    spec: &Result<MemorySpec>,
    content: &[u64],
) -> Result<(Granularity, u64)> {
    let terms = spec.as_ref().map_err(Clone::clone).and_then(|spec| {
        let Granularity { minimum, recommended } = spec.location.device(group).granularity()?;
        let own = vec![group.next_memory(), minimum.len() as u64, recommended.len() as u64];
        let same = [bytes_of(&[content.len() as u64]), bytes_of(content), spec.to_bytes()].concat();
        Ok(CallTerms { own, same })
    });
    let owns = exchange_terms(group.bootstrap(), "create", terms)?;
    // All ranks have sent the same number of words, because the exchange fails otherwise.
    let granule = |index: usize| {
        let largest = owns.iter().map(|own| own[index]).max().expect("the group has at least this rank");
        Granule::new(to_usize(largest))
    };
    Ok((Granularity { minimum: granule(1)?, recommended: granule(2)? }, owns[0][0]))
}

/// Allocates this rank's part of a shared memory and exports it as a file descriptor.
fn allocate(plan: &MemoryPlan, memory: &Device, rank: Rank) -> Result<Option<(Allocation, OwnedFd)>> {
    let Some(extent) = plan.placement.on(rank) else { return Ok(None) };
    let allocation = memory.allocate(extent.allocated)?;
    let handle = allocation.export(HandleKind::Fd, Rights::ReadWrite)?;
    let fd = handle.into_fd().expect("a handle of kind `Fd` is a file descriptor");
    Ok(Some((allocation, fd)))
}

/// Maps the parts of all ranks. In each process, one rank maps them for all ranks of the process. Collective.
fn map(
    group: &Communicator,
    plan: &MemoryPlan,
    memory: &Device,
    own: Option<Allocation>,
    handles: Vec<Vec<OwnedFd>>,
) -> Result<MemoryMappings> {
    let (comm, process_ranks, rank) = (group.bootstrap(), group.process_ranks(), group.rank());
    let sharing = process_ranks.ranks_on_backend(rank);
    let leader = *sharing.first().expect("it includes this rank");
    let len = plan.address_len();
    let mut reservation = None;
    if plan.equal_addresses && len > 0 {
        let backend = (leader == rank).then(|| memory.backend());
        reservation = reserve_common(group, backend, len, plan.granule)?;
    }
    let mut mapped = Ok(MemoryMappings::default());
    if leader == rank && len > 0 {
        let mut parts: Vec<_> =
            handles.into_iter().map(|fds| fds.into_iter().next().map(PartSource::Handle)).collect();
        if let (Some(own), Some(part)) = (own, parts.get_mut(rank.index())) {
            *part = Some(PartSource::Own(own));
        }
        let grants = if memory.backend() == group.device().backend() {
            process_ranks.grants(&sharing)
        } else {
            vec![wholemem_hal::Grant { device: memory.id(), rights: Rights::ReadWrite }]
        };
        let devices = MappingDevices { memory, device: group.device(), grants: &grants };
        mapped = reservation
            .map_or_else(|| Ok(reserve(memory.backend(), len, plan.granule)?), Ok)
            .and_then(|reservation| MemoryMappings::create(plan, &reservation, &mut parts, &devices));
        if let Ok(maps) = &mapped {
            sharing.iter().skip(1).for_each(|other| process_ranks.put(rank, *other, maps.clone()));
        }
    }
    let agreed = agree(comm, mapped);
    if leader != rank {
        let mappings = process_ranks.take(leader, rank);
        // The leader passes the mappings to the other ranks of the process only if the memory is not empty.
        return agreed.map(|none| {
            if len == 0 { none } else { mappings.expect("the leader stored the mappings before the vote") }
        });
    }
    if agreed.is_err() {
        // If the creation failed on any rank, the other ranks of this process do not take the mappings that this rank stored for
        // them, so the mappings are dropped here.
        sharing.iter().skip(1).for_each(|other| drop(process_ranks.take::<MemoryMappings>(rank, *other)));
    }
    agreed
}

/// Returns the description of the memory for kernels, the directory of its chunks, and all memory that kernels access through it.
fn kernel_table(
    device: &Device,
    plan: &MemoryPlan,
    maps: &MemoryMappings,
) -> Result<(GlobalRef, Option<Mapping>, Vec<Span>)> {
    let (partition, stride) = (&plan.partition, plan.row_len as u64);
    let Some(all) = maps.all()? else {
        return Ok((GlobalRef::continuous(0, 0, stride), None, Vec::new()));
    };
    if plan.kind == Kind::Continuous {
        return Ok((GlobalRef::continuous(all.address(), partition.rows(), stride), None, vec![all]));
    }
    let bases: Vec<_> = (0..partition.ranks()).map(|rank| maps.address_of(Rank(rank))).collect();
    if let [base] = bases[..] {
        return Ok((GlobalRef::continuous(base, partition.rows(), stride), None, vec![all]));
    }
    // The directory of chunks is in device memory, because every row lookup reads it.
    let bytes = GlobalRef::directory(&bases, partition);
    let granule = device.granularity()?.minimum;
    let len = granule.round_up(bytes.len()).expect("the directory is shorter than the address space");
    let directory = device.allocate(len)?.map(Rights::ReadWrite)?;
    let span = directory.span(0, bytes.len())?;
    device.stream()?.write(&span, &bytes)?;
    Ok((GlobalRef::chunked(span.address(), partition, stride), Some(directory), vec![all, span]))
}
