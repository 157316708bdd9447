//! Rows in files, as they are read: of a tensor that was saved here, or of an array that others wrote.

use std::ffi::OsStr;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Dir};
use wholemem_os::Errno;

use super::identity::{FileVersion, Identity};
use super::open::{Found, is_at, open, open_folder, open_shard};
use super::shard::{self, Digest, Shard};
use super::{FileError, FileProblem};
use super::{npy, safetensors};
use crate::Dtype;
use wholemem_os::width::to_usize;

/// Which rows to read, in which files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    path: PathBuf,
    format: Format,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Format {
    /// As the name says.
    Named,
    Raw {
        dtype: Dtype,
        row_shape: Vec<u64>,
    },
    Tensor {
        name: String,
    },
}

impl Source {
    /// What a path names: the folder of a saved tensor, a `.npy` file, or a `.safetensors` file of one tensor.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), format: Format::Named }
    }

    /// Elements one after the other and nothing else, little-endian. There are as many rows as there are in the file.
    pub fn raw(path: impl Into<PathBuf>, dtype: Dtype, row_shape: &[u64]) -> Self {
        Self { path: path.into(), format: Format::Raw { dtype, row_shape: row_shape.to_vec() } }
    }

    /// One tensor of a `.safetensors` file.
    pub fn tensor(path: impl Into<PathBuf>, name: &str) -> Self {
        Self { path: path.into(), format: Format::Tensor { name: name.to_owned() } }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Rows in files that were looked at: their type and shape are known, and all of them are there.
///
/// ```
/// use wholemem::files::{Source, Stored};
/// use wholemem::Dtype;
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("features.bin");
/// std::fs::write(&path, [0; 240])?;
/// let stored = Stored::open(&Source::raw(&path, Dtype::F32, &[10]))?;
/// assert_eq!(stored.shape(), [6, 10]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Stored {
    dtype: Dtype,
    shape: Vec<u64>,
    /// In the order of their rows, of which there are no gaps.
    parts: Vec<Part>,
}

/// A file that has some of the rows.
#[derive(Debug)]
struct Part {
    path: PathBuf,
    file: File,
    rows: Range<u64>,
    layout: Layout,
}

#[derive(Debug)]
enum Layout {
    /// One row after the other from here on.
    Plain {
        offset: u64,
        /// As it was before the first byte of it was read.
        version: FileVersion,
    },
    Checked {
        shard: Shard,
        /// Of its header.
        digest: Digest,
    },
}

/// Rows that are read at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    part: usize,
    /// All that is read.
    block: Range<u64>,
    /// What of it is wanted.
    pub(super) rows: Range<u64>,
}

impl Stored {
    /// Opens the files, and looks whether they hold what they say. Their rows are not read yet.
    ///
    /// # Errors
    /// [`FileError`], which names the file.
    pub fn open(source: &Source) -> Result<Self, FileError> {
        let path = source.path();
        let at = |problem: FileProblem| problem.at(path);
        match &source.format {
            Format::Raw { dtype, row_shape } => Self::open_raw(path, *dtype, row_shape).map_err(at),
            Format::Tensor { name } => Self::open_tensor(path, Some(name)).map_err(at),
            Format::Named if path.is_dir() => Self::open_saved(path),
            Format::Named => match path.extension().and_then(|ending| ending.to_str()) {
                Some("npy") => Self::open_npy(path).map_err(at),
                Some("safetensors") => Self::open_tensor(path, None).map_err(at),
                // Whether it is there at all comes first.
                _ => Err(at(open(CWD, path).map_or_else(|problem| problem, |_| FileProblem::UnknownKind))),
            },
        }
    }

    /// The type of the elements.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The shape, rows first.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// How many files there are.
    #[must_use]
    pub fn files(&self) -> usize {
        self.parts.len()
    }

    /// Whether the rows have checksums, which are looked at when they are read.
    #[must_use]
    pub fn is_checked(&self) -> bool {
        self.parts.iter().all(|part| matches!(part.layout, Layout::Checked { .. }))
    }

    /// How many bytes a row has.
    #[must_use]
    pub fn row_len(&self) -> u64 {
        // It fits: looked at when the files were opened.
        self.shape[1..].iter().product::<u64>() * self.dtype.len() as u64
    }

    fn open_raw(path: &Path, dtype: Dtype, row_shape: &[u64]) -> Result<Self, FileProblem> {
        let found = open(CWD, path)?;
        let len = found.len;
        let row_len = row_shape.iter().try_fold(dtype.len() as u64, |len, count| len.checked_mul(*count));
        // A length beyond all numbers saturates: no file has as many bytes.
        let row_len = row_len.unwrap_or(u64::MAX);
        let Some(rows) = len.checked_div(row_len) else { return Err(FileProblem::EmptyRow) };
        if !len.is_multiple_of(row_len) {
            return Err(FileProblem::PartialRow { len, row_len });
        }
        let shape = [&[rows], row_shape].concat();
        Self::plain(path, found, 0, dtype, shape)
    }

    fn open_npy(path: &Path) -> Result<Self, FileProblem> {
        let found = open(CWD, path)?;
        let mut front = vec![0; to_usize(found.len).min(npy::LONGEST)];
        found
            .file
            .read_exact_at(&mut front, 0)
            .map_err(|error| FileProblem::refused("read its header", &error))?;
        let header = npy::decode(&front)?;
        let shape = if header.shape.is_empty() { vec![1] } else { header.shape };
        Self::plain(path, found, header.offset, header.dtype, shape)
    }

    fn open_tensor(path: &Path, name: Option<&str>) -> Result<Self, FileProblem> {
        let found = open(CWD, path)?;
        let refused = |error| FileProblem::refused("read its header", &error);
        let mut front = [0; 8];
        found.file.read_exact_at(&mut front, 0).map_err(refused)?;
        let mut header = vec![0; safetensors::header_len(front, found.len)?];
        found.file.read_exact_at(&mut header, 8).map_err(refused)?;
        let entries = safetensors::decode(&header, found.len)?;
        let known = || entries.iter().map(|entry| entry.name.clone()).collect::<Vec<_>>();
        let entry = match (name, &entries[..]) {
            (None, [entry]) => entry,
            (None, _) => return Err(FileProblem::NotOneTensor { count: entries.len(), known: known() }),
            (Some(name), _) => match entries.iter().find(|entry| entry.name == name) {
                Some(entry) => entry,
                None => return Err(FileProblem::NoSuchTensor { name: name.to_owned(), known: known() }),
            },
        };
        Self::plain(path, found, entry.offset, entry.dtype()?, entry.rows_shape())
    }

    fn plain(
        path: &Path,
        Found { file, len, version }: Found,
        offset: u64,
        dtype: Dtype,
        shape: Vec<u64>,
    ) -> Result<Self, FileProblem> {
        // The rows' own length first: of no rows at all, any would do.
        let row_len = shape[1..].iter().try_fold(dtype.len() as u64, |len, count| len.checked_mul(*count));
        if row_len == Some(0) {
            return Err(FileProblem::EmptyRow);
        }
        let needed = row_len.and_then(|row_len| row_len.checked_mul(shape[0])?.checked_add(offset));
        let Some(_) = needed.filter(|needed| *needed <= len) else {
            // A length beyond all numbers saturates: no file has as many bytes.
            return Err(FileProblem::WrongLength { len, needed: needed.unwrap_or(u64::MAX) });
        };
        let rows = 0..shape[0];
        let parts =
            vec![Part { path: path.to_owned(), file, rows, layout: Layout::Plain { offset, version } }];
        Ok(Self { dtype, shape, parts })
    }

    fn open_saved(path: &Path) -> Result<Self, FileError> {
        let folder = open_folder(path).map_err(|problem| problem.at(path))?;
        Self::in_folder(path, &folder)
    }

    /// What an open folder holds. Another folder may be at its path by now: its files are opened by their names within it.
    pub(super) fn in_folder(path: &Path, folder: &File) -> Result<Self, FileError> {
        // A save that replaces it also removes it, file by file.
        Self::of_parts(path, folder)
            .map_err(|error| if is_at(folder, path) { error } else { FileProblem::Replaced.at(path) })
    }

    fn of_parts(folder: &Path, opened: &File) -> Result<Self, FileError> {
        let refused = |errno| FileProblem::Refused { attempt: "list it", errno }.at(folder);
        let mut found = Vec::new();
        for entry in Dir::read_from(opened).map_err(refused)? {
            let entry = entry.map_err(refused)?;
            let name = Path::new(OsStr::from_bytes(entry.file_name().to_bytes()));
            if name.extension().is_some_and(|ending| ending == super::ENDING) {
                let path = folder.join(name);
                let (file, shard, digest) =
                    open_shard(opened.as_fd(), name).map_err(|problem| problem.at(&path))?;
                found.push((path, file, shard, digest));
            }
        }
        found.sort_by_key(|(_, _, shard, _)| (shard.first_row, shard.number));
        let Some((first_path, _, first, _)) = found.first() else {
            return Err(FileProblem::Malformed { format: "saved tensor", what: "it has no parts" }.at(folder));
        };
        let (first_path, first) = (first_path.clone(), first.clone());
        let rows = first.shape[0];
        let mut next = 0;
        let mut parts = Vec::new();
        for (path, file, shard, digest) in found {
            let same = |shard: &Shard| (shard.save, shard.dtype, shard.count, shard.shape == first.shape);
            if same(&shard) != same(&first) {
                return Err(FileProblem::OtherSave { other: first_path }.at(&path));
            }
            if shard.first_row > next {
                return Err(FileProblem::MissingRows { start: next, end: shard.first_row }.at(folder));
            }
            if shard.first_row < next {
                let what = "two of its parts have the same rows";
                return Err(FileProblem::Malformed { format: "saved tensor", what }.at(folder));
            }
            next += shard.rows;
            let rows = shard.first_row..next;
            parts.push(Part { path, file, rows, layout: Layout::Checked { shard, digest } });
        }
        if next != rows {
            return Err(FileProblem::MissingRows { start: next, end: rows }.at(folder));
        }
        Ok(Self { dtype: first.dtype, shape: first.shape, parts })
    }

    /// Which save, or which version of a file, it is.
    pub(super) fn identity(&self) -> Identity {
        let digests = self.parts.iter().map(|part| match &part.layout {
            Layout::Plain { version, .. } => Err(version),
            Layout::Checked { digest, .. } => Ok(digest),
        });
        // Either all parts have checksums, or there is one without.
        digests.collect::<Result<Vec<_>, _>>().map_or_else(Identity::of_file, Identity::of_save)
    }

    /// How the bytes are read: what they are, and where they begin.
    pub(super) fn layout(&self) -> Identity {
        let kind = [u64::from(self.dtype.code())];
        let offsets = self.parts.iter().filter_map(|part| match part.layout {
            Layout::Plain { offset, .. } => Some(offset),
            Layout::Checked { .. } => None,
        });
        Identity::of_words(
            &kind.into_iter().chain(offsets).chain(self.shape.iter().copied()).collect::<Vec<_>>(),
        )
    }

    /// Whether what was read is what was opened: called after the last read. Rows with checksums are known to be, since each
    /// block was compared with its own.
    pub(super) fn check_unchanged(&self) -> Result<(), FileError> {
        self.parts.iter().try_for_each(|part| {
            let Layout::Plain { version, .. } = &part.layout else { return Ok(()) };
            match version.is_still(&part.file) {
                Ok(true) => Ok(()),
                Ok(false) => Err(FileProblem::Changed.at(&part.path)),
                Err(error) => Err(FileProblem::refused("look at it", &error).at(&part.path)),
            }
        })
    }

    /// What to read for some of the rows.
    pub(super) fn pieces(&self, rows: &Range<u64>) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for (number, part) in self.parts.iter().enumerate() {
            let wanted = rows.start.max(part.rows.start)..rows.end.min(part.rows.end);
            let mut at = wanted.start;
            while at < wanted.end {
                let block = part.block_of(at, self.row_len());
                let rows = at..block.end.min(wanted.end);
                at = rows.end;
                // Without checksums, what is not wanted need not be read.
                let block = if matches!(part.layout, Layout::Plain { .. }) { rows.clone() } else { block };
                pieces.push(Piece { part: number, block, rows });
            }
        }
        pieces
    }

    /// Reads a piece into `buffer`, and returns the bytes of its wanted rows.
    pub(super) fn read<'b>(&self, piece: &Piece, buffer: &'b mut Vec<u8>) -> Result<&'b [u8], FileError> {
        let part = &self.parts[piece.part];
        let row_len = self.row_len();
        let bytes = |rows: u64| to_usize(rows * row_len);
        let len = bytes(piece.block.end - piece.block.start);
        // A block is short, but for a row that is longer, and a file may say that of any.
        let too_long = |_| FileProblem::Refused { attempt: "read it", errno: Errno::NOMEM }.at(&part.path);
        buffer.try_reserve(len.saturating_sub(buffer.len())).map_err(too_long)?;
        buffer.resize(len, 0);
        let place = match &part.layout {
            Layout::Plain { offset, .. } => offset + piece.block.start * row_len,
            Layout::Checked { shard, .. } => shard.place_of(piece.block.start),
        };
        let refused = |error| FileProblem::refused("read it", &error).at(&part.path);
        part.file.read_exact_at(buffer, place).map_err(refused)?;
        if let Layout::Checked { shard, .. } = &part.layout {
            let block = (piece.block.start - shard.first_row) / shard.block_rows;
            let saved = usize::try_from(block).ok().and_then(|block| shard.digests.get(block));
            if saved != Some(&shard::digest(buffer)) {
                let Range { start, end } = piece.block;
                return Err(FileProblem::Corrupt { start, end }.at(&part.path));
            }
        }
        let start = bytes(piece.rows.start - piece.block.start);
        Ok(&buffer[start..start + bytes(piece.rows.end - piece.rows.start)])
    }
}

impl Part {
    /// The rows that are read together with `row`.
    fn block_of(&self, row: u64, row_len: u64) -> Range<u64> {
        match &self.layout {
            Layout::Plain { .. } => row..self.rows.end.min(row + Shard::rows_of_a_block(row_len)),
            Layout::Checked { shard, .. } => shard.rows_of((row - shard.first_row) / shard.block_rows),
        }
    }
}
