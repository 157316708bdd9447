//! Capability tests: each capability of a device is tested by using it.
//!
//! The attributes that a driver reports are not sufficient: an attribute may promise a capability that the first call
//! then refuses. So each capability has a small test that makes the same safe calls as a user.

use wholemem_os::{Deadline, vm};

use crate::{
    Allocation, AllocationSpec, Args, Attempt, Capability, CapabilityProbe, CudaMallocBuffer, Device, Error,
    Event, EventHandle, EventKind, Grant, HandleKind, KernelImage, LaunchShape, Mapping, Module, Reservation,
    Result, Rights,
};

impl Device {
    /// Returns the kind of memory handle with the widest reach that works on this device (fabric, file descriptor,
    /// CUDA IPC, in this order), and the failed tests of the kinds before it.
    ///
    /// ```
    /// use wholemem_hal::{AllocationSpec, Allocation, Backend, HandleKind, HostConfig};
    ///
    /// let device = Backend::host(HostConfig::default())?.device(0)?;
    /// let (handle, failed) = device.widest_handle_kind();
    /// assert_eq!((handle, failed.len()), (HandleKind::Fd, 1)); // no fabric on the host
    /// let spec = AllocationSpec { handle, ..AllocationSpec::new(&device, 1 << 20) };
    /// let memory = Allocation::create(device.backend(), &spec)?;
    /// # Ok::<(), wholemem_hal::Error>(())
    /// ```
    #[must_use]
    pub fn widest_handle_kind(&self) -> (HandleKind, Vec<CapabilityProbe>) {
        let kinds = [(HandleKind::Fabric, Capability::Fabric), (HandleKind::Fd, Capability::ShareFd)];
        let mut failed = Vec::new();
        for (kind, capability) in kinds {
            let probe = self.probe(capability);
            if probe.outcome.is_ok() {
                return (kind, failed);
            }
            failed.push(probe);
        }
        // If allocations cannot be shared at all, buffers from `cuMemAlloc` can, as CUDA IPC handles.
        (HandleKind::CudaIpc, failed)
    }

    /// Tests whether a capability works on this device, by using it. Results are cached, except for temporary failures.
    ///
    /// ```
    /// use wholemem_hal::{Backend, Capability, HostConfig};
    ///
    /// let device = Backend::host(HostConfig::default())?.device(0)?;
    /// assert_eq!(device.probe(Capability::ShareFd).outcome, Ok(()));
    /// let why_not = device.probe(Capability::Fabric).outcome.unwrap_err();
    /// assert_eq!(why_not.to_string(), "host:0 has no fabric: host memory is shared as a file descriptor");
    /// # Ok::<(), wholemem_hal::Error>(())
    /// ```
    #[must_use]
    pub fn probe(&self, capability: Capability) -> CapabilityProbe {
        self.backend().cached_probe(self.id(), capability, || test_capability(self, capability))
    }

    /// Tests whether work of this device can access memory of `peer`.
    ///
    /// # Errors
    /// [`Error::WrongBackend`]; the error of the failed access.
    pub fn check_peer_access(&self, peer: &Device) -> Result<()> {
        if self.backend() != peer.backend() {
            return Err(Error::WrongBackend {
                attempt: Attempt::Grant { device: self.id(), rights: Rights::ReadWrite },
            });
        }
        test_peer_access(self, peer)
    }
}

/// Tests one capability of a device, by using it.
fn test_capability(device: &Device, capability: Capability) -> Result<()> {
    let granule = device.granularity()?.minimum.len();
    let expect =
        |works: bool, reason| works.then_some(()).ok_or_else(|| device.unsupported(capability, reason));
    match capability {
        Capability::Create => {
            let map = device.allocate(granule)?.map(Rights::ReadWrite)?;
            expect(write_is_visible(device, &map, &map)?, "the bytes read differ from the bytes written")
        }
        Capability::ShareFd => {
            let created = device.allocate(granule)?;
            let received = import(device, &created, HandleKind::Fd, Rights::ReadWrite)?;
            let (here, there) = (created.map(Rights::ReadWrite)?, received.map(Rights::ReadWrite)?);
            expect(
                write_is_visible(device, &here, &there)?,
                "the importer read other bytes than the exporter wrote",
            )
        }
        Capability::ShareReadOnly => {
            let received = import(device, &device.allocate(granule)?, HandleKind::Fd, Rights::Read)?;
            let rejected = received.map(Rights::ReadWrite).err();
            let rights = Rights::ReadWrite;
            let attempt = Attempt::Grant { device: device.id(), rights };
            let expected = Error::ReadOnlyHandle { attempt };
            expect(rejected == Some(expected), "a read-only handle allowed a writable mapping")
        }
        Capability::ReadOnlyMap => {
            let map = device.allocate(granule)?.map(Rights::Read)?;
            let stored = match map.bytes() {
                // SAFETY: the memory was created for this test and contains no data.
                Ok(bytes) => unsafe { vm::try_store(bytes.as_ptr()) },
                // SAFETY: the memory was created for this test and contains no data, so writing it is acceptable.
                Err(_) => unsafe { device.stream()?.fill_unchecked(&map.all(), 1) }.is_ok(),
            };
            expect(!stored, "a store to a read-only mapping succeeded")
        }
        Capability::ZeroedMemory => {
            // Memory that was written is released first, so that the driver can return it to the next allocation.
            let map = device.allocate(granule)?.map(Rights::ReadWrite)?;
            let stream = device.stream()?;
            stream.fill(&map.all(), 0xAB)?;
            stream.synchronize(Deadline::NEVER)?;
            drop(map);
            let mut seen = vec![0xCD; granule];
            stream.read(&device.allocate(granule)?.map(Rights::Read)?.all(), &mut seen)?;
            expect(seen.iter().all(|&byte| byte == 0), "new memory was not zeroed")
        }
        Capability::FixedAddress => {
            let first = Reservation::create(device.backend(), granule)?;
            let address = first.address();
            first.free()?;
            let again = Reservation::create_at(device.backend(), granule, address)?;
            expect(again.address() == address, "the reservation is not at the requested address")
        }
        Capability::Populate => device.allocate(granule)?.map(Rights::ReadWrite)?.populate(),
        Capability::HostNuma => {
            let spec = AllocationSpec { node: Some(0), ..AllocationSpec::new(device, granule) };
            let map = Allocation::create(device.backend(), &spec)?.map(Rights::ReadWrite)?;
            expect(write_is_visible(device, &map, &map)?, "the bytes read differ from the bytes written")
        }
        Capability::SharedEvent => {
            let event = Event::create(device, EventKind::Shared)?;
            device.stream()?.record(&event)?;
            match event.export()? {
                handle @ EventHandle::Fd(_) => Event::import(device, handle)?.wait(Deadline::NEVER),
                // Only another process can open a CUDA IPC event handle, so the test waits for the exported event
                // itself.
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
            expect(seen == [0x5A], "a launched graph did not run its work")
        }
        Capability::Kernels => kernels(device, granule),
        Capability::Multicast => multicast(device, granule),
        Capability::Retain => retain(device, granule),
        Capability::Fabric => {
            let fabric =
                AllocationSpec { handle: HandleKind::Fabric, ..AllocationSpec::new(device, granule) };
            let created = Allocation::create(device.backend(), &fabric)?;
            import(device, &created, HandleKind::Fabric, Rights::ReadWrite).map(drop)
        }
        // A process cannot open its own CUDA IPC handle, so the test only creates one; tests with two processes cover
        // opening.
        Capability::CudaIpc => CudaMallocBuffer::create(device, granule)?.export().map(drop),
        Capability::DmaBuf => dma_buf(device, granule),
        Capability::Rdma => {
            let spec = AllocationSpec { rdma: true, ..AllocationSpec::new(device, granule) };
            Allocation::create(device.backend(), &spec).map(drop)
        }
    }
}

/// Tests whether work of `device` can access memory of `peer`.
pub(crate) fn test_peer_access(device: &Device, peer: &Device) -> Result<()> {
    let granule = peer.granularity()?.minimum.len();
    let map = peer.allocate(granule)?.map(Rights::ReadWrite)?;
    map.grant(&[Grant { device: device.id(), rights: Rights::ReadWrite }])?;
    match write_is_visible(device, &map, &map)? {
        true => Ok(()),
        false => Err(device
            .unsupported(Capability::Create, "the bytes read from the peer differ from the bytes written")),
    }
}

fn import(device: &Device, created: &Allocation, kind: HandleKind, rights: Rights) -> Result<Allocation> {
    Allocation::import(device, created.export(kind, rights)?, created.len())
}

/// Returns whether bytes that are written through the mapping `to` are read through `from`, at the start and at the
/// end.
fn write_is_visible(device: &Device, to: &Mapping, from: &Mapping) -> Result<bool> {
    let stream = device.stream()?;
    let sent = *b"wholemem";
    let mut seen = [[0; 8]; 2];
    for (offset, seen) in [0, to.len() - sent.len()].into_iter().zip(&mut seen) {
        stream.write(&to.span(offset, sent.len())?, &sent)?;
        stream.read(&from.span(offset, sent.len())?, seen)?;
    }
    Ok(seen == [sent; 2])
}

unsafe fn empty_kernel(_: &LaunchShape, _: &Args) {}

/// An empty kernel, in the PTX version of all kernels of this project.
const PROBE: KernelImage = KernelImage {
    ptx: Some(".version 8.4\n.target sm_70\n.address_size 64\n.visible .entry probe()\n{\n ret;\n}\n"),
    host: &[("probe", empty_kernel)],
};

fn kernels(device: &Device, _granule: usize) -> Result<()> {
    // SAFETY: the kernel `probe` has no parameters and an empty body.
    let function = unsafe { Module::load(device, &PROBE) }?.function("probe")?;
    let stream = device.stream()?;
    // SAFETY: the kernel `probe` takes no arguments and accesses no memory.
    unsafe { stream.launch(&function, &LaunchShape::linear(1, 1), &Args::new(), &[]) }?;
    stream.synchronize(Deadline::NEVER)
}

fn multicast(device: &Device, granule: usize) -> Result<()> {
    let backend = device.backend();
    let devices: Vec<_> = backend.devices().iter().map(|info| info.id).collect();
    let attempt = || Attempt::Create { len: granule, device: device.label() };
    // SAFETY: the devices exist, the length is one granule, and the multicast object is released below.
    let created = unsafe { backend.memory().create_multicast(&devices, granule) }
        .map_err(|cause| backend.to_error(device.id(), attempt(), cause))?;
    // SAFETY: the multicast object was created above, and is not mapped.
    unsafe { backend.memory().release(created) }
        .map_err(|cause| backend.to_error(device.id(), Attempt::Release, cause))
}

fn retain(device: &Device, granule: usize) -> Result<()> {
    let map = device.allocate(granule)?.map(Rights::Read)?;
    Allocation::retain(device, map.address(), granule).map(drop)
}

fn dma_buf(device: &Device, granule: usize) -> Result<()> {
    device.allocate(granule)?.map(Rights::ReadWrite)?.dma_buf().map(drop)
}
