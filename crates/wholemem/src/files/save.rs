//! Saving: each rank writes the rows that it has, and the folder appears when all of them are done.

use std::ops::Range;
use std::path::Path;

use wholemem_comm::Rank;

use super::FileError;
use super::parallel::{Watch, in_parallel, threads_of};
use super::writer::{Cut, Partial, SaveId, SaveSpec, ShardWriter, fresh_id};
use crate::communicator::{CallTerms, agree, bytes_of, exchange_terms};
use crate::{Error, Partition, Result, WholeTensor};
use wholemem_os::width::to_usize;

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
    ///     table.save(&path, SaveSpec::default(), &unwatched)
    /// })?;
    /// let readers = Communicator::local(&[device.clone(), device.clone(), device])?;
    /// let load = |group: &Communicator| WholeTensor::load(group, &Source::new(&path), &LoadSpec::default(), &unwatched);
    /// let tables = Communicator::on_each(&readers, load)?;
    /// assert_eq!(tables[2].shape(), [1000, 16]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Differs`](crate::Error::Differs) where ranks call it of different tensors;
    /// [`Error::OnRank`](crate::Error::OnRank) with the [file](FileError) that could not be written, or with
    /// [`Error::Interrupted`](crate::Error::Interrupted); [`Error::Comm`](crate::Error::Comm).
    pub fn save(&self, path: &Path, spec: SaveSpec, watch: Watch<'_>) -> Result<()> {
        let comm = self.group().bootstrap();
        let is_first = comm.rank() == Rank(0);
        let own = fresh_id(path).map(words_of).map_err(Error::from);
        let ids =
            exchange_terms(comm, "save", own.map(|own| CallTerms { own, same: bytes_of(&self.identity()) }))?;
        let save = id_of_first(&ids)?;
        let mut partial = Partial::beside(path, save);
        let on_first = |work: &mut dyn FnMut() -> Result<(), FileError>| {
            agree(comm, if is_first { work().map_err(Error::from) } else { Ok(()) })
        };
        on_first(&mut || partial.create(path, spec))?;
        agree(comm, self.write_shard(&partial.folder, save, watch))?;
        on_first(&mut || partial.publish(path, spec))
    }

    /// Writes this rank's rows, if it has some.
    fn write_shard(&self, folder: &Path, save: SaveId, watch: Watch<'_>) -> Result<()> {
        let rank = self.group().rank();
        let ranges = ranges_of(self.memory().partition(), self.first_row(), self.row_count());
        let Some(number) = ranges.iter().position(|(owner, _)| *owner == rank) else { return Ok(()) };
        let cut = Cut { dtype: self.dtype(), shape: self.shape(), save, count: ranges.len() };
        let writer = ShardWriter::create(folder, cut, number, &ranges[number].1)?;
        let threads = threads_of(self.group().size());
        let start = || Ok((self.group().device().stream()?, Vec::new()));
        in_parallel(
            threads,
            &writer.blocks(),
            |block| writer.len_of(*block),
            watch,
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

/// A save's id as ranks tell it to each other.
fn words_of(id: SaveId) -> Vec<u64> {
    id.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
}

/// The id of rank 0, which all ranks use.
fn id_of_first(ids: &[Vec<u64>]) -> Result<SaveId> {
    let id = ids.first().and_then(|words| SaveId::try_from(bytes_of(words)).ok());
    let what = "the id of a save has another length";
    id.ok_or_else(|| wholemem_comm::Error::Protocol { rank: Rank(0), what }.into())
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
