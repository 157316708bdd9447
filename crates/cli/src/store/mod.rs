//! The commands of an object store: `serve`, `put`, `get`, `ls`, `stat`, `rm` and `watch`.
//!
//! | module | contents |
//! |---|---|
//! | [`serve`](mod@serve) | the daemon: a keeper, and the server that it starts |
//! | [`transfer`] | copies files to objects and objects to files |
//! | [`tensors`] | descriptions of objects that were .npy and .safetensors files |
//! | [`inspect`] | lists, shows and deletes objects |
//! | [`watch`](mod@watch) | prints events |

mod inspect;
mod serve;
mod tensors;
mod transfer;
mod watch;

use anyhow::Result;
use wholemem_store::Client;

use crate::cli::SocketArgs;

pub(crate) use inspect::{list, remove, stat};
pub(crate) use serve::serve;
pub(crate) use transfer::{get, put};
pub(crate) use watch::watch;

fn connect(args: &SocketArgs) -> Result<Client> {
    Ok(Client::connect(wholemem_store::socket(args.socket.as_deref())?)?)
}
