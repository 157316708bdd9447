//! Loading: each rank reads the rows that it has.

use wholemem_comm::{Bootstrap, Rank};

use super::FileError;
use super::identity::Identity;
use super::parallel::{Watch, in_parallel, threads_of};
use super::stored::{Piece, Source, Stored};
use crate::communicator::{CallTerms, agree, exchange_terms};
use crate::{Communicator, Error, Kind, Location, Result, TensorSpec, WholeTensor};

/// How a tensor is to be divided among the ranks that load it. It is the same on all of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadSpec {
    /// How ranks see it.
    pub kind: Kind,
    /// Where its bytes are.
    pub location: Location,
    /// How many rows each rank has; evenly shared out if not given.
    pub rows_of_each: Option<Vec<u64>>,
}

impl Default for LoadSpec {
    /// Continuous memory of the ranks' devices, evenly shared out.
    fn default() -> Self {
        Self { kind: Kind::Continuous, location: Location::Device, rows_of_each: None }
    }
}

impl WholeTensor {
    /// Makes a tensor of rows in files. Collective: each rank reads the rows that it has, several at a time, and `watch`
    /// is told how far it has come with them.
    ///
    /// ```
    /// use wholemem::files::{LoadSpec, Source, unwatched};
    /// use wholemem::{Backend, Communicator, Dtype, WholeTensor};
    ///
    /// let folder = tempfile::tempdir()?;
    /// let path = folder.path().join("features.bin");
    /// std::fs::write(&path, [1; 1200])?;
    ///
    /// let device = Backend::auto()?.device(0)?;
    /// let groups = Communicator::local(&[device.clone(), device])?;
    /// let source = Source::raw(&path, Dtype::F32, &[3]);
    /// let load = |group: &Communicator| WholeTensor::load(group, &source, &LoadSpec::default(), &unwatched);
    /// let tables = Communicator::on_each(&groups, load)?;
    /// assert_eq!(tables[0].shape(), [100, 3]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::SavesDiffer`] where a rank opened another save, or another version of the file, than rank 0: one was saved
    /// in between, or the paths differ; [`Error::Differs`] where ranks read one file differently; [`Error::OnRank`] with the
    /// [file](FileError) that could not be read, or was changed while it was, or with [`Error::Interrupted`]; and as
    /// [`WholeTensor::create`]. Then there is no tensor on any rank.
    pub fn load(group: &Communicator, source: &Source, spec: &LoadSpec, watch: Watch<'_>) -> Result<Self> {
        Self::load_opened(group, Stored::open(source), spec, watch)
    }

    /// Makes a tensor of what this rank has opened.
    fn load_opened(
        group: &Communicator,
        opened: Result<Stored, FileError>,
        spec: &LoadSpec,
        watch: Watch<'_>,
    ) -> Result<Self> {
        let comm = group.bootstrap();
        let stored = on_one_save(comm, opened)?;
        let LoadSpec { kind, location, rows_of_each } = spec.clone();
        let spec = TensorSpec::new(stored.dtype(), stored.shape());
        let tensor = Self::create(group, &TensorSpec { kind, location, rows_of_each, ..spec })?;
        agree(comm, tensor.fill(&stored, watch))?;
        Ok(tensor)
    }

    /// Reads this rank's own rows.
    fn fill(&self, stored: &Stored, watch: Watch<'_>) -> Result<()> {
        let Some(own) = self.local() else { return Ok(()) };
        let pieces = stored.pieces(&own.rows);
        let len = |piece: &Piece| (piece.rows.end - piece.rows.start) * stored.row_len();
        let threads = threads_of(self.group().size());
        let start = || Ok((self.group().device().stream()?, Vec::new()));
        in_parallel(threads, &pieces, len, watch, start, |piece, (stream, buffer)| {
            self.write_rows_on(stream, piece.rows.start, stored.read(piece, buffer)?)
        })?;
        Ok(stored.check_unchanged()?)
    }
}

/// What this rank opened, if all ranks opened the same. Collective.
fn on_one_save(comm: &Bootstrap, opened: Result<Stored, FileError>) -> Result<Stored> {
    let opened = opened.map_err(Error::from);
    let words =
        |stored: &Stored| [stored.identity(), stored.layout()].map(|identity| identity.words()).concat();
    let terms = opened.as_ref().map(|stored| CallTerms { own: words(stored), same: Vec::new() });
    let all = exchange_terms(comm, "load", terms.map_err(Clone::clone))?;
    let Some(first) = all.first() else { return opened };
    let save = |words: &[u64]| words.get(..Identity::WORDS).map(<[u64]>::to_vec);
    let ranks = || (0..).map(Rank).zip(&all);
    // Another save may hold another tensor, so it is compared first.
    if let Some((rank, _)) = ranks().find(|(_, words)| save(words) != save(first)) {
        return Err(Error::SavesDiffer { rank });
    }
    match ranks().find(|(_, words)| *words != first) {
        Some((rank, _)) => Err(Error::Differs { rank }),
        None => opened,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use wholemem_hal::{Backend, HostConfig};

    use super::super::{SaveSpec, unwatched};
    use super::*;
    use crate::Dtype;

    fn save(path: &Path, byte: u8) {
        let raw = path.with_extension("raw");
        fs::write(&raw, [byte; 60]).unwrap();
        let rows = Stored::open(&Source::raw(&raw, Dtype::U8, &[6])).unwrap();
        rows.save(path, 2, SaveSpec { overwrite: true }, &unwatched).unwrap();
    }

    /// Rank 0 opens a save, which is replaced before rank 1 opens it.
    #[test]
    fn a_save_that_is_replaced_between_two_ranks_is_loaded_by_neither() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table");
        let backend = Backend::host(HostConfig::virtual_devices(2)).unwrap();
        let groups = Communicator::local(&[backend.device(0).unwrap(), backend.device(1).unwrap()]).unwrap();
        for source in [Source::new(&path), Source::raw(path.with_extension("raw"), Dtype::U8, &[6])] {
            let opened = [1, 2].map(|byte| {
                // Whoever replaces a file by another one makes a new file.
                let _ = fs::remove_file(path.with_extension("raw"));
                save(&path, byte);
                std::sync::Mutex::new(Some(Stored::open(&source)))
            });
            let load = |group: &Communicator| {
                let opened = opened[group.rank().index()].lock().unwrap().take().unwrap();
                Ok(WholeTensor::load_opened(group, opened, &LoadSpec::default(), &unwatched).map(drop))
            };
            let outcomes = Communicator::on_each(&groups, load).unwrap();
            assert_eq!(outcomes, vec![Err(Error::SavesDiffer { rank: Rank(1) }); 2], "{source:?}");
        }
    }
}
