//! What the ranks of a group have in common before they meet: where to look for each other, and a secret.
//!
//! One process makes a [`UniqueId`] and gives its text to the others, by a pipe, an environment variable or a file
//! that only they can read: whoever knows it can join. From the id and a rank follows the address at which that rank
//! listens, by a hash that strangers cannot compute.

use std::fmt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use wholemem_os::packet::Address;
use wholemem_os::{Errno, Error as OsError};

use crate::{Error, Rank, Result};

/// Names the folder that sockets are made in.
pub(crate) const SOCKET_DIR: &str = "WHOLEMEM_SOCKET_DIR";

const PREFIX: &str = "wm1";

/// The longest text of an id.
const LONGEST: usize = 128;

/// An address that strangers can guess is no harm, but it could be taken before its owner comes.
const ADDRESS_CONTEXT: &str = "wholemem 2026-11 address of a rank";
const STAND_IN_CONTEXT: &str = "wholemem 2026-11 address of a dead rank's stand-in";
const PROOF_CONTEXT: &str = "wholemem 2026-11 proof of the secret";
const CHILD_CONTEXT: &str = "wholemem 2026-11 id of a part of a group";

/// What the ranks of one group have in common before they meet. Whoever knows it can join.
///
/// Its text is at most 128 bytes of one line. `Debug` hides the secret; `Display` is the text itself.
///
/// ```
/// use wholemem_comm::UniqueId;
///
/// let id = UniqueId::create()?;
/// let text = id.to_string(); // give this to the other ranks, and to nobody else
/// assert!(text.len() <= 128);
/// assert_eq!(text.parse::<UniqueId>()?, id);
/// # Ok::<(), wholemem_comm::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct UniqueId {
    home: Home,
    nonce: [u8; 8],
    /// All zero: there is none, and only processes of the same user are believed.
    secret: [u8; 16],
}

/// Where the sockets of a group are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Home {
    /// Files in a folder.
    Folder(PathBuf),
    /// Abstract names in the network namespace with this number.
    Namespace(u64),
}

/// The key of all proofs of a group.
#[derive(Clone)]
pub(crate) struct Key([u8; 32]);

impl Key {
    pub(crate) fn hasher(&self) -> blake3::Hasher {
        blake3::Hasher::new_keyed(&self.0)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

impl UniqueId {
    /// Makes a new id. Its sockets will be files in `WHOLEMEM_SOCKET_DIR` where that is set, so that ranks in other
    /// network namespaces can join, and abstract names otherwise.
    ///
    /// # Errors
    /// [`Error::SocketDir`] when the folder is another user's, or open to others, or its path is too long.
    pub fn create() -> Result<Self> {
        match std::env::var_os(SOCKET_DIR) {
            Some(folder) => Self::create_in(Path::new(&folder)),
            None => Self::create_private(),
        }
    }

    /// Makes a new id whose sockets will be files in `folder`, which is made if it is not there.
    ///
    /// # Errors
    /// [`Error::SocketDir`] when the folder is another user's, or open to others, or its path is too long.
    pub fn create_in(folder: &Path) -> Result<Self> {
        Ok(Self { home: Home::in_folder(folder)?, nonce: random()?, secret: random()? })
    }

    /// Makes a new id with abstract names.
    pub(crate) fn create_private() -> Result<Self> {
        Ok(Self { home: Home::here()?, nonce: random()?, secret: random()? })
    }

    /// An id that follows from a text which all ranks know, with a secret or without.
    pub(crate) fn agreed(home: Home, text: &str, secret: Option<&str>) -> Self {
        let hash = |what: &str, of: &str| {
            let mut hasher = blake3::Hasher::new_derive_key(CHILD_CONTEXT);
            hasher.update(what.as_bytes()).update(of.as_bytes());
            *hasher.finalize().as_bytes()
        };
        let nonce = hash("nonce", text);
        let secret = secret.map(|secret| hash("secret", secret));
        Self {
            home,
            nonce: std::array::from_fn(|n| nonce[n]),
            secret: secret.map_or([0; 16], |secret| std::array::from_fn(|n| secret[n])),
        }
    }

    /// The id of a part of the group, which all members can compute and nobody else.
    pub(crate) fn part(&self, split: u64, color: u32) -> Self {
        let mut hasher = self.derive(CHILD_CONTEXT);
        hasher.update(&split.to_le_bytes()).update(&color.to_le_bytes());
        let mut bytes = [0; 24];
        hasher.finalize_xof().fill(&mut bytes);
        let secret: [u8; 16] = std::array::from_fn(|n| bytes[8 + n]);
        Self {
            home: self.home.clone(),
            nonce: std::array::from_fn(|n| bytes[n]),
            secret: if self.has_secret() { secret } else { self.secret },
        }
    }

    /// Whether the ranks prove themselves by a secret. Otherwise they believe their own user.
    pub(crate) fn has_secret(&self) -> bool {
        self.secret != [0; 16]
    }

    pub(crate) fn key(&self) -> Key {
        Key(*self.derive(PROOF_CONTEXT).finalize().as_bytes())
    }

    /// Where a rank listens for its children.
    pub(crate) fn address(&self, rank: Rank) -> Address {
        self.address_in(ADDRESS_CONTEXT, rank)
    }

    /// Where another rank listens for the children of a rank that died while the group came together.
    ///
    /// It is not the dead rank's own address: the kernel may take long to close that, and a forked child may keep it.
    pub(crate) fn stand_in_address(&self, dead: Rank) -> Address {
        self.address_in(STAND_IN_CONTEXT, dead)
    }

    fn address_in(&self, context: &str, rank: Rank) -> Address {
        let mut hasher = self.derive(context);
        hasher.update(&rank.0.to_le_bytes());
        let name = format!("wm-{}", hex(&hasher.finalize().as_bytes()[..8]));
        match &self.home {
            Home::Folder(folder) => Address::Path(folder.join(name)),
            Home::Namespace(_) => Address::Abstract(name.into_bytes()),
        }
    }

    /// Whether this process can reach the others at all.
    pub(crate) fn check_home(&self, rank: Rank) -> Result<()> {
        match &self.home {
            Home::Folder(folder) => check_folder(folder),
            home if Home::here()? != *home => Err(Error::OtherNamespace { rank }),
            Home::Namespace(_) => Ok(()),
        }
    }

    fn derive(&self, context: &str) -> blake3::Hasher {
        let mut hasher = blake3::Hasher::new_derive_key(context);
        hasher.update(&self.nonce).update(&self.secret);
        hasher
    }
}

impl Home {
    /// The network namespace of this process.
    pub(crate) fn here() -> Result<Self> {
        let namespace = rustix::fs::stat("/proc/self/ns/net");
        let namespace = namespace.map_err(|errno| OsError::Call { call: "stat", errno })?;
        Ok(Self::Namespace(namespace.st_ino))
    }

    pub(crate) fn in_folder(folder: &Path) -> Result<Self> {
        const LONGEST_FOLDER: usize =
            LONGEST - "wm1-0123456789abcdef-0123456789abcdef0123456789abcdef-d".len();
        let problem = |problem| Error::SocketDir { path: folder.display().to_string(), problem };
        let text = folder.to_str().ok_or_else(|| problem("is not UTF-8"))?;
        if !folder.is_absolute() || text.contains('\n') {
            return Err(problem("is not an absolute path"));
        }
        if text.len() > LONGEST_FOLDER {
            return Err(problem("is longer than 73 bytes"));
        }
        match std::fs::DirBuilder::new().mode(0o700).create(folder) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                // An error without a number is that of a path with a zero byte.
                let errno = Errno::from_io_error(&error).unwrap_or(Errno::INVAL);
                return Err(OsError::Call { call: "mkdir", errno }.into());
            }
            _ => {}
        }
        check_folder(folder)?;
        Ok(Self::Folder(folder.to_owned()))
    }
}

fn check_folder(folder: &Path) -> Result<()> {
    let problem = |problem| Err(Error::SocketDir { path: folder.display().to_string(), problem });
    match std::fs::metadata(folder) {
        Err(_) => problem("cannot be reached from here"),
        Ok(found) if !found.is_dir() => problem("is no folder"),
        Ok(found) if found.uid() != rustix::process::geteuid().as_raw() => problem("belongs to another user"),
        Ok(found) if found.mode() & 0o077 != 0 => problem("is open to other users: its mode must be 0700"),
        Ok(_) => Ok(()),
    }
}

impl fmt::Display for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}-{}-{}-", hex(&self.nonce), hex(&self.secret))?;
        match &self.home {
            Home::Folder(folder) => write!(f, "d{}", folder.display()),
            Home::Namespace(number) => write!(f, "n{number:x}"),
        }
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UniqueId")
            .field("home", &self.home)
            .field("nonce", &hex(&self.nonce))
            .finish_non_exhaustive()
    }
}

impl FromStr for UniqueId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = |what| Error::BadId { what };
        if text.len() > LONGEST {
            return Err(bad("length"));
        }
        let mut parts = text.splitn(4, '-');
        if parts.next() != Some(PREFIX) {
            return Err(bad("version"));
        }
        let nonce = parts.next().and_then(unhex).ok_or_else(|| bad("nonce"))?;
        let secret = parts.next().and_then(unhex).ok_or_else(|| bad("secret"))?;
        let home = parts.next().unwrap_or_default();
        let home = match home.split_at_checked(1) {
            Some(("d", folder)) if folder.starts_with('/') && !folder.contains('\n') => {
                Home::Folder(folder.into())
            }
            Some(("n", number)) => {
                Home::Namespace(u64::from_str_radix(number, 16).map_err(|_| bad("namespace"))?)
            }
            _ => return Err(bad("address")),
        };
        Ok(Self { home, nonce, secret })
    }
}

/// Numbers that nobody can foresee.
pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(more) => filled += more,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(OsError::Call { call: "getrandom", errno }.into()),
        }
    }
    Ok(bytes)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    if text.len() != 2 * N || !text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn an_id_survives_its_text_and_shows_its_secret_only_there() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
        for id in [UniqueId::create_private().unwrap(), UniqueId::create_in(folder.path()).unwrap()] {
            let text = id.to_string();
            assert!(text.len() <= LONGEST, "{text}");
            assert_eq!(text.parse(), Ok(id.clone()));
            let secret = hex(&id.secret);
            assert!(text.contains(&secret));
            assert!(!format!("{id:?} {:?}", id.key()).contains(&secret));
        }
    }

    #[test]
    fn malformed_texts_say_which_part_is_wrong() {
        let good = "wm1-0123456789abcdef-0123456789abcdef0123456789abcdef-n1";
        assert!(good.parse::<UniqueId>().is_ok());
        for (text, what) in [
            ("", "version"),
            ("wm2-0123456789abcdef-0123456789abcdef0123456789abcdef-n1", "version"),
            ("wm1-0123456789abcde-0123456789abcdef0123456789abcdef-n1", "nonce"),
            ("wm1-0123456789ABCDEF-0123456789abcdef0123456789abcdef-n1", "nonce"),
            ("wm1-0123456789abcdef-01-n1", "secret"),
            ("wm1-0123456789abcdef-0123456789abcdef0123456789abcdef", "address"),
            ("wm1-0123456789abcdef-0123456789abcdef0123456789abcdef-drelative", "address"),
            ("wm1-0123456789abcdef-0123456789abcdef0123456789abcdef-nx", "namespace"),
        ] {
            assert_eq!(text.parse::<UniqueId>(), Err(Error::BadId { what }), "{text}");
        }
        assert_eq!("x".repeat(129).parse::<UniqueId>(), Err(Error::BadId { what: "length" }));
    }

    #[test]
    fn a_folder_that_is_open_to_others_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o750)).unwrap();
        let error = UniqueId::create_in(folder.path()).unwrap_err();
        assert!(matches!(error, Error::SocketDir { problem, .. } if problem.contains("0700")), "{error}");
        let long = format!("/{}", "x".repeat(80));
        let error = UniqueId::create_in(Path::new(&long)).unwrap_err();
        assert!(matches!(error, Error::SocketDir { problem: "is longer than 73 bytes", .. }), "{error}");
    }

    #[test]
    fn addresses_differ_by_rank_and_id_and_parts_have_secrets_of_their_own() {
        let id = UniqueId::create_private().unwrap();
        assert_ne!(id.address(Rank(0)), id.address(Rank(1)));
        assert_ne!(id.address(Rank(0)), UniqueId::create_private().unwrap().address(Rank(0)));
        assert_eq!(id.part(3, 1), id.part(3, 1));
        assert_ne!(id.part(3, 1).secret, id.part(3, 2).secret);
        assert_ne!(id.part(3, 1).secret, id.part(4, 1).secret);
        assert_ne!(id.part(3, 1).secret, id.secret);
    }

    #[test]
    fn another_network_namespace_is_noticed() {
        let mut id = UniqueId::create_private().unwrap();
        assert_eq!(id.check_home(Rank(2)), Ok(()));
        id.home = Home::Namespace(1);
        assert_eq!(id.check_home(Rank(2)), Err(Error::OtherNamespace { rank: Rank(2) }));
    }
}
