//! The identity of opened tensor files: of the saved tensor in a folder, or of the version of a file.
//!
//! Each rank opens files by itself, and a concurrent save may replace a folder between the calls of two ranks. Ranks compare
//! identities before they read.
//!
//! - A saved tensor is identified by the digests of its files' headers. A header holds the random id of the saved tensor and the
//!   digest of every block, which is checked when the block is read, so equal identities imply equal rows. A copy of a saved
//!   tensor has the same identity.
//! - Any other file is identified by its device, inode, length and time of modification, which are read from the open descriptor
//!   before the first byte and again after the last one. Ranks of a group run on one node, so device numbers are comparable.
//!
//! In a file without checksums, a write that changes neither the length nor the time of modification is not detected: a write
//! within one tick of the file system's clock, a later write through a shared mapping, or a write after which the time is reset.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;

/// The version of a tensor file that has no checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileVersion {
    device: u64,
    inode: u64,
    len: u64,
    /// The time of the file's last modification in seconds and nanoseconds.
    modified: (i64, i64),
}

impl FileVersion {
    pub(super) fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            len: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        }
    }

    /// Returns true if an open file still has this version.
    pub(super) fn is_still(&self, file: &File) -> io::Result<bool> {
        Ok(Self::of(&file.metadata()?) == *self)
    }

    fn hash_into(&self, hasher: &mut blake3::Hasher) {
        let Self { device, inode, len, modified: (seconds, nanoseconds) } = *self;
        for word in [device, inode, len] {
            hasher.update(&word.to_le_bytes());
        }
        for word in [seconds, nanoseconds] {
            hasher.update(&word.to_le_bytes());
        }
    }
}

/// A hash that is equal on two ranks only if they read the same bytes from tensor files. It has the same number of words on all
/// ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileIdentity([u64; Self::WORDS]);

impl FileIdentity {
    pub(super) const WORDS: usize = 4;

    /// Returns the identity of a saved tensor: a hash of the digests of the headers of its files, in the order of the files'
    /// rows.
    pub(super) fn of_save<'a>(headers: impl IntoIterator<Item = &'a super::shard::Digest>) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("wholemem save");
        for header in headers {
            hasher.update(header);
        }
        Self::finished(&hasher)
    }

    /// Returns the identity of a tensor file without checksums.
    pub(super) fn of_file(version: &FileVersion) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("wholemem file version");
        version.hash_into(&mut hasher);
        Self::finished(&hasher)
    }

    /// Returns the identity of the element type, shape and offsets with which a file is read: a hash of `words` in order.
    pub(super) fn of_words(words: &[u64]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("wholemem layout of rows");
        for word in words {
            hasher.update(&word.to_le_bytes());
        }
        Self::finished(&hasher)
    }

    pub(super) fn words(&self) -> [u64; Self::WORDS] {
        self.0
    }

    fn finished(hasher: &blake3::Hasher) -> Self {
        let hash = hasher.finalize();
        let (words, _) = hash.as_bytes().as_chunks::<8>();
        Self(std::array::from_fn(|n| u64::from_le_bytes(words[n])))
    }
}
