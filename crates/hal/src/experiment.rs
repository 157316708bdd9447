//! What a device can do, found out by doing it.
//!
//! A driver's own word is not enough: an attribute may promise what the first call refuses. So each capability has a
//! small experiment here, made of the same safe calls that a user would make.

use wholemem_os::{Deadline, vm};

use crate::{
    Allocation, AllocationSpec, Args, Attempt, Capability, Device, Error, Event, EventHandle, EventKind,
    Grant, HandleKind, KernelImage, LaunchShape, Mapping, Module, PlainBuffer, Proof, Reservation, Result,
    Rights,
};

impl Device {
    /// The handle that reaches farthest of those that work here, each tried, and what came of trying the farther ones.
    ///
    /// ```
    /// use wholemem_hal::{AllocationSpec, Allocation, Backend, HandleKind, HostConfig};
    ///
    /// let device = Backend::host(HostConfig::default())?.device(0)?;
    /// let (handle, refused) = device.farthest_handle();
    /// assert_eq!((handle, refused.len()), (HandleKind::Fd, 1)); // no fabric here, and the reason is kept
    /// let spec = AllocationSpec { handle, ..AllocationSpec::new(&device, 1 << 20) };
    /// let memory = Allocation::create(device.backend(), &spec)?;
    /// # Ok::<(), wholemem_hal::Error>(())
    /// ```
    #[must_use]
    pub fn farthest_handle(&self) -> (HandleKind, Vec<Proof>) {
        let kinds = [(HandleKind::Fabric, Capability::Fabric), (HandleKind::Fd, Capability::ShareFd)];
        let mut refused = Vec::new();
        for (kind, capability) in kinds {
            let proof = self.prove(capability);
            if proof.outcome.is_ok() {
                return (kind, refused);
            }
            refused.push(proof);
        }
        // What is left where allocations cannot be shared at all: buffers of the older kind.
        (HandleKind::CudaIpc, refused)
    }

    /// Finds out whether a capability works here, by doing it; asked again, remembers. What failed is tried again.
    ///
    /// ```
    /// use wholemem_hal::{Backend, Capability, HostConfig};
    ///
    /// let device = Backend::host(HostConfig::default())?.device(0)?;
    /// assert_eq!(device.prove(Capability::ShareFd).outcome, Ok(()));
    /// let why_not = device.prove(Capability::Fabric).outcome.unwrap_err();
    /// assert_eq!(why_not.to_string(), "host:0 has no fabric: host memory travels as a file descriptor");
    /// # Ok::<(), wholemem_hal::Error>(())
    /// ```
    #[must_use]
    pub fn prove(&self, capability: Capability) -> Proof {
        self.backend().proof(self.id(), capability, || experiment(self, capability))
    }

    /// Finds out whether work of this device reaches memory of `peer`, by doing it.
    ///
    /// # Errors
    /// [`Error::WrongBackend`]; why it does not.
    pub fn reaches(&self, peer: &Device) -> Result<()> {
        if self.backend() != peer.backend() {
            return Err(Error::WrongBackend {
                attempt: Attempt::Grant { device: self.id(), rights: Rights::ReadWrite },
            });
        }
        prove_peer(self, peer)
    }
}

/// Tries one capability.
fn experiment(device: &Device, tried: Capability) -> Result<()> {
    let granule = device.granularity()?.minimum.len();
    let expect = |held: bool, reason| held.then_some(()).ok_or_else(|| device.unsupported(tried, reason));
    match tried {
        Capability::Create => {
            let map = device.allocate(granule)?.map(Rights::ReadWrite)?;
            expect(echoes(device, &map, &map)?, "what was written was not what was read")
        }
        Capability::ShareFd => {
            let made = device.allocate(granule)?;
            let received = import(device, &made, HandleKind::Fd, Rights::ReadWrite)?;
            let (here, there) = (made.map(Rights::ReadWrite)?, received.map(Rights::ReadWrite)?);
            expect(echoes(device, &here, &there)?, "the importer saw other bytes than the exporter wrote")
        }
        Capability::ShareReadOnly => {
            let received = import(device, &device.allocate(granule)?, HandleKind::Fd, Rights::Read)?;
            let refused = received.map(Rights::ReadWrite).err();
            let rights = Rights::ReadWrite;
            let attempt = Attempt::Grant { device: device.id(), rights };
            let expected = Error::ReadOnlyHandle { attempt };
            expect(refused == Some(expected), "a read-only handle gave a writable map")
        }
        Capability::ReadOnlyMap => {
            let map = device.allocate(granule)?.map(Rights::Read)?;
            let stored = match map.bytes() {
                // SAFETY: the memory was made for this, and holds nothing.
                Ok(bytes) => unsafe { vm::try_store(bytes.as_ptr()) },
                // SAFETY: the memory was made for this and holds nothing, so a fill that the driver does not refuse
                // does no harm.
                Err(_) => unsafe { device.stream()?.fill_unchecked(&map.all(), 1) }.is_ok(),
            };
            expect(!stored, "a store into a read-only map went through")
        }
        Capability::ZeroedMemory => {
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
        Capability::FixedAddress => {
            let first = Reservation::create(device.backend(), granule)?;
            let address = first.address();
            first.free()?;
            let again = Reservation::create_at(device.backend(), granule, address)?;
            expect(again.address() == address, "another address was given than was asked for")
        }
        Capability::Populate => device.allocate(granule)?.map(Rights::ReadWrite)?.populate(),
        Capability::HostNuma => {
            let spec = AllocationSpec { node: Some(0), ..AllocationSpec::new(device, granule) };
            let map = Allocation::create(device.backend(), &spec)?.map(Rights::ReadWrite)?;
            expect(echoes(device, &map, &map)?, "what was written was not what was read")
        }
        Capability::SharedEvent => {
            let event = Event::create(device, EventKind::Shared)?;
            device.stream()?.record(&event)?;
            match event.export()? {
                handle @ EventHandle::Fd(_) => Event::import(device, handle)?.wait(Deadline::NEVER),
                // As with CUDA IPC handles: only another process can open it.
                EventHandle::CudaIpc(_) => event.wait(Deadline::NEVER),
            }
        }
        Capability::Timing => {
            let (start, end) =
                (Event::create(device, EventKind::Timed)?, Event::create(device, EventKind::Timed)?);
            let stream = device.stream()?;
            stream.record(&start)?;
            stream.record(&end)?;
            stream.synchronize(Deadline::NEVER)?;
            start.elapsed(&end).map(drop)
        }
        Capability::Graph => {
            let map = device.allocate(granule)?.map(Rights::ReadWrite)?;
            let stream = device.stream()?;
            let graph = stream.capture(|stream| stream.fill(&map.all(), 0x5A))?;
            graph.launch(&stream)?;
            stream.synchronize(Deadline::NEVER)?;
            let mut seen = [0];
            stream.read(&map.span(granule - 1, 1)?, &mut seen)?;
            expect(seen == [0x5A], "a launched graph did not do its work")
        }
        Capability::Kernels => kernels(device, granule),
        Capability::Multicast => multicast(device, granule),
        Capability::Retain => retain(device, granule),
        Capability::Fabric => {
            let fabric =
                AllocationSpec { handle: HandleKind::Fabric, ..AllocationSpec::new(device, granule) };
            let made = Allocation::create(device.backend(), &fabric)?;
            import(device, &made, HandleKind::Fabric, Rights::ReadWrite).map(drop)
        }
        // A process cannot open its own; that the other side can is for tests with two.
        Capability::CudaIpc => PlainBuffer::create(device, granule)?.export().map(drop),
        Capability::DmaBuf => dma_buf(device, granule),
        Capability::Rdma => {
            let spec = AllocationSpec { rdma: true, ..AllocationSpec::new(device, granule) };
            Allocation::create(device.backend(), &spec).map(drop)
        }
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
    // SAFETY: the function is the one of `PROBE`, which takes no arguments and touches no memory.
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
