//! Tests of the order of collective calls on several streams and in several groups. Calls that cannot be ordered fail by
//! timeout.

use std::time::Duration;

use wholemem::{Communicator, Dtype, Error, ReduceOp, SymmetricMemory, SymmetricSpec};
use wholemem_comm::Error as CommError;
use wholemem_hal::{Span, Stream};
use wholemem_os::Deadline;
use wholemem_testkit::{Ranks, cuda, test_name};

use super::harness::{Guarded, spec};
use super::peer_failures::join;

const COUNT: usize = 1000;

/// Runs `work` in `ranks` processes on one GPU, each of which is a rank of `groups` groups.
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

fn spec_with_timeout(group: &Communicator, timeout: Duration) -> SymmetricSpec {
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

/// Waits for the collective calls on a stream, and returns the value in a buffer, or the error of a call.
fn outcome(symmetric: &SymmetricMemory, stream: &Stream, buffer: &Span) -> Result<u32, Error> {
    stream.synchronize(Deadline::NEVER)?;
    symmetric.check()?;
    let mut seen = vec![0; COUNT * 4];
    stream.read(buffer, &mut seen)?;
    let first = [seen[0], seen[1], seen[2], seen[3]];
    assert_eq!(seen, first.repeat(COUNT));
    Ok(u32::from_ne_bytes(first))
}

/// Returns true if environment variables make independent CUDA streams wait for each other.
fn streams_are_serialized() -> bool {
    let is_one = |name| std::env::var(name).is_ok_and(|value| value == "1");
    is_one("CUDA_DEVICE_MAX_CONNECTIONS") || is_one("CUDA_LAUNCH_BLOCKING")
}

/// Tests that collective calls of one group run in the order in which they are enqueued, on any stream.
#[test]
fn gpu_calls_of_processes_on_two_streams_run_in_order() {
    with_groups(2, 1, test_name!(), |groups| {
        let symmetric =
            SymmetricMemory::create(&groups[0], &spec_with_timeout(&groups[0], Duration::from_secs(20)))
                .unwrap();
        let streams = [(); 2].map(|()| groups[0].device().stream().unwrap());
        let buffers: Vec<_> = (0..200).map(|call| buffer(&symmetric, call + groups[0].rank().0)).collect();
        for (call, buffer) in buffers.iter().enumerate() {
            // Two consecutive calls are sometimes on the same stream and sometimes on different streams.
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

/// Tests two groups that ranks call in opposite orders, on a separate stream for each group: the calls do not wait for each
/// other. If environment variables serialize streams, the calls may time out on all ranks.
#[test]
fn gpu_groups_of_processes_called_in_opposite_orders_complete_on_two_streams() {
    with_groups(2, 2, test_name!(), |groups| {
        let timeout = Duration::from_secs(3);
        let both = [&groups[0], &groups[1]]
            .map(|group| SymmetricMemory::create(group, &spec_with_timeout(group, timeout)).unwrap());
        let own = groups[0].rank().0 as usize;
        let streams = [(); 2].map(|()| groups[0].device().stream().unwrap());
        let buffers = [0, 1].map(|group| buffer(&both[group], 5));
        let enqueued =
            [own, 1 - own].map(|group| (group, enqueue(&both[group], &streams[group], &buffers[group])));
        for (group, enqueued) in enqueued {
            match enqueued.and_then(|()| outcome(&both[group], &streams[group], &buffers[group])) {
                Ok(sum) => assert_eq!(sum, 10),
                Err(error) => assert!(streams_are_serialized() && is_timeout(&error), "{error}"),
            }
        }
    });
}

/// Tests two groups that ranks call in opposite orders on one stream: every rank waits for a call that the other rank has
/// enqueued second.
#[test]
fn gpu_groups_of_processes_called_in_opposite_orders_time_out_on_one_stream() {
    with_groups(2, 2, test_name!(), |groups| {
        let timeout = Duration::from_millis(500);
        let both = [&groups[0], &groups[1]]
            .map(|group| SymmetricMemory::create(group, &spec_with_timeout(group, timeout)).unwrap());
        let own = groups[0].rank().0 as usize;
        let stream = groups[0].device().stream().unwrap();
        let buffers = [0, 1].map(|group| buffer(&both[group], 5));
        let first = enqueue(&both[own], &stream, &buffers[own]);
        let second = enqueue(&both[1 - own], &stream, &buffers[1 - own]);
        let first = first.and_then(|()| outcome(&both[own], &stream, &buffers[own]));
        let second = second.and_then(|()| outcome(&both[1 - own], &stream, &buffers[1 - own]));
        // After the first timeout on one rank, its next call may run while the other rank still waits in that same call, so one
        // of the calls may succeed.
        for outcome in [&first, &second] {
            assert!(outcome.as_ref().map_or_else(is_timeout, |sum| *sum == 10), "{outcome:?}");
        }
        let timed_out = groups[0].bootstrap().all_gather(&[u8::from(first.is_err())]).unwrap();
        assert!(timed_out.iter().any(|flag| flag[..] == [1]), "at least one rank must time out");
        // After the timeouts, the device and newly created symmetric memory remain usable.
        groups.iter().for_each(|group| group.bootstrap().barrier().unwrap());
        let again =
            SymmetricMemory::create(&groups[0], &spec_with_timeout(&groups[0], Duration::from_secs(20)))
                .unwrap();
        let buffer = buffer(&again, 5);
        enqueue(&again, &stream, &buffer).unwrap();
        assert_eq!(outcome(&again, &stream, &buffer), Ok(10));
    });
}

fn is_timeout(error: &Error) -> bool {
    matches!(error, Error::Comm(CommError::Timeout { joining: false, .. }))
}

/// Tests alternating long and short calls, more than can be resident at once: kernels with programmatic launches, which may
/// start early, leave resources for the calls that they wait for.
#[test]
fn gpu_calls_of_processes_that_fill_the_device_do_not_deadlock() {
    const LONGEST: usize = 4 << 20;
    with_groups(4, 1, test_name!(), |groups| {
        let group = &groups[0];
        let spec = SymmetricSpec { timeout: Duration::from_secs(20), ..SymmetricSpec::default() };
        let symmetric = SymmetricMemory::create(group, &spec).unwrap();
        let stream = group.device().stream().unwrap();
        let memory = Guarded::buffer(&symmetric, LONGEST);
        for round in 0..50_u32 {
            stream.write(&memory, &(round + group.rank().0).to_ne_bytes().repeat(LONGEST / 4)).unwrap();
            // Each part of the memory gets a call of its own, and the longer calls use all blocks.
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
