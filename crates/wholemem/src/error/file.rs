//! The errors of tensor files.

use std::io;
use std::path::{Path, PathBuf};

use wholemem_os::Errno;

/// An error of a tensor file, with its path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct FileError {
    /// The path of the file or folder.
    pub path: PathBuf,
    /// The problem.
    pub problem: FileProblem,
}

/// The problem with a tensor file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FileProblem {
    /// A system call failed.
    #[error("cannot {attempt}: {errno}")]
    SystemCall {
        /// The failed operation, as a verb phrase.
        attempt: &'static str,
        /// The error code.
        errno: Errno,
    },

    /// A folder, a pipe or a device instead of a file.
    #[error("it is not a regular file")]
    NotAFile,

    /// Rows of no bytes.
    #[error("its rows have no bytes")]
    EmptyRow,

    /// A file of unknown format.
    #[error("it is neither the folder of a saved tensor nor a .npy or .safetensors file")]
    UnknownFormat,

    /// A file that breaks the rules of its format.
    #[error("invalid {format}: {reason}")]
    Malformed {
        /// The format.
        format: &'static str,
        /// The violated rule.
        reason: &'static str,
    },

    /// An element type that tensors do not support.
    #[error("tensors do not support its element type `{name}`")]
    UnknownType {
        /// The type's name in the file.
        name: String,
    },

    /// An array in Fortran order: the first dimension varies fastest.
    #[error("it is in Fortran order, and tensors are in C order")]
    ColumnsFirst,

    /// A file that is shorter or longer than its header requires.
    #[error("it has {len} bytes, but its header requires {needed}")]
    WrongLength {
        /// Its length.
        len: u64,
        /// The length that its header requires.
        needed: u64,
    },

    /// Raw bytes that are not a whole number of rows.
    #[error("its length of {len} bytes is not a multiple of the row length of {row_len} bytes")]
    PartialRow {
        /// Its length.
        len: u64,
        /// The length of a row.
        row_len: u64,
    },

    /// A tensor that is not in the file.
    #[error("it has no tensor `{name}`: its tensors are {}", NameList(known))]
    NoSuchTensor {
        /// The requested name.
        name: String,
        /// Some of the names it has.
        known: Vec<String>,
    },

    /// A file of several tensors, or of none, without a requested name.
    #[error("it has {count} tensors: specify one of {}", NameList(known))]
    NotOneTensor {
        /// The number of tensors.
        count: usize,
        /// Some of their names.
        known: Vec<String>,
    },

    /// A missing file of a saved tensor.
    #[error("rows {start}..{end} are missing")]
    MissingRows {
        /// The first missing row.
        start: u64,
        /// The end of the range.
        end: u64,
    },

    /// A file of another saved tensor.
    #[error("it belongs to another save than {}", other.display())]
    OtherSave {
        /// Another file of the folder.
        other: PathBuf,
    },

    /// Bytes other than the saved ones.
    #[error("rows {start}..{end} are corrupt: their checksum differs")]
    Corrupt {
        /// The first row of the block.
        start: u64,
        /// The end of the range.
        end: u64,
    },

    /// A file that was written while it was read.
    #[error("the file changed while it was read")]
    Changed,

    /// A folder that was replaced or removed while its files were opened.
    #[error("it was replaced while it was opened")]
    Replaced,

    /// The path of a save exists, and overwriting is not enabled.
    #[error("it already exists")]
    AlreadyExists,

    /// The path of a save exists and is not a saved tensor, so it is not overwritten.
    #[error("it is not a saved tensor, so it is not overwritten")]
    NotASavedTensor,
}

impl FileProblem {
    pub(crate) fn at(self, path: &Path) -> FileError {
        FileError { path: path.to_owned(), problem: self }
    }

    pub(crate) fn failed(attempt: &'static str, error: &io::Error) -> Self {
        match error.kind() {
            // The file is shorter than its header requires, or was truncated after it was opened.
            io::ErrorKind::UnexpectedEof => Self::Malformed { format: "file", reason: "it ends too early" },
            _ => Self::SystemCall { attempt, errno: Errno::from_io_error(error).unwrap_or(Errno::IO) },
        }
    }
}

impl FileError {
    /// A hint for the user on how to resolve the error, if there is one.
    #[must_use]
    pub fn hint(&self) -> Option<&'static str> {
        match &self.problem {
            FileProblem::UnknownType { name } if name.starts_with('>') => {
                Some("in numpy, save `array.astype(array.dtype.newbyteorder('<'))`")
            }
            FileProblem::UnknownFormat => {
                Some("to read raw bytes, specify the element type and the shape of a row")
            }
            FileProblem::ColumnsFirst => Some("in numpy, save `numpy.ascontiguousarray(array)`"),
            FileProblem::Changed => Some("load it again while no process writes it"),
            FileProblem::Replaced => Some("load it again"),
            FileProblem::AlreadyExists => Some("enable overwriting, or save to another path"),
            FileProblem::Corrupt { .. } => Some("restore the file from a backup, and load it again"),
            _ => None,
        }
    }
}

/// Displays the first names of a list.
struct NameList<'a>(&'a [String]);

impl std::fmt::Display for NameList<'_> {
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
