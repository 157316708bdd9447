//! From files to files, without ranks: exporting what others can read, and checking what was saved.

use std::fs::{self, File};
use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;

use super::error::{FileError, FileProblem};
use super::npy;
use super::parallel::{Copied, Watch};
use super::stored::Stored;
use crate::{Error, Result};

impl Stored {
    /// Reads all rows once, so that a checksum that differs is noticed.
    ///
    /// # Errors
    /// [`Error::File`] with the rows that are not what was saved; [`Error::Interrupted`].
    pub fn verify(&self, watch: Watch<'_>) -> Result<()> {
        self.each_piece(watch, |_| Ok(()))
    }

    /// Writes all rows to a new `.npy` file, which appears when it is complete and replaces what was there.
    ///
    /// # Errors
    /// As [`verify`](Self::verify), and when the file cannot be written; [`FileProblem::UnknownType`] for elements that
    /// numpy does not have.
    pub fn export_npy(&self, path: &Path, watch: Watch<'_>) -> Result<()> {
        let header = npy::encode(self.dtype(), self.shape()).map_err(|problem| problem.at(path))?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let partial = path.with_file_name(format!(".{name}.{}.partial", std::process::id()));
        let outcome = self.write_to(&partial, &header, watch).and_then(|()| {
            let refused = |error| FileProblem::refused("put it in its place", &error).at(path);
            fs::rename(&partial, path).map_err(refused).map_err(Error::from)
        });
        if outcome.is_err() {
            let _ = fs::remove_file(&partial);
        }
        outcome
    }

    fn write_to(&self, path: &Path, header: &[u8], watch: Watch<'_>) -> Result<()> {
        let refused = |error| FileProblem::refused("write it", &error).at(path);
        let mut file = File::create(path).map_err(refused)?;
        file.write_all(header).map_err(refused)?;
        self.each_piece(watch, |bytes| file.write_all(bytes).map_err(refused))?;
        Ok(file.sync_all().map_err(refused)?)
    }

    /// Reads everything, in order.
    fn each_piece(
        &self,
        watch: Watch<'_>,
        mut take: impl FnMut(&[u8]) -> Result<(), FileError>,
    ) -> Result<()> {
        let total = self.shape()[0] * self.row_len();
        let (mut done, mut buffer) = (0, Vec::new());
        for piece in self.pieces(&(0..self.shape()[0])) {
            let bytes = self.read(&piece, &mut buffer)?;
            take(bytes)?;
            done += bytes.len() as u64;
            if watch(Copied { done, total }) == ControlFlow::Break(()) {
                return Err(Error::Interrupted);
            }
        }
        Ok(())
    }
}
