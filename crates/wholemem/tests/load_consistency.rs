//! Tests that all ranks load the same saved tensor, or the same version of a file, or else all ranks fail.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::fs::{self, File};
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::{Duration, SystemTime};

use wholemem::files::{
    CopyProgress, FileError, FileProblem, FileSource, LoadSpec, SaveSpec, StoredTensor, ignore_progress,
};
use wholemem::{Communicator, Dtype, Error, Rank, Result, WholeTensor};
use wholemem_hal::{Backend, HostConfig};

/// The number of rows in each file. There are so many that each of two ranks reads its rows in two blocks.
const ROWS: usize = 4 * 4096;
const ROW_LEN: usize = 1024;

fn groups(count: u32) -> Vec<Communicator> {
    let backend = Backend::host(HostConfig::virtual_devices(count as usize)).unwrap();
    let devices: Vec<_> = (0..count).map(|id| backend.device(id).unwrap()).collect();
    Communicator::local(&devices).unwrap()
}

fn write_raw(path: &Path, byte: u8) -> FileSource {
    fs::write(path, vec![byte; ROWS * ROW_LEN]).unwrap();
    FileSource::raw(path, Dtype::U8, &[ROW_LEN as u64])
}

/// Saves a tensor in which all bytes have the value `byte`.
fn save(path: &Path, byte: u8, spec: SaveSpec) -> FileSource {
    let raw = path.with_extension("bin");
    StoredTensor::open(&write_raw(&raw, byte)).unwrap().save(path, 2, spec, &ignore_progress).unwrap();
    fs::remove_file(raw).unwrap();
    FileSource::new(path)
}

/// Loads a tensor with each rank from the file source at its position in `sources`.
fn load_each(sources: &[FileSource]) -> Vec<Result<WholeTensor>> {
    let groups = groups(u32::try_from(sources.len()).unwrap());
    let load = |group: &Communicator| {
        let source = &sources[group.rank().index()];
        Ok(WholeTensor::load(group, source, &LoadSpec::default(), &ignore_progress))
    };
    Communicator::on_each(&groups, load).unwrap()
}

/// Returns the errors of all ranks. Panics if a rank succeeded.
fn errors(outcomes: Vec<Result<WholeTensor>>) -> Vec<Error> {
    outcomes.into_iter().map(|outcome| outcome.map(|tensor| tensor.shape().to_vec()).unwrap_err()).collect()
}

#[test]
fn ranks_that_open_different_saves_all_fail() {
    let folder = tempfile::tempdir().unwrap();
    let sources = ["a", "b"].map(|name| save(&folder.path().join(name), 7, SaveSpec::default()));
    let failed = errors(load_each(&[sources[0].clone(), sources[0].clone(), sources[1].clone()]));
    assert_eq!(failed, vec![Error::SavesDiffer { rank: Rank(2) }; 3]);
    let message = "cannot load: rank 2 opened a different saved tensor, or a different version of the file, than rank 0";
    assert_eq!(failed[0].to_string(), message);
    let hint = "the files were replaced while the ranks opened them, or the ranks passed different paths: load again";
    assert_eq!(failed[0].hint(), Some(hint));
}

#[test]
fn ranks_that_open_different_versions_of_a_file_all_fail() {
    let folder = tempfile::tempdir().unwrap();
    let sources = ["a.bin", "b.bin"].map(|name| write_raw(&folder.path().join(name), 7));
    let failed = errors(load_each(&sources));
    assert_eq!(failed, vec![Error::SavesDiffer { rank: Rank(1) }; 2]);
}

/// Tests that a saved tensor or a file has the same identity at every path.
#[test]
fn ranks_may_open_one_save_by_different_paths() {
    let folder = tempfile::tempdir().unwrap();
    let (path, raw) = (folder.path().join("a"), folder.path().join("a.raw"));
    let (saved, raw_sources) = (save(&path, 7, SaveSpec::default()), write_raw(&raw, 7));
    let link = |to: &Path, name: &str| -> PathBuf {
        let link = folder.path().join(name);
        std::os::unix::fs::symlink(to, &link).unwrap();
        link
    };
    let copy = folder.path().join("copy");
    fs::create_dir(&copy).unwrap();
    for entry in fs::read_dir(&path).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
    }
    let saved = [saved, FileSource::new(link(&path, "b")), FileSource::new(copy)];
    let raw_sources = [raw_sources, FileSource::raw(link(&raw, "b.raw"), Dtype::U8, &[ROW_LEN as u64])];
    for sources in [&saved[..], &raw_sources[..]] {
        assert!(load_each(sources).iter().all(Result::is_ok), "{sources:?}");
    }
}

#[test]
fn ranks_that_interpret_one_file_differently_all_fail() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("two.safetensors");
    let header = r#"{"x":{"dtype":"U8","shape":[4,4],"data_offsets":[0,16]},
        "y":{"dtype":"U8","shape":[4,4],"data_offsets":[16,32]}}"#;
    let len = (header.len() as u64).to_le_bytes();
    fs::write(&path, [&len[..], header.as_bytes(), &[1; 32]].concat()).unwrap();
    let failed = errors(load_each(&["x", "y"].map(|name| FileSource::tensor(&path, name))));
    assert_eq!(failed, vec![Error::RanksDisagree { rank: Rank(1) }; 2]);
}

/// Returns a progress callback that overwrites the file in place after its first block was read, and changes the file's
/// modification time.
fn overwrite_after_first_block(path: &Path) -> impl Fn(CopyProgress) -> ControlFlow<()> + Sync + use<> {
    let file = File::options().write(true).open(path).unwrap();
    // The modification time is set explicitly, because two writes may happen in one tick of the file system's clock.
    file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1)).unwrap();
    let once = Once::new();
    move |_| {
        once.call_once(|| {
            file.write_all_at(&vec![9; ROWS * ROW_LEN], 0).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(2)).unwrap();
        });
        ControlFlow::Continue(())
    }
}

#[test]
fn a_file_that_changes_while_it_is_loaded_is_an_error_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.bin");
    let source = write_raw(&path, 7);
    let overwrite = overwrite_after_first_block(&path);
    let groups = groups(2);
    let load = |group: &Communicator| {
        // Only rank 1 overwrites the file; both ranks read it.
        let progress: wholemem::files::ProgressCallback<'_> =
            if group.rank() == Rank(1) { &overwrite } else { &ignore_progress };
        Ok(WholeTensor::load(group, &source, &LoadSpec::default(), progress))
    };
    for error in errors(Communicator::on_each(&groups, load).unwrap()) {
        let Error::OnRank { code: 1017, reason: message, hint, .. } = &error else { panic!("{error:?}") };
        assert_eq!(*message, format!("{}: the file was modified after it was opened", path.display()));
        assert_eq!(hint.as_deref(), Some("load it again while no process writes it"));
    }
}

#[test]
fn a_file_that_changes_while_it_is_saved_or_exported_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.bin");
    let changed = Err(Error::File(FileError { path: path.clone(), problem: FileProblem::Changed }));
    let (saved, npy) = (folder.path().join("saved"), folder.path().join("a.npy"));
    let source = write_raw(&path, 7);
    let overwrite = overwrite_after_first_block(&path);
    let stored = StoredTensor::open(&source).unwrap();
    assert_eq!(stored.save(&saved, 2, SaveSpec::default(), &overwrite), changed);
    assert_eq!(stored.export_npy(&npy, &ignore_progress), changed);
    assert_eq!(stored.verify(&ignore_progress), changed);
    let remaining: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(remaining, [path], "files remain after a failed export");
}

/// Tests that a saved tensor that is replaced after it was opened is still read completely, because its files stay open.
#[test]
fn a_save_replaced_after_all_ranks_have_opened_it_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    let source = save(&path, 7, SaveSpec::default());
    let once = Once::new();
    let replace = |_: CopyProgress| {
        once.call_once(|| drop(save(&path, 9, SaveSpec { overwrite: true })));
        ControlFlow::Continue(())
    };
    let load = |group: &Communicator| WholeTensor::load(group, &source, &LoadSpec::default(), &replace);
    for tensor in Communicator::on_each(&groups(2), load).unwrap() {
        let mut bytes = vec![0; ROWS * ROW_LEN];
        tensor.read_rows_on(&tensor.group().device().stream().unwrap(), 0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 7), "rows of the new save were read");
    }
}
