//! Creates a group from the environment variables of a launcher: `wholemem launch`, torchrun, Slurm or Open MPI.
//!
//! The variables of torchrun contain no secret. Its agent listens at `MASTER_PORT`, so the port only identifies the
//! run here.

use std::path::Path;
use std::time::Duration;

use super::DEFAULT_TIMEOUT;
use crate::id::{SOCKET_DIR, SocketLocation};
use crate::{Bootstrap, Error, Rank, Result, UniqueId};

const ID: &str = "WHOLEMEM_ID";
const RENDEZVOUS: &str = "WHOLEMEM_RENDEZVOUS";
const SECRET: &str = "WHOLEMEM_SECRET";
const SECRET_FILE: &str = "WHOLEMEM_SECRET_FILE";
const TIMEOUT: &str = "WHOLEMEM_TIMEOUT";

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
    /// | `WHOLEMEM_ID` | the unique id; if it is set, the next four variables are ignored |
    /// | `WHOLEMEM_RENDEZVOUS` | a text that all ranks of this run have in common, and no other run; else `MASTER_ADDR` and `MASTER_PORT`, Slurm's job and step, or Open MPI's job |
    /// | `WHOLEMEM_SECRET`, `WHOLEMEM_SECRET_FILE` | a secret, or the file that contains it; without one, ranks accept every process of their user, on this machine only |
    /// | `WHOLEMEM_SOCKET_DIR` | the directory for sockets |
    /// | `RANK`, `WORLD_SIZE` | as torchrun sets them; else `SLURM_PROCID` and `SLURM_NTASKS`, or `OMPI_COMM_WORLD_RANK` and `_SIZE` |
    /// | `LOCAL_WORLD_SIZE` | as torchrun sets it: if it is less than `WORLD_SIZE`, the ranks are on several nodes, which is refused; with Slurm `SLURM_STEP_NUM_NODES`, `SLURM_NNODES` or the tasks per node, with Open MPI `OMPI_COMM_WORLD_LOCAL_SIZE` |
    /// | `WHOLEMEM_TIMEOUT` | seconds to wait for all ranks, and in each operation; the default is 60 |
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
    /// [`Error::Environment`] with the variable that is missing or wrong; [`Error::SeveralNodes`]; the errors of
    /// [`create`](Self::create).
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
        let launch = read(|name| std::env::var(name).ok())?;
        let timeout = timeout.unwrap_or(launch.timeout);
        let id = match launch.id {
            IdSource::Id(id) => id,
            IdSource::Derived { run, secret } => {
                let location = match std::env::var_os(SOCKET_DIR) {
                    Some(folder) => SocketLocation::in_directory(Path::new(&folder))?,
                    None => SocketLocation::current_namespace()?,
                };
                UniqueId::from_text(location, &run, secret.as_deref())
            }
        };
        let mut bootstrap = Self::create_part(&id, launch.rank, launch.size, timeout, None)?;
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

/// Returns an error if the launcher's variables show that the ranks are on several nodes.
fn check_one_node(launcher: &Launcher, size: u32, set: &impl Fn(&str) -> Option<String>) -> Result<()> {
    for variable in launcher.node_counts {
        let (NodeCountVariable::Nodes(name) | NodeCountVariable::Ranks(name)) = *variable;
        let Some(text) = set(name) else { continue };
        let number = parse(name, text.split(['(', ',']).next().unwrap_or_default())?;
        let is_one = match variable {
            NodeCountVariable::Nodes(_) => number <= 1,
            NodeCountVariable::Ranks(_) => number >= size,
        };
        // A single rank is on one node, even if its job has several nodes.
        return if is_one || size <= 1 {
            Ok(())
        } else {
            Err(Error::SeveralNodes { name, value: text, size })
        };
    }
    Ok(())
}

fn read(get: impl Fn(&str) -> Option<String>) -> Result<LaunchEnv> {
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
    check_one_node(launcher, size, &set)?;
    let timeout = timeout(&get)?;
    let id = match set(ID) {
        Some(text) => IdSource::Id(text.parse()?),
        None => IdSource::Derived { run: run(&set)?, secret: secret(&set)? },
    };
    Ok(LaunchEnv { id, rank: Rank(rank), size, timeout })
}

fn timeout(get: &impl Fn(&str) -> Option<String>) -> Result<Duration> {
    match get(TIMEOUT).filter(|text| !text.is_empty()).map(|text| text.parse::<f64>()) {
        None => Ok(DEFAULT_TIMEOUT),
        Some(Ok(seconds)) if seconds > 0.0 && seconds < 1e9 => Ok(Duration::from_secs_f64(seconds)),
        Some(_) => Err(Error::Environment { name: TIMEOUT, problem: "is not a number of seconds" }),
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
        read(|name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned()))
    }

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
    fn ranks_on_several_nodes_are_refused() {
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
            let (name, value) = *variables.last().unwrap();
            let refused = Error::SeveralNodes { name: known(name), value: value.to_owned(), size: 4 };
            assert_eq!(read_from(variables), Err(refused));
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
            assert!(read_from(variables).is_ok(), "{variables:?}");
        }
        assert_eq!(problem(&torchrun("two")), "LOCAL_WORLD_SIZE");
    }

    /// Returns the `&'static str` that equals the name of a launcher's variable.
    fn known(name: &str) -> &'static str {
        let mut names = LAUNCHERS.iter().flat_map(|launcher| launcher.node_counts).map(|variable| {
            let (NodeCountVariable::Nodes(name) | NodeCountVariable::Ranks(name)) = *variable;
            name
        });
        names.find(|known| *known == name).unwrap()
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
        let expected =
            LaunchEnv { id: IdSource::Id(id), rank: Rank(0), size: 1, timeout: Duration::from_millis(1500) };
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
