//! `wholemem serve`, and what people do with a store: put, get, ls, stat, rm, watch.
//!
//! | room | what it holds |
//! |---|---|
//! | [`serve`](mod@serve) | the daemon: a keeper, and the server it starts |
//! | [`transfer`] | files into objects and back |
//! | [`tensors`] | .npy and .safetensors files: what is in them, and where |
//! | [`inspect`] | what is in a store, and what happens to it |

mod inspect;
mod serve;
mod tensors;
mod transfer;

use anyhow::Result;
use wholemem_store::Client;

use crate::cli::SocketArgs;

pub(crate) use inspect::{list, remove, stat, watch};
pub(crate) use serve::serve;
pub(crate) use transfer::{get, put};

fn connect(args: &SocketArgs) -> Result<Client> {
    Ok(Client::connect(wholemem_store::socket(args.socket.as_deref())?)?)
}
