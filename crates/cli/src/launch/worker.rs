//! `wholemem launch --worker`: one of several launchers, one on each node, as Slurm and Kubernetes start them.
//!
//! The workers do not talk to each other. Each computes the same numbering from the number of its node: all nodes have the
//! same number of ranks. The user provides the group's secret.

use anyhow::{Context, Result, bail, ensure};
use wholemem_comm::discovery::{Discovery, default_port, expand_task_counts};

use super::plan::{ByteText, NodePlan};
use crate::cli::LaunchArgs;

/// The variables that identify a step of Slurm.
const SLURM_RUN: [&str; 2] = ["SLURM_JOB_ID", "SLURM_STEP_ID"];

/// The place of a node among all nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct NodePlace {
    node: u32,
    nodes: u32,
}

/// Returns the plan for the ranks of this node.
pub(super) fn plan(args: &LaunchArgs, ranks: u32) -> Result<NodePlan> {
    let given = args.node.zip(args.nodes).map(|(node, nodes)| NodePlace { node, nodes });
    let get = |name: &str| std::env::var(name).ok();
    let (place, variables) = plan_from(get, given)?;
    if place.nodes == 1 {
        return super::local_plan(args, ranks);
    }
    let size = ranks.checked_mul(place.nodes).filter(|size| *size <= 1 << 16);
    Ok(NodePlan {
        first_rank: place.node * ranks,
        ranks,
        size: size.with_context(|| format!("{} nodes of {ranks} ranks are too many ranks", place.nodes))?,
        node: place.node,
        nodes: place.nodes,
        host: None,
        variables,
        command: args.command.iter().map(ByteText::new).collect(),
        log_dir: args.log_dir.as_ref().map(ByteText::new),
    })
}

/// Returns the place of this node, and the variables of its ranks if there are several nodes.
fn plan_from(
    get: impl Fn(&str) -> Option<String>,
    given: Option<NodePlace>,
) -> Result<(NodePlace, Vec<(String, String)>)> {
    let set = |name: &str| get(name).filter(|value| !value.is_empty());
    let place = given.map_or_else(|| slurm_place(&set), Ok)?;
    let NodePlace { node, nodes } = place;
    ensure!(node < nodes, "there is no node {node}: the number of nodes is {nodes}");
    if nodes == 1 {
        return Ok((place, Vec::new()));
    }
    let run = run(&set)?;
    let discovery = Discovery::read(set, &wholemem_os::interface::addresses()?, &run)?;
    discovery.require_secret()?;
    let master_port =
        set("MASTER_PORT").unwrap_or_else(|| default_port(&format!("MASTER_PORT of {run}")).to_string());
    let variables = [
        ("WHOLEMEM_ADDR", discovery.root.to_string()),
        ("WHOLEMEM_RENDEZVOUS", run.clone()),
        ("MASTER_ADDR", discovery.root.host),
        ("MASTER_PORT", master_port),
        ("TORCHELASTIC_RUN_ID", run),
    ];
    Ok((place, variables.map(|(name, value)| (name.to_owned(), value)).to_vec()))
}

/// Returns the place of this node in a step of Slurm, which must have one task on each node.
fn slurm_place(set: &impl Fn(&str) -> Option<String>) -> Result<NodePlace> {
    let number = |name: &str| -> Result<Option<u32>> {
        let value = set(name);
        value
            .map(|text| text.parse().with_context(|| format!("`{name}` is `{text}`, which is no number")))
            .transpose()
    };
    let Some(node) = number("SLURM_NODEID")? else {
        bail!("`SLURM_NODEID` is not set: start the worker with srun, or set `--nodes` and `--node`");
    };
    let nodes = match number("SLURM_STEP_NUM_NODES")? {
        Some(nodes) => nodes,
        None => {
            number("SLURM_NNODES")?.context("neither `SLURM_STEP_NUM_NODES` nor `SLURM_NNODES` is set")?
        }
    };
    if let Some(tasks) = set("SLURM_STEP_TASKS_PER_NODE") {
        let counts = expand_task_counts(&tasks).map_err(|problem| {
            anyhow::anyhow!("`SLURM_STEP_TASKS_PER_NODE` is `{tasks}`, which {problem}")
        })?;
        ensure!(
            counts.iter().all(|count| *count == 1),
            "`SLURM_STEP_TASKS_PER_NODE` is `{tasks}`: each node needs one worker, as with `srun --ntasks-per-node=1`"
        );
    }
    Ok(NodePlace { node, nodes })
}

/// Returns a text that is equal on all nodes of the run, and different in other runs.
fn run(set: &impl Fn(&str) -> Option<String>) -> Result<String> {
    if let Some(run) = set("WHOLEMEM_RENDEZVOUS") {
        return Ok(run);
    }
    if set(SLURM_RUN[0]).is_some() {
        let values = SLURM_RUN.map(|name| set(name).unwrap_or_default());
        return Ok(format!("slurm-{}-{}", values[0], values[1]));
    }
    let address = set("WHOLEMEM_ADDR").or_else(|| set("MASTER_ADDR"));
    let address =
        address.context("nothing identifies the run: set `WHOLEMEM_RENDEZVOUS` or `WHOLEMEM_ADDR`")?;
    Ok(format!("nodes-of-{address}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: (&str, &str) = ("WHOLEMEM_SECRET", "0123456789abcdef");
    const SLURM: [(&str, &str); 6] = [
        ("SLURM_JOB_ID", "77"),
        ("SLURM_STEP_ID", "1"),
        ("SLURM_NODEID", "1"),
        ("SLURM_NNODES", "3"),
        ("SLURM_STEP_NUM_NODES", "2"),
        ("SLURM_STEP_NODELIST", "gpu[07-08]"),
    ];

    fn plan_of(
        variables: &[(&str, &str)],
        given: Option<NodePlace>,
    ) -> Result<(NodePlace, Vec<(String, String)>)> {
        plan_from(
            |name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned()),
            given,
        )
    }

    fn value<'a>(variables: &'a [(String, String)], name: &str) -> &'a str {
        &variables.iter().find(|(n, _)| n == name).unwrap().1
    }

    #[test]
    fn a_worker_of_slurm_has_the_number_of_its_node_and_the_first_host() {
        let (place, variables) = plan_of(&[&SLURM[..], &[SECRET]].concat(), None).unwrap();
        assert_eq!(place, NodePlace { node: 1, nodes: 2 });
        let port = default_port("slurm-77-1");
        assert_eq!(value(&variables, "WHOLEMEM_ADDR"), format!("gpu07:{port}"));
        assert_eq!(value(&variables, "MASTER_ADDR"), "gpu07");
        assert_ne!(value(&variables, "MASTER_PORT"), port.to_string());
        assert_eq!(value(&variables, "WHOLEMEM_RENDEZVOUS"), "slurm-77-1");
        assert!(!format!("{variables:?}").contains(SECRET.1), "the ranks inherit the secret");
    }

    #[test]
    fn the_place_may_be_given() {
        let given = NodePlace { node: 0, nodes: 4 };
        let variables = [("WHOLEMEM_ADDR", "job-0.job:29600"), SECRET, ("MASTER_PORT", "5")];
        let (place, variables) = plan_of(&variables, Some(given)).unwrap();
        assert_eq!(place, given);
        assert_eq!(value(&variables, "WHOLEMEM_ADDR"), "job-0.job:29600");
        assert_eq!(value(&variables, "WHOLEMEM_RENDEZVOUS"), "nodes-of-job-0.job:29600");
        assert_eq!(value(&variables, "MASTER_PORT"), "5");
        let alone = plan_of(&[], Some(NodePlace { node: 0, nodes: 1 })).unwrap();
        assert_eq!(alone.1, []);
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        let with = |more: &[(&'static str, &'static str)]| [&SLURM[..], more].concat();
        for (variables, given, expected) in [
            (vec![], None, "`SLURM_NODEID` is not set: start the worker with srun"),
            (SLURM.to_vec(), None, "need a secret: set `WHOLEMEM_SECRET_FILE`"),
            (with(&[("SLURM_STEP_TASKS_PER_NODE", "2(x2)")]), None, "srun --ntasks-per-node=1"),
            (with(&[("SLURM_STEP_TASKS_PER_NODE", "x")]), None, "is not a list of task counts"),
            (vec![SECRET], Some(NodePlace { node: 0, nodes: 2 }), "nothing identifies the run"),
            (vec![SECRET], Some(NodePlace { node: 2, nodes: 2 }), "there is no node 2"),
        ] {
            let error = format!("{:#}", plan_of(&variables, given).unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
    }
}
