//! Tests of the CUDA backend that need a GPU, or the fake driver.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use wholemem_hal::limits::{EmptyLaunches, LaunchMethod};
use wholemem_hal::pattern::{self, Pattern};
use wholemem_hal::{
    Allocation, Args, Attempt, Backend, BackendError, Capability, CudaMallocBuffer, Device, Error, Event,
    EventHandle, EventKind, Grant, HandleKind, HostConfig, KernelImage, LaunchShape, Mapping, Module,
    PinnedBuffer, Registration, Reservation, Rights, ShareHandle, Span, Stream,
};
use wholemem_os::Deadline;
use wholemem_testkit::{Census, Ranks, cuda, test_name};

/// Returns the first GPU. Without a GPU, reports the test as skipped.
fn gpu() -> Option<Device> {
    cuda::backend().map(|backend| backend.device(0).unwrap())
}

fn granule(device: &Device) -> usize {
    device.granularity().unwrap().minimum.len()
}

const TESTING: KernelImage = KernelImage { ptx: Some(cuda::TESTING_PTX), host: &[] };

#[test]
fn the_cpu_cannot_address_gpu_memory() {
    let Some(device) = gpu() else { return };
    let map = device.allocate(granule(&device)).unwrap().map(Rights::ReadWrite).unwrap();
    assert_eq!(map.bytes().unwrap_err(), Error::NotHostVisible { device: device.label() });
}

#[test]
fn the_gpu_pattern_equals_the_host_pattern() {
    let Some(device) = gpu() else { return };
    let map = device.allocate(3 * granule(&device)).unwrap().map(Rights::ReadWrite).unwrap();
    let (stream, kernels) = (device.stream().unwrap(), Pattern::load(&device).unwrap());
    stream.fill(&map.all(), 0xEE).unwrap();
    for len in [8, 4096, 1_000_000, 3 * granule(&device)] {
        let span = map.span(0, len).unwrap();
        kernels.fill(&stream, &span, 0xFEED).unwrap();
        assert_eq!(kernels.checksum(&stream, &span).unwrap(), pattern::expected(0xFEED, len));
        let mut words = vec![0; len];
        stream.read(&span, &mut words).unwrap();
        let expected = (0..).map(|index| pattern::word(0xFEED, index).to_ne_bytes());
        assert!(words.chunks_exact(8).zip(expected).all(|(word, expected)| word == expected));
    }
}

#[test]
fn memory_dropped_while_a_kernel_uses_it_stays_mapped_until_the_kernel_ends() {
    if gpu().is_none() && !Ranks::is_rank() {
        return;
    }
    // The test runs in a separate process, so that no other test changes the available memory.
    Ranks::of(1).run(test_name!(), |_| drop_memory_of_a_running_kernel(&gpu().unwrap()));
}

fn drop_memory_of_a_running_kernel(device: &Device) {
    let step = granule(device);
    // Resources whose creation may block on running kernels are created first.
    // SAFETY: the launch passes the parameters of `wait_then_set`.
    let wait = unsafe { Module::load(device, &TESTING) }.unwrap().function("wait_then_set").unwrap();
    let flag = PinnedBuffer::create(device, 4).unwrap();
    let (slow, other) = (device.stream().unwrap(), device.stream().unwrap());
    let memory = device.allocate(step).unwrap();
    let handle = memory.export(HandleKind::Fd, Rights::ReadWrite).unwrap();
    let before = device.available().unwrap();

    let map = memory.map(Rights::ReadWrite).unwrap();
    let minute = 60_000_000_000;
    let args = Args::new().u64(flag.all().address()).u64(minute).u64(map.address()).bytes(&[77], 1);
    // SAFETY: the arguments are a flag, a time, a byte address and a value, as `wait_then_set` takes them; the
    // mapping is an operand, and the flag outlives the work.
    unsafe { slow.launch(&wait, &LaunchShape::linear(1, 1), &args, &[map.all()]) }.unwrap();
    drop((map, memory));
    // The kernel spins, and its memory is still mapped: none of the following calls waits for the kernel.
    assert_eq!(slow.synchronize(Deadline::NOW), Err(Error::TimedOut { attempt: Attempt::Synchronize }));
    for _ in 0..8 {
        let more = device.allocate(step).unwrap().map(Rights::ReadWrite).unwrap();
        other.fill(&more.all(), 1).unwrap();
    }
    other.synchronize(Deadline::NEVER).unwrap();
    drop(slow);
    assert_eq!(device.backend().collect(), 1, "the dropped stream is retired until its kernel ends");

    flag.bytes().unwrap().write_at(0, &1_u32.to_ne_bytes()).unwrap();
    while device.backend().collect() > 0 {
        std::thread::yield_now();
    }
    let map = Allocation::import(device, handle, step).unwrap().map(Rights::Read).unwrap();
    let mut seen = [0];
    other.read(&map.span(0, 1).unwrap(), &mut seen).unwrap();
    assert_eq!(seen, [77], "the kernel wrote to its memory after the handles were dropped");
    drop(map);
    assert!(device.available().unwrap() >= before, "the memory was released after the kernel");
}

#[test]
fn each_device_can_access_its_own_memory() {
    let Some(backend) = cuda::backend() else { return };
    for device in (0..).map_while(|id| backend.device(id).ok()) {
        for peer in (0..).map_while(|id| backend.device(id).ok()) {
            if device.id() == peer.id() {
                device.check_peer_access(&peer).unwrap();
            }
        }
    }
}

#[test]
fn the_driver_refuses_to_fill_a_read_only_mapping() {
    let Some(device) = gpu() else { return };
    assert_eq!(device.probe(Capability::ReadOnlyMap).outcome, Ok(()));
    // The CUDA context is still usable after the refused fill.
    assert_eq!(device.probe(Capability::Create).outcome, Ok(()));
}

#[test]
fn foreign_memory_is_adopted_segment_by_segment() {
    let Some(device) = gpu() else { return };
    let step = granule(&device);
    // The test creates one reservation with adjacent segments, as the allocator of a framework does.
    let whole = Reservation::create(device.backend(), 4 * step).unwrap();
    let rights = [Grant { device: device.id(), rights: Rights::ReadWrite }];
    let maps = [(0, 1), (1, 2)].map(|(offset, granules)| {
        let memory = device.allocate(granules * step).unwrap();
        Mapping::create(&whole, offset * step, &memory, &rights).unwrap()
    });
    let stream = device.stream().unwrap();
    stream.fill(&maps[0].all(), 1).unwrap();
    stream.fill(&maps[1].all(), 2).unwrap();
    stream.synchronize(Deadline::NEVER).unwrap();

    let segments = Allocation::adopt(&device, whole.address() + 8, 3 * step - 8).unwrap();
    let shape: Vec<_> = segments.iter().map(|segment| (segment.address, segment.allocation.len())).collect();
    assert_eq!(shape, [(maps[0].address(), step), (maps[1].address(), 2 * step)]);
    for (segment, value) in segments.iter().zip([1, 2]) {
        let handle = segment.allocation.export(HandleKind::Fd, Rights::ReadWrite).unwrap();
        let again = Allocation::import(&device, handle, segment.allocation.len()).unwrap();
        let mut seen = vec![0; again.len()];
        stream.read(&again.map(Rights::Read).unwrap().all(), &mut seen).unwrap();
        assert!(seen.iter().all(|&byte| byte == value));
    }

    let malloced = CudaMallocBuffer::create(&device, step).unwrap();
    let refused = Allocation::adopt(&device, malloced.address(), step).unwrap_err();
    assert!(
        matches!(&refused, Error::Unsupported { capability: Capability::ShareFd, .. }),
        "memory from cudaMalloc has no allocation: {refused:?}"
    );
    let unmapped = Allocation::adopt(&device, 0x1000, step).unwrap_err();
    assert!(matches!(unmapped, Error::Failed { cause: BackendError::Driver { .. }, .. }), "{unmapped:?}");
}

#[test]
fn device_at_finds_the_device_of_an_address() {
    let Some(backend) = cuda::backend() else { return };
    for id in 0..backend.devices().len() {
        let device = backend.device(u32::try_from(id).unwrap()).unwrap();
        let step = granule(&device);
        let map = device.allocate(step).unwrap().map(Rights::ReadWrite).unwrap();
        let malloced = CudaMallocBuffer::create(&device, 4096).unwrap();
        for address in [map.address(), map.address() + step as u64 - 1, malloced.address() + 7] {
            let found = backend.device_at(address).unwrap().map(|found| found.id());
            assert_eq!(found, Some(device.id()));
        }
        let pinned = PinnedBuffer::create(&device, 4096).unwrap();
        assert!(backend.device_at(pinned.all().address()).unwrap().is_some());
    }
    let own = [0_u8; 8];
    assert!(backend.device_at(own.as_ptr().addr() as u64).unwrap().is_none());
    let host = Backend::host(HostConfig::default()).unwrap();
    let Err(Error::Unsupported { capability, .. }) = host.device_at(4096) else {
        panic!("the host does not track addresses")
    };
    assert_eq!(capability, Capability::Retain);
}

#[test]
fn a_block_has_an_id_that_is_not_used_again() {
    let Some(device) = gpu() else { return };
    let (backend, step) = (device.backend(), granule(&device));
    let malloced = CudaMallocBuffer::create(&device, 5000).unwrap();
    let block = backend.block_at(malloced.address() + 4999).unwrap();
    assert!(block.address == malloced.address() && block.len >= 5000, "{block:?}");
    assert!(block.id.is_some() && backend.memory_id(malloced.address() + 100).unwrap() == block.id);
    let span = malloced.all().part(1000, 4).unwrap();
    let ShareHandle::CudaIpc { offset, .. } = span.export_cuda_ipc(&device).unwrap() else {
        panic!("not a CUDA IPC handle")
    };
    assert_eq!(offset, 1000);
    drop((malloced, span));
    let mut seen = vec![block.id];
    // The driver often returns the address of the buffer that was freed last, and the new buffer there must get a new id.
    for _ in 0..5 {
        let again = CudaMallocBuffer::create(&device, 5000).unwrap();
        seen.push(backend.memory_id(again.address()).unwrap());
    }
    // Memory is mapped and unmapped repeatedly at the same addresses, as allocators with expandable segments do. Each mapping
    // must get a new id.
    let whole = Reservation::create(backend, 2 * step).unwrap();
    let grants = [Grant { device: device.id(), rights: Rights::ReadWrite }];
    for _ in 0..5 {
        let map = |at| Mapping::create(&whole, at, &device.allocate(step).unwrap(), &grants).unwrap();
        let maps = [map(0), map(step)];
        assert_eq!(backend.block_at(maps[1].address() + 7).unwrap().address, maps[1].address());
        seen.extend(maps.map(|map| backend.memory_id(map.address()).unwrap()));
    }
    assert!(seen.iter().all(Option::is_some), "{seen:?}");
    let distinct: std::collections::HashSet<_> = seen.iter().collect();
    assert_eq!(distinct.len(), seen.len(), "{seen:?}");
    assert_eq!(backend.memory_id(0x1000).unwrap(), None);
    assert!(backend.block_at(0x1000).is_err());
}

#[test]
fn mapping_more_than_the_imported_memory_fails() {
    let Some(device) = gpu() else { return };
    let step = granule(&device);
    let handle = device.allocate(step).unwrap().export(HandleKind::Fd, Rights::ReadWrite).unwrap();
    let imported = Allocation::import(&device, handle, 2 * step).unwrap();
    let refused = imported.map(Rights::ReadWrite).unwrap_err();
    let attempt = Attempt::Map { len: 2 * step, offset: 0 };
    let call = "cuMemMap";
    assert!(
        matches!(&refused, Error::Failed { attempt: tried, cause: BackendError::Driver { call: found, .. } }
            if *tried == attempt && *found == call),
        "{refused:?}"
    );
}

#[test]
fn descriptors_of_gpu_memory_close_on_exec() {
    let Some(device) = gpu() else { return };
    let memory = device.allocate(granule(&device)).unwrap();
    for _ in 0..2 {
        let fd = memory.export(HandleKind::Fd, Rights::ReadWrite).unwrap().into_fd().unwrap();
        assert!(rustix::io::fcntl_getfd(&fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    }
}

#[test]
fn import_rejects_invalid_handles() {
    let Some(device) = gpu() else { return };
    let step = granule(&device);
    let refused = |handle| Allocation::import(&device, handle, step).unwrap_err();
    let pipe = rustix::pipe::pipe().unwrap().0;
    for handle in [ShareHandle::Fd(pipe), ShareHandle::Fabric([0xA5; 64])] {
        let kind = handle.kind();
        let error = refused(handle);
        let call = "cuMemImportFromShareableHandle";
        assert!(
            matches!(&error, Error::Failed { cause: BackendError::Driver { call: found, .. }, .. } if *found == call),
            "{kind}: {error:?}"
        );
    }
    let ipc = ShareHandle::CudaIpc { token: [1; 64], offset: 0 };
    assert!(CudaMallocBuffer::import(&device, &ipc, 8).is_err());
    assert_eq!(device.probe(Capability::Create).outcome, Ok(()), "the context is still usable");
}

#[test]
fn a_kernel_newer_than_the_driver_is_rejected() {
    let Some(device) = gpu() else { return };
    let image = KernelImage {
        ptx: Some(
            ".version 99.9\n.target sm_70\n.address_size 64\n.visible .entry unsupported()\n{\n ret;\n}\n",
        ),
        host: &[],
    };
    // SAFETY: no kernel of the module is launched.
    let error = unsafe { Module::load(&device, &image) }.unwrap_err();
    let Error::Failed { attempt, cause: BackendError::Driver { call, .. } } = &error else {
        panic!("{error:?}")
    };
    assert_eq!((attempt, *call), (&Attempt::LoadModule { device: device.label() }, "cuModuleLoadDataEx"));
}

#[test]
fn dropping_a_foreign_stream_does_not_destroy_it() {
    let Some(device) = gpu() else { return };
    let map = device.allocate(granule(&device)).unwrap().map(Rights::ReadWrite).unwrap();
    for _ in 0..2 {
        // SAFETY: zero is the default stream of every device.
        let foreign = unsafe { Stream::from_foreign(&device, 0) };
        foreign.fill(&map.all(), 9).unwrap();
        foreign.synchronize(Deadline::after(Duration::from_secs(60))).unwrap();
    }
    let mut seen = [0];
    device.stream().unwrap().read(&map.span(0, 1).unwrap(), &mut seen).unwrap();
    assert_eq!(seen, [9]);
}

#[test]
fn a_foreign_graph_holds_the_operands_of_captured_work() {
    let Some(device) = gpu() else { return };
    let map = device.allocate(granule(&device)).unwrap().map(Rights::ReadWrite).unwrap();
    let (stream, event) = (device.stream().unwrap(), Event::create(&device, EventKind::Order).unwrap());
    // SAFETY: both handles are those of `stream`, which outlives the wrapped streams.
    let borrowed = [unsafe { Stream::from_foreign(&device, stream.handle()) }, unsafe {
        Stream::from_foreign_static(&device, stream.handle())
    }];
    for (other, value) in borrowed.into_iter().zip([5, 6]) {
        let owner = Arc::new(());
        // SAFETY: the mapping outlives the span, and no reference to its bytes exists.
        let span =
            unsafe { Span::foreign(&device, map.address(), 16, Rights::ReadWrite, Arc::<()>::clone(&owner)) };
        assert!(!other.is_capturing());
        let graph = stream.capture(|_| {
            assert!(other.is_capturing());
            other.fill(&span, value)?;
            let refused = |attempt| Err(Error::Capturing { attempt });
            assert_eq!(other.synchronize(Deadline::NOW), refused(Attempt::Synchronize));
            assert_eq!(other.record(&event), refused(Attempt::Record));
            Ok(())
        });
        let graph = graph.unwrap();
        drop(span);
        for _ in 0..3 {
            stream.write(&map.span(0, 16).unwrap(), &[0; 16]).unwrap();
            graph.launch(&stream).unwrap();
            let mut seen = [0; 16];
            stream.read(&map.span(0, 16).unwrap(), &mut seen).unwrap();
            assert_eq!(seen, [value; 16]);
        }
        device.backend().collect();
        assert_eq!(Arc::strong_count(&owner), 2, "the graph holds the owner");
        drop((graph, other));
        // The driver drops the user objects of a destroyed graph asynchronously.
        let limit = Deadline::after(Duration::from_secs(60));
        while Arc::strong_count(&owner) > 1 && !limit.has_passed() {
            device.backend().collect();
            std::thread::yield_now();
        }
        assert_eq!(Arc::strong_count(&owner), 1, "the owner is released with the graph");
    }
}

#[test]
fn host_memory_is_registered_and_shared_with_the_gpu() {
    let Some(device) = gpu() else { return };
    let host = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
    let map = host.allocate(1 << 20).unwrap().map(Rights::ReadWrite).unwrap();
    let registered = Registration::create(&device, &map).unwrap();
    let (stream, kernels) = (device.stream().unwrap(), Pattern::load(&device).unwrap());
    kernels.fill(&stream, &registered.all(), 5).unwrap();
    assert_eq!(kernels.checksum(&stream, &registered.all()).unwrap(), pattern::expected(5, 1 << 20));
    let mut word = [0; 8];
    map.bytes().unwrap().read_at(8 * 1000, &mut word).unwrap();
    assert_eq!(u64::from_ne_bytes(word), pattern::word(5, 1000));
    // The registration holds the mapping, so the memory stays mapped after `map` is dropped.
    drop(map);
    assert_eq!(kernels.checksum(&stream, &registered.all()).unwrap(), pattern::expected(5, 1 << 20));

    let received = Allocation::import(
        &host,
        host.allocate(1 << 20).unwrap().export(HandleKind::Fd, Rights::Read).unwrap(),
        1 << 20,
    );
    let read_only = Registration::create(&device, &received.unwrap().map(Rights::Read).unwrap()).unwrap();
    assert_ne!(kernels.checksum(&stream, &read_only.all()).unwrap(), pattern::expected(5, 1 << 20));
    let refused = kernels.fill(&stream, &read_only.all(), 1).unwrap_err();
    assert!(matches!(refused, Error::Denied { granted: Rights::Read, .. }), "{refused:?}");
}

#[test]
fn two_processes_share_gpu_memory_events_and_cuda_malloc_buffers() {
    if gpu().is_none() && !Ranks::is_rank() {
        return;
    }
    Ranks::of(2).run(test_name!(), |rank| {
        let device = gpu().unwrap();
        let step = granule(&device);
        let (stream, kernels) = (device.stream().unwrap(), Pattern::load(&device).unwrap());
        if rank.id() == 0 {
            let memory = device.allocate(2 * step).unwrap();
            let map = memory.map(Rights::ReadWrite).unwrap();
            let malloced = CudaMallocBuffer::create(&device, 4096).unwrap();
            let event = Event::create(&device, EventKind::Shared).unwrap();
            kernels.fill(&stream, &map.all(), 11).unwrap();
            kernels.fill(&stream, &malloced.all(), 12).unwrap();
            stream.record(&event).unwrap();
            // The address is inside the buffer, so the handle contains its offset.
            // SAFETY: the buffer lives until the other rank has finished.
            let malloced_handle =
                unsafe { CudaMallocBuffer::export_foreign(&device, malloced.address() + 1024) }.unwrap();
            let ShareHandle::CudaIpc { token, offset } = malloced_handle else {
                panic!("not a CUDA IPC handle")
            };
            assert_eq!(offset % 4096, 1024);
            let EventHandle::CudaIpc(event_token) = event.export().unwrap() else {
                panic!("not a CUDA IPC handle")
            };
            let fd = memory.export(HandleKind::Fd, Rights::ReadWrite).unwrap().into_fd().unwrap();
            let mut message = token.to_vec();
            message.extend_from_slice(&event_token);
            message.extend_from_slice(&(offset as u64).to_le_bytes());
            rank.send(1, &message, &[fd.as_fd()]);
            assert_eq!(rank.recv(1).0, b"seen");
            assert_eq!(kernels.checksum(&stream, &map.all()).unwrap(), pattern::expected(13, 2 * step));
        } else {
            let (message, mut fds) = rank.recv(0);
            let token = message[..64].try_into().unwrap();
            let event = EventHandle::CudaIpc(message[64..128].try_into().unwrap());
            let offset = usize::try_from(u64::from_le_bytes(message[128..136].try_into().unwrap())).unwrap();
            let event = Event::import(&device, event).unwrap();
            let memory = Allocation::import(&device, ShareHandle::from(fds.remove(0)), 2 * step).unwrap();
            let map = memory.map(Rights::ReadWrite).unwrap();
            let handle = ShareHandle::CudaIpc { token, offset };
            let malloced = CudaMallocBuffer::import(&device, &handle, 1024).unwrap();
            stream.await_event(&event).unwrap();
            assert_eq!(kernels.checksum(&stream, &map.all()).unwrap(), pattern::expected(11, 2 * step));
            let mut word = [0; 8];
            stream.read(&malloced.all().part(0, 8).unwrap(), &mut word).unwrap();
            assert_eq!(u64::from_ne_bytes(word), pattern::word(12, 1024 / 8));
            kernels.fill(&stream, &map.all(), 13).unwrap();
            stream.synchronize(Deadline::NEVER).unwrap();
            drop(malloced);
            rank.send(0, b"seen", &[]);
        }
    });
}

#[test]
fn a_process_without_cuda_keeps_gpu_memory_of_a_killed_process_alive() {
    if gpu().is_none() && !Ranks::is_rank() {
        return;
    }
    Ranks::of(3).killed(0).run(test_name!(), |rank| match rank.id() {
        0 => {
            let device = gpu().unwrap();
            let memory = device.allocate(16 * granule(&device)).unwrap();
            let map = memory.map(Rights::ReadWrite).unwrap();
            let (stream, kernels) = (device.stream().unwrap(), Pattern::load(&device).unwrap());
            kernels.fill(&stream, &map.all(), 21).unwrap();
            stream.synchronize(Deadline::NEVER).unwrap();
            let fd = memory.export(HandleKind::Fd, Rights::ReadWrite).unwrap().into_fd().unwrap();
            rank.send(1, b"memory", &[fd.as_fd()]);
            rank.wait_to_be_killed();
        }
        1 => {
            // This rank never opens CUDA, and only passes the descriptor on.
            let (_, fds) = rank.recv(0);
            rank.kill(0);
            rank.send(2, b"memory", &[fds[0].as_fd()]);
            drop(fds);
        }
        _ => {
            let (_, mut fds) = rank.recv(1);
            let device = gpu().unwrap();
            let len = 16 * granule(&device);
            let map =
                Allocation::import(&device, fds.remove(0).into(), len).unwrap().map(Rights::Read).unwrap();
            let (stream, kernels) = (device.stream().unwrap(), Pattern::load(&device).unwrap());
            assert_eq!(kernels.checksum(&stream, &map.all()).unwrap(), pattern::expected(21, len));
        }
    });
}

#[test]
fn ten_thousand_cycles_leak_no_gpu_memory_descriptors_or_maps() {
    if gpu().is_none() && !Ranks::is_rank() {
        return;
    }
    Ranks::of(1).run(test_name!(), |_| {
        let device = gpu().unwrap();
        let step = granule(&device);
        let stream = device.stream().unwrap();
        let cycle = || {
            let created = device.allocate(step).unwrap();
            let here = created.map(Rights::ReadWrite).unwrap();
            let handle = created.export(HandleKind::Fd, Rights::ReadWrite).unwrap();
            let there = Allocation::import(&device, handle, step).unwrap().map(Rights::ReadWrite).unwrap();
            stream.copy(&there.span(0, 64).unwrap(), &here.span(64, 64).unwrap()).unwrap();
            stream.synchronize(Deadline::NEVER).unwrap();
        };
        (0..100).for_each(|_| cycle());
        let (available, before) = (device.available().unwrap(), Census::take());
        (0..10_000).for_each(|_| cycle());
        assert_eq!(device.available().unwrap(), available);
        let after = Census::take();
        assert_eq!(after.fds.len(), before.fds.len(), "{:?}", after.fds);
        assert_eq!(after.maps.values().sum::<usize>(), before.maps.values().sum::<usize>());
    });
}

#[test]
fn empty_kernels_are_launched_by_every_method() {
    let Some(device) = gpu() else { return };
    let launches = EmptyLaunches::load(&device).unwrap();
    assert_eq!(launches.parameter_lens().collect::<Vec<_>>(), [8, 192, 240, 248, 256, 512]);
    for kernel in 0..launches.parameter_lens().count() {
        for method in LaunchMethod::ALL {
            let took = launches.measure(kernel, method, 10).unwrap();
            assert!(!took.caller.is_zero(), "{took:?}");
        }
    }
}
