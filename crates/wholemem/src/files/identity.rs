//! Identity of what is loaded: which save a folder holds, or which version of a file was opened.
//!
//! Ranks open files each by themselves, and a save may replace a folder between two of them. They compare these values
//! before they read.
//!
//! - A saved tensor is identified by the digests of its files' headers. A header holds the random id of the save and the
//!   digest of every block, which is checked when the block is read: equal identities are equal rows. Copies of a save are
//!   the same save.
//! - Any other file is identified by its device, inode, length and time of modification, taken from the open descriptor
//!   before the first byte is read and again after the last one. Ranks of a group run on one node, so that device numbers
//!   are comparable.
//!
//! A write that leaves the length and the time of modification as they were is not noticed in a file without checksums: a
//! write within one tick of the file system's clock, a later write through a shared map, or one whose time was set back.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;

/// One version of a file without checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileVersion {
    device: u64,
    inode: u64,
    len: u64,
    /// The time of modification in seconds and nanoseconds.
    modified: (i64, i64),
}

impl FileVersion {
    pub(super) fn of(found: &Metadata) -> Self {
        Self {
            device: found.dev(),
            inode: found.ino(),
            len: found.len(),
            modified: (found.mtime(), found.mtime_nsec()),
        }
    }

    /// Whether an open file is still this version.
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

/// A value that two ranks have in common only if they read the same bytes: as many words on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity([u64; Self::WORDS]);

impl Identity {
    pub(super) const WORDS: usize = 4;

    /// Of a saved tensor, by the digests of its files' headers in the order of their rows.
    pub(super) fn of_save<'a>(headers: impl IntoIterator<Item = &'a super::shard::Digest>) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("wholemem save");
        for header in headers {
            hasher.update(header);
        }
        Self::finished(&hasher)
    }

    /// Of a file without checksums.
    pub(super) fn of_file(version: &FileVersion) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("wholemem file version");
        version.hash_into(&mut hasher);
        Self::finished(&hasher)
    }

    /// Of what is made of a file's bytes: its words are hashed in order.
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
