//! Tensors in files: saves and loads tensors on all ranks in parallel, and reads `.npy`, `.safetensors` and raw files.
//!
//! ```text
//!   features/                       a saved tensor is a folder, which appears only when it is complete
//!     00000-of-00003.rows           a file for each rank that had rows: a header with type, shape and
//!     00001-of-00003.rows           checksums, then the rows
//!     00002-of-00003.rows
//! ```
//!
//! Guarantees: a tensor that any number of ranks saved can be loaded by any other number of ranks. Saving is atomic: if a writer
//! is killed, the folder does not appear. Bytes that differ from the saved ones are an error that names the rows. Files are
//! untrusted: headers are validated before they are used.
//!
//! All ranks load the same saved tensor, or the same version of a file, or all ranks fail.
//!
//! There is no compression, and no reading over a network.

mod export;
mod identity;
mod load;
pub mod npy;
mod open;
mod parallel;
pub mod safetensors;
mod save;
mod shard;
mod stored_tensor;
mod writer;

pub use load::LoadSpec;
pub use parallel::{CopyProgress, ProgressCallback, ignore_progress};
pub use stored_tensor::{FileSource, StoredTensor};
pub use writer::SaveSpec;

pub use crate::error::{FileError, FileProblem};

/// The extension of the files in the folder of a saved tensor.
const SHARD_EXTENSION: &str = "rows";
