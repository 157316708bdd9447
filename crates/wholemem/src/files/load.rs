//! Loading: each rank reads the rows that it has.

use super::parallel::{Watch, in_parallel, threads_of};
use super::stored::{Piece, Source, Stored};
use crate::verdict::agree;
use crate::{Group, Kind, Location, Result, TensorSpec, WholeTensor};

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
    /// use wholemem::{Dtype, Group, WholeTensor};
    /// use wholemem_hal::Backend;
    ///
    /// let folder = tempfile::tempdir()?;
    /// let path = folder.path().join("features.bin");
    /// std::fs::write(&path, [1; 1200])?;
    ///
    /// let device = Backend::auto()?.device(0)?;
    /// let groups = Group::local(&[device.clone(), device])?;
    /// let source = Source::raw(&path, Dtype::F32, &[3]);
    /// let load = |group: &Group| WholeTensor::load(group, &source, &LoadSpec::default(), &unwatched);
    /// let tables = Group::on_each(&groups, load)?;
    /// assert_eq!(tables[0].shape(), [100, 3]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::OnRank`](crate::Error::OnRank) with the [file](super::FileError) that could not be read, or with
    /// [`Error::Interrupted`](crate::Error::Interrupted), and as [`WholeTensor::create`]. Then there is no tensor on any
    /// rank.
    pub fn load(group: &Group, source: &Source, spec: &LoadSpec, watch: Watch<'_>) -> Result<Self> {
        let comm = group.communicator();
        let stored = agree(comm, Stored::open(source).map_err(Into::into))?;
        let LoadSpec { kind, location, rows_of_each } = spec.clone();
        let (meaning, spec) = (stored.meaning(), TensorSpec::new(stored.dtype(), stored.shape()));
        let tensor = Self::create(group, &TensorSpec { meaning, kind, location, rows_of_each, ..spec })?;
        agree(comm, tensor.fill(&stored, watch))?;
        Ok(tensor)
    }

    /// Reads this rank's own rows.
    fn fill(&self, stored: &Stored, watch: Watch<'_>) -> Result<()> {
        let Some(own) = self.local()? else { return Ok(()) };
        let pieces = stored.pieces(&own.rows);
        let len = |piece: &Piece| (piece.rows.end - piece.rows.start) * stored.row_len();
        let threads = threads_of(self.group().size());
        let start = || Ok((self.group().device().stream()?, Vec::new()));
        in_parallel(threads, &pieces, len, watch, start, |piece, (stream, buffer)| {
            self.write_rows(stream, piece.rows.start, stored.read(piece, buffer)?)
        })
    }
}
