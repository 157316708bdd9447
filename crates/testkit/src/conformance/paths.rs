//! Code paths that together make every raw call of a backend, for the fault sweeps of [`crate::sweep`].
//!
//! They return every error, and assume nothing that an injected failure would break.

#![allow(unsafe_code, reason = "a kernel launch is unsafe")]

use wholemem_hal::{
    Allocation, Args, Backend, BackendKind, Event, EventHandle, EventKind, Grant, HandleKind, KernelImage,
    LaunchShape, Mapping, Module, PinnedBuffer, Reservation, Result, Rights,
};
use wholemem_os::Deadline;

/// Creates, reserves, maps, grants, populates and inspects memory, and releases everything explicitly.
///
/// # Errors
/// Returns the first error of a call.
pub fn memory(backend: &Backend) -> Result<()> {
    let device = backend.device(0)?;
    let step = device.granularity()?.minimum.len();
    let rights = [Grant { device: device.id(), rights: Rights::ReadWrite }];
    let reservation = Reservation::create_aligned(backend, 4 * step, 8 << 20)?;
    let [first, second] = [device.allocate(step)?, device.allocate(2 * step)?];
    let left = Mapping::create(&reservation, 0, &first, &rights)?;
    let right = Mapping::create(&reservation, step, &second, &[])?;
    right.grant(&rights)?;
    left.populate()?;
    first.properties()?;
    left.unmap()?;
    right.unmap()?;
    first.release()?;
    second.release()?;
    reservation.free()
}

/// Exports and imports memory, both read-write and read-only, and releases everything by dropping it.
///
/// # Errors
/// Returns the first error of a call.
pub fn sharing(backend: &Backend) -> Result<()> {
    let device = backend.device(0)?;
    let step = device.granularity()?.minimum.len();
    let created = device.allocate(step)?;
    let here = created.map(Rights::ReadWrite)?;
    let both = [Rights::ReadWrite, Rights::Read];
    let has_read_only = device.backend().kind() == BackendKind::Host;
    for rights in both.into_iter().take(if has_read_only { 2 } else { 1 }) {
        let received = Allocation::import(&device, created.export(HandleKind::Fd, rights)?, step)?;
        let there = received.map(rights)?;
        there.populate()?;
    }
    drop(here);
    let event = Event::create(&device, EventKind::Shared)?;
    // A CUDA IPC handle is not imported, because only another process can open it.
    if let handle @ EventHandle::Fd(_) = event.export()? {
        Event::import(&device, handle)?;
    }
    Ok(())
}

unsafe fn empty_kernel(_: &LaunchShape, _: &Args) {}

/// Uses streams, events, copies, graphs, kernels and pinned memory.
///
/// # Errors
/// Returns the first error of a call.
pub fn work(backend: &Backend) -> Result<()> {
    const IMAGE: KernelImage =
        KernelImage { ptx: Some(crate::cuda::TESTING_PTX), host: &[("nothing", empty_kernel)] };
    let device = backend.device(0)?;
    let step = device.granularity()?.minimum.len();
    let map = device.allocate(step)?.map(Rights::ReadWrite)?;
    let buffer = PinnedBuffer::create(&device, 100)?;
    let stream = device.stream()?;
    let (start, end) = (Event::create(&device, EventKind::Timed)?, Event::create(&device, EventKind::Timed)?);
    stream.record(&start)?;
    stream.fill(&map.all(), 1)?;
    stream.copy(&map.span(0, 100)?, &buffer.all())?;
    let graph = stream.capture(|stream| stream.fill(&map.span(0, 10)?, 2))?;
    // Enqueues work with more operands than fit into one batch of operands that the stream keeps alive.
    for _ in 0..20 {
        graph.launch(&stream)?;
        stream.copy(&map.span(0, 100)?, &buffer.all())?;
    }
    // SAFETY: the only kernel in the image has no parameters and an empty body.
    let function = unsafe { Module::load(&device, &IMAGE) }?.function("nothing")?;
    function.occupancy(1, 0)?;
    // SAFETY: the kernel takes no arguments and accesses no memory.
    unsafe { stream.launch(&function, &LaunchShape::linear(1, 1), &Args::new(), &[]) }?;
    stream.record(&end)?;
    let other = device.stream()?;
    other.await_event(&end)?;
    stream.write(&map.span(0, 4)?, &[1; 4])?;
    stream.read(&map.span(0, 4)?, &mut [0; 4])?;
    end.wait(Deadline::NEVER)?;
    start.elapsed(&end)?;
    other.synchronize(Deadline::NEVER)?;
    // The last fill is still in flight when its operands are dropped.
    stream.fill(&map.all(), 3)
}

/// A code path that a fault sweep runs once for each call of the path, with that call failing.
pub type Path = fn(&Backend) -> Result<()>;

/// All code paths for fault sweeps, with their names.
pub const ALL: [(&str, Path); 3] = [("memory", memory), ("sharing", sharing), ("work", work)];
