//! The words of the commands of a store.

use std::path::PathBuf;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueEnum};
use wholemem_command::backend::BackendChoice;
use wholemem_command::size::ByteCount;

use wholemem_store::ObjectId;

#[derive(Debug, Args)]
pub(crate) struct SocketArgs {
    /// The socket of the store [default: `WHOLEMEM_SOCKET`, or `wholemem.sock` in the runtime directory]
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// The socket to serve at [default: `WHOLEMEM_SOCKET`, or `wholemem.sock` in the runtime directory]
    #[arg(long, value_name = "PATH")]
    pub(crate) listen: Option<PathBuf>,
    /// How much host memory objects may take [default: three quarters of what is available]
    #[arg(long)]
    pub(crate) size: Option<ByteCount>,
    /// How much device memory objects may take [default: nine tenths of what there is]
    #[arg(long)]
    pub(crate) device_size: Option<ByteCount>,
    /// How many objects there may be [default: 65536]
    #[arg(long, value_parser = clap::value_parser!(u32).range(16..=4_194_304))]
    pub(crate) objects: Option<u32>,
    /// Whose devices' memory to hand out: CUDA's where there is one, none, or CUDA's or nothing at all
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    pub(crate) backend: BackendChoice,
    /// End when the process with this number does; for commands that serve a store of their own
    #[arg(long, hide = true)]
    pub(crate) parent: Option<u32>,
    /// Play one of the two processes; started by the other one only
    #[arg(long, value_enum, hide = true)]
    pub(crate) role: Option<ServeRole>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ServeRole {
    /// Holds all memory, and starts the server
    Keeper,
    /// Serves clients
    Server,
}

#[derive(Debug, Args)]
pub(crate) struct PutArgs {
    /// The name of the object, or of the pack
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub(crate) name: String,
    /// The file: .npy and .safetensors are taken apart, any other is taken as it is
    pub(crate) file: PathBuf,
    /// How many seconds to wait for others to delete something, if the quota is full
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
    /// The name of the object, or of the pack
    pub(crate) name: String,
    /// The file to write
    pub(crate) file: PathBuf,
    /// How many seconds to wait for the name, if nobody has it yet
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
    /// How the names begin
    #[arg(default_value = "")]
    pub(crate) prefix: String,
    /// List drafts instead: objects that were created and are not sealed yet
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
    /// The name of an object; without one, the store as a whole
    pub(crate) name: Option<String>,
    #[command(flatten)]
    pub(crate) socket: SocketArgs,
    /// Print one JSON object instead of lines
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RemoveArgs {
    /// The names of the objects, or of packs, which go as a whole
    #[arg(required_unless_present = "ids")]
    pub(crate) names: Vec<String>,
    /// Delete the object with this id, as `stat` and `ls --drafts` print it; also a draft, if you run the server
    #[arg(long = "id", value_name = "ID")]
    pub(crate) ids: Vec<ObjectId>,
    #[command(flatten)]
    pub(crate) socket: SocketArgs,
}

#[derive(Debug, Args)]
pub(crate) struct WatchArgs {
    /// How the names begin
    #[arg(default_value = "")]
    pub(crate) prefix: String,
    /// End after so many events
    #[arg(long)]
    pub(crate) count: Option<u64>,
    #[command(flatten)]
    pub(crate) socket: SocketArgs,
    /// Print a JSON object for each event instead of a line
    #[arg(long)]
    pub(crate) json: bool,
}

/// A time that can be waited for.
fn seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if (0.0..=1e9).contains(&seconds) { Ok(seconds) } else { Err("not a time to wait for".to_owned()) }
}
