//! Tensors in files: saved and loaded by all ranks at once, and arrays that others wrote.
//!
//! ```text
//!   features/                       a saved tensor is a folder, which appears when it is complete
//!     00000-of-00003.rows           a file for each rank that had rows: a header with type, shape and
//!     00001-of-00003.rows           checksums, then the rows
//!     00002-of-00003.rows
//! ```
//!
//! What it keeps true: whatever number of ranks wrote it, any number reads it, each its own rows. A tensor is there
//! whole or not at all, whenever the writers stop. Bytes that are not those that were saved are an error that names the
//! rows. Files are hostile: what they say of themselves is looked at before it is believed.
//!
//! All ranks load the same save, or the same version of a file, or all of them fail.
//!
//! What it will not do: compress, or read parts of a tensor from a network.

mod export;
mod identity;
mod load;
pub mod npy;
mod open;
mod parallel;
pub mod safetensors;
mod save;
mod shard;
mod stored;
mod writer;

pub use load::LoadSpec;
pub use parallel::{Copied, Watch, unwatched};
pub use stored::{Source, Stored};
pub use writer::SaveSpec;

pub use crate::error::{FileError, FileProblem};

/// How the names of a saved tensor's files end.
const ENDING: &str = "rows";
