//! Streams, groups and orders of calls: what can be ordered is, and what cannot ends with an error in time.

use std::time::Duration;

use wholemem::{Communicator, Dtype, Error, ReduceOp, SymmetricMemory, SymmetricSpec};
use wholemem_comm::Error as CommError;
use wholemem_hal::{Span, Stream};
use wholemem_os::Deadline;
use wholemem_testkit::{Ranks, cuda, test_name};

use super::deaths::join;
use super::world::{Guarded, spec};

const COUNT: usize = 1000;

/// Processes on one GPU, each with so many groups that all are in.
fn with_groups(ranks: usize, groups: usize, test: &str, work: impl Fn(&[Communicator])) {
    if !Ranks::is_rank() && cuda::backend().is_none() {
        return;
    }
    Ranks::of(ranks).run(test, |rank| {
        let backend = cuda::backend().unwrap();
        let members: Vec<_> = (0..rank.count()).collect();
        let groups: Vec<_> = (0..groups).map(|_| join(rank, &members, &backend)).collect();
        work(&groups);
        groups.iter().for_each(|group| group.bootstrap().barrier().unwrap());
    });
}

fn patient(group: &Communicator, timeout: Duration) -> SymmetricSpec {
    SymmetricSpec { timeout, ..spec(group.device().backend(), group.size(), None) }
}

fn buffer(symmetric: &SymmetricMemory, value: u32) -> Span {
    let buffer = Guarded::buffer(symmetric, COUNT * 4);
    symmetric.group().device().stream().unwrap().write(&buffer, &value.to_ne_bytes().repeat(COUNT)).unwrap();
    buffer
}

fn enqueue(symmetric: &SymmetricMemory, stream: &Stream, buffer: &Span) -> Result<(), Error> {
    symmetric.all_reduce(stream, buffer, buffer, Dtype::U32, ReduceOp::Sum)
}

/// What is in a buffer when all is over, if nothing has failed.
fn outcome(symmetric: &SymmetricMemory, stream: &Stream, buffer: &Span) -> Result<u32, Error> {
    stream.synchronize(Deadline::NEVER)?;
    symmetric.check()?;
    let mut seen = vec![0; COUNT * 4];
    stream.read(buffer, &mut seen)?;
    let first = [seen[0], seen[1], seen[2], seen[3]];
    assert_eq!(seen, first.repeat(COUNT));
    Ok(u32::from_ne_bytes(first))
}

/// Whether the environment lets streams wait for each other that have nothing to do with each other.
fn streams_are_bound() -> bool {
    let is_one = |name| std::env::var(name).is_ok_and(|value| value == "1");
    is_one("CUDA_DEVICE_MAX_CONNECTIONS") || is_one("CUDA_LAUNCH_BLOCKING")
}

/// Calls of one group on whichever stream come one after the other.
#[test]
fn gpu_calls_of_processes_on_two_streams_are_in_order() {
    with_groups(2, 1, test_name!(), |groups| {
        let symmetric =
            SymmetricMemory::create(&groups[0], &patient(&groups[0], Duration::from_secs(20))).unwrap();
        let streams = [(); 2].map(|()| groups[0].device().stream().unwrap());
        let buffers: Vec<_> = (0..200).map(|call| buffer(&symmetric, call + groups[0].rank().0)).collect();
        for (call, buffer) in buffers.iter().enumerate() {
            // Now and then the same stream twice.
            enqueue(&symmetric, &streams[call % 3 % 2], buffer).unwrap();
        }
        for (call, buffer) in buffers.iter().enumerate() {
            assert_eq!(
                outcome(&symmetric, &streams[call % 3 % 2], buffer),
                Ok(2 * call as u32 + 1),
                "{call}"
            );
        }
    });
}

/// Two groups whose ranks call in opposite orders, on a stream for each group: they do not wait for each other. Where the
/// environment makes streams wait for one another, they may, and then all ranks are told.
#[test]
fn gpu_groups_of_processes_in_opposite_orders_pass_each_other_on_two_streams() {
    with_groups(2, 2, test_name!(), |groups| {
        let timeout = Duration::from_secs(3);
        let both = [&groups[0], &groups[1]]
            .map(|group| SymmetricMemory::create(group, &patient(group, timeout)).unwrap());
        let own = groups[0].rank().0 as usize;
        let streams = [(); 2].map(|()| groups[0].device().stream().unwrap());
        let buffers = [0, 1].map(|group| buffer(&both[group], 5));
        let enqueued =
            [own, 1 - own].map(|group| (group, enqueue(&both[group], &streams[group], &buffers[group])));
        for (group, enqueued) in enqueued {
            match enqueued.and_then(|()| outcome(&both[group], &streams[group], &buffers[group])) {
                Ok(sum) => assert_eq!(sum, 10),
                Err(error) => assert!(streams_are_bound() && is_late(&error), "{error}"),
            }
        }
    });
}

/// The same on one stream, where every rank waits for a call that the other has behind its own.
#[test]
fn gpu_groups_of_processes_in_opposite_orders_on_one_stream_end_in_time() {
    with_groups(2, 2, test_name!(), |groups| {
        let timeout = Duration::from_millis(500);
        let both = [&groups[0], &groups[1]]
            .map(|group| SymmetricMemory::create(group, &patient(group, timeout)).unwrap());
        let own = groups[0].rank().0 as usize;
        let stream = groups[0].device().stream().unwrap();
        let buffers = [0, 1].map(|group| buffer(&both[group], 5));
        let first = enqueue(&both[own], &stream, &buffers[own]);
        let second = enqueue(&both[1 - own], &stream, &buffers[1 - own]);
        let first = first.and_then(|()| outcome(&both[own], &stream, &buffers[own]));
        let second = second.and_then(|()| outcome(&both[1 - own], &stream, &buffers[1 - own]));
        // Who is the first to give up may come to the other's call while that still waits.
        for outcome in [&first, &second] {
            assert!(outcome.as_ref().map_or_else(is_late, |sum| *sum == 10), "{outcome:?}");
        }
        let gave_up = groups[0].bootstrap().all_gather(&[u8::from(first.is_err())]).unwrap();
        assert!(gave_up.iter().any(|told| told[..] == [1]), "somebody has to");
        // The device works, and so does a new sequence of calls.
        groups.iter().for_each(|group| group.bootstrap().barrier().unwrap());
        let again =
            SymmetricMemory::create(&groups[0], &patient(&groups[0], Duration::from_secs(20))).unwrap();
        let buffer = buffer(&again, 5);
        enqueue(&again, &stream, &buffer).unwrap();
        assert_eq!(outcome(&again, &stream, &buffer), Ok(10));
    });
}

fn is_late(error: &Error) -> bool {
    matches!(error, Error::Comm(CommError::Timeout { joining: false, .. }))
}

/// Long and short calls in turn, more than the device has room for at once: those that are set up early leave room for what
/// they wait for.
#[test]
fn gpu_calls_of_processes_that_fill_the_device_leave_each_other_room() {
    const LONGEST: usize = 4 << 20;
    with_groups(4, 1, test_name!(), |groups| {
        let group = &groups[0];
        let spec = SymmetricSpec { timeout: Duration::from_secs(20), ..SymmetricSpec::default() };
        let symmetric = SymmetricMemory::create(group, &spec).unwrap();
        let stream = group.device().stream().unwrap();
        let memory = Guarded::buffer(&symmetric, LONGEST);
        for round in 0..50_u32 {
            stream.write(&memory, &(round + group.rank().0).to_ne_bytes().repeat(LONGEST / 4)).unwrap();
            // Each part by a call of its own, the longer ones with as many blocks as there are.
            let lengths = [1 << 10, 256 << 10, 1 << 20, 64 << 10, 1 << 20, 512, 128 << 10];
            let mut start = 0;
            for len in lengths {
                let part = memory.part(start, len).unwrap();
                symmetric.all_reduce(&stream, &part, &part, Dtype::U32, ReduceOp::Sum).unwrap();
                start += len;
            }
            let mut seen = vec![0; start];
            stream.read(&memory.part(0, start).unwrap(), &mut seen).unwrap();
            symmetric.check().unwrap();
            assert!(seen == (4 * round + 6).to_ne_bytes().repeat(start / 4), "round {round}");
        }
    });
}
