//! The unique id of a group: the location of its ranks' sockets, and the secret that authenticates the ranks.
//!
//! One process creates a [`UniqueId`] and passes its text to the others through a pipe, an environment variable or a
//! file that only they can read: every process that knows the text can join. The address at which a rank listens is
//! derived from the id and the rank with a hash that requires the secret.

use std::fmt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use wholemem_os::packet::Address;
use wholemem_os::{Errno, Error as OsError};

use crate::{Error, Rank, Result};

/// The environment variable with the directory for the sockets of a group.
pub(crate) const SOCKET_DIR: &str = "WHOLEMEM_SOCKET_DIR";

const PREFIX: &str = "wm1";

/// The maximum length in bytes of the text form of a unique id.
const MAX_TEXT_LEN: usize = 128;

/// The context of the hash that derives the socket addresses of ranks from the secret: if another process could guess
/// an address, it could bind the address before the rank does.
const ADDRESS_CONTEXT: &str = "wholemem 2026-11 address of a rank";
const SUCCESSOR_CONTEXT: &str = "wholemem 2026-11 address of a dead rank's stand-in";
/// The context of the hash of the address at which the leader of a node listens, if it is not rank 0.
const LEADER_CONTEXT: &str = "wholemem 2026-11 address of the leader of a node";
const PROOF_CONTEXT: &str = "wholemem 2026-11 proof of the secret";
const CHILD_CONTEXT: &str = "wholemem 2026-11 id of a part of a group";

/// The socket location and the secret of a group. Every process that knows the unique id can join the group.
///
/// Its text has at most 128 bytes and one line. `Display` writes the text; `Debug` hides the secret.
///
/// ```
/// use wholemem_comm::UniqueId;
///
/// let id = UniqueId::create()?;
/// let text = id.to_string(); // pass this to the other ranks, and to no other process
/// assert!(text.len() <= 128);
/// assert_eq!(text.parse::<UniqueId>()?, id);
/// # Ok::<(), wholemem_comm::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct UniqueId {
    location: SocketLocation,
    nonce: [u8; 8],
    /// The secret of the group. If all bytes are zero, there is no secret, and ranks accept only processes of the same
    /// user.
    secret: [u8; 16],
}

/// The location of a group's sockets: a directory or a network namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SocketLocation {
    /// The sockets are files in this directory.
    Directory(PathBuf),
    /// The sockets have abstract names in the network namespace with this inode number.
    Namespace(u64),
}

/// The key of the hashes by which ranks of a group prove that they know the secret.
#[derive(Clone)]
pub(crate) struct GroupKey([u8; 32]);

impl GroupKey {
    pub(crate) fn hasher(&self) -> blake3::Hasher {
        blake3::Hasher::new_keyed(&self.0)
    }
}

impl fmt::Debug for GroupKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GroupKey(..)")
    }
}

impl UniqueId {
    /// Creates a new unique id. If `WHOLEMEM_SOCKET_DIR` is set, the sockets are files in that directory, so that ranks
    /// in other network namespaces can join; otherwise the sockets have abstract names.
    ///
    /// # Errors
    /// [`Error::SocketDir`] if the directory belongs to another user or is accessible to others, or if its path is
    /// too long.
    pub fn create() -> Result<Self> {
        match std::env::var_os(SOCKET_DIR) {
            Some(directory) => Self::create_in(Path::new(&directory)),
            None => Self::create_private(),
        }
    }

    /// Creates a new unique id whose sockets are files in `directory`, which is created if it does not exist.
    ///
    /// # Errors
    /// [`Error::SocketDir`] if the directory belongs to another user or is accessible to others, or if its path is
    /// too long.
    pub fn create_in(directory: &Path) -> Result<Self> {
        Ok(Self { location: SocketLocation::in_directory(directory)?, nonce: random()?, secret: random()? })
    }

    /// Creates a new unique id whose sockets have abstract names in the network namespace of this process.
    pub(crate) fn create_private() -> Result<Self> {
        Ok(Self { location: SocketLocation::current_namespace()?, nonce: random()?, secret: random()? })
    }

    /// Derives a unique id from a text that all ranks know, with or without a secret.
    pub(crate) fn from_text(location: SocketLocation, text: &str, secret: Option<&str>) -> Self {
        let hash = |label: &str, of: &str| {
            let mut hasher = blake3::Hasher::new_derive_key(CHILD_CONTEXT);
            hasher.update(label.as_bytes()).update(of.as_bytes());
            *hasher.finalize().as_bytes()
        };
        let nonce = hash("nonce", text);
        let secret = secret.map(|secret| hash("secret", secret));
        Self {
            location,
            nonce: std::array::from_fn(|n| nonce[n]),
            secret: secret.map_or([0; 16], |secret| std::array::from_fn(|n| secret[n])),
        }
    }

    /// Derives the unique id of a split group. Only processes that know the unique id of the original group can compute
    /// it.
    pub(crate) fn split_id(&self, split: u64, color: u32) -> Self {
        let mut hasher = self.derive(CHILD_CONTEXT);
        hasher.update(&split.to_le_bytes()).update(&color.to_le_bytes());
        let mut bytes = [0; 24];
        hasher.finalize_xof().fill(&mut bytes);
        let secret: [u8; 16] = std::array::from_fn(|n| bytes[8 + n]);
        Self {
            location: self.location.clone(),
            nonce: std::array::from_fn(|n| bytes[n]),
            secret: if self.has_secret() { secret } else { self.secret },
        }
    }

    /// Returns true if ranks authenticate each other with a secret. Otherwise they accept every process of the same
    /// user.
    pub(crate) fn has_secret(&self) -> bool {
        self.secret != [0; 16]
    }

    /// Returns the part of the id that is not secret, and is equal on all ranks.
    pub(crate) fn public_text(&self) -> String {
        hex(&self.nonce)
    }

    pub(crate) fn key(&self) -> GroupKey {
        GroupKey(*self.derive(PROOF_CONTEXT).finalize().as_bytes())
    }

    /// Returns the address at which a rank listens for its children.
    pub(crate) fn address(&self, rank: Rank) -> Address {
        self.address_in(ADDRESS_CONTEXT, rank)
    }

    /// Returns the address for the children of a rank that died while joining. The successor of the dead rank listens
    /// there.
    ///
    /// It differs from the dead rank's own address: the kernel may close that late, and a forked child may hold it
    /// open.
    pub(crate) fn successor_address(&self, dead: Rank) -> Address {
        self.address_in(SUCCESSOR_CONTEXT, dead)
    }

    /// Returns the address at which the leader of a node listens for the ranks of its node, if it is not rank 0.
    pub(crate) fn leader_address(&self) -> Address {
        self.address_in(LEADER_CONTEXT, Rank(0))
    }

    /// Returns the same id with another location of the sockets.
    pub(crate) fn in_location(&self, location: SocketLocation) -> Self {
        Self { location, ..self.clone() }
    }

    fn address_in(&self, context: &str, rank: Rank) -> Address {
        let mut hasher = self.derive(context);
        hasher.update(&rank.0.to_le_bytes());
        let name = format!("wm-{}", hex(&hasher.finalize().as_bytes()[..8]));
        match &self.location {
            SocketLocation::Directory(directory) => Address::Path(directory.join(name)),
            SocketLocation::Namespace(_) => Address::Abstract(name.into_bytes()),
        }
    }

    /// Checks that this process can reach the sockets of the other ranks.
    pub(crate) fn check_location(&self, rank: Rank) -> Result<()> {
        match &self.location {
            SocketLocation::Directory(directory) => check_directory(directory),
            location if SocketLocation::current_namespace()? != *location => {
                Err(Error::OtherNamespace { rank })
            }
            SocketLocation::Namespace(_) => Ok(()),
        }
    }

    fn derive(&self, context: &str) -> blake3::Hasher {
        let mut hasher = blake3::Hasher::new_derive_key(context);
        hasher.update(&self.nonce).update(&self.secret);
        hasher
    }
}

impl SocketLocation {
    /// Returns the network namespace of this process as a socket location.
    pub(crate) fn current_namespace() -> Result<Self> {
        let namespace = rustix::fs::stat("/proc/self/ns/net");
        let namespace = namespace.map_err(|errno| OsError::Call { call: "stat", errno })?;
        Ok(Self::Namespace(namespace.st_ino))
    }

    pub(crate) fn in_directory(directory: &Path) -> Result<Self> {
        const MAX_DIRECTORY_LEN: usize =
            MAX_TEXT_LEN - "wm1-0123456789abcdef-0123456789abcdef0123456789abcdef-d".len();
        let problem = |problem| Error::SocketDir { path: directory.display().to_string(), problem };
        let text = directory.to_str().ok_or_else(|| problem("is not UTF-8"))?;
        if !directory.is_absolute() || text.contains('\n') {
            return Err(problem("is not an absolute path"));
        }
        if text.len() > MAX_DIRECTORY_LEN {
            return Err(problem("is longer than 73 bytes"));
        }
        match std::fs::DirBuilder::new().mode(0o700).create(directory) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                // If `mkdir` fails without an errno, the path contains a zero byte.
                let errno = Errno::from_io_error(&error).unwrap_or(Errno::INVAL);
                return Err(OsError::Call { call: "mkdir", errno }.into());
            }
            _ => {}
        }
        check_directory(directory)?;
        Ok(Self::Directory(directory.to_owned()))
    }
}

fn check_directory(directory: &Path) -> Result<()> {
    let problem = |problem| Err(Error::SocketDir { path: directory.display().to_string(), problem });
    match std::fs::metadata(directory) {
        Err(_) => problem("does not exist or is not accessible"),
        Ok(metadata) if !metadata.is_dir() => problem("is not a directory"),
        Ok(metadata) if metadata.uid() != rustix::process::geteuid().as_raw() => {
            problem("belongs to another user")
        }
        Ok(metadata) if metadata.mode() & 0o077 != 0 => {
            problem("is accessible to other users: its mode must be 0700")
        }
        Ok(_) => Ok(()),
    }
}

impl fmt::Display for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}-{}-{}-", hex(&self.nonce), hex(&self.secret))?;
        match &self.location {
            SocketLocation::Directory(directory) => write!(f, "d{}", directory.display()),
            SocketLocation::Namespace(number) => write!(f, "n{number:x}"),
        }
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UniqueId")
            .field("location", &self.location)
            .field("nonce", &hex(&self.nonce))
            .finish_non_exhaustive()
    }
}

impl FromStr for UniqueId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = |part| Error::BadId { part };
        if text.len() > MAX_TEXT_LEN {
            return Err(bad("length"));
        }
        let mut parts = text.splitn(4, '-');
        if parts.next() != Some(PREFIX) {
            return Err(bad("version"));
        }
        let nonce = parts.next().and_then(unhex).ok_or_else(|| bad("nonce"))?;
        let secret = parts.next().and_then(unhex).ok_or_else(|| bad("secret"))?;
        let location = parts.next().unwrap_or_default();
        let location = match location.split_at_checked(1) {
            Some(("d", directory)) if directory.starts_with('/') && !directory.contains('\n') => {
                SocketLocation::Directory(directory.into())
            }
            Some(("n", number)) => {
                SocketLocation::Namespace(u64::from_str_radix(number, 16).map_err(|_| bad("namespace"))?)
            }
            _ => return Err(bad("address")),
        };
        Ok(Self { location, nonce, secret })
    }
}

/// Returns random bytes from the kernel.
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
    fn an_id_is_parsed_from_its_text_and_debug_hides_the_secret() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
        for id in [UniqueId::create_private().unwrap(), UniqueId::create_in(directory.path()).unwrap()] {
            let text = id.to_string();
            assert!(text.len() <= MAX_TEXT_LEN, "{text}");
            assert_eq!(text.parse(), Ok(id.clone()));
            let secret = hex(&id.secret);
            assert!(text.contains(&secret));
            assert!(!format!("{id:?} {:?}", id.key()).contains(&secret));
        }
    }

    #[test]
    fn parsing_a_malformed_text_names_the_wrong_part() {
        let good = "wm1-0123456789abcdef-0123456789abcdef0123456789abcdef-n1";
        assert!(good.parse::<UniqueId>().is_ok());
        for (text, part) in [
            ("", "version"),
            ("wm2-0123456789abcdef-0123456789abcdef0123456789abcdef-n1", "version"),
            ("wm1-0123456789abcde-0123456789abcdef0123456789abcdef-n1", "nonce"),
            ("wm1-0123456789ABCDEF-0123456789abcdef0123456789abcdef-n1", "nonce"),
            ("wm1-0123456789abcdef-01-n1", "secret"),
            ("wm1-0123456789abcdef-0123456789abcdef0123456789abcdef", "address"),
            ("wm1-0123456789abcdef-0123456789abcdef0123456789abcdef-drelative", "address"),
            ("wm1-0123456789abcdef-0123456789abcdef0123456789abcdef-nx", "namespace"),
        ] {
            assert_eq!(text.parse::<UniqueId>(), Err(Error::BadId { part }), "{text}");
        }
        assert_eq!("x".repeat(129).parse::<UniqueId>(), Err(Error::BadId { part: "length" }));
    }

    #[test]
    fn a_directory_that_is_accessible_to_others_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o750)).unwrap();
        let error = UniqueId::create_in(directory.path()).unwrap_err();
        assert!(matches!(error, Error::SocketDir { problem, .. } if problem.contains("0700")), "{error}");
        let long = format!("/{}", "x".repeat(80));
        let error = UniqueId::create_in(Path::new(&long)).unwrap_err();
        assert!(matches!(error, Error::SocketDir { problem: "is longer than 73 bytes", .. }), "{error}");
    }

    #[test]
    fn addresses_differ_by_rank_and_id_and_split_groups_have_their_own_secrets() {
        let id = UniqueId::create_private().unwrap();
        assert_ne!(id.address(Rank(0)), id.address(Rank(1)));
        assert_ne!(id.address(Rank(0)), UniqueId::create_private().unwrap().address(Rank(0)));
        assert_eq!(id.split_id(3, 1), id.split_id(3, 1));
        assert_ne!(id.split_id(3, 1).secret, id.split_id(3, 2).secret);
        assert_ne!(id.split_id(3, 1).secret, id.split_id(4, 1).secret);
        assert_ne!(id.split_id(3, 1).secret, id.secret);
    }

    #[test]
    fn another_network_namespace_is_refused() {
        let mut id = UniqueId::create_private().unwrap();
        assert_eq!(id.check_location(Rank(2)), Ok(()));
        id.location = SocketLocation::Namespace(1);
        assert_eq!(id.check_location(Rank(2)), Err(Error::OtherNamespace { rank: Rank(2) }));
    }
}
