//! Saves tensors to files. Each rank writes its own rows, and the folder appears when all ranks are done.

use std::ops::Range;
use std::path::Path;

use wholemem_comm::Rank;

use super::FileError;
use super::parallel::{ProgressCallback, in_parallel, threads_of};
use super::writer::{PartialFolder, SaveId, SaveLayout, SaveSpec, ShardWriter, random_save_id};
use crate::communicator::{CallTerms, agree, bytes_of, exchange_terms};
use crate::{Error, Partition, Result, WholeTensor};
use wholemem_os::width::to_usize;

impl WholeTensor {
    /// Saves the tensor as a folder at `path`. Collective: each rank writes its own rows, in several threads, and reports its
    /// progress to the callback `progress`.
    ///
    /// The folder appears atomically when all ranks are done, and replaces an older saved tensor if `spec` permits it. Until then,
    /// and after an error, an older saved tensor remains. If a process is killed during the save, a temporary folder remains in the
    /// parent folder; its name begins with a dot and ends in `.partial`.
    ///
    /// ```
    /// use wholemem::files::{LoadSpec, SaveSpec, FileSource, ignore_progress};
    /// use wholemem::{Backend, Communicator, Dtype, TensorSpec, WholeTensor};
    ///
    /// let folder = tempfile::tempdir()?;
    /// let path = folder.path().join("features");
    /// let device = Backend::auto()?.device(0)?;
    ///
    /// // Two ranks write, three read.
    /// let writers = Communicator::local(&[device.clone(), device.clone()])?;
    /// Communicator::on_each(&writers, |group| {
    ///     let table = WholeTensor::create(group, &TensorSpec::new(Dtype::F32, &[1000, 16]))?;
    ///     table.save(&path, SaveSpec::default(), &ignore_progress)
    /// })?;
    /// let readers = Communicator::local(&[device.clone(), device.clone(), device])?;
    /// let load = |group: &Communicator| WholeTensor::load(group, &FileSource::new(&path), &LoadSpec::default(), &ignore_progress);
    /// let tables = Communicator::on_each(&readers, load)?;
    /// assert_eq!(tables[2].shape(), [1000, 16]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::RanksDisagree`](crate::Error::RanksDisagree) if ranks call it on different tensors;
    /// [`Error::OnRank`](crate::Error::OnRank) with the [file](FileError) that could not be written, or with
    /// [`Error::Interrupted`](crate::Error::Interrupted); [`Error::Comm`](crate::Error::Comm).
    pub fn save(&self, path: &Path, spec: SaveSpec, progress: ProgressCallback<'_>) -> Result<()> {
        let comm = self.group().bootstrap();
        let is_first = comm.rank() == Rank(0);
        let own = random_save_id(path).map(words_of).map_err(Error::from);
        let ids =
            exchange_terms(comm, "save", own.map(|own| CallTerms { own, same: bytes_of(&self.identity()) }))?;
        let save = save_id_of_rank_0(&ids)?;
        let mut partial = PartialFolder::next_to(path, save);
        let on_first = |work: &mut dyn FnMut() -> Result<(), FileError>| {
            agree(comm, if is_first { work().map_err(Error::from) } else { Ok(()) })
        };
        on_first(&mut || partial.create(path, spec))?;
        agree(comm, self.write_shard(&partial.folder, save, progress))?;
        on_first(&mut || partial.publish(path, spec))
    }

    /// Writes one file of the saved tensor with this rank's rows, if the rank has any.
    fn write_shard(&self, folder: &Path, save: SaveId, progress: ProgressCallback<'_>) -> Result<()> {
        let rank = self.group().rank();
        let ranges = ranges_of(self.memory().partition(), self.first_row(), self.row_count());
        let Some(number) = ranges.iter().position(|(owner, _)| *owner == rank) else { return Ok(()) };
        let layout = SaveLayout { dtype: self.dtype(), shape: self.shape(), save, count: ranges.len() };
        let writer = ShardWriter::create(folder, layout, number, &ranges[number].1)?;
        let threads = threads_of(self.group().size());
        let start = || Ok((self.group().device().stream()?, Vec::new()));
        in_parallel(
            threads,
            &writer.blocks(),
            |block| writer.len_of(*block),
            progress,
            start,
            |block, own| {
                let (stream, buffer) = own;
                buffer.resize(to_usize(writer.len_of(*block)), 0);
                self.read_rows_on(stream, writer.shard.rows_of(*block).start, buffer)?;
                Ok(writer.write(*block, buffer)?)
            },
        )?;
        Ok(writer.finish()?)
    }
}

/// Encodes the id of a saved tensor as words, which ranks exchange.
fn words_of(id: SaveId) -> Vec<u64> {
    id.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
}

/// Decodes the id that rank 0 has chosen for the saved tensor, which all ranks use.
fn save_id_of_rank_0(ids: &[Vec<u64>]) -> Result<SaveId> {
    let id = ids.first().and_then(|words| SaveId::try_from(bytes_of(words)).ok());
    let what = "the id of its save has an invalid length";
    id.ok_or_else(|| wholemem_comm::Error::Protocol { rank: Rank(0), what }.into())
}

/// Returns the ranks that have rows of a view, with their ranges of rows. If no rank has rows, returns rank 0 with an empty
/// range, so that the shape is saved.
fn ranges_of(partition: &Partition, first: u64, rows: u64) -> Vec<(Rank, Range<u64>)> {
    let within = |row: u64| row.clamp(first, first + rows) - first;
    let ranges = (0..partition.ranks()).map(Rank).map(|rank| {
        let own = partition.range(rank);
        (rank, within(own.start)..within(own.end))
    });
    let some: Vec<_> = ranges.filter(|(_, rows)| !rows.is_empty()).collect();
    if some.is_empty() { vec![(Rank(0), 0..0)] } else { some }
}
