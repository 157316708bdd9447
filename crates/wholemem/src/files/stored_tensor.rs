//! Reads tensors from files: saved tensors, `.npy`, `.safetensors` and raw files.

use std::ffi::OsStr;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Dir};
use wholemem_os::Errno;

use super::identity::{FileIdentity, FileVersion};
use super::open::{OpenedFile, is_at, open, open_folder, open_shard};
use super::shard::{self, Digest, Shard};
use super::{FileError, FileProblem};
use super::{npy, safetensors};
use crate::Dtype;
use wholemem_os::width::to_usize;

/// The path and format of the files from which a tensor is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileSource {
    path: PathBuf,
    format: SourceFormat,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum SourceFormat {
    /// The path determines the format of a tensor file: a folder, or the extension of a file.
    ByPath,
    Raw {
        dtype: Dtype,
        row_shape: Vec<u64>,
    },
    Tensor {
        name: String,
    },
}

impl FileSource {
    /// Creates a source whose format the path determines: the folder of a saved tensor, a `.npy` file, or a `.safetensors` file
    /// with one tensor.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), format: SourceFormat::ByPath }
    }

    /// Creates a source for a raw file: contiguous little-endian elements without a header. The length of the file determines the
    /// number of rows.
    pub fn raw(path: impl Into<PathBuf>, dtype: Dtype, row_shape: &[u64]) -> Self {
        Self { path: path.into(), format: SourceFormat::Raw { dtype, row_shape: row_shape.to_vec() } }
    }

    /// Creates a source for one tensor of a `.safetensors` file.
    pub fn tensor(path: impl Into<PathBuf>, name: &str) -> Self {
        Self { path: path.into(), format: SourceFormat::Tensor { name: name.to_owned() } }
    }

    /// Returns the path of the tensor's file or folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// A tensor in files that are open and checked: the element type and shape are known, and no row is missing. Its rows are not
/// read yet.
///
/// ```
/// use wholemem::files::{FileSource, StoredTensor};
/// use wholemem::Dtype;
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("features.bin");
/// std::fs::write(&path, [0; 240])?;
/// let stored = StoredTensor::open(&FileSource::raw(&path, Dtype::F32, &[10]))?;
/// assert_eq!(stored.shape(), [6, 10]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct StoredTensor {
    dtype: Dtype,
    shape: Vec<u64>,
    /// The open files of the tensor, in the order of their rows, without gaps.
    files: Vec<RowFile>,
}

/// An open file with some of a tensor's rows.
#[derive(Debug)]
struct RowFile {
    path: PathBuf,
    file: File,
    rows: Range<u64>,
    layout: RowLayout,
}

#[derive(Debug)]
enum RowLayout {
    /// The file has contiguous rows from `offset` on, without checksums.
    Contiguous {
        offset: u64,
        /// The version that the file had before its first byte was read.
        version: FileVersion,
    },
    /// The file is one shard of a saved tensor, with a checksum for each block of rows.
    Checksummed {
        shard: Shard,
        /// The digest of the header of the shard.
        digest: Digest,
    },
}

/// A range of a tensor's rows that one read of a file returns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ReadBlock {
    file_index: usize,
    /// The rows that are read from the file: a whole block if the block has a checksum.
    block: Range<u64>,
    /// The requested rows of the block.
    pub(super) rows: Range<u64>,
}

impl StoredTensor {
    /// Opens the files of a tensor and checks their headers and lengths, without reading rows.
    ///
    /// # Errors
    /// [`FileError`], with the path of the file.
    pub fn open(source: &FileSource) -> Result<Self, FileError> {
        let path = source.path();
        let at = |problem: FileProblem| problem.at(path);
        match &source.format {
            SourceFormat::Raw { dtype, row_shape } => Self::open_raw(path, *dtype, row_shape).map_err(at),
            SourceFormat::Tensor { name } => Self::open_tensor(path, Some(name)).map_err(at),
            SourceFormat::ByPath if path.is_dir() => Self::open_saved(path),
            SourceFormat::ByPath => match path.extension().and_then(|ending| ending.to_str()) {
                Some("npy") => Self::open_npy(path).map_err(at),
                Some("safetensors") => Self::open_tensor(path, None).map_err(at),
                // A file that does not exist is reported as missing, not as of unknown format.
                _ => Err(at(open(CWD, path).map_or_else(|problem| problem, |_| FileProblem::UnknownFormat))),
            },
        }
    }

    /// Returns the element type of the tensor.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Returns the shape of the tensor, rows first.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Returns the number of files that the tensor has.
    #[must_use]
    pub fn files(&self) -> usize {
        self.files.len()
    }

    /// Returns true if the rows in the files have checksums, which are compared when rows are read.
    #[must_use]
    pub fn is_checked(&self) -> bool {
        self.files.iter().all(|row_file| matches!(row_file.layout, RowLayout::Checksummed { .. }))
    }

    /// Returns the length of a row in bytes.
    #[must_use]
    pub fn row_len(&self) -> u64 {
        // The product does not overflow, because `open` has checked it.
        self.shape[1..].iter().product::<u64>() * self.dtype.len() as u64
    }

    fn open_raw(path: &Path, dtype: Dtype, row_shape: &[u64]) -> Result<Self, FileProblem> {
        let opened = open(CWD, path)?;
        let len = opened.len;
        let row_len = row_shape.iter().try_fold(dtype.len() as u64, |len, count| len.checked_mul(*count));
        // If the row length overflows, the maximum is used, because no file is that long.
        let row_len = row_len.unwrap_or(u64::MAX);
        let Some(rows) = len.checked_div(row_len) else { return Err(FileProblem::EmptyRow) };
        if !len.is_multiple_of(row_len) {
            return Err(FileProblem::PartialRow { len, row_len });
        }
        let shape = [&[rows], row_shape].concat();
        Self::contiguous(path, opened, 0, dtype, shape)
    }

    fn open_npy(path: &Path) -> Result<Self, FileProblem> {
        let opened = open(CWD, path)?;
        let mut front = vec![0; to_usize(opened.len).min(npy::MAX_HEADER_LEN)];
        opened
            .file
            .read_exact_at(&mut front, 0)
            .map_err(|error| FileProblem::failed("read its header", &error))?;
        let header = npy::decode(&front)?;
        let shape = if header.shape.is_empty() { vec![1] } else { header.shape };
        Self::contiguous(path, opened, header.offset, header.dtype, shape)
    }

    fn open_tensor(path: &Path, name: Option<&str>) -> Result<Self, FileProblem> {
        let opened = open(CWD, path)?;
        let failed = |error| FileProblem::failed("read its header", &error);
        let mut front = [0; 8];
        opened.file.read_exact_at(&mut front, 0).map_err(failed)?;
        let mut header = vec![0; safetensors::header_len(front, opened.len)?];
        opened.file.read_exact_at(&mut header, 8).map_err(failed)?;
        let entries = safetensors::decode(&header, opened.len)?;
        let known = || entries.iter().map(|entry| entry.name.clone()).collect::<Vec<_>>();
        let entry = match (name, &entries[..]) {
            (None, [entry]) => entry,
            (None, _) => return Err(FileProblem::NotOneTensor { count: entries.len(), known: known() }),
            (Some(name), _) => match entries.iter().find(|entry| entry.name == name) {
                Some(entry) => entry,
                None => return Err(FileProblem::NoSuchTensor { name: name.to_owned(), known: known() }),
            },
        };
        Self::contiguous(path, opened, entry.offset, entry.dtype()?, entry.shape_with_rows())
    }

    fn contiguous(
        path: &Path,
        OpenedFile { file, len, version }: OpenedFile,
        offset: u64,
        dtype: Dtype,
        shape: Vec<u64>,
    ) -> Result<Self, FileProblem> {
        // The length of a row is checked first, because zero rows of any length would pass the check of the file length.
        let row_len = shape[1..].iter().try_fold(dtype.len() as u64, |len, count| len.checked_mul(*count));
        if row_len == Some(0) {
            return Err(FileProblem::EmptyRow);
        }
        let needed = row_len.and_then(|row_len| row_len.checked_mul(shape[0])?.checked_add(offset));
        let Some(_) = needed.filter(|needed| *needed <= len) else {
            // If the needed length overflows, the maximum is reported, because no file is that long.
            return Err(FileProblem::WrongLength { len, needed: needed.unwrap_or(u64::MAX) });
        };
        let rows = 0..shape[0];
        let files = vec![RowFile {
            path: path.to_owned(),
            file,
            rows,
            layout: RowLayout::Contiguous { offset, version },
        }];
        Ok(Self { dtype, shape, files })
    }

    fn open_saved(path: &Path) -> Result<Self, FileError> {
        let folder = open_folder(path).map_err(|problem| problem.at(path))?;
        Self::in_folder(path, &folder)
    }

    /// Opens the saved tensor in an open folder. Its files are opened relative to the folder, because a concurrent call may have
    /// saved another tensor in place of the folder at `path`.
    pub(super) fn in_folder(path: &Path, folder: &File) -> Result<Self, FileError> {
        // A concurrent call that saves another tensor at `path` also removes the old folder, file by file, which may be the
        // reason of an error here.
        Self::from_shards(path, folder)
            .map_err(|error| if is_at(folder, path) { error } else { FileProblem::Replaced.at(path) })
    }

    fn from_shards(folder: &Path, opened: &File) -> Result<Self, FileError> {
        let failed = |errno| FileProblem::SystemCall { attempt: "list it", errno }.at(folder);
        let mut shards = Vec::new();
        for entry in Dir::read_from(opened).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = Path::new(OsStr::from_bytes(entry.file_name().to_bytes()));
            if name.extension().is_some_and(|ending| ending == super::SHARD_EXTENSION) {
                let path = folder.join(name);
                let (file, shard, digest) =
                    open_shard(opened.as_fd(), name).map_err(|problem| problem.at(&path))?;
                shards.push((path, file, shard, digest));
            }
        }
        shards.sort_by_key(|(_, _, shard, _)| (shard.first_row, shard.number));
        let Some((first_path, _, first, _)) = shards.first() else {
            return Err(
                FileProblem::Malformed { format: "saved tensor", reason: "it has no files" }.at(folder)
            );
        };
        let (first_path, first) = (first_path.clone(), first.clone());
        let rows = first.shape[0];
        let mut next = 0;
        let mut files = Vec::new();
        for (path, file, shard, digest) in shards {
            let same = |shard: &Shard| (shard.save, shard.dtype, shard.count, shard.shape == first.shape);
            if same(&shard) != same(&first) {
                return Err(FileProblem::OtherSave { other: first_path }.at(&path));
            }
            if shard.first_row > next {
                return Err(FileProblem::MissingRows { start: next, end: shard.first_row }.at(folder));
            }
            if shard.first_row < next {
                let what = "two of its files have the same rows";
                return Err(FileProblem::Malformed { format: "saved tensor", reason: what }.at(folder));
            }
            next += shard.rows;
            let rows = shard.first_row..next;
            files.push(RowFile { path, file, rows, layout: RowLayout::Checksummed { shard, digest } });
        }
        if next != rows {
            return Err(FileProblem::MissingRows { start: next, end: rows }.at(folder));
        }
        Ok(Self { dtype: first.dtype, shape: first.shape, files })
    }

    /// Returns the identity of the saved tensor, or of the version of the file, from which rows are read.
    pub(super) fn identity(&self) -> FileIdentity {
        let digests = self.files.iter().map(|row_file| match &row_file.layout {
            RowLayout::Contiguous { version, .. } => Err(version),
            RowLayout::Checksummed { digest, .. } => Ok(digest),
        });
        // Either all files of a tensor have checksums, or the tensor has one file without checksums.
        digests.collect::<Result<Vec<_>, _>>().map_or_else(FileIdentity::of_file, FileIdentity::of_save)
    }

    /// Returns the identity of the element type, shape and offsets with which the files are read.
    pub(super) fn layout(&self) -> FileIdentity {
        let kind = [u64::from(self.dtype.code())];
        let offsets = self.files.iter().filter_map(|row_file| match row_file.layout {
            RowLayout::Contiguous { offset, .. } => Some(offset),
            RowLayout::Checksummed { .. } => None,
        });
        FileIdentity::of_words(
            &kind.into_iter().chain(offsets).chain(self.shape.iter().copied()).collect::<Vec<_>>(),
        )
    }

    /// Checks after the last read that no file without checksums has changed since it was opened. Blocks with checksums were
    /// checked when they were read.
    pub(super) fn check_unchanged(&self) -> Result<(), FileError> {
        self.files.iter().try_for_each(|row_file| {
            let RowLayout::Contiguous { version, .. } = &row_file.layout else { return Ok(()) };
            match version.is_still(&row_file.file) {
                Ok(true) => Ok(()),
                Ok(false) => Err(FileProblem::Changed.at(&row_file.path)),
                Err(error) => Err(FileProblem::failed("read its metadata", &error).at(&row_file.path)),
            }
        })
    }

    /// Divides the read of a range of rows into blocks that are read one at a time.
    pub(super) fn read_blocks(&self, rows: &Range<u64>) -> Vec<ReadBlock> {
        let mut read_blocks = Vec::new();
        for (number, row_file) in self.files.iter().enumerate() {
            let requested = rows.start.max(row_file.rows.start)..rows.end.min(row_file.rows.end);
            let mut at = requested.start;
            while at < requested.end {
                let block = row_file.block_of(at, self.row_len());
                let rows = at..block.end.min(requested.end);
                at = rows.end;
                // In a file without checksums, only the requested rows of a block are read.
                let block = if matches!(row_file.layout, RowLayout::Contiguous { .. }) {
                    rows.clone()
                } else {
                    block
                };
                read_blocks.push(ReadBlock { file_index: number, block, rows });
            }
        }
        read_blocks
    }

    /// Reads one block of rows into `buffer`, and returns the bytes of the requested rows in the block.
    pub(super) fn read<'b>(
        &self,
        read_block: &ReadBlock,
        buffer: &'b mut Vec<u8>,
    ) -> Result<&'b [u8], FileError> {
        let row_file = &self.files[read_block.file_index];
        let row_len = self.row_len();
        let bytes = |rows: u64| to_usize(rows * row_len);
        let len = bytes(read_block.block.end - read_block.block.start);
        // A block is at most 4 MiB long unless a single row is longer. A file header may claim any row length, so the allocation
        // can fail.
        let too_long =
            |_| FileProblem::SystemCall { attempt: "read it", errno: Errno::NOMEM }.at(&row_file.path);
        buffer.try_reserve(len.saturating_sub(buffer.len())).map_err(too_long)?;
        buffer.resize(len, 0);
        let offset = match &row_file.layout {
            RowLayout::Contiguous { offset, .. } => offset + read_block.block.start * row_len,
            RowLayout::Checksummed { shard, .. } => shard.offset_of(read_block.block.start),
        };
        let failed = |error| FileProblem::failed("read it", &error).at(&row_file.path);
        row_file.file.read_exact_at(buffer, offset).map_err(failed)?;
        if let RowLayout::Checksummed { shard, .. } = &row_file.layout {
            let block = (read_block.block.start - shard.first_row) / shard.block_rows;
            let saved = usize::try_from(block).ok().and_then(|block| shard.digests.get(block));
            if saved != Some(&shard::digest(buffer)) {
                let Range { start, end } = read_block.block;
                return Err(FileProblem::Corrupt { start, end }.at(&row_file.path));
            }
        }
        let start = bytes(read_block.rows.start - read_block.block.start);
        Ok(&buffer[start..start + bytes(read_block.rows.end - read_block.rows.start)])
    }
}

impl RowFile {
    /// Returns the rows of this file's block that contains `row`.
    fn block_of(&self, row: u64, row_len: u64) -> Range<u64> {
        match &self.layout {
            RowLayout::Contiguous { .. } => row..self.rows.end.min(row + Shard::rows_of_a_block(row_len)),
            RowLayout::Checksummed { shard, .. } => shard.rows_of((row - shard.first_row) / shard.block_rows),
        }
    }
}
