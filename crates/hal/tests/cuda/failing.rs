//! Every path, with each of its calls to the driver failing in turn: exactly that error comes out, and nothing is left
//! behind, neither in the process nor in the driver.

use std::os::fd::AsFd;

use wholemem_hal::{
    Allocation, Attempt, Backend, Cause, DriverCode, Error, Event, EventHandle, EventKind, HostConfig,
    Mapping, PlainBuffer, Registration, Reservation, Result, Rights, ShareHandle,
};
use wholemem_os::Deadline;
use wholemem_testkit::conformance::paths;
use wholemem_testkit::{FakeCuda, FakeDriver, Rank, Ranks, cuda, sweep, test_name};

/// Runs `body` in ranks over the fake driver.
fn over_fake(count: usize, test: &str, body: impl FnOnce(&Rank)) {
    if Ranks::is_rank() {
        return Ranks::of(count).run(test, body);
    }
    let Some(fake) = FakeCuda::install() else { return };
    fake.ranks(count).run(test, body);
}

/// Sweeps a path in a process of its own.
fn swept(test: &str, at_least: u64, path: impl Fn(&Backend) -> Result<()>) {
    over_fake(1, test, |_| {
        let backend = cuda::backend().unwrap();
        let calls = sweep::driver_calls(&backend, &FakeDriver::of_process(), path);
        assert!(calls >= at_least, "the path makes {calls} calls");
    });
}

#[test]
fn on_the_path_of_memory() {
    swept(test_name!(), 20, paths::memory);
}

#[test]
fn on_the_path_of_sharing() {
    swept(test_name!(), 20, paths::sharing);
}

#[test]
fn on_the_path_of_work() {
    swept(test_name!(), 100, paths::work);
}

#[test]
fn on_the_path_of_older_buffers() {
    swept(test_name!(), 10, |backend| {
        let buffer = PlainBuffer::create(&backend.device(0)?, 4096)?;
        buffer.export()?;
        let stream = backend.device(0)?.stream()?;
        stream.fill(&buffer.all(), 1)?;
        stream.synchronize(Deadline::NEVER)
    });
}

#[test]
fn on_the_path_of_registered_memory() {
    let host = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
    let map = host.allocate(1 << 20).unwrap().map(Rights::ReadWrite).unwrap();
    swept(test_name!(), 5, |backend| {
        let registered = Registration::create(&backend.device(0)?, &map)?;
        let stream = backend.device(0)?.stream()?;
        stream.fill(&registered.all(), 1)?;
        stream.synchronize(Deadline::NEVER)
    });
}

#[test]
fn on_the_path_of_adopted_memory() {
    swept(test_name!(), 20, |backend| {
        let device = backend.device(0)?;
        let step = device.granularity()?.minimum.len();
        let whole = Reservation::create(backend, 2 * step)?;
        let [left, right] = [device.allocate(step)?, device.allocate(step)?];
        let _maps = [Mapping::create(&whole, 0, &left, &[])?, Mapping::create(&whole, step, &right, &[])?];
        Allocation::adopt(&device, whole.address(), 2 * step).map(drop)
    });
}

#[test]
fn on_the_path_of_a_descriptor_for_network_cards() {
    swept(test_name!(), 10, |backend| {
        let device = backend.device(0)?;
        let step = device.granularity()?.minimum.len();
        device.available()?;
        device.allocate(step)?.map(Rights::ReadWrite)?.dma_buf().map(drop)
    });
}

#[test]
fn on_the_path_of_addresses_that_are_taken() {
    swept(test_name!(), 5, |backend| {
        let step = backend.device(0)?.granularity()?.minimum.len();
        let there = Reservation::create(backend, step)?;
        let cause = Cause::Driver { call: "cuMemAddressReserve", code: DriverCode(1) };
        let refused = Error::Failed { attempt: Attempt::Reserve { len: step }, cause };
        match Reservation::create_at(backend, step, there.address()) {
            Err(error) if error == refused => Ok(()),
            other => other.map(drop),
        }
    });
}

#[test]
fn on_the_path_of_what_another_process_shares() {
    over_fake(2, test_name!(), |rank| {
        let backend = cuda::backend().unwrap();
        let device = backend.device(0).unwrap();
        let step = device.granularity().unwrap().minimum.len();
        if rank.id() == 0 {
            let (buffer, memory) =
                (PlainBuffer::create(&device, 4096).unwrap(), device.allocate(step).unwrap());
            let event = Event::create(&device, EventKind::Shared).unwrap();
            let ShareHandle::CudaIpc { token, .. } = buffer.export().unwrap() else { panic!("a token") };
            let EventHandle::CudaIpc(event_token) = event.export().unwrap() else { panic!("a token") };
            let handle = memory.export(wholemem_hal::HandleKind::Fd, Rights::ReadWrite).unwrap();
            let fd = handle.into_fd().unwrap();
            rank.send(1, &[token, event_token].concat(), &[fd.as_fd()]);
            assert_eq!(rank.recv(1).0, b"swept");
        } else {
            let (message, fds) = rank.recv(0);
            let token: [u8; 64] = message[..64].try_into().unwrap();
            let event_token: [u8; 64] = message[64..].try_into().unwrap();
            let calls = sweep::driver_calls(&backend, &FakeDriver::of_process(), |_| {
                let older = PlainBuffer::import(&device, &ShareHandle::CudaIpc { token, offset: 0 }, 4096)?;
                let event = Event::import(&device, EventHandle::CudaIpc(event_token))?;
                let fd = ShareHandle::from(fds[0].try_clone().unwrap());
                let map = Allocation::import(&device, fd, step)?.map(Rights::ReadWrite)?;
                let stream = device.stream()?;
                stream.await_event(&event)?;
                stream.copy(&map.span(0, 4096)?, &older.all())?;
                stream.synchronize(Deadline::NEVER)
            });
            assert!(calls > 30, "the path makes {calls} calls");
            rank.send(0, b"swept", &[]);
        }
    });
}
