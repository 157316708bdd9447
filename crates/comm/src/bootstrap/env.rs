//! Creates a group from the environment variables of a launcher: `wholemem launch`, torchrun, Slurm or Open MPI.
//!
//! The variables of torchrun contain no secret. Its agent listens at `MASTER_PORT`, so the port only identifies the
//! run here.
//!
//! If the launcher's variables show that all ranks are on one node, they join by Unix sockets, and the variables for
//! several nodes are not read. Otherwise they join over TCP, with what [`Discovery`] reads.

use std::path::Path;
use std::time::{Duration, Instant};

use wholemem_os::interface::InterfaceAddress;
use wholemem_os::interrupt;

use super::collective::WAIT_SLICE;
use super::{DEFAULT_TIMEOUT, MAX_TIMEOUT, to_milliseconds};
use crate::discovery::{Discovery, DiscoveryError};
use crate::id::{SOCKET_DIR, SocketLocation};
use crate::network::{DEFAULT_SILENCE, Network};
use crate::{Bootstrap, Error, Rank, Result, UniqueId};

const ID: &str = "WHOLEMEM_ID";
const RENDEZVOUS: &str = "WHOLEMEM_RENDEZVOUS";
const SECRET: &str = "WHOLEMEM_SECRET";
const SECRET_FILE: &str = "WHOLEMEM_SECRET_FILE";
const TIMEOUT: &str = "WHOLEMEM_TIMEOUT";
const NODE_TIMEOUT: &str = "WHOLEMEM_NODE_TIMEOUT";
const ADDR: &str = "WHOLEMEM_ADDR";

/// The names of the environment variables that a launcher sets.
#[derive(Debug)]
struct Launcher {
    rank: &'static str,
    size: &'static str,
    /// The variable with the rank of this process among the ranks of its node.
    local_rank: &'static str,
    /// The variables that show whether the ranks are on one node. Only the first of them that is set is used.
    node_counts: &'static [NodeCountVariable],
}

/// An environment variable that shows whether all ranks are on one node.
#[derive(Debug, Clone, Copy)]
enum NodeCountVariable {
    /// The variable contains the number of nodes.
    Nodes(&'static str),
    /// The variable contains the number of ranks on this node, or the numbers of ranks on all nodes in Slurm's format:
    /// `4(x2),3`.
    Ranks(&'static str),
}

const LAUNCHERS: [Launcher; 3] = [
    Launcher {
        rank: "RANK",
        size: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        node_counts: &[NodeCountVariable::Ranks("LOCAL_WORLD_SIZE")],
    },
    Launcher {
        rank: "SLURM_PROCID",
        size: "SLURM_NTASKS",
        local_rank: "SLURM_LOCALID",
        node_counts: &[
            // The variables of the Slurm step come first: a step may have fewer nodes than its job.
            NodeCountVariable::Nodes("SLURM_STEP_NUM_NODES"),
            NodeCountVariable::Nodes("SLURM_NNODES"),
            NodeCountVariable::Ranks("SLURM_STEP_TASKS_PER_NODE"),
            NodeCountVariable::Ranks("SLURM_TASKS_PER_NODE"),
        ],
    },
    Launcher {
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        node_counts: &[NodeCountVariable::Ranks("OMPI_COMM_WORLD_LOCAL_SIZE")],
    },
];

/// Sets of environment variables that identify a run. The first set whose first variable is present is used, and its
/// other variables are optional.
const RUN_VARIABLES: [&[&str]; 3] = [
    &["MASTER_PORT", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"],
    &["SLURM_JOB_ID", "SLURM_STEP_ID"],
    &["OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"],
];

/// The group, rank, size and timeout that the environment variables describe.
#[derive(Debug, Clone, PartialEq, Eq)]
struct LaunchEnv {
    id: IdSource,
    rank: Rank,
    size: u32,
    timeout: Duration,
    /// How to reach the other nodes, if the ranks are on several.
    nodes: Option<NodesEnv>,
}

/// The variables for ranks on several nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct NodesEnv {
    discovery: Discovery,
    /// The time after which a silent node is given up.
    silence: Duration,
}

/// The source of a group's unique id: its text in `WHOLEMEM_ID`, or the variables that identify the run.
#[derive(Debug, Clone, PartialEq, Eq)]
enum IdSource {
    Id(UniqueId),
    Derived { run: String, secret: Option<String> },
}

impl Bootstrap {
    /// Joins the group for which a launcher started this process.
    ///
    /// | variable | meaning |
    /// |---|---|
    /// | `WHOLEMEM_ID` | the unique id; if it is set, the variables of the next two lines are ignored |
    /// | `WHOLEMEM_RENDEZVOUS` | a text that all ranks of this run have in common, and no other run; else `MASTER_ADDR` and `MASTER_PORT`, Slurm's job and step, or Open MPI's job |
    /// | `WHOLEMEM_SECRET`, `WHOLEMEM_SECRET_FILE` | a secret, or the file that contains it; without one, ranks accept every process of their user, on this machine only |
    /// | `WHOLEMEM_SOCKET_DIR` | the directory for sockets |
    /// | `RANK`, `WORLD_SIZE` | as torchrun sets them; else `SLURM_PROCID` and `SLURM_NTASKS`, or `OMPI_COMM_WORLD_RANK` and `_SIZE` |
    /// | `LOCAL_WORLD_SIZE` | as torchrun sets it: if it is less than `WORLD_SIZE`, the ranks are on several nodes; with Slurm `SLURM_STEP_NUM_NODES`, `SLURM_NNODES` or the tasks per node, with Open MPI `OMPI_COMM_WORLD_LOCAL_SIZE`. If the launcher sets none of them, the ranks may be on several nodes if `WHOLEMEM_ADDR` is set |
    /// | `WHOLEMEM_TIMEOUT` | seconds to wait for all ranks, and in each operation; the default is 60 |
    /// | `WHOLEMEM_NODE_TIMEOUT` | seconds after which a node that does not answer is given up; the default is 5 |
    ///
    /// Ranks on several nodes join as with [`create_over`](Self::create_over). They need a secret, of at least 16 bytes,
    /// and the address of rank 0: [`discovery`](crate::discovery) has the variables.
    ///
    /// ```no_run
    /// use wholemem_comm::Bootstrap;
    ///
    /// // wholemem launch -n 4 -- ./my_program
    /// let comm = Bootstrap::from_env()?;
    /// println!("rank {} of {}", comm.rank(), comm.size());
    /// comm.barrier()?;
    /// # Ok::<(), wholemem_comm::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Environment`] and [`Error::Discovery`] with the variable that is missing or wrong; the errors of
    /// [`create`](Self::create) and [`create_over`](Self::create_over).
    pub fn from_env() -> Result<Self> {
        Self::join_from_env(None)
    }

    /// Joins a group like [`from_env`](Self::from_env), but `timeout` replaces `WHOLEMEM_TIMEOUT` for joining and for
    /// later operations.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn from_env_within(timeout: Duration) -> Result<Self> {
        Self::join_from_env(Some(timeout))
    }

    fn join_from_env(timeout: Option<Duration>) -> Result<Self> {
        let interfaces = || Ok(wholemem_os::interface::addresses()?);
        let launch = read(|name| std::env::var(name).ok(), interfaces)?;
        let timeout = timeout.unwrap_or(launch.timeout);
        let folder = std::env::var_os(SOCKET_DIR);
        let folder = folder.as_deref().map(Path::new);
        let id = match launch.id {
            IdSource::Id(id) => id,
            IdSource::Derived { run, secret } => {
                let location = match folder {
                    Some(folder) => SocketLocation::in_directory(folder)?,
                    None => SocketLocation::current_namespace()?,
                };
                UniqueId::from_text(location, &run, secret.as_deref())
            }
        };
        let mut bootstrap = match launch.nodes {
            None => Self::create_part(&id, launch.rank, launch.size, timeout, None)?,
            Some(nodes) => {
                let began = Instant::now();
                let timeout = timeout.min(MAX_TIMEOUT);
                let mut network = nodes.network(launch.rank, began + timeout)?;
                if let Some(folder) = folder {
                    network = network.with_socket_dir(folder);
                }
                let left = to_milliseconds(timeout.saturating_sub(began.elapsed()));
                Self::create_part_over(&network, &id, launch.rank, launch.size, left, None)?
            }
        };
        bootstrap.timeout = timeout;
        Ok(bootstrap)
    }

    /// Returns the default timeout of a group: the seconds in `WHOLEMEM_TIMEOUT`, or [`DEFAULT_TIMEOUT`].
    ///
    /// # Errors
    /// [`Error::Environment`] if the variable is not a number of seconds.
    pub fn timeout_from_env() -> Result<Duration> {
        timeout(&|name: &str| std::env::var(name).ok())
    }

    /// Returns the rank of this process among the ranks of its node, which selects its device. The variable is that of
    /// the launcher that set the rank: `LOCAL_RANK` of torchrun and `wholemem launch`, `SLURM_LOCALID` of Slurm, or
    /// `OMPI_COMM_WORLD_LOCAL_RANK` of Open MPI. Returns `None` if no launcher set the rank, or if the variable is not
    /// set.
    ///
    /// # Errors
    /// [`Error::Environment`] if the variable is not a number.
    pub fn local_rank_from_env() -> Result<Option<u32>> {
        local_rank(|name| std::env::var(name).ok())
    }
}

/// Returns the launcher whose rank or size variable is set.
fn launcher(set: &impl Fn(&str) -> Option<String>) -> Option<&'static Launcher> {
    LAUNCHERS.iter().find(|launcher| set(launcher.rank).is_some() || set(launcher.size).is_some())
}

fn parse(name: &'static str, text: &str) -> Result<u32> {
    text.parse().map_err(|_| Error::Environment { name, problem: "is not a number" })
}

fn local_rank(get: impl Fn(&str) -> Option<String>) -> Result<Option<u32>> {
    let set = |name: &str| get(name).filter(|text| !text.is_empty());
    let Some(name) = launcher(&set).map(|launcher| launcher.local_rank) else { return Ok(None) };
    set(name).map(|text| parse(name, &text)).transpose()
}

/// Returns true if the ranks are on several nodes, or if only `WHOLEMEM_ADDR` tells that they may be.
fn are_on_several_nodes(
    launcher: &Launcher,
    size: u32,
    set: &impl Fn(&str) -> Option<String>,
) -> Result<bool> {
    for variable in launcher.node_counts {
        let (NodeCountVariable::Nodes(name) | NodeCountVariable::Ranks(name)) = *variable;
        let Some(text) = set(name) else { continue };
        let number = parse(name, text.split(['(', ',']).next().unwrap_or_default())?;
        let is_one = match variable {
            NodeCountVariable::Nodes(_) => number <= 1,
            NodeCountVariable::Ranks(_) => number >= size,
        };
        // A single rank is on one node, even if its job has several nodes.
        return Ok(!is_one && size > 1);
    }
    Ok(size > 1 && set(ADDR).is_some())
}

impl NodesEnv {
    /// Reads the variables. `id` is the unique id, if it is given: it then contains the secret.
    fn read(
        set: &impl Fn(&str) -> Option<String>,
        interfaces: &[InterfaceAddress],
        run: &str,
        has_id: bool,
    ) -> Result<Self> {
        let get = |name: &str| if has_id && matches!(name, SECRET | SECRET_FILE) { None } else { set(name) };
        let discovery = Discovery::read(get, interfaces, run)?;
        Ok(Self { discovery, silence: seconds(set, NODE_TIMEOUT, DEFAULT_SILENCE)? })
    }

    /// Returns the network of the group. The name of rank 0's host is looked up until the deadline: the name of a pod exists
    /// only when the pod runs.
    fn network(&self, rank: Rank, deadline: Instant) -> Result<Network> {
        let addresses = loop {
            match self.discovery.root.resolve() {
                Ok(addresses) => break addresses,
                Err(error @ DiscoveryError::UnknownHost { .. }) if Instant::now() < deadline => {
                    if interrupt::is_interrupted() {
                        return Err(Error::Aborted { by: rank });
                    }
                    tracing::debug!(%rank, %error, "looks the host of rank 0 up again");
                    std::thread::sleep(WAIT_SLICE);
                }
                Err(error) => return Err(error.into()),
            }
        };
        let (root, local) = self.discovery.select_root(&addresses)?;
        let network = Network::new(root).with_ports(self.discovery.ports.ports()).with_silence(self.silence);
        Ok(match local {
            Some(address) => network.with_interface(address),
            None => network,
        })
    }
}

/// Reads the variables with `get`. The interfaces of this node are only read if the ranks are on several nodes.
fn read(
    get: impl Fn(&str) -> Option<String>,
    interfaces: impl FnOnce() -> Result<Vec<InterfaceAddress>>,
) -> Result<LaunchEnv> {
    let set = |name: &str| get(name).filter(|text| !text.is_empty());
    let number = |name: &'static str| match set(name) {
        None => {
            Err(Error::Environment { name, problem: "is not set, but the other variable of the launcher is" })
        }
        Some(text) => parse(name, &text),
    };
    let Some(launcher) = launcher(&set) else {
        let problem = "is not set, and neither are the variables of Slurm or Open MPI: start the ranks with \
                       `wholemem launch`, torchrun, srun or mpirun";
        return Err(Error::Environment { name: "RANK", problem });
    };
    let (rank, size) = (number(launcher.rank)?, number(launcher.size)?);
    let is_on_several_nodes = are_on_several_nodes(launcher, size, &set)?;
    let timeout = timeout(&get)?;
    let given: Option<UniqueId> = set(ID).map(|text| text.parse()).transpose()?;
    let run = match &given {
        Some(id) => id.public_text(),
        None => run(&set)?,
    };
    let nodes = if is_on_several_nodes {
        Some(NodesEnv::read(&set, &interfaces()?, &run, given.is_some())?)
    } else {
        None
    };
    let id = match (given, &nodes) {
        (Some(id), _) => IdSource::Id(id),
        (None, None) => IdSource::Derived { run, secret: secret(&set)? },
        (None, Some(nodes)) => {
            let secret = nodes.discovery.require_secret()?.expose().to_owned();
            IdSource::Derived { run, secret: Some(secret) }
        }
    };
    Ok(LaunchEnv { id, rank: Rank(rank), size, timeout, nodes })
}

fn timeout(get: &impl Fn(&str) -> Option<String>) -> Result<Duration> {
    seconds(get, TIMEOUT, DEFAULT_TIMEOUT)
}

fn seconds(get: &impl Fn(&str) -> Option<String>, name: &'static str, default: Duration) -> Result<Duration> {
    match get(name).filter(|text| !text.is_empty()).map(|text| text.parse::<f64>()) {
        None => Ok(default),
        Some(Ok(seconds)) if seconds > 0.0 && seconds < 1e9 => Ok(Duration::from_secs_f64(seconds)),
        Some(_) => Err(Error::Environment { name, problem: "is not a number of seconds" }),
    }
}

fn run(set: &impl Fn(&str) -> Option<String>) -> Result<String> {
    if let Some(text) = set(RENDEZVOUS) {
        return Ok(text);
    }
    let Some(names) = RUN_VARIABLES.iter().find(|names| set(names[0]).is_some()) else {
        let problem = "is not set, and no other variable identifies this run";
        return Err(Error::Environment { name: RENDEZVOUS, problem });
    };
    Ok(names.iter().map(|name| format!("{name}={}\n", set(name).unwrap_or_default())).collect())
}

fn secret(set: &impl Fn(&str) -> Option<String>) -> Result<Option<String>> {
    if let Some(secret) = set(SECRET) {
        return Ok(Some(secret));
    }
    let Some(path) = set(SECRET_FILE) else { return Ok(None) };
    let problem = |problem| Error::Environment { name: SECRET_FILE, problem };
    let text = std::fs::read_to_string(path).map_err(|_| problem("names a file that cannot be read"))?;
    match text.trim() {
        "" => Err(problem("names a file that is empty")),
        secret => Ok(Some(secret.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_from(variables: &[(&str, &str)]) -> Result<LaunchEnv> {
        let get =
            |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
        read(get, || Ok(Vec::new()))
    }

    const SECRET_TEXT: (&str, &str) = ("WHOLEMEM_SECRET", "0123456789abcdef");

    fn problem(variables: &[(&str, &str)]) -> &'static str {
        match read_from(variables) {
            Err(Error::Environment { name, .. }) => name,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_variables_of_each_launcher_are_read() {
        for (variables, rank, size) in [
            (&[("RANK", "1"), ("WORLD_SIZE", "4"), ("MASTER_PORT", "29500")][..], 1, 4),
            (&[("SLURM_PROCID", "2"), ("SLURM_NTASKS", "8"), ("SLURM_JOB_ID", "77")], 2, 8),
            (
                &[
                    ("OMPI_COMM_WORLD_RANK", "0"),
                    ("OMPI_COMM_WORLD_SIZE", "2"),
                    ("OMPI_MCA_ess_base_jobid", "5"),
                ],
                0,
                2,
            ),
        ] {
            let launch = read_from(variables).unwrap();
            assert_eq!((launch.rank, launch.size, launch.timeout), (Rank(rank), size, DEFAULT_TIMEOUT));
            assert!(matches!(launch.id, IdSource::Derived { secret: None, .. }));
        }
    }

    #[test]
    fn ranks_on_several_nodes_need_an_address_and_a_secret() {
        let torchrun =
            |local| [("RANK", "0"), ("WORLD_SIZE", "4"), ("MASTER_PORT", "1"), ("LOCAL_WORLD_SIZE", local)];
        let slurm = |name, value| {
            [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_JOB_ID", "7"), (name, value)]
        };
        let open_mpi = |local| {
            [
                ("OMPI_COMM_WORLD_RANK", "0"),
                ("OMPI_COMM_WORLD_SIZE", "4"),
                ("PMIX_NAMESPACE", "x"),
                ("OMPI_MCA_ess_base_jobid", "5"),
                ("OMPI_COMM_WORLD_LOCAL_SIZE", local),
            ]
        };
        for variables in [
            &torchrun("2")[..],
            &slurm("SLURM_NNODES", "2"),
            &slurm("SLURM_STEP_NUM_NODES", "3"),
            &slurm("SLURM_TASKS_PER_NODE", "2(x2)"),
            &slurm("SLURM_STEP_TASKS_PER_NODE", "3,1"),
            &open_mpi("1"),
        ] {
            let with = |more: &[(&'static str, &'static str)]| read_from(&[variables, more].concat());
            let address = ("WHOLEMEM_ADDR", "n0:29600");
            let refused = with(&[]).unwrap_err();
            assert!(matches!(refused, Error::Discovery(DiscoveryError::NoAddress { .. })), "{refused}");
            let no_secret = Error::Discovery(DiscoveryError::NoSecret);
            assert_eq!(with(&[address]), Err(no_secret));
            let launch = with(&[address, SECRET_TEXT]).unwrap();
            assert_eq!(launch.nodes.unwrap().discovery.root.to_string(), "n0:29600");
            let IdSource::Derived { secret, .. } = launch.id else { panic!("no id is given") };
            assert_eq!(secret.as_deref(), Some(SECRET_TEXT.1));
        }
        let step = [&slurm("SLURM_NNODES", "2")[..], &[("SLURM_STEP_NUM_NODES", "1")]].concat();
        let alone =
            [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1"), ("SLURM_JOB_ID", "7"), ("SLURM_NNODES", "2")];
        for variables in [
            &torchrun("4")[..],
            &slurm("SLURM_NNODES", "1"),
            &slurm("SLURM_TASKS_PER_NODE", "4"),
            &open_mpi("4"),
            &step,
            &alone,
        ] {
            // An address does not matter on one node, nor does a short secret.
            let more = [("WHOLEMEM_ADDR", "n0:1"), ("WHOLEMEM_SECRET", "short")];
            assert_eq!(read_from(&[variables, &more].concat()).unwrap().nodes, None, "{variables:?}");
        }
        assert_eq!(problem(&torchrun("two")), "LOCAL_WORLD_SIZE");
    }

    #[test]
    fn an_address_tells_of_several_nodes_if_the_launcher_does_not() {
        let by_hand = [("RANK", "1"), ("WORLD_SIZE", "2"), ("WHOLEMEM_RENDEZVOUS", "x"), SECRET_TEXT];
        assert_eq!(read_from(&by_hand).unwrap().nodes, None);
        let with = |more: &[(&'static str, &'static str)]| read_from(&[&by_hand[..], more].concat());
        let nodes = with(&[("WHOLEMEM_ADDR", "n0:29600")]).unwrap().nodes.unwrap();
        assert_eq!(nodes.silence, DEFAULT_SILENCE);
        let of = |seconds| with(&[("WHOLEMEM_ADDR", "n0:29600"), ("WHOLEMEM_NODE_TIMEOUT", seconds)]);
        assert_eq!(of("1.5").unwrap().nodes.unwrap().silence, Duration::from_millis(1500));
        let wrong =
            Error::Environment { name: "WHOLEMEM_NODE_TIMEOUT", problem: "is not a number of seconds" };
        assert_eq!(of("0"), Err(wrong));
    }

    #[test]
    fn ranks_of_all_nodes_derive_the_same_id_and_port_from_the_run_and_the_secret() {
        let on = |rank: &'static str, local: &'static str, secret: &'static str| {
            let torchrun = [("RANK", rank), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", local)];
            let run = [("MASTER_ADDR", "n0"), ("MASTER_PORT", "29500"), ("WHOLEMEM_SECRET", secret)];
            let launch = read_from(&[torchrun, run].concat()).unwrap();
            let IdSource::Derived { run, secret } = launch.id else { panic!("no id is given") };
            let location = SocketLocation::current_namespace().unwrap();
            let id = UniqueId::from_text(location, &run, secret.as_deref());
            (id.to_string(), launch.nodes.unwrap().discovery.root)
        };
        let first = on("0", "1", SECRET_TEXT.1);
        assert_eq!(on("1", "3", SECRET_TEXT.1), first);
        let other = on("1", "3", "another secret of 16 bytes");
        assert_ne!(other.0, first.0);
        assert_eq!(other.1, first.1, "the port does not depend on the secret");
    }

    #[test]
    fn a_given_id_has_the_secret_of_ranks_on_several_nodes() {
        let id = UniqueId::create_private().unwrap();
        let text = id.to_string();
        let ranks = [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "1")];
        let more = [("WHOLEMEM_ID", &*text), ("MASTER_ADDR", "n0"), ("WHOLEMEM_SECRET", "short")];
        let launch = read_from(&[ranks, more].concat()).unwrap();
        assert_eq!(launch.id, IdSource::Id(id));
        assert_eq!(launch.nodes.unwrap().discovery.secret, None);
    }

    #[test]
    fn the_local_rank_is_from_the_launcher_that_set_the_rank() {
        let of = |variables: &[(&str, &str)]| {
            local_rank(|name| {
                variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned())
            })
        };
        assert_eq!(of(&[("RANK", "5"), ("LOCAL_RANK", "1"), ("SLURM_LOCALID", "2")]), Ok(Some(1)));
        assert_eq!(of(&[("SLURM_PROCID", "5"), ("SLURM_LOCALID", "2")]), Ok(Some(2)));
        assert_eq!(of(&[("OMPI_COMM_WORLD_RANK", "5"), ("OMPI_COMM_WORLD_LOCAL_RANK", "3")]), Ok(Some(3)));
        // The shell of a Slurm batch job has `SLURM_LOCALID` 0, and so do all processes that are started by hand from
        // this shell.
        assert_eq!(of(&[("RANK", "5"), ("SLURM_LOCALID", "0")]), Ok(None));
        assert_eq!(of(&[("LOCAL_RANK", "1")]), Ok(None));
        let wrong = Error::Environment { name: "LOCAL_RANK", problem: "is not a number" };
        assert_eq!(of(&[("RANK", "5"), ("LOCAL_RANK", "-1")]), Err(wrong));
    }

    #[test]
    fn an_id_overrides_all_other_variables() {
        let id = UniqueId::create_private().unwrap();
        let text = id.to_string();
        let launch = read_from(&[
            ("WHOLEMEM_ID", &text),
            ("RANK", "0"),
            ("WORLD_SIZE", "1"),
            ("WHOLEMEM_TIMEOUT", "1.5"),
        ]);
        let timeout = Duration::from_millis(1500);
        let expected = LaunchEnv { id: IdSource::Id(id), rank: Rank(0), size: 1, timeout, nodes: None };
        assert_eq!(launch, Ok(expected));
    }

    #[test]
    fn a_restarted_run_has_another_id() {
        let of = |count| {
            let variables = [
                ("RANK", "0"),
                ("WORLD_SIZE", "1"),
                ("MASTER_PORT", "29500"),
                ("TORCHELASTIC_RESTART_COUNT", count),
            ];
            read_from(&variables).unwrap().id
        };
        assert_ne!(of("0"), of("1"));
    }

    #[test]
    fn an_error_names_the_missing_or_wrong_variable() {
        assert_eq!(problem(&[]), "RANK");
        assert_eq!(problem(&[("RANK", "0")]), "WORLD_SIZE");
        assert_eq!(problem(&[("RANK", "x"), ("WORLD_SIZE", "1")]), "RANK");
        assert_eq!(problem(&[("RANK", "0"), ("WORLD_SIZE", "1")]), "WHOLEMEM_RENDEZVOUS");
        let run = [("RANK", "0"), ("WORLD_SIZE", "1"), ("WHOLEMEM_RENDEZVOUS", "x")];
        assert_eq!(problem(&[&run[..], &[("WHOLEMEM_TIMEOUT", "-1")]].concat()), "WHOLEMEM_TIMEOUT");
        assert_eq!(
            problem(&[&run[..], &[("WHOLEMEM_SECRET_FILE", "/nowhere")]].concat()),
            "WHOLEMEM_SECRET_FILE"
        );
    }
}
