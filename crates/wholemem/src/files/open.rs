//! Opens tensor files relative to an open folder, and records the version of each file before it is read.

use std::fs::{self, File};
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use rustix::fs::{Mode, OFlags};

use super::FileProblem;
use super::identity::FileVersion;
use super::shard::{DIGEST_LEN, Digest, Shard};
use wholemem_os::width::to_usize;

/// Opens the folder of a saved tensor.
pub(super) fn open_folder(path: &Path) -> Result<File, FileProblem> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::open(path, flags, Mode::empty());
    Ok(File::from(folder.map_err(|errno| FileProblem::SystemCall { attempt: "list it", errno })?))
}

/// A tensor file that is open and has not been read.
pub(super) struct OpenedFile {
    pub(super) file: File,
    pub(super) len: u64,
    pub(super) version: FileVersion,
}

/// Opens a tensor file by its name in a folder, and records its length and version.
pub(super) fn open(folder: BorrowedFd<'_>, path: &Path) -> Result<OpenedFile, FileProblem> {
    let failed = |error: io::Error| FileProblem::failed("open it", &error);
    // Without `NONBLOCK`, opening a pipe would wait for a writer.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::openat(folder, path, flags, Mode::empty());
    let file = File::from(file.map_err(|errno| failed(errno.into()))?);
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(FileProblem::NotAFile);
    }
    Ok(OpenedFile { file, len: metadata.len(), version: FileVersion::of(&metadata) })
}

/// Opens one file of a saved tensor and reads its header. Also returns the digest of the header.
pub(super) fn open_shard(folder: BorrowedFd<'_>, name: &Path) -> Result<(File, Shard, Digest), FileProblem> {
    let OpenedFile { file, len, .. } = open(folder, name)?;
    let failed = |error| FileProblem::failed("read its header", &error);
    let mut front = vec![0; to_usize(len).min(4096)];
    file.read_exact_at(&mut front, 0).map_err(failed)?;
    let header_len = Shard::len_of_header(&front)?;
    if header_len as u64 > len {
        return Err(FileProblem::WrongLength { len, needed: header_len as u64 });
    }
    let mut header = vec![0; header_len];
    file.read_exact_at(&mut header, 0).map_err(failed)?;
    let shard = Shard::decode(&header, len)?;
    let mut digest = [0; DIGEST_LEN];
    digest.copy_from_slice(&header[header_len - DIGEST_LEN..]);
    Ok((file, shard, digest))
}

/// Returns true if `path` still refers to the open folder.
pub(super) fn is_at(folder: &File, path: &Path) -> bool {
    let identity = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    let (opened, named) = (folder.metadata().map(identity), fs::metadata(path).map(identity));
    opened.is_ok_and(|opened| named.is_ok_and(|named| opened == named))
}

#[cfg(test)]
mod tests {
    use super::super::{FileSource, SaveSpec, StoredTensor, ignore_progress};
    use super::*;
    use crate::Dtype;

    /// Tests that the replacement of a folder is reported, if it happens after the folder was opened and before its files are
    /// opened.
    #[test]
    fn a_folder_replaced_while_it_is_opened_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let (raw, path) = (folder.path().join("raw"), folder.path().join("table"));
        fs::write(&raw, [7; 60]).unwrap();
        let rows = StoredTensor::open(&FileSource::raw(&raw, Dtype::U8, &[6])).unwrap();
        rows.save(&path, 3, SaveSpec::default(), &ignore_progress).unwrap();
        let opened = open_folder(&path).unwrap();
        assert!(StoredTensor::in_folder(&path, &opened).is_ok());
        rows.save(&path, 3, SaveSpec { overwrite: true }, &ignore_progress).unwrap();
        let error = StoredTensor::in_folder(&path, &opened).unwrap_err();
        assert_eq!(error, FileProblem::Replaced.at(&path));
        assert_eq!(error.hint(), Some("load it again"));

        let part = path.join("00001-of-00003.rows");
        fs::remove_file(part).unwrap();
        let error = StoredTensor::open(&FileSource::new(&path)).unwrap_err();
        assert_eq!(
            error,
            FileProblem::MissingRows { start: 3, end: 6 }.at(&path),
            "the folder was not replaced"
        );
    }
}
