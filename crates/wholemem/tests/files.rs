//! Tests of saving and loading tensors, of other file formats, and of invalid, corrupt and missing files.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::fs;
use std::ops::ControlFlow;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use proptest::prelude::*;
use rustix::fs::{CWD, FileType, MemfdFlags, Mode};
use wholemem::files::{
    CopyProgress, FileError, FileProblem, FileSource, LoadSpec, SaveSpec, StoredTensor, ignore_progress,
};
use wholemem::{
    Bootstrap, Communicator, Dtype, Error, Kind, Location, Rank, Result, TensorSpec, WholeTensor,
};
use wholemem_comm::UniqueId;
use wholemem_hal::{Backend, HostConfig};
use wholemem_os::Deadline;
use wholemem_testkit::{Ranks, test_name};

fn groups(count: u32) -> Vec<Communicator> {
    let backend = Backend::host(HostConfig::virtual_devices(count as usize)).unwrap();
    let devices: Vec<_> = (0..count).map(|id| backend.device(id).unwrap()).collect();
    Communicator::local(&devices).unwrap()
}

/// Returns the bytes of a test row, which differ for every row.
fn row_bytes(row: u64, len: usize) -> Vec<u8> {
    let byte =
        |n: usize| (row.wrapping_mul(0x9e37_79b9) >> (n % 4 * 8)).to_le_bytes()[0] ^ n.to_le_bytes()[0];
    (0..len).map(byte).collect()
}

/// Creates a tensor on all ranks, and fills every row with the bytes from [`row_bytes`].
fn filled(groups: &[Communicator], spec: &TensorSpec) -> Vec<WholeTensor> {
    let fill = |group: &Communicator| {
        let tensor = WholeTensor::create(group, spec)?;
        let stream = group.device().stream()?;
        if let Some(own) = tensor.local() {
            let bytes: Vec<_> = own.rows.clone().flat_map(|row| row_bytes(row, tensor.row_len())).collect();
            tensor.write_rows_on(&stream, own.rows.start, &bytes)?;
        }
        group.barrier_on(&stream)?;
        Ok(tensor)
    };
    Communicator::on_each(groups, fill).unwrap()
}

/// Returns all rows of a tensor, as one rank reads them.
fn all_rows(tensor: &WholeTensor) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(tensor.row_count()).unwrap() * tensor.row_len()];
    tensor.read_rows_on(&tensor.group().device().stream().unwrap(), 0, &mut bytes).unwrap();
    bytes
}

fn save(tensors: &[WholeTensor], path: &Path, spec: SaveSpec) -> Result<()> {
    let groups: Vec<_> = tensors.iter().map(|tensor| tensor.group().clone()).collect();
    let save = |group: &Communicator| tensors[group.rank().index()].save(path, spec, &ignore_progress);
    Communicator::on_each(&groups, save).map(drop)
}

fn load(count: u32, source: &FileSource, spec: &LoadSpec) -> Result<Vec<WholeTensor>> {
    Communicator::on_each(&groups(count), |group| WholeTensor::load(group, source, spec, &ignore_progress))
}

/// Returns the sorted paths of the entries of a folder.
fn listed(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

/// Returns the message of a file error that one rank caused and all ranks returned.
fn file_error(outcome: Result<Vec<WholeTensor>>) -> String {
    match outcome {
        Err(Error::OnRank { code: 1017, reason, .. }) => reason,
        other => panic!("{other:?}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn tensors_are_loaded_by_another_number_of_ranks_than_saved_them(
        writers in prop::collection::vec(0u64..40, 1..6),
        readers in prop::collection::vec(1u64..10, 1..6),
        columns in 1u64..9,
        dtype in prop::sample::select(&Dtype::ALL[..]),
        chunked: bool,
        host: bool,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table");
        let rows: u64 = writers.iter().sum();
        let kind = if chunked { Kind::Chunked } else { Kind::Continuous };
        let spec = TensorSpec::new(dtype, &[rows, columns]);
        let spec = TensorSpec { kind, rows_of_each: Some(writers.clone()), ..spec };
        let saved = filled(&groups(u32::try_from(writers.len()).unwrap()), &spec);
        save(&saved, &path, SaveSpec::default()).unwrap();

        let location = if host { Location::Host } else { Location::Device };
        // The saved rows are loaded with another partition among the ranks.
        let total: u64 = readers.iter().sum();
        let mut rows_of_readers: Vec<u64> = readers.iter().map(|share| rows * share / total).collect();
        *rows_of_readers.last_mut().unwrap() += rows - rows_of_readers.iter().sum::<u64>();
        let spec = LoadSpec { kind, location, rows_of_each: Some(rows_of_readers) };
        let loaded = load(u32::try_from(readers.len()).unwrap(), &FileSource::new(&path), &spec).unwrap();
        for tensor in &loaded {
            prop_assert_eq!(tensor.dtype(), dtype);
            prop_assert_eq!(tensor.shape(), &[rows, columns][..]);
            prop_assert_eq!(all_rows(tensor), all_rows(&saved[0]));
        }
        prop_assert_eq!(listed(folder.path()), [path], "no temporary files remain");
    }
}

/// Tests that the names and codes of every element type in every file format are fixed, because files of earlier versions must
/// remain readable.
#[test]
fn names_and_codes_of_types_in_files_are_stable() {
    // The columns are: the type, its code and its meaning in a saved tensor, its `descr` in `.npy`, and its name in
    // `.safetensors`.
    let stored = [
        ("u8", 0, 0, Some("|u1"), Some("U8")),
        ("i8", 1, 0, Some("|i1"), Some("I8")),
        ("u16", 2, 0, Some("<u2"), Some("U16")),
        ("i16", 3, 0, Some("<i2"), Some("I16")),
        ("u32", 4, 0, Some("<u4"), Some("U32")),
        ("i32", 5, 0, Some("<i4"), Some("I32")),
        ("u64", 6, 0, Some("<u8"), Some("U64")),
        ("i64", 7, 0, Some("<i8"), Some("I64")),
        ("f16", 8, 0, Some("<f2"), Some("F16")),
        ("bf16", 9, 0, None, Some("BF16")),
        ("f32", 10, 0, Some("<f4"), Some("F32")),
        ("f64", 11, 0, Some("<f8"), Some("F64")),
        ("bool", 0, 1, Some("|b1"), Some("BOOL")),
        ("complex64", 6, 2, Some("<c8"), Some("C64")),
        ("float8_e4m3fn", 0, 3, None, Some("F8_E4M3")),
        ("float8_e4m3fnuz", 0, 4, None, None),
        ("float8_e5m2", 0, 5, None, Some("F8_E5M2")),
        ("float8_e5m2fnuz", 0, 6, None, None),
        ("float8_e8m0fnu", 0, 7, None, Some("F8_E8M0")),
    ];
    assert_eq!(stored.map(|(name, ..)| name.parse()), Dtype::ALL.map(Ok));
    let folder = tempfile::tempdir().unwrap();
    for (name, code, meaning, npy, safetensors) in stored {
        let dtype: Dtype = name.parse().unwrap();
        let path = folder.path().join(name);
        save(&filled(&groups(1), &TensorSpec::new(dtype, &[3, 2])), &path, SaveSpec::default()).unwrap();
        let shard = fs::read(path.join("00000-of-00001.rows")).unwrap();
        let word = |at: usize| u32::from_le_bytes(shard[at..at + 4].try_into().unwrap());
        assert_eq!((word(12), word(84)), (code, meaning), "{name}");
        assert_eq!((dtype.info().npy, dtype.info().safetensors), (npy, safetensors), "{name}");
        assert_eq!(npy.and_then(Dtype::from_npy), npy.map(|_| dtype), "{name}");
        assert_eq!(safetensors.and_then(Dtype::from_safetensors), safetensors.map(|_| dtype), "{name}");
    }
}

/// Tests rows that are longer than a block of a file, and blocks that contain rows of two ranks.
#[test]
fn long_rows_and_many_blocks_are_loaded_with_another_partition() {
    let folder = tempfile::tempdir().unwrap();
    for (name, rows, columns) in [("long", 5, (4 << 20) + 4), ("many", 40_000, 300)] {
        let path = folder.path().join(name);
        let saved = filled(&groups(3), &TensorSpec::new(Dtype::U8, &[rows, columns]));
        save(&saved, &path, SaveSpec::default()).unwrap();
        let loaded = load(2, &FileSource::new(&path), &LoadSpec::default()).unwrap();
        assert!(all_rows(&loaded[1]) == all_rows(&saved[0]), "{name}");
    }
}

#[test]
fn a_view_is_saved_as_a_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("part");
    let whole = filled(&groups(3), &TensorSpec::new(Dtype::U16, &[100, 10]));
    let part = |whole: &WholeTensor| whole.rows(20..90).unwrap().columns(3..5).unwrap();
    let parts: Vec<_> = whole.iter().map(part).collect();
    save(&parts, &path, SaveSpec::default()).unwrap();
    let loaded = load(2, &FileSource::new(&path), &LoadSpec::default()).unwrap();
    assert_eq!(loaded[0].shape(), [70, 2]);
    assert_eq!(all_rows(&loaded[0]), all_rows(&parts[0]));
}

#[test]
fn only_saved_tensors_are_overwritten_and_only_on_request() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("table");
    let first = filled(&groups(2), &TensorSpec::new(Dtype::F32, &[10, 2]));
    let second = filled(&groups(3), &TensorSpec::new(Dtype::I64, &[30, 3]));
    save(&first, &path, SaveSpec::default()).unwrap();
    let error = save(&second, &path, SaveSpec::default()).unwrap_err();
    let message = format!("{}: cannot save the tensor: the path exists already", path.display());
    let hint = Some("enable overwriting, or save to another path".to_owned());
    assert_eq!(error, Error::OnRank { rank: Rank(0), code: 1017, reason: message, hint });
    let overwrite = SaveSpec { overwrite: true };
    save(&second, &path, overwrite).unwrap();
    assert_eq!(StoredTensor::open(&FileSource::new(&path)).unwrap().shape(), [30, 3]);
    assert_eq!(listed(folder.path()), std::slice::from_ref(&path), "the first tensor is replaced");

    fs::write(path.join("notes.txt"), "mine").unwrap();
    let error = save(&first, &path, overwrite).unwrap_err();
    assert!(error.to_string().ends_with("is not a saved tensor, so it is not overwritten"), "{error}");
    assert_eq!(fs::read(path.join("notes.txt")).unwrap(), b"mine");
}

#[test]
fn corrupt_rows_are_an_error_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("table");
    let spec =
        TensorSpec { rows_of_each: Some(vec![10_000; 2]), ..TensorSpec::new(Dtype::U8, &[20_000, 512]) };
    save(&filled(&groups(2), &spec), &path, SaveSpec::default()).unwrap();
    let shard = &listed(&path)[1];
    let mut bytes = fs::read(shard).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(shard, &bytes).unwrap();
    // A block of the file has 8,192 rows of 512 bytes, so the last block of the second shard begins at row 18,192.
    let problem_text = "rows 18192..20000 of the saved tensor are corrupt: their checksum differs";
    let message = format!("{}: {problem_text}", shard.display());
    assert_eq!(file_error(load(3, &FileSource::new(&path), &LoadSpec::default())), message);
    let stored = StoredTensor::open(&FileSource::new(&path)).unwrap();
    assert!(
        matches!(stored.verify(&ignore_progress), Err(Error::File(error)) if error.to_string() == message)
    );

    fs::write(shard, &bytes[..last]).unwrap();
    let message = file_error(load(1, &FileSource::new(&path), &LoadSpec::default()));
    assert!(
        message.contains(&format!("the file has {last} bytes, but its header requires {}", last + 1)),
        "{message}"
    );
}

#[test]
fn missing_files_and_files_of_another_save_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (folder.path().join("one"), folder.path().join("two"));
    let spec = TensorSpec { rows_of_each: Some(vec![10; 3]), ..TensorSpec::new(Dtype::U8, &[30, 4]) };
    let tensors = filled(&groups(3), &spec);
    for path in [&one, &two] {
        save(&tensors, path, SaveSpec::default()).unwrap();
    }
    let middle = &listed(&one)[1];
    fs::remove_file(middle).unwrap();
    let missing = StoredTensor::open(&FileSource::new(&one)).unwrap_err();
    assert_eq!(missing.problem, FileProblem::MissingRows { start: 10, end: 20 });
    fs::copy(&listed(&two)[1], middle).unwrap();
    let other = StoredTensor::open(&FileSource::new(&one)).unwrap_err();
    assert_eq!((&other.path, matches!(other.problem, FileProblem::OtherSave { .. })), (middle, true));
    fs::remove_file(middle).unwrap();
    fs::remove_file(&listed(&one)[1]).unwrap();
    let missing = StoredTensor::open(&FileSource::new(&one)).unwrap_err();
    assert_eq!(missing.problem, FileProblem::MissingRows { start: 10, end: 30 });
}

#[test]
fn the_progress_callback_can_interrupt_a_save() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("table");
    let groups = groups(2);
    let spec =
        TensorSpec { rows_of_each: Some(vec![15_000; 2]), ..TensorSpec::new(Dtype::U8, &[30_000, 1000]) };
    let tensors = filled(&groups, &spec);
    let max_done = AtomicU64::new(0);
    let interrupt = |at: CopyProgress| {
        assert_eq!(at.total, 15_000_000);
        max_done.fetch_max(at.done, Ordering::Relaxed);
        if at.done > 8_000_000 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let save =
        |group: &Communicator| tensors[group.rank().index()].save(&path, SaveSpec::default(), &interrupt);
    let interrupted = Communicator::on_each(&groups, save).unwrap_err();
    assert_eq!(
        interrupted.to_string(),
        "rank 0 failed: the save, load, export or check of a tensor was interrupted"
    );
    assert!(max_done.load(Ordering::Relaxed) > 8_000_000);
    assert!(listed(folder.path()).is_empty(), "files remain after a failed save");
    Communicator::on_each(&groups, |group| Ok(group.bootstrap().barrier()?)).unwrap();
}

#[test]
fn a_rank_that_cannot_write_fails_all_ranks_and_leaves_no_files() {
    let folder = tempfile::tempdir().unwrap();
    let nowhere = folder.path().join("nowhere").join("table");
    let tensors = filled(&groups(2), &TensorSpec::new(Dtype::U8, &[100_000, 10]));
    let error = save(&tensors, &nowhere, SaveSpec::default()).unwrap_err();
    assert!(matches!(&error, Error::OnRank { rank: Rank(0), code: 1017, .. }), "{error}");
    // Rank 1 passes another path than rank 0, in a folder that does not exist.
    let groups: Vec<_> = tensors.iter().map(|tensor| tensor.group().clone()).collect();
    let save = |group: &Communicator| {
        let path = if group.rank() == Rank(1) { nowhere.clone() } else { folder.path().join("table") };
        tensors[group.rank().index()].save(&path, SaveSpec::default(), &ignore_progress)
    };
    let error = Communicator::on_each(&groups, save).unwrap_err();
    assert!(matches!(&error, Error::OnRank { rank: Rank(1), code: 1017, .. }), "{error}");
    assert!(listed(folder.path()).is_empty(), "files remain after a failed save");
}

#[test]
fn an_earlier_save_remains_if_a_rank_is_killed_while_saving() {
    let folder = tempfile::tempdir().unwrap();
    let parameter = format!("{} {}", UniqueId::create().unwrap(), folder.path().join("table").display());
    Ranks::of(3).killed(1).parameter(parameter).run(test_name!(), |rank| {
        let parameter = rank.parameter();
        let (id, path) = parameter.split_once(' ').unwrap();
        let (id, path) = (id.parse().unwrap(), Path::new(path));
        let own = Rank(u32::try_from(rank.id()).unwrap());
        let deadline = Deadline::after(Duration::from_secs(60));
        let comm = Bootstrap::create(&id, own, 3, deadline).unwrap();
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let group = Communicator::create(comm, &device).unwrap();
        let table = WholeTensor::create(&group, &TensorSpec::new(Dtype::U8, &[60_000, 100])).unwrap();
        table.save(path, SaveSpec::default(), &ignore_progress).unwrap();
        rank.barrier();
        // Rank 0 kills rank 1 from its progress callback, after both ranks have written some of their rows.
        let once = Once::new();
        let progress = |_: CopyProgress| {
            match rank.id() {
                0 => once.call_once(|| {
                    assert_eq!(rank.recv(1).0, b"now");
                    rank.kill(1);
                }),
                1 => {
                    rank.send(0, b"now", &[]);
                    rank.wait_to_be_killed()
                }
                _ => {}
            }
            ControlFlow::Continue(())
        };
        let smaller = table.rows(0..30_000).unwrap();
        let lost = Err(Error::Comm(wholemem_comm::Error::PeerLost { rank: Rank(1) }));
        assert_eq!(smaller.save(path, SaveSpec { overwrite: true }, &progress), lost);
        if rank.id() == 0 {
            assert_eq!(StoredTensor::open(&FileSource::new(path)).unwrap().shape(), [60_000, 100]);
            StoredTensor::open(&FileSource::new(path)).unwrap().verify(&ignore_progress).unwrap();
            assert_eq!(listed(path.parent().unwrap()), [path]);
        }
    });
}

#[test]
fn npy_safetensors_and_raw_files_are_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let rows: Vec<u8> = (0..600u16).flat_map(|n| f32::from(n).to_le_bytes()).collect();

    let npy = folder.path().join("a.npy");
    let header = format!("{:<117}\n", "{'descr': '<f4', 'fortran_order': False, 'shape': (100, 2, 3), }");
    fs::write(&npy, [b"\x93NUMPY\x01\x00\x76\x00", header.as_bytes(), &rows].concat()).unwrap();
    let safe = folder.path().join("a.safetensors");
    let header = r#"{"other":{"dtype":"U8","shape":[3],"data_offsets":[2400,2403]},
        "x":{"dtype":"F32","shape":[100,2,3],"data_offsets":[0,2400]}}"#;
    let len = (header.len() as u64).to_le_bytes();
    fs::write(&safe, [&len[..], header.as_bytes(), &rows, &[1, 2, 3]].concat()).unwrap();
    let raw = folder.path().join("a.bin");
    fs::write(&raw, &rows).unwrap();

    for source in
        [FileSource::new(&npy), FileSource::tensor(&safe, "x"), FileSource::raw(&raw, Dtype::F32, &[2, 3])]
    {
        let loaded = load(3, &source, &LoadSpec::default()).unwrap();
        assert_eq!((loaded[0].dtype(), loaded[0].shape()), (Dtype::F32, &[100, 2, 3][..]));
        assert_eq!(all_rows(&loaded[2]), rows, "{source:?}");
    }

    let out = folder.path().join("b.npy");
    StoredTensor::open(&FileSource::tensor(&safe, "x")).unwrap().export_npy(&out, &ignore_progress).unwrap();
    let loaded = load(2, &FileSource::new(&out), &LoadSpec::default()).unwrap();
    assert_eq!((loaded[0].shape(), all_rows(&loaded[0])), (&[100, 2, 3][..], rows));

    // An export replaces only regular files. The test uses a pipe as an example of a file that is not regular.
    let pipe = folder.path().join("pipe");
    rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, Mode::RWXU, 0).unwrap();
    for existing in [&pipe, folder.path()] {
        let error = StoredTensor::open(&FileSource::new(&out))
            .unwrap()
            .export_npy(existing, &ignore_progress)
            .unwrap_err();
        assert_eq!(
            error,
            Error::File(FileError { path: existing.to_owned(), problem: FileProblem::NotAFile })
        );
    }
    assert_eq!(listed(folder.path()), [raw.clone(), npy, safe.clone(), out, pipe]);

    let problem = |source: &FileSource| StoredTensor::open(source).unwrap_err().problem;
    let known = vec!["x".to_owned(), "other".to_owned()];
    assert_eq!(
        problem(&FileSource::new(&safe)),
        FileProblem::NotOneTensor { count: 2, known: known.clone() }
    );
    let unknown = FileProblem::NoSuchTensor { name: "y".to_owned(), known };
    assert_eq!(problem(&FileSource::tensor(&safe, "y")), unknown);
    assert_eq!(problem(&FileSource::new(&raw)), FileProblem::UnknownFormat);
    let partial = FileProblem::PartialRow { len: 2400, row_len: 28 };
    assert_eq!(problem(&FileSource::raw(&raw, Dtype::F32, &[7])), partial);
    let missing = StoredTensor::open(&FileSource::new(folder.path().join("none"))).unwrap_err();
    let message = "none: cannot open it: No such file or directory (os error 2)";
    assert!(missing.to_string().ends_with(message), "{missing}");
}

/// Tests that the headers of files are validated before they are used, and that opening a pipe does not block.
#[test]
fn invalid_files_are_rejected_when_they_are_opened() {
    let folder = tempfile::tempdir().unwrap();
    let problem = |source: &FileSource| StoredTensor::open(source).unwrap_err().problem;
    let npy = folder.path().join("a.npy");
    let of_shape = |shape: &str| {
        let header =
            format!("{:<117}\n", format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"));
        fs::write(&npy, [b"\x93NUMPY\x01\x00\x76\x00", header.as_bytes()].concat()).unwrap();
        problem(&FileSource::new(&npy))
    };
    assert_eq!(of_shape("(4611686018427387904, 0)"), FileProblem::EmptyRow);
    let overflowing = |len| FileProblem::WrongLength { len, needed: u64::MAX };
    assert_eq!(of_shape("(0, 9223372036854775808, 4)"), overflowing(128));
    assert_eq!(of_shape("(9223372036854775808, 4)"), overflowing(128));

    let raw = folder.path().join("a.bin");
    fs::write(&raw, []).unwrap();
    assert_eq!(problem(&FileSource::raw(&raw, Dtype::F32, &[1 << 62, 1 << 62])), overflowing(0));
    assert_eq!(problem(&FileSource::raw(&raw, Dtype::F32, &[0])), FileProblem::EmptyRow);
    assert_eq!(problem(&FileSource::raw(folder.path(), Dtype::U8, &[])), FileProblem::NotAFile);
    let pipe = folder.path().join("pipe.npy");
    rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, Mode::RWXU, 0).unwrap();
    assert_eq!(problem(&FileSource::new(&pipe)), FileProblem::NotAFile);
}

#[test]
fn a_row_longer_than_memory_is_an_error() {
    const LEN: u64 = 1 << 48;
    let file = fs::File::from(rustix::fs::memfd_create("rows", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(LEN).unwrap();
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let stored = StoredTensor::open(&FileSource::raw(&path, Dtype::U8, &[LEN])).unwrap();
    let error = stored.verify(&ignore_progress).unwrap_err();
    assert!(error.to_string().ends_with("cannot read it: Cannot allocate memory (os error 12)"), "{error}");
}
