//! What a device can do, found out by doing it.
//!
//! A driver's own word is not enough: an attribute may promise what the first call refuses. So each capability has a
//! small experiment here, made of the same safe calls that a user would make.

use std::fmt;

use wholemem_os::{Deadline, vm};

use crate::{
    Allocation, AllocationSpec, Args, Attempt, Device, Error, Event, EventHandle, EventKind, Grant,
    HandleKind, KernelImage, LaunchShape, Mapping, Module, PlainBuffer, Reservation, Result, Rights,
};

/// Something that not every device can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Capability {
    /// Memory can be created, mapped, written and read.
    Create,
    /// Memory goes to another process as a file descriptor.
    ShareFd,
    /// A file descriptor can be handed out that allows reading only.
    ShareReadOnly,
    /// A map can refuse writes.
    ReadOnlyMap,
    /// Fresh memory holds nobody's old bytes.
    ZeroedMemory,
    /// Addresses can be chosen, so that several processes have the same memory at the same place.
    FixedAddress,
    /// Pages can be entered ahead of their first touch.
    Populate,
    /// Memory can be tied to a NUMA node of the host.
    HostNuma,
    /// An event of one process can be waited for in another.
    SharedEvent,
    /// The time between two events can be measured.
    Timing,
    /// Work can be captured once and launched many times.
    Graph,
    /// Kernels can be loaded and launched.
    Kernels,
    /// Several devices can be written through one address.
    Multicast,
    /// The allocation behind a foreign address can be found.
    Retain,
    /// Memory goes between machines of one NVLink fabric.
    Fabric,
    /// Memory goes to another process through CUDA's older handles.
    CudaIpc,
    /// A mapped range can be handed to a network card.
    DmaBuf,
    /// Memory can be created for network cards to read and write.
    Rdma,
}

impl Capability {
    /// Every capability there is, the plainest first.
    pub const ALL: [Self; 18] = [
        Self::Create,
        Self::ShareFd,
        Self::ShareReadOnly,
        Self::ReadOnlyMap,
        Self::ZeroedMemory,
        Self::FixedAddress,
        Self::Populate,
        Self::HostNuma,
        Self::SharedEvent,
        Self::Timing,
        Self::Graph,
        Self::Kernels,
        Self::Multicast,
        Self::Retain,
        Self::Fabric,
        Self::CudaIpc,
        Self::DmaBuf,
        Self::Rdma,
    ];

    /// Its name for programs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::ShareFd => "share-fd",
            Self::ShareReadOnly => "share-read-only",
            Self::ReadOnlyMap => "read-only-map",
            Self::ZeroedMemory => "zeroed-memory",
            Self::FixedAddress => "fixed-address",
            Self::Populate => "populate",
            Self::HostNuma => "host-numa",
            Self::SharedEvent => "shared-event",
            Self::Timing => "timing",
            Self::Graph => "graph",
            Self::Kernels => "kernels",
            Self::Multicast => "multicast",
            Self::Retain => "retain",
            Self::Fabric => "fabric",
            Self::CudaIpc => "cuda-ipc",
            Self::DmaBuf => "dma-buf",
            Self::Rdma => "rdma",
        }
    }

    pub(crate) fn prove(self, device: &Device) -> Proof {
        Proof { capability: self, outcome: self.experiment(device) }
    }

    fn experiment(self, device: &Device) -> Result<()> {
        let granule = device.granularity()?.minimum.len();
        let expect = |held: bool, reason| held.then_some(()).ok_or_else(|| device.unsupported(self, reason));
        match self {
            Self::Create => {
                let map = device.allocate(granule)?.map(Rights::ReadWrite)?;
                expect(echoes(device, &map, &map)?, "what was written was not what was read")
            }
            Self::ShareFd => {
                let made = device.allocate(granule)?;
                let received = import(device, &made, HandleKind::Fd, Rights::ReadWrite)?;
                let (here, there) = (made.map(Rights::ReadWrite)?, received.map(Rights::ReadWrite)?);
                expect(echoes(device, &here, &there)?, "the importer saw other bytes than the exporter wrote")
            }
            Self::ShareReadOnly => {
                let received = import(device, &device.allocate(granule)?, HandleKind::Fd, Rights::Read)?;
                let refused = received.map(Rights::ReadWrite).err();
                let rights = Rights::ReadWrite;
                let attempt = Attempt::Grant { device: device.id(), rights };
                let expected = Error::ReadOnlyHandle { attempt };
                expect(refused == Some(expected), "a read-only handle gave a writable map")
            }
            Self::ReadOnlyMap => {
                let map = device.allocate(granule)?.map(Rights::Read)?;
                let stored = match map.bytes() {
                    // SAFETY: the memory was made for this, and holds nothing.
                    Ok(bytes) => unsafe { vm::try_store(bytes.as_ptr()) },
                    // SAFETY: as above; the driver refuses it, or does it.
                    Err(_) => unsafe { device.stream()?.fill_unchecked(&map.all(), 1) }.is_ok(),
                };
                expect(!stored, "a store into a read-only map went through")
            }
            Self::ZeroedMemory => {
                // Dirty memory is released first, so that it has a chance to come back.
                let map = device.allocate(granule)?.map(Rights::ReadWrite)?;
                let stream = device.stream()?;
                stream.fill(&map.all(), 0xAB)?;
                stream.synchronize(Deadline::NEVER)?;
                drop(map);
                let mut seen = vec![0xCD; granule];
                stream.read(&device.allocate(granule)?.map(Rights::Read)?.all(), &mut seen)?;
                expect(seen.iter().all(|&byte| byte == 0), "fresh memory was not zero")
            }
            Self::FixedAddress => {
                let first = Reservation::create(device.backend(), granule)?;
                let address = first.address();
                first.free()?;
                let again = Reservation::create_at(device.backend(), granule, address)?;
                expect(again.address() == address, "another address was given than was asked for")
            }
            Self::Populate => device.allocate(granule)?.map(Rights::ReadWrite)?.populate(),
            Self::HostNuma => {
                let spec = AllocationSpec { node: Some(0), ..AllocationSpec::new(device, granule) };
                let map = Allocation::create(device.backend(), &spec)?.map(Rights::ReadWrite)?;
                expect(echoes(device, &map, &map)?, "what was written was not what was read")
            }
            Self::SharedEvent => {
                let event = Event::create(device, EventKind::Shared)?;
                device.stream()?.record(&event)?;
                match event.export()? {
                    handle @ EventHandle::Fd(_) => Event::import(device, handle)?.wait(Deadline::NEVER),
                    // As with CUDA IPC handles: only another process can open it.
                    EventHandle::CudaIpc(_) => event.wait(Deadline::NEVER),
                }
            }
            Self::Timing => {
                let (start, end) =
                    (Event::create(device, EventKind::Timed)?, Event::create(device, EventKind::Timed)?);
                let stream = device.stream()?;
                stream.record(&start)?;
                stream.record(&end)?;
                stream.synchronize(Deadline::NEVER)?;
                start.elapsed(&end).map(drop)
            }
            Self::Graph => {
                let map = device.allocate(granule)?.map(Rights::ReadWrite)?;
                let stream = device.stream()?;
                let graph = stream.capture(|stream| stream.fill(&map.all(), 0x5A))?;
                graph.launch(&stream)?;
                stream.synchronize(Deadline::NEVER)?;
                let mut seen = [0];
                stream.read(&map.span(granule - 1, 1)?, &mut seen)?;
                expect(seen == [0x5A], "a launched graph did not do its work")
            }
            Self::Kernels => kernels(device, granule),
            Self::Multicast => multicast(device, granule),
            Self::Retain => retain(device, granule),
            Self::Fabric => {
                let fabric =
                    AllocationSpec { handle: HandleKind::Fabric, ..AllocationSpec::new(device, granule) };
                let made = Allocation::create(device.backend(), &fabric)?;
                import(device, &made, HandleKind::Fabric, Rights::ReadWrite).map(drop)
            }
            // A process cannot open its own; that the other side can is for tests with two.
            Self::CudaIpc => PlainBuffer::create(device, granule)?.export().map(drop),
            Self::DmaBuf => dma_buf(device, granule),
            Self::Rdma => {
                let spec = AllocationSpec { rdma: true, ..AllocationSpec::new(device, granule) };
                Allocation::create(device.backend(), &spec).map(drop)
            }
        }
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Finds out whether work of `device` reaches memory of `peer`, by doing it.
pub(crate) fn prove_peer(device: &Device, peer: &Device) -> Result<()> {
    let granule = peer.granularity()?.minimum.len();
    let map = peer.allocate(granule)?.map(Rights::ReadWrite)?;
    map.grant(&[Grant { device: device.id(), rights: Rights::ReadWrite }])?;
    match echoes(device, &map, &map)? {
        true => Ok(()),
        false => {
            Err(device.unsupported(Capability::Create, "what was written to the peer was not what was read"))
        }
    }
}

/// What came of trying a capability.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proof {
    /// What was tried.
    pub capability: Capability,
    /// It worked, or why not.
    pub outcome: Result<()>,
}

fn import(device: &Device, made: &Allocation, kind: HandleKind, rights: Rights) -> Result<Allocation> {
    Allocation::import(device, made.export(kind, rights)?, made.len())
}

/// Whether what is written through one map is read through another, at the first and the last bytes.
fn echoes(device: &Device, to: &Mapping, from: &Mapping) -> Result<bool> {
    let stream = device.stream()?;
    let sent = *b"wholemem";
    let mut seen = [[0; 8]; 2];
    for (offset, seen) in [0, to.len() - sent.len()].into_iter().zip(&mut seen) {
        stream.write(&to.span(offset, sent.len())?, &sent)?;
        stream.read(&from.span(offset, sent.len())?, seen)?;
    }
    Ok(seen == [sent; 2])
}

unsafe fn nothing(_: &LaunchShape, _: &Args) {}

/// A kernel that does nothing, in the version of PTX that all our kernels are written in.
const PROBE: KernelImage = KernelImage {
    ptx: Some(".version 8.4\n.target sm_70\n.address_size 64\n.visible .entry probe()\n{\n ret;\n}\n"),
    host: &[("probe", nothing)],
};

fn kernels(device: &Device, _granule: usize) -> Result<()> {
    // SAFETY: the one function takes nothing and does nothing.
    let function = unsafe { Module::load(device, &PROBE) }?.function("probe")?;
    let stream = device.stream()?;
    // SAFETY: as above.
    unsafe { stream.launch(&function, &LaunchShape::line(1, 1), &Args::new(), &[]) }?;
    stream.synchronize(Deadline::NEVER)
}

fn multicast(device: &Device, granule: usize) -> Result<()> {
    let backend = device.backend();
    let devices: Vec<_> = backend.devices().iter().map(|info| info.id).collect();
    let attempt = || Attempt::Create { len: granule, device: device.label() };
    // SAFETY: the devices exist, the length is one granule, and what is made is given back.
    let made = unsafe { backend.memory().create_multicast(&devices, granule) }
        .map_err(|cause| backend.refused(device.id(), attempt(), cause))?;
    // SAFETY: made in the line above, and mapped nowhere.
    unsafe { backend.memory().release(made) }
        .map_err(|cause| backend.refused(device.id(), Attempt::Release, cause))
}

fn retain(device: &Device, granule: usize) -> Result<()> {
    let map = device.allocate(granule)?.map(Rights::Read)?;
    Allocation::retain(device, map.address(), granule).map(drop)
}

fn dma_buf(device: &Device, granule: usize) -> Result<()> {
    device.allocate(granule)?.map(Rights::ReadWrite)?.dma_buf().map(drop)
}
