//! Tests of differences between ranks' calls that kernels do not compare, and of calls that agree although the ranks' memory
//! differs.

use super::harness::{Guarded, host, on_ranks};
use super::registered::MemoryKind;
use wholemem::{Dtype, Error, Rank, ReduceOp};
use wholemem_comm::Error as CommError;
use wholemem_os::Deadline;

#[test]
fn a_disagreement_is_reported_also_after_the_other_rank_has_left() {
    let outcomes = on_ranks(&host(), 2, None, |symmetric| {
        let group = symmetric.group();
        let stream = group.device().stream().unwrap();
        let span = Guarded::buffer(symmetric, 64);
        let op = if group.rank().0 == 0 { ReduceOp::Sum } else { ReduceOp::Prod };
        let first = symmetric.all_reduce(&stream, &span, &span, Dtype::U32, op);
        if group.rank().0 == 0 {
            group.bootstrap().leave();
            return (first.clone(), first);
        }
        while group.bootstrap().check().is_ok() {
            std::thread::yield_now();
        }
        (first, symmetric.check())
    });
    for (first, second) in outcomes {
        assert!(matches!(first, Err(Error::Comm(CommError::RanksDisagree { .. }))), "{first:?}");
        assert!(matches!(second, Err(Error::Comm(CommError::RanksDisagree { .. }))), "{second:?}");
    }
}

#[test]
fn different_window_calls_are_an_error_on_every_rank() {
    let outcomes = on_ranks(&host(), 2, None, |symmetric| {
        let group = symmetric.group();
        drop(symmetric.mem_alloc(100).unwrap());
        let block = MemoryKind::Mapped.create(symmetric, 1 << 20);
        if group.rank().0 == 0 {
            symmetric.mem_alloc(1000).map(|w| (w.len(), w.len_of(Rank(1))))
        } else {
            symmetric.window_register_span(&block).map(|w| (w.len(), w.len_of(Rank(0))))
        }
    });
    for outcome in outcomes {
        assert_eq!(outcome, Err(Error::RanksDisagree { rank: Rank(1) }));
    }
}

#[test]
fn memory_of_a_registration_that_failed_is_not_used_later() {
    on_ranks(&host(), 2, None, |symmetric| {
        let group = symmetric.group();
        drop(symmetric.mem_alloc(100).unwrap());
        let stream = group.device().stream().unwrap();
        let [old, new] = [1_u8, 2].map(|value| {
            let block = MemoryKind::Mapped.create(symmetric, 1 << 20);
            stream.fill(&block, 10 * value + group.rank().0 as u8).unwrap();
            block
        });
        let failed = if group.rank().0 == 0 {
            symmetric.window_register_span(&old)
        } else {
            symmetric.mem_alloc(1000)
        };
        assert_eq!(failed.map(|_| ()), Err(Error::RanksDisagree { rank: Rank(1) }));
        group.bootstrap().barrier().unwrap();
        let window = symmetric.window_register_span(&new).unwrap();
        group.bootstrap().barrier().unwrap();
        for rank in 0..2 {
            let mut seen = [0];
            stream.read(&window.part_of(Rank(rank), 0, 1).unwrap(), &mut seen).unwrap();
            assert_eq!(seen, [20 + rank as u8], "rank {} reads the part of rank {rank}", group.rank());
        }
        group.bootstrap().barrier().unwrap();
    });
}

#[test]
fn slices_of_different_types_are_an_error_on_every_rank() {
    for broadcasts in [true, false] {
        let outcomes = on_ranks(&host(), 2, None, |symmetric| {
            let group = symmetric.group();
            let outcome = match (broadcasts, group.rank().0) {
                (true, 0) => symmetric.broadcast_slice(Rank(0), &mut [1.0_f32; 4]),
                (true, _) => symmetric.broadcast_slice(Rank(0), &mut [1_i32; 4]),
                (false, 0) => symmetric.all_gather_slice(&[1.0_f32; 4]).map(drop),
                (false, _) => symmetric.all_gather_slice(&[1_i32; 4]).map(drop),
            };
            group.bootstrap().barrier().unwrap();
            outcome
        });
        for outcome in outcomes {
            let Err(Error::Comm(CommError::RanksDisagree { here, there, .. })) = outcome else {
                panic!("{outcome:?}")
            };
            assert_ne!(here, there);
        }
    }
}

/// On rank 1, the output's span is longer than the call needs and exceeds the window; on rank 0, it has the length of the call.
/// Nevertheless the call is staged on neither rank.
#[test]
fn outputs_may_be_longer_than_the_call_by_another_length_on_each_rank() {
    on_ranks(&host(), 2, None, |symmetric| {
        let group = symmetric.group();
        let stream = group.device().stream().unwrap();
        let block = MemoryKind::Mapped.create(symmetric, 8192);
        let window = symmetric.window_register_span(&block.part(0, 4096).unwrap()).unwrap();
        let input = block.part(0, 64).unwrap();
        let output = block.part(2048, if group.rank().0 == 0 { 64 } else { 4096 }).unwrap();
        symmetric.all_reduce(&stream, &input, &output, Dtype::U8, ReduceOp::Sum).unwrap();
        assert_eq!(symmetric.staged_calls(), 0);
        drop(window);
        group.bootstrap().barrier().unwrap();
        let recording = symmetric.record_captures().unwrap();
        let graph = stream
            .capture(|stream| {
                symmetric.all_reduce(stream, &input, &output, Dtype::U8, ReduceOp::Sum).unwrap();
                Ok(())
            })
            .unwrap();
        assert_eq!(recording.finish().unwrap().len(), 2);
        graph.launch(&stream).unwrap();
        stream.synchronize(Deadline::NEVER).unwrap();
        symmetric.check().unwrap();
        group.bootstrap().barrier().unwrap();
    });
}

#[test]
fn a_graph_of_many_calls_is_not_staged() {
    on_ranks(&host(), 2, None, |symmetric| {
        let group = symmetric.group();
        let stream = group.device().stream().unwrap();
        let block = MemoryKind::Mapped.create(symmetric, 8192).part(0, 64).unwrap();
        let recording = symmetric.record_captures().unwrap();
        let graph = stream
            .capture(|stream| {
                for _ in 0..5000 {
                    symmetric.all_reduce(stream, &block, &block, Dtype::U8, ReduceOp::Sum).unwrap();
                }
                Ok(())
            })
            .unwrap();
        assert_eq!(recording.finish().unwrap().len(), 5000);
        assert_eq!(symmetric.staged_calls(), 0);
        graph.launch(&stream).unwrap();
        stream.synchronize(Deadline::NEVER).unwrap();
        symmetric.check().unwrap();
        group.bootstrap().barrier().unwrap();
    });
}

#[test]
fn recordings_of_ranks_with_other_tables_agree() {
    on_ranks(&host(), 2, None, |symmetric| {
        let group = symmetric.group();
        let stream = group.device().stream().unwrap();
        let block = MemoryKind::Mapped.create(symmetric, 8192).part(0, 64).unwrap();
        // Each recording on rank 1 finds windows of rank 1 that are kept from the first recording.
        let mut kept = Vec::new();
        for calls in [100_usize, 1000] {
            let recording = symmetric.record_captures().unwrap();
            let graph = stream
                .capture(|stream| {
                    for _ in 0..calls {
                        symmetric.all_reduce(stream, &block, &block, Dtype::U8, ReduceOp::Sum).unwrap();
                    }
                    Ok(())
                })
                .unwrap();
            let windows = recording.finish().unwrap();
            if group.rank().0 == 1 {
                kept.push((graph, windows));
            }
            group.bootstrap().barrier().unwrap();
        }
    });
}
