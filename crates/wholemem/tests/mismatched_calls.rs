//! Tests of collective calls in which ranks pass different tensors or make different calls: all ranks fail before data changes.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use wholemem::files::{SaveSpec, ignore_progress};
use wholemem::{
    Communicator, Dtype, Error, Indices, Order, Rank, Result, RowBuffer, TensorSpec, WholeTensor,
};
use wholemem_hal::{Backend, HostConfig, PinnedBuffer, Stream};

/// Creates two equal tensors on each of three ranks. Each rank picks one of the two and calls `work` with it.
fn on_picked_tensors<T: Send>(
    pick: impl Fn(Rank, &[WholeTensor; 2]) -> WholeTensor + Sync,
    work: impl Fn(&WholeTensor, &Stream) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
    let groups = Communicator::local(&vec![device; 3]).unwrap();
    let outcomes = Communicator::on_each(&groups, |group| {
        let spec = TensorSpec::new(Dtype::F32, &[10, 2]);
        let both = [WholeTensor::create(group, &spec)?, WholeTensor::create(group, &spec)?];
        let stream = group.device().stream()?;
        let outcome = work(&pick(group.rank(), &both), &stream);
        group.bootstrap().barrier()?;
        for tensor in &both {
            let mut rows = [1; 80];
            tensor.memory().read(&stream, 0, &mut rows)?;
            assert!(outcome.is_ok() || rows == [0; 80], "a failed call must not change rows");
        }
        Ok(outcome)
    });
    outcomes.unwrap()
}

fn pick_same(_: Rank, both: &[WholeTensor; 2]) -> WholeTensor {
    both[1].clone()
}

fn pick_other(rank: Rank, both: &[WholeTensor; 2]) -> WholeTensor {
    both[usize::from(rank == Rank(2))].clone()
}

/// Picks a view of the same tensor on all ranks. Rank 2 picks other rows of that tensor, but equally many.
fn pick_view(rank: Rank, both: &[WholeTensor; 2]) -> WholeTensor {
    let first = u64::from(rank == Rank(2));
    both[0].rows(first..first + 9).unwrap()
}

/// Adds values to row 0 if `adds` is true, and otherwise writes row 0, both in a fixed order.
fn scatter_row(tensor: &WholeTensor, stream: &Stream, adds: bool) -> Result<()> {
    let device = tensor.group().device();
    let (index, row) = (PinnedBuffer::create(device, 8)?, PinnedBuffer::create(device, 8)?);
    stream.write(&row.all(), &[1_f32; 2].map(f32::to_ne_bytes).concat())?;
    let (indices, row) = (Indices::i64(index.all()), RowBuffer::new(row.all(), Dtype::F32));
    if adds {
        tensor.scatter_add_on_sync(stream, &indices, &row, Order::Fixed)
    } else {
        tensor.scatter_on_sync(stream, &indices, &row, Order::Fixed)
    }
}

#[test]
fn scatters_into_different_tensors_fail_on_all_ranks() {
    for adds in [false, true] {
        let scatter_row = |tensor: &WholeTensor, stream: &Stream| scatter_row(tensor, stream, adds);
        assert_eq!(on_picked_tensors(pick_same, scatter_row), [Ok(()), Ok(()), Ok(())]);
        let differs = || Err(Error::RanksDisagree { rank: Rank(2) });
        assert_eq!(on_picked_tensors(pick_other, scatter_row), [differs(), differs(), differs()]);
        assert_eq!(on_picked_tensors(pick_view, scatter_row), [differs(), differs(), differs()]);
    }
    let one_adds =
        |tensor: &WholeTensor, stream: &Stream| scatter_row(tensor, stream, tensor.group().rank() == Rank(1));
    let differs = || Err(Error::RanksDisagree { rank: Rank(1) });
    assert_eq!(on_picked_tensors(pick_same, one_adds), [differs(), differs(), differs()]);
}

#[test]
fn like_of_different_tensors_fails_on_all_ranks() {
    let like = |tensor: &WholeTensor, _: &Stream| Ok(tensor.like()?.shape().to_vec());
    assert_eq!(on_picked_tensors(pick_same, like), [Ok(vec![10, 2]), Ok(vec![10, 2]), Ok(vec![10, 2])]);
    let differs = || Err(Error::RanksDisagree { rank: Rank(2) });
    assert_eq!(on_picked_tensors(pick_other, like), [differs(), differs(), differs()]);
    assert_eq!(on_picked_tensors(pick_view, like), [differs(), differs(), differs()]);
}

#[test]
fn saves_of_different_tensors_fail_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("saved");
    let save = |tensor: &WholeTensor, _: &Stream| tensor.save(&path, SaveSpec::default(), &ignore_progress);
    let differs = || Err(Error::RanksDisagree { rank: Rank(2) });
    assert_eq!(on_picked_tensors(pick_other, save), [differs(), differs(), differs()]);
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "a failed save must not leave files");
    assert_eq!(on_picked_tensors(pick_same, save), [Ok(()), Ok(()), Ok(())]);
}
