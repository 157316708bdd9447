//! Paths through the interface that make every raw call there is, for [`crate::sweep`] to fail each in turn.
//!
//! They return every error they meet, and make no assumption that a failure elsewhere would break.

use wholemem_hal::{
    Allocation, Args, Backend, BackendKind, Event, EventHandle, EventKind, Grant, HandleKind, KernelImage,
    LaunchShape, Mapping, Module, PinnedBuffer, Reservation, Result, Rights,
};
use wholemem_os::Deadline;

/// Creates, reserves, maps, grants, fills in, inspects, and gives everything back with an answer.
///
/// # Errors
/// The first that a call answers.
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

/// Exports and imports memory, with both kinds of rights, and drops everything without an answer.
///
/// # Errors
/// The first that a call answers.
pub fn sharing(backend: &Backend) -> Result<()> {
    let device = backend.device(0)?;
    let step = device.granularity()?.minimum.len();
    let made = device.allocate(step)?;
    let here = made.map(Rights::ReadWrite)?;
    let both = [Rights::ReadWrite, Rights::Read];
    let has_read_only = device.backend().kind() == BackendKind::Host;
    for rights in both.into_iter().take(if has_read_only { 2 } else { 1 }) {
        let received = Allocation::import(&device, made.export(HandleKind::Fd, rights)?, step)?;
        let there = received.map(rights)?;
        there.populate()?;
    }
    drop(here);
    let event = Event::create(&device, EventKind::Shared)?;
    // The driver's tokens can be opened by other processes only.
    if let handle @ EventHandle::Fd(_) = event.export()? {
        Event::import(&device, handle)?;
    }
    Ok(())
}

unsafe fn nothing(_: &LaunchShape, _: &Args) {}

/// Streams, events, copies, graphs, kernels and pinned memory.
///
/// # Errors
/// The first that a call answers.
pub fn work(backend: &Backend) -> Result<()> {
    const IMAGE: KernelImage =
        KernelImage { ptx: Some(crate::cuda::TESTING_PTX), host: &[("nothing", nothing)] };
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
    // More work than is kept behind one event.
    for _ in 0..20 {
        graph.launch(&stream)?;
        stream.copy(&map.span(0, 100)?, &buffer.all())?;
    }
    // SAFETY: the kernel takes nothing and does nothing.
    let function = unsafe { Module::load(&device, &IMAGE) }?.function("nothing")?;
    function.occupancy(1, 0)?;
    // SAFETY: the kernel takes no arguments and touches no memory.
    unsafe { stream.launch(&function, &LaunchShape::linear(1, 1), &Args::new(), &[]) }?;
    stream.record(&end)?;
    let other = device.stream()?;
    other.await_event(&end)?;
    stream.write(&map.span(0, 4)?, &[1; 4])?;
    stream.read(&map.span(0, 4)?, &mut [0; 4])?;
    end.wait(Deadline::NEVER)?;
    start.elapsed(&end)?;
    other.synchronize(Deadline::NEVER)?;
    // And some that is dropped before it is waited for.
    stream.fill(&map.all(), 3)
}

/// A path, as sweeps walk it.
pub type Path = fn(&Backend) -> Result<()>;

/// Every path, by name.
pub const ALL: [(&str, Path); 3] = [("memory", memory), ("sharing", sharing), ("work", work)];
