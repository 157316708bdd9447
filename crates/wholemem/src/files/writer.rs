//! A saved tensor while it is written: its files, block by block, and the folder that is not finished yet.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use wholemem_os::Errno;

use super::shard::{self, DIGEST, Digest, Shard};
use super::{FileError, FileProblem};
use crate::Dtype;
use wholemem_os::width::to_usize;

/// How a tensor is to be saved. It is the same on all ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SaveSpec {
    /// Whether to replace what is there; otherwise that is an error.
    pub overwrite: bool,
}

/// What all files of a save have in common.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cut<'a> {
    pub(super) dtype: Dtype,
    pub(super) shape: &'a [u64],
    pub(super) save: SaveId,
    /// How many files there are.
    pub(super) count: usize,
}

/// A file of a saved tensor, while its blocks are written, in any order.
#[derive(Debug)]
pub(super) struct ShardWriter {
    path: PathBuf,
    file: File,
    /// Its digests are not known before the end.
    pub(super) shard: Shard,
    digests: Mutex<Vec<Digest>>,
}

impl ShardWriter {
    pub(super) fn create(
        folder: &Path,
        cut: Cut<'_>,
        number: usize,
        rows: &Range<u64>,
    ) -> Result<Self, FileError> {
        let Cut { dtype, shape, save, count } = cut;
        let row_len = shape[1..].iter().product::<u64>() * dtype.len() as u64;
        let block_rows = Shard::rows_of_a_block(row_len);
        let blocks = Shard::blocks(rows.end - rows.start, block_rows);
        let shard = Shard {
            dtype,
            shape: shape.to_vec(),
            save,
            number: u32::try_from(number).expect("a file for each rank, or for each of a `u32` of parts"),
            count: u32::try_from(count).expect("a file for each rank, or for each of a `u32` of parts"),
            first_row: rows.start,
            rows: rows.end - rows.start,
            block_rows,
            digests: vec![[0; DIGEST]; to_usize(blocks)],
        };
        let path = folder.join(format!("{number:05}-of-{count:05}.{}", super::ENDING));
        let failed = |attempt| move |error: io::Error| FileProblem::refused(attempt, &error);
        let file = OpenOptions::new().write(true).create_new(true).open(&path);
        let file = file.map_err(failed("create it")).and_then(|file| {
            file.set_len(shard.file_len()).map_err(failed("make it so long"))?;
            Ok(file)
        });
        let digests = Mutex::new(shard.digests.clone());
        Ok(Self { file: file.map_err(|problem| problem.at(&path))?, path, shard, digests })
    }

    pub(super) fn blocks(&self) -> Vec<u64> {
        (0..self.shard.digests.len() as u64).collect()
    }

    /// How many bytes a block has.
    pub(super) fn len_of(&self, block: u64) -> u64 {
        let rows = self.shard.rows_of(block);
        (rows.end - rows.start) * self.shard.row_len()
    }

    pub(super) fn write(&self, block: u64, bytes: &[u8]) -> Result<(), FileError> {
        let place = self.shard.place_of(self.shard.rows_of(block).start);
        let failed = |error| FileProblem::refused("write it", &error).at(&self.path);
        self.file.write_all_at(bytes, place).map_err(failed)?;
        let digest = shard::digest(bytes);
        let mut digests = self.digests.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = usize::try_from(block).ok().and_then(|block| digests.get_mut(block)) {
            *place = digest;
        }
        Ok(())
    }

    /// Writes the header, last: a file without it is of no use to anybody.
    pub(super) fn finish(mut self) -> Result<(), FileError> {
        self.shard.digests = self.digests.into_inner().unwrap_or_else(PoisonError::into_inner);
        let stored = self.file.write_all_at(&self.shard.encode(), 0).and_then(|()| self.file.sync_all());
        stored.map_err(|error| FileProblem::refused("store it", &error).at(&self.path))
    }
}

/// The id of a save.
pub(super) type SaveId = [u8; 16];

/// An id that no other save has.
pub(super) fn fresh_id(path: &Path) -> Result<SaveId, FileError> {
    let mut id = SaveId::default();
    match rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty()) {
        Ok(len) if len == id.len() => Ok(id),
        // So few bytes are given whole or not at all.
        Ok(_) => Err(FileProblem::Refused { attempt: "draw its id", errno: Errno::IO }.at(path)),
        Err(errno) => Err(FileProblem::Refused { attempt: "draw its id", errno }.at(path)),
    }
}

/// A folder that is not finished. It is removed with this value, on the rank that has created it, unless it has become the
/// real one.
#[derive(Debug)]
pub(super) struct Partial {
    pub(super) folder: PathBuf,
    is_ours: bool,
}

impl Partial {
    pub(super) fn beside(path: &Path, save: SaveId) -> Self {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let digits: String = save[..4].iter().map(|byte| format!("{byte:02x}")).collect();
        Self { folder: path.with_file_name(format!(".{name}.{digits}.partial")), is_ours: false }
    }

    pub(super) fn create(&mut self, path: &Path, spec: SaveSpec) -> Result<(), FileError> {
        if path.symlink_metadata().is_ok() {
            if !spec.overwrite {
                return Err(FileProblem::AlreadyThere.at(path));
            }
            if !is_saved(path) {
                return Err(FileProblem::NotReplaced.at(path));
            }
        }
        fs::create_dir(&self.folder)
            .map_err(|error| FileProblem::refused("create it", &error).at(&self.folder))?;
        self.is_ours = true;
        Ok(())
    }

    /// Makes it the real one, in the place of what was there.
    pub(super) fn publish(&self, path: &Path, spec: SaveSpec) -> Result<(), FileError> {
        let refused = |attempt| move |error: io::Error| FileProblem::refused(attempt, &error).at(path);
        let sync = |folder: &Path| File::open(folder).and_then(|folder| folder.sync_all());
        sync(&self.folder).map_err(refused("store it"))?;
        let rename = |flags| renameat_with(CWD, &self.folder, CWD, path, flags);
        match rename(RenameFlags::NOREPLACE) {
            // What was there is now where the new one was, and is removed with it.
            Err(Errno::EXIST) if spec.overwrite => rename(RenameFlags::EXCHANGE),
            outcome => outcome,
        }
        .map_err(|errno| match errno {
            Errno::EXIST => FileProblem::AlreadyThere.at(path),
            errno => FileProblem::Refused { attempt: "put it in its place", errno }.at(path),
        })?;
        let parent =
            path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
        sync(parent).map_err(refused("store its name"))
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if self.is_ours {
            // It is not there any more, or it is of no use to anybody.
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

/// Whether there is a folder that holds a saved tensor, and nothing else that would be lost with it.
fn is_saved(path: &Path) -> bool {
    let is_part = |entry: io::Result<fs::DirEntry>| {
        entry.is_ok_and(|entry| entry.path().extension().is_some_and(|ending| ending == super::ENDING))
    };
    fs::read_dir(path).is_ok_and(|mut entries| entries.all(is_part))
}
