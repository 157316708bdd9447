//! The path of a store's socket: given by the caller, by the environment, or the default of the current user.

use std::env;
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// The environment variable with the path of a store's socket, used if the caller gives no path.
const VARIABLE: &str = "WHOLEMEM_SOCKET";

/// Returns the path of a store's socket: `given`, else `WHOLEMEM_SOCKET`, else `wholemem.sock` in the current user's runtime
/// folder, where other users cannot create files.
///
/// ```
/// use std::path::Path;
///
/// assert_eq!(wholemem_store::socket(Some(Path::new("/run/model.sock")))?, Path::new("/run/model.sock"));
/// # Ok::<(), wholemem_store::Error>(())
/// ```
///
/// # Errors
/// [`Error::NoSocket`] if the runtime folder does not exist.
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
