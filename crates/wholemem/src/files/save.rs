//! Saving: each rank writes the rows that it has, and the folder appears when all of them are done.

use std::fs::{self, File, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use wholemem_comm::Rank;
use wholemem_os::Errno;

use super::error::{FileError, FileProblem};
use super::parallel::{Watch, in_parallel};
use super::shard::{self, DIGEST, Shard};
use crate::verdict::agree;
use crate::{Error, Partition, Result, WholeTensor};

/// How a tensor is to be saved. It is the same on all ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SaveSpec {
    /// Whether to replace what is there; otherwise that is an error.
    pub overwrite: bool,
}

impl WholeTensor {
    /// Saves the tensor as a folder at `path`. Collective: each rank writes the rows that it has, several at a time, and
    /// `watch` is told how far it has come with them.
    ///
    /// The folder appears at once when all ranks are done, and in the place of an older one where that is asked for; until
    /// then, and after an error, there is what was there before. A process that is killed meanwhile leaves a folder beside
    /// it whose name begins with a dot and ends in `.partial`.
    ///
    /// ```
    /// use wholemem::files::{LoadSpec, SaveSpec, Source, unwatched};
    /// use wholemem::{Dtype, Group, TensorSpec, WholeTensor};
    /// use wholemem_hal::Backend;
    ///
    /// let folder = tempfile::tempdir()?;
    /// let path = folder.path().join("features");
    /// let device = Backend::auto()?.device(0)?;
    ///
    /// // Two ranks write, three read.
    /// let writers = Group::local(&[device.clone(), device.clone()])?;
    /// Group::on_each(&writers, |group| {
    ///     let table = WholeTensor::create(group, &TensorSpec::new(Dtype::F32, &[1000, 16]))?;
    ///     table.save(&path, SaveSpec::default(), &unwatched)
    /// })?;
    /// let readers = Group::local(&[device.clone(), device.clone(), device])?;
    /// let load = |group: &Group| WholeTensor::load(group, &Source::new(&path), &LoadSpec::default(), &unwatched);
    /// let tables = Group::on_each(&readers, load)?;
    /// assert_eq!(tables[2].shape(), [1000, 16]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::OnRank`](crate::Error::OnRank) with the [file](FileError) that could not be written, or with
    /// [`Error::Interrupted`](crate::Error::Interrupted); [`Error::Comm`](crate::Error::Comm).
    pub fn save(&self, path: &Path, spec: SaveSpec, watch: Watch<'_>) -> Result<()> {
        let comm = self.group().communicator();
        let is_first = comm.rank() == Rank(0);
        let save = comm.broadcast(Rank(0), &fresh())?;
        let save = <[u8; 16]>::try_from(save).unwrap_or_default();
        let mut partial = Partial::beside(path, save);
        let on_first = |work: &mut dyn FnMut() -> Result<(), FileError>| {
            agree(comm, if is_first { work().map_err(Error::from) } else { Ok(()) })
        };
        on_first(&mut || partial.create(path, spec))?;
        agree(comm, self.write_shard(&partial.folder, save, watch))?;
        on_first(&mut || partial.publish(path, spec))
    }

    /// Writes this rank's rows, if it has some.
    fn write_shard(&self, folder: &Path, save: [u8; 16], watch: Watch<'_>) -> Result<()> {
        let rank = self.group().rank();
        let ranges: Vec<_> = ranges_of(self.memory().partition(), self.first_row(), self.row_count());
        let Some(number) = ranges.iter().position(|(owner, _)| *owner == rank) else { return Ok(()) };
        let rows = ranges[number].1.clone();
        let row_len = self.row_len() as u64;
        let block_rows = Shard::rows_of_a_block(row_len);
        let blocks = Shard::blocks(rows.end - rows.start, block_rows);
        let mut shard = Shard {
            dtype: self.dtype(),
            shape: self.shape().to_vec(),
            save,
            number: u32::try_from(number).unwrap_or(u32::MAX),
            count: u32::try_from(ranges.len()).unwrap_or(u32::MAX),
            first_row: rows.start,
            rows: rows.end - rows.start,
            block_rows,
            digests: vec![[0; DIGEST]; usize::try_from(blocks).unwrap_or(usize::MAX)],
        };
        let path = folder.join(format!("{number:05}-of-{:05}.{}", ranges.len(), super::ENDING));
        let failed = |attempt| {
            let path = path.clone();
            move |error: std::io::Error| FileProblem::refused(attempt, &error).at(&path)
        };
        let file =
            OpenOptions::new().write(true).create_new(true).open(&path).map_err(failed("create it"))?;
        file.set_len(shard.file_len()).map_err(failed("make it so long"))?;
        let digests = Mutex::new(shard.digests.clone());
        let numbers: Vec<u64> = (0..blocks).collect();
        let len = |block: &u64| {
            let rows = shard.rows_of(*block);
            (rows.end - rows.start) * row_len
        };
        in_parallel(self.group(), &numbers, len, watch, |block, stream, buffer| {
            let rows = shard.rows_of(*block);
            buffer.resize(usize::try_from(len(block)).unwrap_or(usize::MAX), 0);
            self.read_rows(stream, rows.start, buffer)?;
            file.write_all_at(buffer, shard.place_of(rows.start)).map_err(failed("write it"))?;
            let digest = shard::digest(buffer);
            let mut digests = digests.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(place) = usize::try_from(*block).ok().and_then(|block| digests.get_mut(block)) {
                *place = digest;
            }
            Ok(())
        })?;
        shard.digests = digests.into_inner().unwrap_or_else(PoisonError::into_inner);
        // The header last: a file without it is of no use to anybody.
        file.write_all_at(&shard.encode(), 0).map_err(failed("write its header"))?;
        file.sync_all().map_err(failed("store it"))?;
        Ok(())
    }
}

/// Who has which rows of a view, of those who have some; rank 0 where nobody has, so that the shape is kept.
fn ranges_of(partition: &Partition, first: u64, rows: u64) -> Vec<(Rank, Range<u64>)> {
    let within = |row: u64| row.clamp(first, first + rows) - first;
    let ranges = (0..partition.ranks()).map(Rank).map(|rank| {
        let own = partition.range(rank);
        (rank, within(own.start)..within(own.end))
    });
    let some: Vec<_> = ranges.filter(|(_, rows)| !rows.is_empty()).collect();
    if some.is_empty() { vec![(Rank(0), 0..0)] } else { some }
}

fn fresh() -> [u8; 16] {
    let mut bytes = [0; 16];
    // Without it, two saves at the same place and time would meet, which `create_new` notices.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    bytes
}

/// A folder that is not finished. It is removed with this value, on the rank that has created it, unless it has become the
/// real one.
#[derive(Debug)]
struct Partial {
    folder: PathBuf,
    is_ours: bool,
}

impl Partial {
    fn beside(path: &Path, save: [u8; 16]) -> Self {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let digits: String = save[..4].iter().map(|byte| format!("{byte:02x}")).collect();
        Self { folder: path.with_file_name(format!(".{name}.{digits}.partial")), is_ours: false }
    }

    fn create(&mut self, path: &Path, spec: SaveSpec) -> Result<(), FileError> {
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
    fn publish(&self, path: &Path, spec: SaveSpec) -> Result<(), FileError> {
        let refused = |attempt| move |error: std::io::Error| FileProblem::refused(attempt, &error).at(path);
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
    let is_part = |entry: std::io::Result<fs::DirEntry>| {
        entry.is_ok_and(|entry| entry.path().extension().is_some_and(|ending| ending == super::ENDING))
    };
    fs::read_dir(path).is_ok_and(|mut entries| entries.all(is_part))
}
