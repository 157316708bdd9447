//! Loads tensors from files. Each rank reads its own rows.

use wholemem_comm::{Bootstrap, Rank};

use super::FileError;
use super::identity::FileIdentity;
use super::parallel::{ProgressCallback, in_parallel, threads_of};
use super::stored_tensor::{FileSource, ReadBlock, StoredTensor};
use crate::communicator::{CallTerms, agree, exchange_terms};
use crate::{Communicator, Error, Kind, Location, Result, TensorSpec, WholeTensor};

/// The options with which a tensor is loaded from files: how the tensor is stored and divided among ranks. They must be equal on
/// all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadSpec {
    /// The way in which ranks address the tensor: as one range, or in one chunk per rank.
    pub kind: Kind,
    /// The memory in which the tensor's rows are stored: of the devices or of the host.
    pub location: Location,
    /// The number of rows of each rank; `None` to divide the rows evenly.
    pub rows_of_each: Option<Vec<u64>>,
}

impl Default for LoadSpec {
    /// Returns options for continuous device memory whose rows are divided evenly among ranks.
    fn default() -> Self {
        Self { kind: Kind::Continuous, location: Location::Device, rows_of_each: None }
    }
}

impl WholeTensor {
    /// Loads a tensor from files. Collective: each rank reads its own rows, in several threads, and reports its progress to the
    /// callback `progress`.
    ///
    /// ```
    /// use wholemem::files::{LoadSpec, FileSource, ignore_progress};
    /// use wholemem::{Backend, Communicator, Dtype, WholeTensor};
    ///
    /// let folder = tempfile::tempdir()?;
    /// let path = folder.path().join("features.bin");
    /// std::fs::write(&path, [1; 1200])?;
    ///
    /// let device = Backend::auto()?.device(0)?;
    /// let groups = Communicator::local(&[device.clone(), device])?;
    /// let source = FileSource::raw(&path, Dtype::F32, &[3]);
    /// let load = |group: &Communicator| WholeTensor::load(group, &source, &LoadSpec::default(), &ignore_progress);
    /// let tables = Communicator::on_each(&groups, load)?;
    /// assert_eq!(tables[0].shape(), [100, 3]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::SavesDiffer`] if a rank opened a different saved tensor, or a different version of the file, than rank 0, because
    /// of a concurrent save or different paths; [`Error::RanksDisagree`] if ranks interpret one file differently;
    /// [`Error::OnRank`] with the [file](FileError) that could not be read or changed during the read, or with
    /// [`Error::Interrupted`]; and as [`WholeTensor::create`]. After an error no rank has a tensor.
    pub fn load(
        group: &Communicator,
        source: &FileSource,
        spec: &LoadSpec,
        progress: ProgressCallback<'_>,
    ) -> Result<Self> {
        Self::load_opened(group, StoredTensor::open(source), spec, progress)
    }

    /// Creates a tensor and fills it from the files that this rank has opened. Collective.
    fn load_opened(
        group: &Communicator,
        opened: Result<StoredTensor, FileError>,
        spec: &LoadSpec,
        progress: ProgressCallback<'_>,
    ) -> Result<Self> {
        let comm = group.bootstrap();
        let stored = check_same_save(comm, opened)?;
        let LoadSpec { kind, location, rows_of_each } = spec.clone();
        let spec = TensorSpec::new(stored.dtype(), stored.shape());
        let tensor = Self::create(group, &TensorSpec { kind, location, rows_of_each, ..spec })?;
        agree(comm, tensor.fill(&stored, progress))?;
        Ok(tensor)
    }

    /// Reads this rank's own rows from the files into the tensor.
    fn fill(&self, stored: &StoredTensor, progress: ProgressCallback<'_>) -> Result<()> {
        let Some(own) = self.local() else { return Ok(()) };
        let read_blocks = stored.read_blocks(&own.rows);
        let len = |read_block: &ReadBlock| (read_block.rows.end - read_block.rows.start) * stored.row_len();
        let threads = threads_of(self.group().size());
        let start = || Ok((self.group().device().stream()?, Vec::new()));
        in_parallel(threads, &read_blocks, len, progress, start, |read_block, (stream, buffer)| {
            self.write_rows_on(stream, read_block.rows.start, stored.read(read_block, buffer)?)
        })?;
        Ok(stored.check_unchanged()?)
    }
}

/// Checks that all ranks opened the same version of a saved tensor or file, and returns the files that this rank opened.
/// Collective.
fn check_same_save(comm: &Bootstrap, opened: Result<StoredTensor, FileError>) -> Result<StoredTensor> {
    let opened = opened.map_err(Error::from);
    let words = |stored: &StoredTensor| {
        [stored.identity(), stored.layout()].map(|identity| identity.words()).concat()
    };
    let terms = opened.as_ref().map(|stored| CallTerms { own: words(stored), same: Vec::new() });
    let all = exchange_terms(comm, "load", terms.map_err(Clone::clone))?;
    let Some(first) = all.first() else { return opened };
    let save = |words: &[u64]| words.get(..FileIdentity::WORDS).map(<[u64]>::to_vec);
    let ranks = || (0..).map(Rank).zip(&all);
    // The identity of the opened files is compared first, because a different saved tensor may also have another type and shape.
    if let Some((rank, _)) = ranks().find(|(_, words)| save(words) != save(first)) {
        return Err(Error::SavesDiffer { rank });
    }
    match ranks().find(|(_, words)| *words != first) {
        Some((rank, _)) => Err(Error::RanksDisagree { rank }),
        None => opened,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use wholemem_hal::{Backend, HostConfig};

    use super::super::{SaveSpec, ignore_progress};
    use super::*;
    use crate::Dtype;

    fn save(path: &Path, byte: u8) {
        let raw = path.with_extension("raw");
        fs::write(&raw, [byte; 60]).unwrap();
        let rows = StoredTensor::open(&FileSource::raw(&raw, Dtype::U8, &[6])).unwrap();
        rows.save(path, 2, SaveSpec { overwrite: true }, &ignore_progress).unwrap();
    }

    /// Tests that a saved tensor is not loaded if it is replaced after rank 0 has opened its files and before rank 1 opens them.
    #[test]
    fn a_save_replaced_between_the_opens_of_two_ranks_is_not_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table");
        let backend = Backend::host(HostConfig::virtual_devices(2)).unwrap();
        let groups = Communicator::local(&[backend.device(0).unwrap(), backend.device(1).unwrap()]).unwrap();
        for source in [FileSource::new(&path), FileSource::raw(path.with_extension("raw"), Dtype::U8, &[6])] {
            let opened = [1, 2].map(|byte| {
                // The old file is removed, so that the file that replaces it has another inode.
                let _ = fs::remove_file(path.with_extension("raw"));
                save(&path, byte);
                std::sync::Mutex::new(Some(StoredTensor::open(&source)))
            });
            let load = |group: &Communicator| {
                let opened = opened[group.rank().index()].lock().unwrap().take().unwrap();
                Ok(WholeTensor::load_opened(group, opened, &LoadSpec::default(), &ignore_progress).map(drop))
            };
            let outcomes = Communicator::on_each(&groups, load).unwrap();
            assert_eq!(outcomes, vec![Err(Error::SavesDiffer { rank: Rank(1) }); 2], "{source:?}");
        }
    }
}
