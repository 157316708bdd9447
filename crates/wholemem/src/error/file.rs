//! The errors of tensor files.

use std::io;
use std::path::{Path, PathBuf};

use wholemem_os::Errno;

/// An error of a tensor file, with the path of the file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct FileError {
    /// The path of the file or folder.
    pub path: PathBuf,
    /// The problem with the tensor file or folder.
    pub problem: FileProblem,
}

/// The problem with a tensor file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FileProblem {
    /// A system call on a tensor file failed.
    #[error("cannot {attempt}: {errno}")]
    SystemCall {
        /// The failed operation, as a verb phrase such as "open it".
        attempt: &'static str,
        /// The error code of the system call.
        errno: Errno,
    },

    /// The path of a tensor file is a folder, a pipe or a device.
    #[error("the tensor file is not a regular file")]
    NotAFile,

    /// The rows of the tensor in a file, or the rows that the caller specified for a raw file, have a length of zero.
    #[error("the rows of the tensor in the file have a length of 0 bytes")]
    EmptyRow,

    /// The path is of no format from which tensors can be read.
    #[error("the path is neither the folder of a saved tensor nor a .npy or .safetensors file")]
    UnknownFormat,

    /// A tensor file breaks a rule of its format.
    #[error("invalid {format}: {reason}")]
    Malformed {
        /// The format of the file, such as ".npy file".
        format: &'static str,
        /// The violated rule of the format.
        reason: &'static str,
    },

    /// A tensor file has an element type that tensors do not support.
    #[error("the element type `{name}` of the file is not supported")]
    UnknownType {
        /// The name of the element type in the file.
        name: String,
    },

    /// The array in a file is in Fortran order: the first dimension varies fastest.
    #[error("the array in the file is in Fortran order, but tensors are in C order")]
    ColumnsFirst,

    /// A tensor file is shorter or longer than its header requires.
    #[error("the file has {len} bytes, but its header requires {needed}")]
    WrongLength {
        /// The length of the file in bytes.
        len: u64,
        /// The length in bytes that the file's header requires.
        needed: u64,
    },

    /// A raw tensor file does not have a whole number of rows.
    #[error("the file length of {len} bytes is not a multiple of the row length of {row_len} bytes")]
    PartialRow {
        /// The length of the raw file in bytes.
        len: u64,
        /// The length of a row in bytes.
        row_len: u64,
    },

    /// The requested tensor is not in the file.
    #[error("the file has no tensor `{name}`: its tensors are {names}", names = NameList(known))]
    NoSuchTensor {
        /// The requested name of a tensor.
        name: String,
        /// Names of tensors that the file has.
        known: Vec<String>,
    },

    /// The file has several tensors or none, and no name of a tensor was requested.
    #[error("the file has {count} tensors: specify one of {names}", names = NameList(known))]
    NotOneTensor {
        /// The number of tensors in the file.
        count: usize,
        /// Names of tensors that the file has.
        known: Vec<String>,
    },

    /// Rows of a saved tensor are missing, because one of its files is missing.
    #[error("rows {start}..{end} of the saved tensor are missing")]
    MissingRows {
        /// The first missing row of the saved tensor.
        start: u64,
        /// The end of the range of missing rows.
        end: u64,
    },

    /// A file in the folder of a saved tensor does not belong to the same saved tensor as another file of the folder.
    #[error("the file does not belong to the same saved tensor as {first}", first = other.display())]
    OtherSave {
        /// The first file of the folder, to which the file does not belong.
        other: PathBuf,
    },

    /// The bytes in a saved tensor's file differ from the bytes that were saved.
    #[error("rows {start}..{end} of the saved tensor are corrupt: their checksum differs")]
    Corrupt {
        /// The first row of the block of rows whose checksum differs.
        start: u64,
        /// The end of the block of rows whose checksum differs.
        end: u64,
    },

    /// A tensor file without checksums was modified after it was opened.
    #[error("the file was modified after it was opened")]
    Changed,

    /// The folder of a saved tensor was replaced or removed while its files were being opened.
    #[error("the saved tensor was replaced or removed while it was being opened")]
    Replaced,

    /// The path to which a tensor is saved exists, and overwriting is not enabled.
    #[error("cannot save the tensor: the path exists already")]
    AlreadyExists,

    /// The path to which a tensor is saved exists and is not a saved tensor, so it is not overwritten.
    #[error("the existing file or folder is not a saved tensor, so it is not overwritten")]
    NotASavedTensor,
}

impl FileProblem {
    pub(crate) fn at(self, path: &Path) -> FileError {
        FileError { path: path.to_owned(), problem: self }
    }

    pub(crate) fn failed(attempt: &'static str, error: &io::Error) -> Self {
        match error.kind() {
            // The tensor file is shorter than its header requires, or was truncated after it was opened.
            io::ErrorKind::UnexpectedEof => Self::Malformed { format: "file", reason: "it ends too early" },
            _ => Self::SystemCall { attempt, errno: Errno::from_io_error(error).unwrap_or(Errno::IO) },
        }
    }
}

impl FileError {
    /// Returns a hint for the user on how to resolve the error, if there is one.
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

/// Displays at most eight names of tensors.
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
