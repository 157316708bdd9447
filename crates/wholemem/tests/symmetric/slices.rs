//! Tests that compare collective calls on slices with naive sums and copies.

use wholemem::{Communicator, Dtype, Error, Rank, ReduceOp, SymmetricMemory};
use wholemem_hal::Backend;
use wholemem_testkit::cuda;

use super::harness::{host, on_ranks};

/// The tested numbers of elements: zero, three, and enough for several pieces of a staging buffer.
const COUNTS: [usize; 3] = [0, 3, 5000];

/// A number of elements that exceeds the buffer in which slices are staged for a GPU.
const LONG: usize = (1 << 20) + 7;

fn value(rank: u32, at: usize) -> i32 {
    (rank as i32 + 1) * 1000 + at as i32 % 997
}

fn check_slices(backend: &Backend, counts: &[usize]) {
    const RANKS: u32 = 3;
    on_ranks(backend, RANKS, None, |symmetric| {
        let own = symmetric.group().rank().0;
        for &count in counts {
            let mine = || (0..count).map(|at| value(own, at)).collect::<Vec<_>>();
            let expected = |of: &dyn Fn(usize) -> i32| (0..count).map(of).collect::<Vec<_>>();
            let mut sums = mine();
            symmetric.all_reduce_slice(&mut sums, ReduceOp::Sum).unwrap();
            let sum = |at| (0..RANKS).map(|rank| value(rank, at)).sum();
            assert!(sums == expected(&sum), "the sum of {count}");
            let mut largest = mine();
            symmetric.all_reduce_slice(&mut largest, ReduceOp::Max).unwrap();
            assert!(largest == expected(&|at| value(RANKS - 1, at)), "the largest of {count}");
            let mut roots = mine();
            symmetric.broadcast_slice(Rank(1), &mut roots).unwrap();
            assert!(roots == expected(&|at| value(1, at)), "{count} of the root");
            let all = symmetric.all_gather_slice(&mine()).unwrap();
            let concatenated: Vec<_> = (0..RANKS).flat_map(|rank| expected(&|at| value(rank, at))).collect();
            assert!(all == concatenated, "{count} of each");
        }
    });
}

#[test]
fn collective_calls_on_slices_match_a_naive_loop() {
    check_slices(&host(), &COUNTS);
}

#[test]
fn gpu_collective_calls_on_slices_match_a_naive_loop() {
    let Some(backend) = cuda::backend() else { return };
    check_slices(&backend, &[&COUNTS[..], &[LONG]].concat());
}

#[test]
fn invalid_arguments_are_rejected_before_ranks_wait() {
    on_ranks(&host(), 2, None, |symmetric: &SymmetricMemory| {
        let refused = Error::OpNotForType { op: ReduceOp::Sum, dtype: Dtype::Complex64 };
        assert_eq!(symmetric.all_reduce_slice(&mut [[1.0_f32; 2]; 3], ReduceOp::Sum), Err(refused));
        let no_rank = wholemem_comm::Error::NoSuchRank { rank: Rank(2), size: 2 };
        assert_eq!(symmetric.broadcast_slice(Rank(2), &mut [1_u8]), Err(Error::Comm(no_rank)));
        let mut values = [1_u8];
        symmetric.all_reduce_slice(&mut values, ReduceOp::Sum).unwrap();
        assert_eq!(values, [2], "the lane remains usable");
    });
}

/// Tests that the error of a waiting call names the rank that left the group.
#[test]
fn a_rank_that_leaves_fails_the_calls_of_the_other_ranks() {
    let device = host().device(0).unwrap();
    let mut comms = Communicator::local(&[device.clone(), device]).unwrap();
    let mut all =
        Communicator::on_each(&comms, |comm| SymmetricMemory::create(comm, &Default::default())).unwrap();
    drop((comms.pop(), all.pop()));
    let error = all[0].all_reduce_slice(&mut [1_f32; 100], ReduceOp::Sum).unwrap_err();
    assert_eq!(error, Error::Comm(wholemem_comm::Error::PeerLeft { rank: Rank(1) }));
}
