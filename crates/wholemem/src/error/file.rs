//! The errors of files of tensors.

use std::io;
use std::path::{Path, PathBuf};

use wholemem_os::Errno;

/// An error of a file of rows, with its path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct FileError {
    /// The file, or the folder.
    pub path: PathBuf,
    /// The error.
    pub problem: FileProblem,
}

/// The error of a file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FileProblem {
    /// A system call failed.
    #[error("cannot {attempt}: {errno}")]
    Refused {
        /// What it attempted.
        attempt: &'static str,
        /// The error code.
        errno: Errno,
    },

    /// A folder, a pipe or a device instead of a file.
    #[error("it is no file")]
    NotAFile,

    /// Rows of no bytes.
    #[error("its rows have no bytes, and no tensor has such")]
    EmptyRow,

    /// A file of unknown format.
    #[error("it is no folder of a saved tensor, and its name ends neither in .npy nor in .safetensors")]
    UnknownKind,

    /// A file that breaks the rules of its format.
    #[error("it is no {format}: {what}")]
    Malformed {
        /// The format.
        format: &'static str,
        /// The violated rule.
        what: &'static str,
    },

    /// Elements of a type that tensors do not have.
    #[error("its elements are `{name}`, which no tensor holds")]
    UnknownType {
        /// The type's name in the file.
        name: String,
    },

    /// An array whose first dimension is not the slowest.
    #[error("its columns, not its rows, are stored one after the other")]
    ColumnsFirst,

    /// A file that is shorter or longer than its header says.
    #[error("it has {len} bytes, and what it holds takes {needed}")]
    WrongLength {
        /// Its length.
        len: u64,
        /// The length that its header says.
        needed: u64,
    },

    /// Raw bytes that are not a whole number of rows.
    #[error("its {len} bytes are no whole number of rows of {row_len} bytes")]
    PartialRow {
        /// Its length.
        len: u64,
        /// The length of a row.
        row_len: u64,
    },

    /// A tensor that is not in the file.
    #[error("it has no tensor `{name}`, but {}", Names(known))]
    NoSuchTensor {
        /// The requested name.
        name: String,
        /// Some of the names it has.
        known: Vec<String>,
    },

    /// A file of several tensors, or of none, without a requested name.
    #[error("it has {count} tensors: name one of {}", Names(known))]
    NotOneTensor {
        /// The number of tensors.
        count: usize,
        /// Some of their names.
        known: Vec<String>,
    },

    /// A missing part of a saved tensor.
    #[error("rows {start}..{end} are missing")]
    MissingRows {
        /// The first missing row.
        start: u64,
        /// The end of the range.
        end: u64,
    },

    /// A part of another saved tensor.
    #[error("it is of another save than {}", other.display())]
    OtherSave {
        /// A file of the tensor with which it was found.
        other: PathBuf,
    },

    /// Bytes other than the saved ones.
    #[error("rows {start}..{end} are not what was saved: their checksum differs")]
    Corrupt {
        /// The first row of the block.
        start: u64,
        /// The end of the range.
        end: u64,
    },

    /// A file that was written while it was read.
    #[error("it was changed while it was read")]
    Changed,

    /// A folder that was replaced or removed while its files were opened.
    #[error("it was replaced while it was opened")]
    Replaced,

    /// A tensor is saved only where nothing is, unless overwriting is asked for.
    #[error("something is there already")]
    AlreadyThere,

    /// Something other than a saved tensor is not replaced.
    #[error("it is no saved tensor, and is not replaced by one")]
    NotReplaced,
}

impl FileProblem {
    pub(crate) fn at(self, path: &Path) -> FileError {
        FileError { path: path.to_owned(), problem: self }
    }

    pub(crate) fn refused(attempt: &'static str, error: &io::Error) -> Self {
        match error.kind() {
            // A file that ends before what it says it holds, or was cut since it was looked at.
            io::ErrorKind::UnexpectedEof => {
                Self::Malformed { format: "whole file", what: "it ends too early" }
            }
            _ => Self::Refused { attempt, errno: Errno::from_io_error(error).unwrap_or(Errno::IO) },
        }
    }
}

impl FileError {
    /// What the user can do about it, if something can be done.
    #[must_use]
    pub fn hint(&self) -> Option<&'static str> {
        match &self.problem {
            FileProblem::UnknownType { name } if name.starts_with('>') => {
                Some("in numpy, save `array.astype(array.dtype.newbyteorder('<'))`")
            }
            FileProblem::UnknownKind => {
                Some("raw bytes need the type of their elements and the shape of a row")
            }
            FileProblem::ColumnsFirst => Some("in numpy, save `numpy.ascontiguousarray(array)`"),
            FileProblem::Changed => Some("load it again when no process writes it"),
            FileProblem::Replaced => Some("load it again"),
            FileProblem::AlreadyThere => Some("ask for overwriting, or save elsewhere"),
            FileProblem::Corrupt { .. } => {
                Some("the medium or a copy of it is at fault: restore it and load again")
            }
            _ => None,
        }
    }
}

/// Displays a few names as a list.
struct Names<'a>(&'a [String]);

impl std::fmt::Display for Names<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const SHOWN: usize = 8;
        if self.0.is_empty() {
            return f.write_str("none");
        }
        for (n, name) in self.0.iter().take(SHOWN).enumerate() {
            write!(f, "{}`{name}`", if n == 0 { "" } else { ", " })?;
        }
        if self.0.len() > SHOWN { write!(f, " and {} more", self.0.len() - SHOWN) } else { Ok(()) }
    }
}
