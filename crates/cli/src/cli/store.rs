//! The options of the store's commands.

use std::path::PathBuf;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueEnum};
use wholemem_command::backend::BackendChoice;
use wholemem_command::size::ByteCount;

use wholemem_store::ObjectId;

#[derive(Debug, Args)]
pub(crate) struct SocketArgs {
    /// Socket of the store [default: `WHOLEMEM_SOCKET`, or `wholemem.sock` in the runtime directory]
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Socket to listen on [default: `WHOLEMEM_SOCKET`, or `wholemem.sock` in the runtime directory]
    #[arg(long, value_name = "PATH")]
    pub(crate) listen: Option<PathBuf>,
    /// Limit of host memory for objects [default: three quarters of the available memory]
    #[arg(long)]
    pub(crate) size: Option<ByteCount>,
    /// Limit of device memory for objects [default: nine tenths of the devices' memory]
    #[arg(long)]
    pub(crate) device_size: Option<ByteCount>,
    /// Maximum number of objects [default: 65536]
    #[arg(long, value_parser = clap::value_parser!(u32).range(16..=4_194_304))]
    pub(crate) objects: Option<u32>,
    /// Device memory of the store: `auto` serves it if CUDA is available, `host` does not, `cuda` requires it
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    pub(crate) backend: BackendChoice,
    /// End when the process with this id ends; for commands that start a temporary store
    #[arg(long, hide = true)]
    pub(crate) parent: Option<u32>,
    /// Run as one of the two processes (internal)
    #[arg(long, value_enum, hide = true)]
    pub(crate) role: Option<ServeRole>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ServeRole {
    /// Holds the descriptors of all memory, and starts the server
    Keeper,
    /// Serves the clients
    Server,
}

#[derive(Debug, Args)]
pub(crate) struct PutArgs {
    /// Name of the object or of the pack
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub(crate) name: String,
    /// File to read: .npy and .safetensors are parsed, the bytes of other files are stored unchanged
    pub(crate) file: PathBuf,
    /// If the quota is reached, wait up to this many seconds until other objects are deleted
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0, value_parser = seconds)]
    pub(crate) wait: f64,
    #[command(flatten)]
    pub(crate) socket: SocketArgs,
    /// Print one JSON object instead of a line
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct GetArgs {
    /// Name of the object or of the pack
    pub(crate) name: String,
    /// File to write: .npy and .safetensors get the header of that format, other files get only the bytes of the object
    pub(crate) file: PathBuf,
    /// If no object has the name, wait up to this many seconds for one
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0, value_parser = seconds)]
    pub(crate) wait: f64,
    #[command(flatten)]
    pub(crate) socket: SocketArgs,
    /// Print one JSON object instead of a line
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Prefix of the names
    #[arg(default_value = "")]
    pub(crate) prefix: String,
    /// List drafts instead: objects that are created but not sealed
    #[arg(long)]
    pub(crate) drafts: bool,
    #[command(flatten)]
    pub(crate) socket: SocketArgs,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct StatArgs {
    /// Name of an object [default: show the store]
    pub(crate) name: Option<String>,
    #[command(flatten)]
    pub(crate) socket: SocketArgs,
    /// Print one JSON object instead of lines
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RemoveArgs {
    /// Names of objects or packs; a pack is deleted with all of its objects
    #[arg(required_unless_present = "ids")]
    pub(crate) names: Vec<String>,
    /// Delete the object with this id, which `stat` and `ls --drafts` print; the user of the server can delete drafts too
    #[arg(long = "id", value_name = "ID")]
    pub(crate) ids: Vec<ObjectId>,
    #[command(flatten)]
    pub(crate) socket: SocketArgs,
}

#[derive(Debug, Args)]
pub(crate) struct WatchArgs {
    /// Prefix of the names
    #[arg(default_value = "")]
    pub(crate) prefix: String,
    /// Exit after this many events
    #[arg(long)]
    pub(crate) count: Option<u64>,
    #[command(flatten)]
    pub(crate) socket: SocketArgs,
    /// Print a JSON object for each event instead of a line
    #[arg(long)]
    pub(crate) json: bool,
}

/// Parses a waiting time in seconds.
fn seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if (0.0..=1e9).contains(&seconds) { Ok(seconds) } else { Err("not between 0 and 1e9".to_owned()) }
}
