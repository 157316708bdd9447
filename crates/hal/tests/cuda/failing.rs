//! Fault sweeps of the CUDA driver: every path (sequence of calls) runs once per driver call with that call failing.
//! It returns exactly that error and leaks nothing, neither in the process nor in the driver.

use std::os::fd::AsFd;

use wholemem_hal::{
    Allocation, Attempt, Backend, BackendError, CudaMallocBuffer, DriverCode, Error, Event, EventHandle,
    EventKind, HostConfig, Mapping, Registration, Reservation, Result, Rights, ShareHandle,
};
use wholemem_os::Deadline;
use wholemem_testkit::conformance::paths;
use wholemem_testkit::{FakeCuda, FakeDriver, Rank, Ranks, cuda, sweep, test_name};

/// Runs `body` in `count` rank processes on the fake CUDA driver.
fn on_fake_driver(count: usize, test: &str, body: impl FnOnce(&Rank)) {
    if Ranks::is_rank() {
        return Ranks::of(count).run(test, body);
    }
    let Some(fake) = FakeCuda::install() else { return };
    fake.ranks(count).run(test, body);
}

/// Runs a path (a sequence of calls) in a separate process, once per driver call with that call failing.
fn sweep_path(test: &str, at_least: u64, path: impl Fn(&Backend) -> Result<()>) {
    on_fake_driver(1, test, |_| {
        let backend = cuda::backend().unwrap();
        let calls = sweep::driver_calls(&backend, &FakeDriver::of_process(), path);
        assert!(calls >= at_least, "the path makes {calls} calls");
    });
}

#[test]
fn memory_calls_fail_cleanly() {
    sweep_path(test_name!(), 20, paths::memory);
}

#[test]
fn sharing_calls_fail_cleanly() {
    sweep_path(test_name!(), 20, paths::sharing);
}

#[test]
fn stream_calls_fail_cleanly() {
    sweep_path(test_name!(), 100, paths::work);
}

#[test]
fn cuda_malloc_calls_fail_cleanly() {
    sweep_path(test_name!(), 10, |backend| {
        let buffer = CudaMallocBuffer::create(&backend.device(0)?, 4096)?;
        buffer.export()?;
        let stream = backend.device(0)?.stream()?;
        stream.fill(&buffer.all(), 1)?;
        stream.synchronize(Deadline::NEVER)
    });
}

#[test]
fn registration_calls_fail_cleanly() {
    let host = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
    let map = host.allocate(1 << 20).unwrap().map(Rights::ReadWrite).unwrap();
    sweep_path(test_name!(), 5, |backend| {
        let registered = Registration::create(&backend.device(0)?, &map)?;
        let stream = backend.device(0)?.stream()?;
        stream.fill(&registered.all(), 1)?;
        stream.synchronize(Deadline::NEVER)
    });
}

#[test]
fn adoption_calls_fail_cleanly() {
    sweep_path(test_name!(), 20, |backend| {
        let device = backend.device(0)?;
        let step = device.granularity()?.minimum.len();
        let whole = Reservation::create(backend, 2 * step)?;
        let [left, right] = [device.allocate(step)?, device.allocate(step)?];
        let _maps = [Mapping::create(&whole, 0, &left, &[])?, Mapping::create(&whole, step, &right, &[])?];
        Allocation::adopt(&device, whole.address(), 2 * step).map(drop)
    });
}

#[test]
fn dma_buf_calls_fail_cleanly() {
    sweep_path(test_name!(), 10, |backend| {
        let device = backend.device(0)?;
        let step = device.granularity()?.minimum.len();
        device.available()?;
        device.allocate(step)?.map(Rights::ReadWrite)?.dma_buf().map(drop)
    });
}

#[test]
fn reserving_occupied_addresses_fails_cleanly() {
    sweep_path(test_name!(), 5, |backend| {
        let step = backend.device(0)?.granularity()?.minimum.len();
        let occupied = Reservation::create(backend, step)?;
        let cause = BackendError::Driver { call: "cuMemAddressReserve", code: DriverCode(1) };
        let refused = Error::Failed { attempt: Attempt::Reserve { len: step }, cause };
        match Reservation::create_at(backend, step, occupied.address()) {
            Err(error) if error == refused => Ok(()),
            other => other.map(drop),
        }
    });
}

#[test]
fn importing_from_another_process_fails_cleanly() {
    on_fake_driver(2, test_name!(), |rank| {
        let backend = cuda::backend().unwrap();
        let device = backend.device(0).unwrap();
        let step = device.granularity().unwrap().minimum.len();
        if rank.id() == 0 {
            let (buffer, memory) =
                (CudaMallocBuffer::create(&device, 4096).unwrap(), device.allocate(step).unwrap());
            let event = Event::create(&device, EventKind::Shared).unwrap();
            let ShareHandle::CudaIpc { token, .. } = buffer.export().unwrap() else {
                panic!("not a CUDA IPC handle")
            };
            let EventHandle::CudaIpc(event_token) = event.export().unwrap() else {
                panic!("not a CUDA IPC handle")
            };
            let handle = memory.export(wholemem_hal::HandleKind::Fd, Rights::ReadWrite).unwrap();
            let fd = handle.into_fd().unwrap();
            rank.send(1, &[token, event_token].concat(), &[fd.as_fd()]);
            assert_eq!(rank.recv(1).0, b"swept");
        } else {
            let (message, fds) = rank.recv(0);
            let token: [u8; 64] = message[..64].try_into().unwrap();
            let event_token: [u8; 64] = message[64..].try_into().unwrap();
            let calls = sweep::driver_calls(&backend, &FakeDriver::of_process(), |_| {
                let malloced =
                    CudaMallocBuffer::import(&device, &ShareHandle::CudaIpc { token, offset: 0 }, 4096)?;
                let event = Event::import(&device, EventHandle::CudaIpc(event_token))?;
                let fd = ShareHandle::from(fds[0].try_clone().unwrap());
                let map = Allocation::import(&device, fd, step)?.map(Rights::ReadWrite)?;
                let stream = device.stream()?;
                stream.await_event(&event)?;
                stream.copy(&map.span(0, 4096)?, &malloced.all())?;
                stream.synchronize(Deadline::NEVER)
            });
            assert!(calls > 30, "the path makes {calls} calls");
            rank.send(0, b"swept", &[]);
        }
    });
}
