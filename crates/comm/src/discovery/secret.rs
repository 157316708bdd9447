//! [`Secret`]: the secret of a group, from a variable or a file.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;

use super::DiscoveryError;

const SECRET: &str = "WHOLEMEM_SECRET";
const SECRET_FILE: &str = "WHOLEMEM_SECRET_FILE";

/// The minimum length of a secret across nodes: a process that records a handshake can guess a shorter one.
pub const MIN_SECRET_LEN: usize = 16;

/// The maximum length of a secret's file. A longer file is certainly not a secret.
const MAX_FILE_LEN: u64 = 4096;

/// The secret of a group. `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Returns the text of the secret. It must not be logged or be on a command line.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Reads the secret from `WHOLEMEM_SECRET`, or else from the file that `WHOLEMEM_SECRET_FILE` names, without leading and
    /// trailing white space. Returns `None` if neither is set.
    pub(super) fn read(set: &impl Fn(&str) -> Option<String>) -> Result<Option<Self>, DiscoveryError> {
        let (name, text) = if let Some(text) = set(SECRET) {
            (SECRET, Ok(text))
        } else if let Some(path) = set(SECRET_FILE) {
            (SECRET_FILE, read_file(&path))
        } else {
            return Ok(None);
        };
        let bad = |problem| DiscoveryError::BadSecret { name, problem };
        let text = text.map_err(bad)?;
        let text = text.trim();
        if text.len() < MIN_SECRET_LEN {
            let len = text.len();
            return Err(bad(format!("has {len} bytes: across nodes a secret has at least {MIN_SECRET_LEN}")));
        }
        Ok(Some(Self(text.to_owned())))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Returns the text of a file that no other user can access, or the problem with it.
fn read_file(path: &str) -> Result<String, String> {
    let unreadable = |error: std::io::Error| format!("names `{path}`, which cannot be read: {error}");
    let file = File::open(path).map_err(unreadable)?;
    // The open file is checked, not the path, which could be replaced in between.
    let metadata = file.metadata().map_err(unreadable)?;
    let user = rustix::process::geteuid().as_raw();
    if metadata.is_dir() {
        return Err(format!("names `{path}`, which is a folder"));
    }
    if metadata.uid() != user && metadata.uid() != 0 {
        return Err(format!("names `{path}`, which belongs to user {}", metadata.uid()));
    }
    if metadata.mode() & 0o077 != 0 {
        let mode = metadata.mode() & 0o777;
        return Err(format!(
            "names `{path}`, which other users can access: its mode is {mode:03o} and must be 600"
        ));
    }
    let mut bytes = Vec::new();
    file.take(MAX_FILE_LEN + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > MAX_FILE_LEN {
        return Err(format!("names `{path}`, which is longer than {MAX_FILE_LEN} bytes"));
    }
    String::from_utf8(bytes).map_err(|_| format!("names `{path}`, which is not a text"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const GOOD: &str = "0123456789abcdef";

    fn from_file(path: &std::path::Path) -> Result<Option<Secret>, DiscoveryError> {
        let path = path.to_str().unwrap().to_owned();
        Secret::read(&|name: &str| (name == SECRET_FILE).then(|| path.clone()))
    }

    fn problem(result: Result<Option<Secret>, DiscoveryError>) -> String {
        match result {
            Err(DiscoveryError::BadSecret { problem, .. }) => problem,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_variable_comes_before_the_file() {
        let both = |name: &str| match name {
            SECRET => Some(format!("  {GOOD}\n")),
            SECRET_FILE => Some("/nowhere".to_owned()),
            _ => None,
        };
        assert_eq!(Secret::read(&both).unwrap().unwrap().expose(), GOOD);
        assert_eq!(Secret::read(&|_: &str| None), Ok(None));
    }

    #[test]
    fn a_file_is_refused_if_others_can_access_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        std::fs::write(&path, format!("{GOOD}\n")).unwrap();
        let chmod = |mode| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        for mode in [0o600, 0o400] {
            chmod(mode);
            assert_eq!(from_file(&path).unwrap().unwrap().expose(), GOOD);
        }
        for (mode, text) in [(0o644, "644"), (0o640, "640"), (0o620, "620"), (0o601, "601")] {
            chmod(mode);
            let expected = format!("which other users can access: its mode is {text} and must be 600");
            assert!(problem(from_file(&path)).ends_with(&expected), "{expected}");
        }
    }

    #[test]
    fn files_that_contain_no_secret_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        let write = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
            problem(from_file(&path))
        };
        assert!(write(b"").starts_with("has 0 bytes: across nodes a secret has at least 16"));
        assert!(write(&GOOD.as_bytes()[1..]).starts_with("has 15 bytes"));
        assert!(write(&[b'x'; 4097]).contains("longer than 4096 bytes"));
        assert!(write(&[0xff; 32]).contains("is not a text"));
        assert!(problem(from_file(folder.path())).contains("is a folder"));
        assert!(problem(from_file(&folder.path().join("none"))).contains("cannot be read"));
    }
}
