//! Opens files of rows: only regular files, by name in an open folder, with the version that each had before it was read.

use std::fs::{self, File};
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use rustix::fs::{Mode, OFlags};

use super::FileProblem;
use super::identity::FileVersion;
use super::shard::{DIGEST, Digest, Shard};
use wholemem_os::width::to_usize;

/// Opens the folder of a saved tensor.
pub(super) fn open_folder(path: &Path) -> Result<File, FileProblem> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::open(path, flags, Mode::empty());
    Ok(File::from(folder.map_err(|errno| FileProblem::Refused { attempt: "list it", errno })?))
}

/// A file that was opened and not read yet.
pub(super) struct Found {
    pub(super) file: File,
    pub(super) len: u64,
    pub(super) version: FileVersion,
}

/// Opens a file by its name in a folder.
pub(super) fn open(folder: BorrowedFd<'_>, path: &Path) -> Result<Found, FileProblem> {
    let refused = |error: io::Error| FileProblem::refused("open it", &error);
    // A pipe would otherwise be waited for until somebody writes.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::openat(folder, path, flags, Mode::empty());
    let file = File::from(file.map_err(|errno| refused(errno.into()))?);
    let found = file.metadata().map_err(refused)?;
    if !found.is_file() {
        return Err(FileProblem::NotAFile);
    }
    Ok(Found { file, len: found.len(), version: FileVersion::of(&found) })
}

/// Opens a part of a saved tensor, and reads its header, whose digest is answered too.
pub(super) fn open_shard(folder: BorrowedFd<'_>, name: &Path) -> Result<(File, Shard, Digest), FileProblem> {
    let Found { file, len, .. } = open(folder, name)?;
    let refused = |error| FileProblem::refused("read its header", &error);
    let mut front = vec![0; to_usize(len).min(4096)];
    file.read_exact_at(&mut front, 0).map_err(refused)?;
    let header_len = Shard::len_of_header(&front)?;
    if header_len as u64 > len {
        return Err(FileProblem::WrongLength { len, needed: header_len as u64 });
    }
    let mut header = vec![0; header_len];
    file.read_exact_at(&mut header, 0).map_err(refused)?;
    let shard = Shard::decode(&header, len)?;
    let mut digest = [0; DIGEST];
    digest.copy_from_slice(&header[header_len - DIGEST..]);
    Ok((file, shard, digest))
}

/// Whether a folder is still the one that its path names.
pub(super) fn is_at(folder: &File, path: &Path) -> bool {
    let place = |found: fs::Metadata| (found.dev(), found.ino());
    let (opened, named) = (folder.metadata().map(place), fs::metadata(path).map(place));
    opened.is_ok_and(|opened| named.is_ok_and(|named| opened == named))
}

#[cfg(test)]
mod tests {
    use super::super::{SaveSpec, Source, Stored, unwatched};
    use super::*;
    use crate::Dtype;

    /// Between opening a folder and its files, a save puts another one in its place.
    #[test]
    fn a_folder_that_is_replaced_while_it_is_opened_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let (raw, path) = (folder.path().join("raw"), folder.path().join("table"));
        fs::write(&raw, [7; 60]).unwrap();
        let rows = Stored::open(&Source::raw(&raw, Dtype::U8, &[6])).unwrap();
        rows.save(&path, 3, SaveSpec::default(), &unwatched).unwrap();
        let opened = open_folder(&path).unwrap();
        assert!(Stored::in_folder(&path, &opened).is_ok());
        rows.save(&path, 3, SaveSpec { overwrite: true }, &unwatched).unwrap();
        let error = Stored::in_folder(&path, &opened).unwrap_err();
        assert_eq!(error, FileProblem::Replaced.at(&path));
        assert_eq!(error.hint(), Some("load it again"));

        let part = path.join("00001-of-00003.rows");
        fs::remove_file(part).unwrap();
        let error = Stored::open(&Source::new(&path)).unwrap_err();
        assert_eq!(error, FileProblem::MissingRows { start: 3, end: 6 }.at(&path), "it is in its place");
    }
}
