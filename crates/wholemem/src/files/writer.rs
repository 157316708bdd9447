//! Writes the files of a saved tensor, block by block, in a temporary folder that is renamed at the end.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use wholemem_os::Errno;

use super::shard::{self, DIGEST_LEN, Digest, Shard};
use super::{FileError, FileProblem};
use crate::Dtype;
use wholemem_os::width::to_usize;

/// The options with which a tensor is saved. They must be equal on all ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SaveSpec {
    /// True to replace an existing saved tensor. Otherwise an existing file or folder is an error.
    pub overwrite: bool,
}

/// The properties that all files of a saved tensor share.
#[derive(Debug, Clone, Copy)]
pub(super) struct SaveLayout<'a> {
    pub(super) dtype: Dtype,
    pub(super) shape: &'a [u64],
    pub(super) save: SaveId,
    /// The number of files of the saved tensor.
    pub(super) count: usize,
}

/// Writes the blocks of one file of a saved tensor, in any order.
#[derive(Debug)]
pub(super) struct ShardWriter {
    path: PathBuf,
    file: File,
    /// The header of the file. `finish` fills in its digests.
    pub(super) shard: Shard,
    digests: Mutex<Vec<Digest>>,
}

impl ShardWriter {
    pub(super) fn create(
        folder: &Path,
        layout: SaveLayout<'_>,
        number: usize,
        rows: &Range<u64>,
    ) -> Result<Self, FileError> {
        let SaveLayout { dtype, shape, save, count } = layout;
        let row_len = shape[1..].iter().product::<u64>() * dtype.len() as u64;
        let block_rows = Shard::rows_of_a_block(row_len);
        let blocks = Shard::blocks(rows.end - rows.start, block_rows);
        let shard = Shard {
            dtype,
            shape: shape.to_vec(),
            save,
            number: u32::try_from(number).expect("the number of files is a `u32`"),
            count: u32::try_from(count).expect("the number of files is a `u32`"),
            first_row: rows.start,
            rows: rows.end - rows.start,
            block_rows,
            digests: vec![[0; DIGEST_LEN]; to_usize(blocks)],
        };
        let path = folder.join(format!("{number:05}-of-{count:05}.{}", super::SHARD_EXTENSION));
        let failed = |attempt| move |error: io::Error| FileProblem::failed(attempt, &error);
        let file = OpenOptions::new().write(true).create_new(true).open(&path);
        let file = file.map_err(failed("create it")).and_then(|file| {
            file.set_len(shard.file_len()).map_err(failed("set its length"))?;
            Ok(file)
        });
        let digests = Mutex::new(shard.digests.clone());
        Ok(Self { file: file.map_err(|problem| problem.at(&path))?, path, shard, digests })
    }

    pub(super) fn blocks(&self) -> Vec<u64> {
        (0..self.shard.digests.len() as u64).collect()
    }

    /// Returns the length in bytes of one block of rows in this file.
    pub(super) fn len_of(&self, block: u64) -> u64 {
        let rows = self.shard.rows_of(block);
        (rows.end - rows.start) * self.shard.row_len()
    }

    pub(super) fn write(&self, block: u64, bytes: &[u8]) -> Result<(), FileError> {
        let place = self.shard.offset_of(self.shard.rows_of(block).start);
        let failed = |error| FileProblem::failed("write it", &error).at(&self.path);
        self.file.write_all_at(bytes, place).map_err(failed)?;
        let digest = shard::digest(bytes);
        let mut digests = self.digests.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = usize::try_from(block).ok().and_then(|block| digests.get_mut(block)) {
            *place = digest;
        }
        Ok(())
    }

    /// Writes the header of the file. It is written last, so that an incomplete file is not valid.
    pub(super) fn finish(mut self) -> Result<(), FileError> {
        self.shard.digests = self.digests.into_inner().unwrap_or_else(PoisonError::into_inner);
        let stored = self.file.write_all_at(&self.shard.encode(), 0).and_then(|()| self.file.sync_all());
        stored.map_err(|error| FileProblem::failed("sync it", &error).at(&self.path))
    }
}

/// The id of a saved tensor, which is equal in all of its files.
pub(super) type SaveId = [u8; 16];

/// Generates a random id, which all files of a tensor that is being saved contain.
pub(super) fn random_save_id(path: &Path) -> Result<SaveId, FileError> {
    let mut id = SaveId::default();
    match rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty()) {
        Ok(len) if len == id.len() => Ok(id),
        // The kernel either returns all of up to 256 random bytes or fails.
        Ok(_) => Err(FileProblem::SystemCall { attempt: "generate its id", errno: Errno::IO }.at(path)),
        Err(errno) => Err(FileProblem::SystemCall { attempt: "generate its id", errno }.at(path)),
    }
}

/// A temporary folder for a tensor that is being saved. Dropping this value removes the folder, on the rank that created it,
/// unless `publish` has renamed it.
#[derive(Debug)]
pub(super) struct PartialFolder {
    pub(super) folder: PathBuf,
    is_owner: bool,
}

impl PartialFolder {
    pub(super) fn next_to(path: &Path, save: SaveId) -> Self {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let digits: String = save[..4].iter().map(|byte| format!("{byte:02x}")).collect();
        Self { folder: path.with_file_name(format!(".{name}.{digits}.partial")), is_owner: false }
    }

    pub(super) fn create(&mut self, path: &Path, spec: SaveSpec) -> Result<(), FileError> {
        if path.symlink_metadata().is_ok() {
            if !spec.overwrite {
                return Err(FileProblem::AlreadyExists.at(path));
            }
            if !is_saved(path) {
                return Err(FileProblem::NotASavedTensor.at(path));
            }
        }
        fs::create_dir(&self.folder)
            .map_err(|error| FileProblem::failed("create it", &error).at(&self.folder))?;
        self.is_owner = true;
        Ok(())
    }

    /// Renames the temporary folder to `path`, and replaces an existing saved tensor if the options permit it.
    pub(super) fn publish(&self, path: &Path, spec: SaveSpec) -> Result<(), FileError> {
        let failed = |attempt| move |error: io::Error| FileProblem::failed(attempt, &error).at(path);
        let sync = |folder: &Path| File::open(folder).and_then(|folder| folder.sync_all());
        sync(&self.folder).map_err(failed("sync it"))?;
        let rename = |flags| renameat_with(CWD, &self.folder, CWD, path, flags);
        match rename(RenameFlags::NOREPLACE) {
            // The exchange moves the old folder to the temporary name, and dropping this `PartialFolder` removes the old folder.
            Err(Errno::EXIST) if spec.overwrite => rename(RenameFlags::EXCHANGE),
            outcome => outcome,
        }
        .map_err(|errno| match errno {
            Errno::EXIST => FileProblem::AlreadyExists.at(path),
            errno => FileProblem::SystemCall { attempt: "rename it", errno }.at(path),
        })?;
        let parent =
            path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
        sync(parent).map_err(failed("sync its folder"))
    }
}

impl Drop for PartialFolder {
    fn drop(&mut self) {
        if self.is_owner {
            // The temporary folder contains an incompletely saved tensor, or the old tensor that `publish` has replaced. If
            // `publish` has renamed the folder, there is none. An error of the removal is ignored, because `drop` cannot return
            // it.
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

/// Returns true if `path` is a folder that has only files of a saved tensor, so that replacing the folder loses nothing else.
fn is_saved(path: &Path) -> bool {
    let is_part = |entry: io::Result<fs::DirEntry>| {
        entry.is_ok_and(|entry| {
            entry.path().extension().is_some_and(|ending| ending == super::SHARD_EXTENSION)
        })
    };
    fs::read_dir(path).is_ok_and(|mut entries| entries.all(is_part))
}
