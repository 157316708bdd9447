//! The commands of an object store: `serve`, `put`, `get`, `ls`, `stat`, `rm` and `watch`.
//!
//! | module | contents |
//! |---|---|
//! | [`serve`](mod@serve) | the daemon: a keeper, and the server that it starts |
//! | [`metrics`](mod@metrics), [`exposition`] | serves metrics for Prometheus; their text |
//! | [`transfer`] | copies files to objects and objects to files |
//! | [`tensors`] | descriptions of objects that were .npy and .safetensors files |
//! | [`inspect`], [`summary`], [`users`] | lists and shows objects |
//! | [`remove`](mod@remove) | deletes objects |
//! | [`pattern`], [`natural`] | patterns of names, and the order of names |
//! | [`watch`](mod@watch) | prints events |

mod exposition;
mod inspect;
mod metrics;
mod natural;
pub(crate) mod pattern;
mod remove;
mod serve;
pub(crate) mod summary;
mod tensors;
mod transfer;
mod users;
mod watch;

use anyhow::Result;
use wholemem_store::Client;

use crate::cli::SocketArgs;

pub(crate) use inspect::{list, stat};
pub(crate) use remove::remove;
pub(crate) use serve::serve;
pub(crate) use transfer::{get, put};
pub(crate) use watch::watch;

pub(crate) fn connect(args: &SocketArgs) -> Result<Client> {
    Ok(Client::connect(wholemem_store::socket(args.socket.as_deref())?)?)
}
