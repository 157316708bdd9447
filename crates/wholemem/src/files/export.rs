//! Operations on tensors in files that need no ranks: saving, exporting to `.npy`, and verifying checksums.

use std::fs;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;

use wholemem_os::replace::Replacement;

use super::npy;
use super::parallel::{CopyProgress, ProgressCallback, in_parallel, threads_of};
use super::stored_tensor::StoredTensor;
use super::writer::{PartialFolder, SaveLayout, SaveSpec, ShardWriter, random_save_id};
use super::{FileError, FileProblem};
use crate::{Error, Result};
use wholemem_os::width::to_usize;

impl StoredTensor {
    /// Saves the tensor in these files as a folder of `parts` files at `path`, in the format of
    /// [`WholeTensor::save`](crate::WholeTensor::save). The call needs no ranks, and does not hold the whole tensor in memory.
    ///
    /// # Errors
    /// [`Error::File`] with the file that could not be read or written, or that changed during the call; [`Error::Interrupted`].
    pub fn save(
        &self,
        path: &Path,
        parts: u32,
        spec: SaveSpec,
        progress: ProgressCallback<'_>,
    ) -> Result<()> {
        let save = random_save_id(path)?;
        let mut partial = PartialFolder::next_to(path, save);
        partial.create(path, spec)?;
        let rows = self.shape()[0];
        let parts = u64::from(parts).min(rows).max(1);
        let bound = |part: u64| {
            let bound = u128::from(rows) * u128::from(part) / u128::from(parts);
            u64::try_from(bound).expect("a bound is at most the number of rows, a `u64`")
        };
        let layout = SaveLayout { dtype: self.dtype(), shape: self.shape(), save, count: to_usize(parts) };
        let mut writers = Vec::new();
        for part in 0..parts {
            let rows = bound(part)..bound(part + 1);
            writers.push(ShardWriter::create(&partial.folder, layout, to_usize(part), &rows)?);
        }
        let blocks: Vec<_> = writers
            .iter()
            .flat_map(|writer| writer.blocks().into_iter().map(move |block| (writer, block)))
            .collect();
        let len = |(writer, block): &(&ShardWriter, u64)| writer.len_of(*block);
        let start = || Ok((Vec::new(), Vec::new()));
        in_parallel(
            threads_of(1),
            &blocks,
            len,
            progress,
            start,
            |(writer, block), (whole, piece_buffer)| {
                whole.clear();
                for read_block in self.read_blocks(&writer.shard.rows_of(*block)) {
                    whole.extend_from_slice(self.read(&read_block, piece_buffer)?);
                }
                Ok(writer.write(*block, whole)?)
            },
        )?;
        drop(blocks);
        self.check_unchanged()?;
        writers.into_iter().try_for_each(ShardWriter::finish)?;
        Ok(partial.publish(path, spec)?)
    }

    /// Reads all rows of the tensor once, and compares their checksums with the saved ones.
    ///
    /// # Errors
    /// [`Error::File`] with the rows whose checksum differs, or with [`FileProblem::Changed`] if a file without checksums has
    /// changed since it was opened; [`Error::Interrupted`].
    pub fn verify(&self, progress: ProgressCallback<'_>) -> Result<()> {
        self.for_each_block(progress, |_| Ok(()))
    }

    /// Writes all rows of the tensor to a `.npy` file. The file appears at `path` when it is complete, and replaces an existing
    /// file.
    ///
    /// # Errors
    /// As [`verify`](Self::verify), and if the file cannot be written; [`FileProblem::UnknownType`] for element types that
    /// numpy does not have; [`FileProblem::NotAFile`] if `path` is a folder or a device.
    pub fn export_npy(&self, path: &Path, progress: ProgressCallback<'_>) -> Result<()> {
        let header = npy::encode(self.dtype(), self.shape()).map_err(|problem| problem.at(path))?;
        // The path is checked before writing, because a folder cannot be replaced, and a device must not be.
        if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
            return Err(FileProblem::NotAFile.at(path).into());
        }
        let failed = |error| FileProblem::failed("write it", &error).at(path);
        let mut file = Replacement::create(path).map_err(failed)?;
        file.write_all(&header).map_err(failed)?;
        self.for_each_block(progress, |bytes| file.write_all(bytes).map_err(failed))?;
        file.file().sync_all().map_err(failed)?;
        let failed = |error| FileProblem::failed("rename it", &error).at(path);
        Ok(file.commit().map_err(failed)?)
    }

    /// Calls `consume` with the bytes of all rows of the tensor, block by block, in order.
    fn for_each_block(
        &self,
        progress: ProgressCallback<'_>,
        mut consume: impl FnMut(&[u8]) -> Result<(), FileError>,
    ) -> Result<()> {
        let total = self.shape()[0] * self.row_len();
        let (mut done, mut buffer) = (0, Vec::new());
        for read_block in self.read_blocks(&(0..self.shape()[0])) {
            let bytes = self.read(&read_block, &mut buffer)?;
            consume(bytes)?;
            done += bytes.len() as u64;
            if progress(CopyProgress { done, total }) == ControlFlow::Break(()) {
                return Err(Error::Interrupted);
            }
        }
        Ok(self.check_unchanged()?)
    }
}
