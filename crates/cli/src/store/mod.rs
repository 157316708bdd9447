//! `wholemem serve`, and what people do with a store: put, get, ls, stat, rm, watch.
//!
//! | room | what it holds |
//! |---|---|
//! | [`serve`](mod@serve) | the daemon: a keeper, and the server it starts |
//! | [`transfer`] | files into objects and back |
//! | [`tensors`] | .npy and .safetensors files: what is in them, and where |
//! | [`own`] | a store for benches and the tour, gone with them |
//! | [`inspect`] | what is in a store, and what happens to it |

mod inspect;
mod own;
mod serve;
mod tensors;
mod transfer;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use wholemem_store::Client;

use crate::cli::SocketArgs;

pub(crate) use inspect::{list, remove, stat, watch};
pub(crate) use own::OwnStore;
pub(crate) use serve::serve;
pub(crate) use transfer::{get, put};

/// Names the socket of a store, where the command line does not.
const VARIABLE: &str = "WHOLEMEM_SOCKET";

fn connect(args: &SocketArgs) -> Result<Client> {
    Ok(Client::connect(socket(args.socket.as_deref())?)?)
}

/// The socket of a store: the one that was given, or named by the environment, or this user's own.
fn socket(given: Option<&Path>) -> Result<PathBuf> {
    let named = || std::env::var_os(VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
    given.map(Path::to_owned).or_else(named).map_or_else(default_socket, Ok)
}

/// A place that no other user can take before us.
fn default_socket() -> Result<PathBuf> {
    let user = rustix::process::geteuid();
    let folder = match std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty()) {
        Some(folder) => PathBuf::from(folder),
        None if user.is_root() => PathBuf::from("/run"),
        None => PathBuf::from(format!("/run/user/{}", user.as_raw())),
    };
    let missing = || anyhow!("there is no folder {}", folder.display());
    folder
        .is_dir()
        .then(|| folder.join("wholemem.sock"))
        .ok_or_else(missing)
        .context("cannot tell where the store is: name its socket with `--socket` or in `WHOLEMEM_SOCKET`")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_that_is_given_is_taken() {
        assert_eq!(socket(Some(Path::new("/x/y"))).unwrap(), Path::new("/x/y"));
    }
}
