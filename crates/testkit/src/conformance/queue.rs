//! Test cases for streams, events, graphs and kernels, which every backend must pass.

#![allow(unsafe_code, reason = "a kernel launch is unsafe")]

use std::time::Instant;

use wholemem_hal::{
    Args, Attempt, Backend, Error, Event, EventHandle, EventKind, KernelImage, LaunchShape, Mapping, Module,
    PinnedBuffer, Rights,
};
use wholemem_os::Deadline;

use super::{first, granule, mapped, pattern, seen, stream};

pub fn work_of_one_stream_runs_in_order(backend: &Backend) {
    let device = first(backend);
    let map = mapped(&device, 1);
    let span = |offset: usize| map.span(offset, 64).unwrap();
    let stream = stream(&device);
    stream.fill(&span(0), 1).unwrap();
    stream.copy(&span(64), &span(0)).unwrap();
    stream.fill(&span(0), 2).unwrap();
    stream.copy(&span(128), &span(0)).unwrap();
    stream.fill(&span(0), 3).unwrap();
    stream.synchronize(Deadline::NEVER).unwrap();
    for (offset, value) in [(0, 3), (64, 1), (128, 2)] {
        assert_eq!(seen(&device, &span(offset)), [value; 64]);
    }
}

pub fn an_event_orders_two_streams(backend: &Backend) {
    let device = first(backend);
    let map = mapped(&device, 1);
    let span = |offset: usize| map.span(offset, 64).unwrap();
    for value in 1..40 {
        let (writer, reader) = (stream(&device), stream(&device));
        let event = Event::create(&device, EventKind::Order).unwrap();
        writer.fill(&span(0), value).unwrap();
        writer.record(&event).unwrap();
        reader.await_event(&event).unwrap();
        reader.copy(&span(64), &span(0)).unwrap();
        // A later record of the event does not prolong a wait that is already enqueued.
        writer.record(&event).unwrap();
        reader.synchronize(Deadline::NEVER).unwrap();
        assert_eq!(seen(&device, &span(64)), [value; 64]);
        event.wait(Deadline::NEVER).unwrap();
        assert_eq!(event.is_done(), Ok(true));
    }
}

pub fn a_wait_ignores_later_records(backend: &Backend) {
    let device = first(backend);
    let map = mapped(&device, 1);
    let span = |offset: usize| map.span(offset, 64).unwrap();
    for value in 1..40 {
        let [writer, reader, third] = [(); 3].map(|()| stream(&device));
        let event = Event::create(&device, EventKind::Order).unwrap();
        writer.fill(&span(0), value).unwrap();
        writer.record(&event).unwrap();
        reader.await_event(&event).unwrap();
        reader.copy(&span(64), &span(0)).unwrap();
        // A later record of the event on an idle stream does not end an enqueued wait early.
        third.record(&event).unwrap();
        reader.synchronize(Deadline::NEVER).unwrap();
        assert_eq!(seen(&device, &span(64)), [value; 64]);
    }
}

pub fn dropped_memory_stays_mapped_until_its_work_has_run(backend: &Backend) {
    let device = first(backend);
    let target = mapped(&device, 1);
    let stream = stream(&device);
    for value in 1..100 {
        let source = device.allocate(granule(&device)).unwrap().map(Rights::ReadWrite).unwrap();
        let event = Event::create(&device, EventKind::Order).unwrap();
        stream.fill(&source.all(), value).unwrap();
        stream.record(&event).unwrap();
        stream.copy(&target.all(), &source.all()).unwrap();
        drop((source, event));
    }
    stream.synchronize(Deadline::NEVER).unwrap();
    assert!(seen(&device, &target.all()).iter().all(|&byte| byte == 99));
}

pub fn a_dropped_stream_still_runs_its_work(backend: &Backend) {
    let device = first(backend);
    let target = mapped(&device, 1);
    let dropped = stream(&device);
    let source = mapped(&device, 1);
    dropped.fill(&source.all(), 9).unwrap();
    dropped.copy(&target.all(), &source.all()).unwrap();
    drop((dropped, source));
    // Each call of `collect` may run one operation and does not block. When all operations have run, the dropped stream
    // is released.
    while backend.collect() > 0 {
        std::thread::yield_now();
    }
    assert!(seen(&device, &target.all()).iter().all(|&byte| byte == 9));
}

pub fn a_graph_can_be_launched_repeatedly(backend: &Backend) {
    let device = first(backend);
    let map = mapped(&device, 1);
    let span = |offset: usize| map.span(offset, 64).unwrap();
    let stream = stream(&device);
    stream.write(&span(0), &[0; 64]).unwrap();
    let source_map = mapped(&device, 1);
    let source = source_map.span(0, 64).unwrap();
    stream.write(&source, &[5; 64]).unwrap();
    let graph = stream.capture(|stream| stream.copy(&span(0), &source)).unwrap();
    assert_eq!(seen(&device, &span(0)), [0; 64], "a capture runs no work");
    // After this drop, only the graph keeps the source of its copy alive.
    drop((source, source_map));
    for _ in 0..3 {
        stream.write(&span(0), &[0; 64]).unwrap();
        graph.launch(&stream).unwrap();
        stream.synchronize(Deadline::NEVER).unwrap();
        assert_eq!(seen(&device, &span(0)), [5; 64]);
    }
    stream.write(&span(0), &[0; 64]).unwrap();
    graph.launch(&stream).unwrap();
    drop(graph);
    stream.synchronize(Deadline::NEVER).unwrap();
    assert_eq!(seen(&device, &span(0)), [5; 64], "a launched graph is held until it has run");
}

pub fn a_failed_capture_leaves_the_stream_usable(backend: &Backend) {
    let device = first(backend);
    let map = mapped(&device, 1);
    let span = map.span(0, 8).unwrap();
    let stream = stream(&device);
    let failure = Error::OutOfRange { offset: 1, len: 2, size: 3 };
    let captured = stream.capture(|stream| {
        stream.fill(&span, 1)?;
        Err(failure.clone())
    });
    assert_eq!(captured.map(drop), Err(failure));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        stream.capture(|_| std::panic::panic_any("intended by the test")).map(drop)
    }));
    assert!(panicked.is_err());
    stream.write(&span, &[2; 8]).unwrap();
    assert_eq!(seen(&device, &span), [2; 8]);
}

pub fn long_reads_and_writes_are_complete(backend: &Backend) {
    let device = first(backend);
    // The length exceeds that of any staging buffer, and is not a multiple of a large power of two.
    let len: usize = (9 << 20) + 12_345;
    let step = granule(&device);
    let map = mapped(&device, (len + 77).div_ceil(step));
    let span = map.span(77, len).unwrap();
    let written = pattern(6, len);
    stream(&device).write(&span, &written).unwrap();
    assert!(seen(&device, &span) == written);
    assert_eq!(seen(&device, &map.span(0, 77).unwrap()), [0; 77]);
}

/// A kernel that sets each byte of a range to its index plus a number. Its arguments are an address, a length and that
/// number.
const ADD_INDEX: KernelImage =
    KernelImage { ptx: Some(crate::cuda::TESTING_PTX), host: &[("add_index", add_index)] };

unsafe fn add_index(shape: &LaunchShape, args: &Args) {
    let (Some(at), Some(len), Some(add)) = (args.read_u64(0), args.read_u32(1), args.read_u32(2)) else {
        panic!("the kernel takes an address, a length and a number: {args:?}");
    };
    assert_eq!(LaunchShape { programmatic: false, ..*shape }, LaunchShape::linear(1, 32));
    let at = wholemem_hal::raw::Address(at).to_host().expect("not null");
    // SAFETY: the test launches this kernel with the address of a mapped, writable range of `len` bytes.
    let bytes = unsafe { wholemem_os::SharedSlice::new(at, len as usize, true) };
    let values: Vec<u8> = (0..len).map(|index| (index + add).to_le_bytes()[0]).collect();
    bytes.write_at(0, &values).expect("in range");
}

pub fn a_kernel_receives_its_arguments(backend: &Backend) {
    let device = first(backend);
    // SAFETY: all launches below pass the parameters that `add_index`, the only kernel in the module, takes.
    let module = unsafe { Module::load(&device, &ADD_INDEX) }.unwrap();
    let missing = module.function("no_such_kernel").map(drop);
    let name = "no_such_kernel".to_owned();
    assert_eq!(missing, Err(Error::NoSuchFunction { name, backend: backend.kind() }));
    let function = module.function("add_index").unwrap();
    drop(module);
    assert!(function.occupancy(32, 0).unwrap() >= 1);

    let map = mapped(&device, 1);
    let span = map.span(16, 100).unwrap();
    let args = Args::new().u64(span.address()).u32(100).u32(7);
    let stream = stream(&device);
    // SAFETY: `args` has the address, length and number that `add_index` takes, and the stream holds the span until the
    // kernel has run.
    unsafe { stream.launch(&function, &LaunchShape::linear(1, 32), &args, std::slice::from_ref(&span)) }
        .unwrap();
    stream.synchronize(Deadline::NEVER).unwrap();
    assert!(seen(&device, &span).into_iter().eq(7..107));

    // A programmatic launch may start before preceding work ends. Here no preceding work is left that the kernel would
    // have to wait for.
    let args = Args::new().u64(span.address()).u32(100).u32(9);
    let shape = LaunchShape::linear(1, 32).programmatic();
    // SAFETY: `args` has the address, length and number that `add_index` takes, and the stream holds the span until the
    // kernel has run.
    unsafe { stream.launch(&function, &shape, &args, std::slice::from_ref(&span)) }.unwrap();
    drop(function);
    stream.synchronize(Deadline::NEVER).unwrap();
    assert!(seen(&device, &span).into_iter().eq(9..109));
}

pub fn timed_events_measure_elapsed_time(backend: &Backend) {
    let device = first(backend);
    let map = mapped(&device, 16);
    let [start, end] = [(); 2].map(|()| Event::create(&device, EventKind::Timed).unwrap());
    let stream = stream(&device);
    let began = Instant::now();
    stream.record(&start).unwrap();
    for value in 0..10 {
        stream.fill(&map.all(), value).unwrap();
    }
    stream.record(&end).unwrap();
    stream.synchronize(Deadline::NEVER).unwrap();
    let elapsed = start.elapsed(&end).unwrap();
    assert!(!elapsed.is_zero() && elapsed <= began.elapsed(), "{elapsed:?}");
    let never = Event::create(&device, EventKind::Timed).unwrap();
    for (start, end) in [(&start, &never), (&never, &end)] {
        assert_eq!(start.elapsed(end), Err(Error::NotReached { attempt: Attempt::Measure }));
    }
    let order = Event::create(&device, EventKind::Order).unwrap();
    stream.record(&order).unwrap();
    stream.synchronize(Deadline::NEVER).unwrap();
    let refused = start.elapsed(&order).unwrap_err();
    assert!(matches!(refused, Error::Unsupported { .. }), "{refused:?}");
}

pub fn a_shared_event_works_through_its_handle(backend: &Backend) {
    let device = first(backend);
    let map = mapped(&device, 1);
    let private = Event::create(&device, EventKind::Order).unwrap();
    let refused = private.export().unwrap_err();
    assert!(matches!(refused, Error::Unsupported { .. }), "{refused:?}");

    let event = Event::create(&device, EventKind::Shared).unwrap();
    let handle = event.export().unwrap();
    if !matches!(handle, EventHandle::Fd(_)) {
        return crate::skipped("only another process can open this backend's event handles");
    }
    let there = Event::import(&device, handle).unwrap();
    let (writer, reader) = (stream(&device), stream(&device));
    writer.fill(&map.span(0, 8).unwrap(), 4).unwrap();
    writer.record(&event).unwrap();
    reader.await_event(&there).unwrap();
    reader.copy(&map.span(8, 8).unwrap(), &map.span(0, 8).unwrap()).unwrap();
    there.wait(Deadline::NEVER).unwrap();
    reader.synchronize(Deadline::NEVER).unwrap();
    assert_eq!(seen(&device, &map.span(8, 8).unwrap()), [4; 8]);
}

pub fn pinned_memory_can_be_copied(backend: &Backend) {
    let device = first(backend);
    let map: Mapping = mapped(&device, 1);
    let [out, back] = [(); 2].map(|()| PinnedBuffer::create(&device, 1000).unwrap());
    let sent = pattern(7, 1000);
    out.bytes().unwrap().write_at(0, &sent).unwrap();
    let stream = stream(&device);
    stream.copy(&map.span(0, 1000).unwrap(), &out.all()).unwrap();
    stream.copy(&back.all(), &map.span(0, 1000).unwrap()).unwrap();
    drop(out);
    stream.synchronize(Deadline::NEVER).unwrap();
    let mut received = vec![0; 1000];
    back.bytes().unwrap().read_at(0, &mut received).unwrap();
    assert_eq!(received, sent);
    let refused = stream.synchronize(Deadline::NOW);
    assert!(
        matches!(refused, Ok(()) | Err(Error::TimedOut { attempt: Attempt::Synchronize })),
        "{refused:?}"
    );
}
