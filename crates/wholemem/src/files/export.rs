//! From files to files, without ranks: saving what others wrote, exporting what others can read, and checking what was
//! saved.

use std::fs;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;

use wholemem_os::replace::Replacement;

use super::npy;
use super::parallel::{Copied, Watch, in_parallel, threads_of};
use super::stored::Stored;
use super::writer::{Cut, Partial, SaveSpec, ShardWriter, fresh_id};
use super::{FileError, FileProblem};
use crate::{Error, Result};
use wholemem_os::width::to_usize;

impl Stored {
    /// Saves these rows as a folder of `parts` files at `path`, as [`WholeTensor::save`](crate::WholeTensor::save) does; without ranks, and without
    /// having them all in memory.
    ///
    /// # Errors
    /// [`Error::File`] with the file that could not be read or written, or was changed meanwhile; [`Error::Interrupted`].
    pub fn save(&self, path: &Path, parts: u32, spec: SaveSpec, watch: Watch<'_>) -> Result<()> {
        let save = fresh_id(path)?;
        let mut partial = Partial::beside(path, save);
        partial.create(path, spec)?;
        let rows = self.shape()[0];
        let parts = u64::from(parts).min(rows).max(1);
        let bound = |part: u64| {
            let bound = u128::from(rows) * u128::from(part) / u128::from(parts);
            u64::try_from(bound).expect("at most the number of rows")
        };
        let cut = Cut { dtype: self.dtype(), shape: self.shape(), save, count: to_usize(parts) };
        let mut writers = Vec::new();
        for part in 0..parts {
            let rows = bound(part)..bound(part + 1);
            writers.push(ShardWriter::create(&partial.folder, cut, to_usize(part), &rows)?);
        }
        let blocks: Vec<_> = writers
            .iter()
            .flat_map(|writer| writer.blocks().into_iter().map(move |block| (writer, block)))
            .collect();
        let len = |(writer, block): &(&ShardWriter, u64)| writer.len_of(*block);
        let start = || Ok((Vec::new(), Vec::new()));
        in_parallel(threads_of(1), &blocks, len, watch, start, |(writer, block), (whole, piece_buffer)| {
            whole.clear();
            for piece in self.pieces(&writer.shard.rows_of(*block)) {
                whole.extend_from_slice(self.read(&piece, piece_buffer)?);
            }
            Ok(writer.write(*block, whole)?)
        })?;
        drop(blocks);
        self.check_unchanged()?;
        writers.into_iter().try_for_each(ShardWriter::finish)?;
        Ok(partial.publish(path, spec)?)
    }

    /// Reads all rows once, so that a checksum that differs is noticed.
    ///
    /// # Errors
    /// [`Error::File`] with the rows that are not what was saved, or [`FileProblem::Changed`] for a file without checksums
    /// that was changed since it was opened; [`Error::Interrupted`].
    pub fn verify(&self, watch: Watch<'_>) -> Result<()> {
        self.each_piece(watch, |_| Ok(()))
    }

    /// Writes all rows to a new `.npy` file, which appears when it is complete and replaces a file that was there.
    ///
    /// # Errors
    /// As [`verify`](Self::verify), and when the file cannot be written; [`FileProblem::UnknownType`] for elements that
    /// numpy does not have; [`FileProblem::NotAFile`] for a folder or a device in its place.
    pub fn export_npy(&self, path: &Path, watch: Watch<'_>) -> Result<()> {
        let header = npy::encode(self.dtype(), self.shape()).map_err(|problem| problem.at(path))?;
        // Before anything is written: a folder could not be replaced, and a device must not be.
        if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
            return Err(FileProblem::NotAFile.at(path).into());
        }
        let refused = |error| FileProblem::refused("write it", &error).at(path);
        let mut file = Replacement::create(path).map_err(refused)?;
        file.write_all(&header).map_err(refused)?;
        self.each_piece(watch, |bytes| file.write_all(bytes).map_err(refused))?;
        file.file().sync_all().map_err(refused)?;
        let refused = |error| FileProblem::refused("put it in its place", &error).at(path);
        Ok(file.commit().map_err(refused)?)
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
        Ok(self.check_unchanged()?)
    }
}
