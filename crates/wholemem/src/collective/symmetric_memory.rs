//! Symmetric memory: creates a group's windows (memory that all ranks map) and lanes (sequences of collective calls).

use std::collections::HashSet;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use wholemem_comm::Rank;
use wholemem_hal::{Allocation, BackendKind, CudaMallocBuffer, Rights, Span};
use wholemem_os::width::{to_u64, to_usize};

use super::address_space::WindowAddressSpace;
use super::call_log::TARGET;
use super::kernel::CollectiveKernels;
use super::lane::{Lane, LaneContext, PRIVATE_LEN};
use super::malloc_windows;
use super::recorder::{CaptureRecorder, CaptureRecording};
use super::spec::SymmetricSpec;
use super::tuning::{DeviceLimits, Tuning};
use super::window::Window;
use super::window_part::WindowPart;
use crate::abi::{LaneLayout, MAX_BLOCKS};
use crate::communicator::agree;
use crate::{Communicator, Error, Result};

/// The default lengths of the staging buffers of collective calls. On CPUs a buffer fits in the inner caches. More than two ranks
/// use a longer buffer, because each synchronization takes longer.
const STAGING_OF_TWO_RANKS: usize = 128 << 10;
const STAGING_ON_HOSTS: usize = 256 << 10;
const STAGING_ON_DEVICES: usize = 8 << 20;

/// The default maximum number of bytes that a rank sends in packets, on CPUs and on GPUs, and the maximum on GPUs for all ranks
/// together.
const PACKETS_ON_HOSTS: usize = 8 << 10;
const PACKETS_ON_DEVICES: usize = 256 << 10;
const PACKETS_OF_ALL_RANKS: usize = 4 << 20;

/// A group's windows, and the collective calls over them. Clones refer to the same windows.
///
/// It dereferences to its first [lane](Self::lane).
#[derive(Debug, Clone)]
#[doc(alias("ncclComm_t", "ncclDevComm"))]
pub struct SymmetricMemory {
    core: Arc<SymmetricCore>,
}

#[derive(Debug)]
struct SymmetricCore {
    group: Communicator,
    address_space: WindowAddressSpace,
    recorder: Arc<CaptureRecorder>,
    /// True if new windows have memory of `cuMemCreate`, false if they have memory of `cudaMalloc`.
    vmm: bool,
    /// The lanes (sequences of collective calls) of this group: at least one.
    lanes: Vec<Lane>,
}

impl SymmetricMemory {
    /// Creates the symmetric memory of a group: its lanes and the address space of its windows. Collective, with the same options
    /// on all ranks.
    ///
    /// The environment variables `WHOLEMEM_ALGO`, `WHOLEMEM_WINDOW_SPACE` and `WHOLEMEM_VMM` override the options.
    ///
    /// # Errors
    /// [`Error::RanksDisagree`]; [`Error::NotResident`] if the kernels of the ranks that share a device cannot be resident at once;
    /// [`Error::NoWindowSpace`], [`Error::Environment`], [`Error::OnRank`], [`Error::Comm`], also if the ranks are on several nodes.
    pub fn create(group: &Communicator, spec: &SymmetricSpec) -> Result<Self> {
        let comm = group.bootstrap();
        comm.require_one_node("create symmetric memory")?;
        let kind = group.device().backend().kind();
        let measured = Tuning::measured(kind, group.size());
        let overridden = spec.with_environment(measured, |name| std::env::var(name).ok());
        let (spec, tuning) = agree(comm, overridden)?;
        let terms = [spec.to_bytes(), tuning.to_bytes()].concat();
        let others = comm.all_gather(&terms)?;
        if let Some((rank, _)) = (0..).map(Rank).zip(&others).find(|(_, other)| **other != others[0]) {
            return Err(Error::RanksDisagree { rank });
        }
        let kernels = Arc::new(agree(comm, CollectiveKernels::load(group.device(), &spec))?);
        let (blocks, near) = resident_blocks(group, &kernels, spec.lanes.max(1))?;
        let (staging, packets) = match kind {
            BackendKind::Host if group.size() <= 2 => (STAGING_OF_TWO_RANKS, PACKETS_ON_HOSTS),
            BackendKind::Host => (STAGING_ON_HOSTS, PACKETS_ON_HOSTS),
            _ => (
                STAGING_ON_DEVICES,
                PACKETS_ON_DEVICES.min(PACKETS_OF_ALL_RANKS / group.size().max(1) as usize),
            ),
        };
        let or = |given: usize, usual: usize| if given == 0 { usual } else { given };
        let (packets_len, staging_len) = (or(spec.packets_len, packets), or(spec.staging_len, staging));
        let layout = LaneLayout::new(group.size(), packets_len, staging_len)?;
        let address_space = WindowAddressSpace::reserve(group, spec.window_space)?;
        let limits = DeviceLimits { packets: layout.ll_len, blocks, near };
        let timeout = if spec.timeout == Duration::MAX { comm.timeout() } else { spec.timeout };
        let dropped = address_space.dropped().clone();
        let index = address_space.index().clone();
        let recorder = Arc::new(CaptureRecorder::new(&address_space));
        let share_cores = share_cores(group)?;
        let group = group.clone();
        let context = LaneContext {
            group: group.clone(),
            kernels,
            limits,
            tuning,
            timeout,
            layout,
            dropped,
            index,
            recorder: Arc::clone(&recorder),
            share_cores,
        };
        let lanes = create_lanes(&context, &address_space, spec.lanes.max(1) as usize)?;
        tracing::debug!(
            target: TARGET,
            rank = %group.rank(),
            ranks = group.size(),
            device = %group.device().label(),
            lanes = lanes.len(),
            ?timeout,
            ?tuning,
            ?limits,
            staging_len,
            packets_len,
            window_space = spec.window_space,
            vmm = spec.vmm,
            share_cores,
            "created symmetric memory",
        );
        let vmm = spec.vmm;
        Ok(Self { core: Arc::new(SymmetricCore { group, address_space, recorder, vmm, lanes }) })
    }

    /// Creates a window of new, zeroed memory, with `len` bytes on this rank. Collective; the lengths of ranks may differ, and may
    /// be zero.
    ///
    /// # Errors
    /// [`Error::EmptyWindow`], [`Error::NoWindowSpace`]; [`Error::OnRank`] if a rank fails, for example for lack of memory;
    /// [`Error::Comm`]. The error is the same on all ranks, and nothing stays allocated.
    #[doc(alias = "ncclMemAlloc")]
    pub fn mem_alloc(&self, len: usize) -> Result<Window> {
        let SymmetricCore { group, address_space, vmm, .. } = &*self.core;
        if !vmm && let Some(window) = malloc_windows::allocate(group, address_space, len)? {
            return Ok(window);
        }
        address_space.allocate(len)
    }

    /// Creates a window of new, zeroed host memory, which the ranks' devices can access, with `len` bytes on this rank. Collective;
    /// the lengths of ranks may differ, and may be zero.
    ///
    /// Use it for memory that the CPU accesses too, or that does not fit on the devices. GPUs access it over the bus. The part of a
    /// rank is on the NUMA node of its GPU, if the kernel permits it. On the host backend it is the same as [`mem_alloc`](Self::mem_alloc).
    ///
    /// # Errors
    /// As [`mem_alloc`](Self::mem_alloc).
    #[doc(alias = "cudaHostAlloc")]
    pub fn mem_alloc_on_host(&self, len: usize) -> Result<Window> {
        self.core.address_space.allocate_on_host(len)
    }

    /// Creates a window of existing memory: a whole allocation on each rank's device. Collective.
    ///
    /// If the memory is also mapped at other addresses, kernels that run concurrently must not access it through both mappings.
    ///
    /// # Errors
    /// As [`mem_alloc`](Self::mem_alloc).
    #[doc(alias("ncclCommWindowRegister", "register_buffer"))]
    pub fn window_register(&self, memory: &Allocation) -> Result<Window> {
        self.core.address_space.register(Ok(WindowPart::of(memory)))
    }

    /// Creates a window of `len` bytes that other code in this process has mapped at `address`, for example a framework that
    /// allocates in segments. Collective. The window keeps the memory alive, even if the other code frees it.
    ///
    /// # Errors
    /// As [`mem_alloc`](Self::mem_alloc); [`Error::OnRank`] on all ranks if the address of a rank is not of mapped device memory; in
    /// a group of one rank, [`Error::Hal`].
    pub fn window_register_mapped(&self, address: u64, len: usize) -> Result<Window> {
        self.core.address_space.register(WindowPart::adopt(self.core.group.device(), address, len))
    }

    /// Registers existing memory of each rank as a window, so that calls can access it directly, without a staging copy.
    /// Collective; the lengths of ranks may differ, and may be zero.
    ///
    /// Each rank uses its memory where it is: a call on `span`, or on a part of it, finds that it lies in the window, if the memory
    /// of every rank does at the same offset. The memory may be from `cudaMalloc`, virtual memory that can be shared as file
    /// descriptors, such as PyTorch's expandable segments, or a mapping of the host backend. The kinds of ranks may differ.
    ///
    /// The registration ends when the window is dropped. This rank keeps `span`, and so its owner, until every rank has dropped the
    /// window and its work has run, which the ranks tell each other when the next window is created; at the latest until this rank
    /// has dropped its symmetric memory and the window. So drop them after the other ranks have finished their work on the window.
    ///
    /// ```
    /// use wholemem::{Backend, Communicator, Dtype, HostConfig, ReduceOp, Rights, SymmetricMemory, SymmetricSpec};
    ///
    /// let device = Backend::host(HostConfig::default())?.device(0)?;
    /// let groups = Communicator::local(&[device.clone(), device])?;
    /// Communicator::on_each(&groups, |group| {
    ///     let symmetric = SymmetricMemory::create(group, &SymmetricSpec::default())?;
    ///     let stream = group.device().stream()?;
    ///     let memory = group.device().allocate(1 << 20)?.map(Rights::ReadWrite)?.all();
    ///
    ///     let window = symmetric.window_register_span(&memory)?;
    ///     symmetric.all_reduce(&stream, &memory, &memory, Dtype::F32, ReduceOp::Sum)?; // in place
    ///     assert_eq!((window.len(), symmetric.staged_calls()), (1 << 20, 0));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), wholemem::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`mem_alloc`](Self::mem_alloc); [`Error::OnRank`] on all ranks if the memory of a rank cannot be shared, or a rank
    /// cannot map that of another one; in a group of one rank, [`Error::Hal`].
    #[doc(alias("ncclCommWindowRegister", "register_buffer", "cudaIpcOpenMemHandle"))]
    pub fn window_register_span(&self, span: &Span) -> Result<Window> {
        self.core.address_space.register_span(span, true)
    }

    /// Registers a buffer from `cudaMalloc` as a window, like [`window_register_span`](Self::window_register_span).
    ///
    /// # Errors
    /// As [`window_register_span`](Self::window_register_span).
    #[doc(alias = "get_graph_buffer_ipc_meta")]
    pub fn window_register_cuda_malloc(&self, buffer: &CudaMallocBuffer) -> Result<Window> {
        self.window_register_span(&buffer.all())
    }

    /// Starts to record the memory of captured calls, so that graphs are not staged: while the result exists, calls of this rank that
    /// a stream captures use memory in place that is not registered. [`finish`](CaptureRecording::finish) then registers it on all
    /// ranks. All ranks capture the same calls between the two.
    ///
    /// Until a rank has finished, it must not launch the graphs: the addresses of the other ranks' memory are not known yet.
    ///
    /// # Errors
    /// [`Error::Recording`] if a recording exists; [`Error::Hal`].
    #[doc(alias("register_graph_buffers", "ncclGraphRegister"))]
    pub fn record_captures(&self) -> Result<CaptureRecording> {
        self.core.recorder.start()?;
        Ok(CaptureRecording { symmetric: self.clone(), is_finished: false })
    }

    /// Drops a window on all ranks, and waits until all ranks have dropped it. Collective. Dropping a [`Window`] without this
    /// call does not communicate.
    ///
    /// # Errors
    /// [`Error::Comm`].
    #[doc(alias = "ncclCommWindowDeregister")]
    pub fn window_unregister(&self, window: Window) -> Result<()> {
        drop(window);
        self.core.group.bootstrap().barrier()?;
        Ok(())
    }

    /// Returns the lane (sequence of collective calls) with the given index.
    ///
    /// # Errors
    /// [`Error::NoSuchLane`].
    pub fn lane(&self, index: usize) -> Result<&Lane> {
        let lanes = &self.core.lanes;
        lanes.get(index).ok_or(Error::NoSuchLane { index, lanes: lanes.len() })
    }

    pub(super) fn recorder(&self) -> &CaptureRecorder {
        &self.core.recorder
    }

    pub(super) fn address_space(&self) -> &WindowAddressSpace {
        &self.core.address_space
    }

    /// Returns the group that owns this symmetric memory.
    #[must_use]
    pub fn group(&self) -> &Communicator {
        &self.core.group
    }
}

impl Deref for SymmetricMemory {
    type Target = Lane;

    fn deref(&self) -> &Lane {
        &self.core.lanes[0]
    }
}

/// Creates the lanes of a group: their memory on all ranks, which is zeroed before other ranks can access it, and the control
/// words of each rank. Collective.
fn create_lanes(
    context: &LaneContext,
    address_space: &WindowAddressSpace,
    count: usize,
) -> Result<Vec<Lane>> {
    let (group, layout) = (&context.group, &context.layout);
    let len = to_usize(layout.len);
    let all_len =
        len.checked_mul(count).ok_or_else(|| Error::TooLong { rows: to_u64(count), row_len: len })?;
    let (memory, base, stride) = address_space.allocate_zeroed(all_len)?;
    let create = || {
        let device = group.device();
        let private_len = device.granularity()?.minimum.round_up(PRIVATE_LEN * count);
        let private_len = private_len.expect("2^32 lanes of 16 KiB fit in the address space");
        let private = device.allocate(private_len)?.map(Rights::ReadWrite)?;
        let lane = |index: usize| {
            let private = private.span(index * PRIVATE_LEN, PRIVATE_LEN)?;
            Lane::create(context, &memory, (base, stride), index * len, private)
        };
        (0..count).map(lane).collect()
    };
    agree(group.bootstrap(), create())
}

/// Returns true if the group has more CPU ranks than cores on which they may run. Collective.
fn share_cores(group: &Communicator) -> Result<bool> {
    if group.device().backend().kind() != BackendKind::Host {
        return Ok(false);
    }
    // A rank that cannot read its CPU affinity counts as a rank without cores.
    let cpus = wholemem_os::numa::usable_cpus().unwrap_or_default();
    let most = std::thread::available_parallelism()
        .map_or(0, |most| u32::try_from(most.get()).expect("a number of CPUs"));
    let own: Vec<u8> = std::iter::once(most).chain(cpus).flat_map(u32::to_le_bytes).collect();
    has_more_ranks_than_cores(&group.bootstrap().all_gather(&own)?)
}

/// Returns true if there are more ranks than cores on which they may run, or more than the CPU quota of a control group allows.
/// `all` has a message of each rank: its available parallelism, then the numbers of its cores.
fn has_more_ranks_than_cores(all: &[Vec<u8>]) -> Result<bool> {
    let mut cpus: HashSet<&[u8; 4]> = HashSet::new();
    let mut most = usize::MAX;
    for (rank, bytes) in (0..).map(Rank).zip(all) {
        let ([at_once, own @ ..], []) = bytes.as_chunks::<4>() else {
            let what = "the list of its CPUs is malformed";
            return Err(wholemem_comm::Error::Protocol { rank, what }.into());
        };
        let at_once = u32::from_le_bytes(*at_once) as usize;
        if at_once < own.len() {
            most = most.min(at_once);
        }
        cpus.extend(own);
    }
    Ok(cpus.len().min(most) < all.len())
}

/// Returns the number of blocks of one collective call that can be resident at once on every device, if every lane of every rank
/// on the device has a call in flight (two calls with programmatic launch); and true if all ranks are on one device. Collective.
fn resident_blocks(group: &Communicator, kernels: &CollectiveKernels, lanes: u32) -> Result<(u32, bool)> {
    let comm = group.bootstrap();
    let fit = agree(comm, kernels.resident_blocks())?;
    let own = [&group.device().info().uuid[..], &fit.to_le_bytes()].concat();
    let mut all = Vec::new();
    for (rank, bytes) in (0..).map(Rank).zip(comm.all_gather(&own)?) {
        let Ok(device) = <[u8; 20]>::try_from(bytes) else {
            let what = "the description of its device has an invalid length";
            return Err(wholemem_comm::Error::Protocol { rank, what }.into());
        };
        let [uuid @ .., a, b, c, d] = device;
        all.push((uuid, u32::from_le_bytes([a, b, c, d])));
    }
    let mut least = MAX_BLOCKS;
    for (rank, (uuid, fits)) in (0..).map(Rank).zip(all.iter().copied()) {
        let sharing = all.iter().filter(|(other, _)| *other == uuid).count();
        let calls = lanes.saturating_mul(kernels.concurrent_calls());
        let each = fits / u32::try_from(sharing).expect("a number of ranks").saturating_mul(calls).max(1);
        let inline = group.device().backend().kind() == BackendKind::Host;
        if each == 0 && !inline {
            return Err(Error::NotResident { rank, sharing, fits });
        }
        least = least.min(each.max(1));
    }
    let (first, _) = all[0];
    Ok((least, all.iter().all(|(uuid, _)| *uuid == first)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_shared_if_cores_or_quota_are_fewer_than_ranks() {
        let rank = |at_once: u32, cpus: &[u32]| {
            std::iter::once(&at_once).chain(cpus).flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>()
        };
        let has_more_ranks_than_cores = |all: &[Vec<u8>]| has_more_ranks_than_cores(all).unwrap();
        assert!(
            !has_more_ranks_than_cores(&[rank(1, &[0]), rank(1, &[1])]),
            "each rank is bound to its own core"
        );
        assert!(
            has_more_ranks_than_cores(&[rank(1, &[1]), rank(1, &[1])]),
            "both ranks are bound to the same core"
        );
        assert!(!has_more_ranks_than_cores(&[rank(2, &[0, 1]), rank(2, &[0, 1])]));
        assert!(has_more_ranks_than_cores(&[rank(2, &[0, 1]), rank(2, &[0, 1]), rank(2, &[0, 1])]));
        assert!(has_more_ranks_than_cores(&[
            rank(2, &[0, 1, 2, 3]),
            rank(2, &[0, 1, 2, 3]),
            rank(2, &[0, 1, 2, 3])
        ]));
        assert!(has_more_ranks_than_cores(&[rank(0, &[]), rank(0, &[])]), "no rank could read its affinity");
    }

    #[test]
    fn a_malformed_list_of_cpus_is_rejected() {
        let what = "the list of its CPUs is malformed";
        let error = Error::Comm(wholemem_comm::Error::Protocol { rank: Rank(1), what });
        for len in [0, 3, 5] {
            assert_eq!(has_more_ranks_than_cores(&[vec![0; 8], vec![0; len]]), Err(error.clone()), "{len}");
        }
    }
}
