//! Where the socket of a store is: the one that is given, or named by the environment, or this user's own.

use std::env;
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// Names the socket of a store, where nobody gives it.
const VARIABLE: &str = "WHOLEMEM_SOCKET";

/// The socket of a store: `given`, or the one that `WHOLEMEM_SOCKET` names, or `wholemem.sock` in the folder of this user's
/// sockets, where no other user can take the place before us.
///
/// ```
/// use std::path::Path;
///
/// assert_eq!(wholemem_store::socket(Some(Path::new("/run/model.sock")))?, Path::new("/run/model.sock"));
/// # Ok::<(), wholemem_store::Error>(())
/// ```
///
/// # Errors
/// [`Error::NoSocket`] where there is no such folder.
pub fn socket(given: Option<&Path>) -> Result<PathBuf> {
    let named = |name: &str| env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    if let Some(path) = given.map(Path::to_owned).or_else(|| named(VARIABLE)) {
        return Ok(path);
    }
    let user = rustix::process::geteuid();
    let own = || if user.is_root() { "/run".into() } else { format!("/run/user/{}", user.as_raw()).into() };
    let folder = named("XDG_RUNTIME_DIR").unwrap_or_else(own);
    if folder.is_dir() { Ok(folder.join("wholemem.sock")) } else { Err(Error::NoSocket { folder }) }
}
