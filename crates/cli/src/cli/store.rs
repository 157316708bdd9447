//! The options of the commands `serve`, `put`, `get`, `ls`, `stat`, `rm` and `watch` of an object store.

use std::path::PathBuf;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueEnum};
use wholemem_command::backend::BackendChoice;
use wholemem_command::size::ByteCount;

use wholemem_store::ObjectId;

#[derive(Debug, Args)]
pub(crate) struct SocketArgs {
    /// Socket on which the store serves [default: `WHOLEMEM_SOCKET`, or `wholemem.sock` in the runtime directory]
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
    /// Serve metrics for Prometheus at this address: a port of the loopback interface such as `127.0.0.1:9464`, or the path of a
    /// Unix socket
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) metrics: Option<String>,
    /// Stop serving when the process with this id ends; for commands that start a temporary store
    #[arg(long, hide = true)]
    pub(crate) parent: Option<u32>,
    /// Run as one of the two processes of a store (internal)
    #[arg(long, value_enum, hide = true)]
    pub(crate) role: Option<ServeRole>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ServeRole {
    /// The keeper of a store: the process that holds the descriptors of all memory, and starts the server
    Keeper,
    /// The server of a store: the process that answers the requests of clients
    Server,
    /// The process that answers requests for the metrics of a store
    Metrics,
}

/// The format of a file that is read into a store, or written from one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FileFormat {
    /// The bytes of the file are those of the object
    Bytes,
    /// An array of numpy
    Npy,
    /// Tensors, each of which becomes an object of a pack
    Safetensors,
}

#[derive(Debug, Args)]
pub(crate) struct PutArgs {
    /// Name of the new object, or of the pack of a .safetensors file
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub(crate) name: String,
    /// File to read, or `-` for stdin: .npy and .safetensors are parsed, the bytes of other files are stored unchanged
    pub(crate) file: PathBuf,
    /// Format of the file [default: as its extension says; `bytes` for stdin]
    #[arg(long, value_enum)]
    pub(crate) format: Option<FileFormat>,
    /// If the store's quota is reached, wait up to this many seconds until other objects are deleted
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
    /// Name of the object, or of the pack (several objects in one memory), to write to a file
    pub(crate) name: String,
    /// File to write, or `-` for stdout: .npy and .safetensors get the header of that format, other files get only the bytes of
    /// the object
    pub(crate) file: PathBuf,
    /// Format of the file [default: as its extension says; `bytes` for stdout]
    #[arg(long, value_enum)]
    pub(crate) format: Option<FileFormat>,
    /// If the store has no object of this name, wait up to this many seconds until one is published
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
    /// List only objects whose names have this prefix, or match this pattern of `*`, `?` and `[...]`
    #[arg(default_value = "")]
    pub(crate) names: String,
    /// Show also the age, the place, and how many clients hold each object
    #[arg(short, long)]
    pub(crate) long: bool,
    /// List also the objects of packs that are listed
    #[arg(short, long)]
    pub(crate) all: bool,
    /// List drafts instead: objects that are created but not sealed
    #[arg(long, conflicts_with_all = ["long", "all"])]
    pub(crate) drafts: bool,
    #[command(flatten)]
    pub(crate) socket: SocketArgs,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct StatArgs {
    /// Name of the object to show [default: show the state of the store]
    pub(crate) name: Option<String>,
    #[command(flatten)]
    pub(crate) socket: SocketArgs,
    /// Print one JSON object instead of lines
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RemoveArgs {
    /// Names of the objects or packs to delete, or patterns of `*`, `?` and `[...]`; a pack is deleted with all of its objects
    #[arg(required_unless_present = "ids")]
    pub(crate) names: Vec<String>,
    /// Delete the object with this id, which `stat` and `ls --drafts` print; the user of the server can delete drafts too
    #[arg(long = "id", value_name = "ID")]
    pub(crate) ids: Vec<ObjectId>,
    #[command(flatten)]
    pub(crate) socket: SocketArgs,
    /// Print one JSON object instead of lines
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct WatchArgs {
    /// Print only events of objects whose names have this prefix; a pack is one event, under its own name
    #[arg(default_value = "")]
    pub(crate) prefix: String,
    /// First print the events behind this revision, which `--json` prints with each event; the server retains the latest
    #[arg(long, value_name = "REVISION")]
    pub(crate) after: Option<u64>,
    /// Exit after this many events
    #[arg(long)]
    pub(crate) count: Option<u64>,
    #[command(flatten)]
    pub(crate) socket: SocketArgs,
    /// Print a JSON object for each event instead of a line
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Time between two updates
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = seconds)]
    pub(crate) interval: f64,
    /// Print the state once; rates are those of one interval
    #[arg(long)]
    pub(crate) once: bool,
    #[command(flatten)]
    pub(crate) socket: SocketArgs,
    /// Print one JSON object instead
    #[arg(long)]
    pub(crate) json: bool,
}

/// Parses the value of `--wait`, a time in seconds.
fn seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if (0.0..=1e9).contains(&seconds) { Ok(seconds) } else { Err("not between 0 and 1e9".to_owned()) }
}
