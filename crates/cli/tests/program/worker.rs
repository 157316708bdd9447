//! Tests of `wholemem launch --worker`, with the variables that Slurm sets, on nodes that are network namespaces.

use wholemem_testkit::cluster::NodeProcess;
use wholemem_testkit::{Cluster, test_name};

use crate::joined;
use crate::run::{finish, program};

const SCRIPT: &str = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE $WHOLEMEM_ADDR \
                      $MASTER_ADDR $WHOLEMEM_RENDEZVOUS $WHOLEMEM_SECRET";

/// The variables that Slurm sets for a step on two nodes of a job that has three.
fn slurm(node: usize) -> Vec<(&'static str, String)> {
    let common = [
        ("SLURM_JOB_ID", "77"),
        ("SLURM_STEP_ID", "2"),
        ("SLURM_JOB_NODELIST", "n[0-2]"),
        ("SLURM_STEP_NODELIST", "n[0-1]"),
        ("SLURM_STEP_NUM_NODES", "2"),
        ("SLURM_NNODES", "3"),
        ("SLURM_STEP_TASKS_PER_NODE", "1(x2)"),
        ("SLURM_NTASKS", "2"),
    ];
    let common = common.map(|(name, value)| (name, value.to_owned()));
    let own = [("SLURM_NODEID", node.to_string()), ("SLURM_PROCID", node.to_string())];
    common.into_iter().chain(own).collect()
}

fn outputs(processes: Vec<NodeProcess>) -> Vec<String> {
    let output = |mut process: NodeProcess| {
        assert_eq!(process.wait().code(), Some(0), "{}", process.stderr());
        let stdout = process.stdout();
        let mut lines: Vec<_> = stdout.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    processes.into_iter().flat_map(output).collect()
}

#[test]
fn workers_of_slurm_number_their_ranks_node_by_node() {
    let Some(cluster) = Cluster::of(&[0, 0]).start(test_name!(), |_| unreachable!("the nodes have no ranks"))
    else {
        return;
    };
    let start = |node: usize| {
        let args = ["launch", "--worker", "-n", "2", "--", "sh", "-c", SCRIPT];
        let worker = cluster.command(node, env!("CARGO_BIN_EXE_wholemem")).args(args);
        let worker = worker.env("WHOLEMEM_SECRET", "0123456789abcdef");
        slurm(node).into_iter().fold(worker, |worker, (name, value)| worker.env(name, value)).spawn()
    };
    let lines = outputs((0..2).map(start).collect());
    let address = lines[0].split(' ').nth(4).unwrap();
    assert!(address.starts_with("n0:"), "the first host of the step: {lines:?}");
    let expected = (0..4).map(|rank: usize| {
        let (node, local) = (rank / 2, rank % 2);
        format!("[{rank}] {rank}/4 {local}/2 {node}/2 {address} n0 slurm-77-2 0123456789abcdef")
    });
    assert_eq!(lines, expected.collect::<Vec<_>>());
}

#[test]
fn ranks_of_all_workers_form_a_group() {
    if joined::run_rank() {
        return;
    }
    let Some(cluster) = Cluster::of(&[0, 0]).start(test_name!(), |_| unreachable!("the nodes have no ranks"))
    else {
        return;
    };
    let script = joined::script(test_name!());
    let start = |node: usize| {
        let args = ["launch", "--worker", "-n", "2", "--", "sh", "-c", &script];
        let worker = cluster.command(node, env!("CARGO_BIN_EXE_wholemem")).args(args);
        let worker = worker.env("WHOLEMEM_SECRET", "0123456789abcdef").env("WHOLEMEM_TIMEOUT", "60");
        slurm(node).into_iter().fold(worker, |worker, (name, value)| worker.env(name, value)).spawn()
    };
    let lines = outputs((0..2).map(start).collect());
    let reports = joined::reports(&lines.join("\n"));
    assert_eq!(reports, [(0, 4, 0, 2), (1, 4, 0, 2), (2, 4, 1, 2), (3, 4, 1, 2)]);
    for node in 0..2 {
        assert!(cluster.counters(node).received > 2 * joined::LEN as u64, "node {node}");
    }
}

#[test]
fn workers_of_other_schedulers_are_told_their_node() {
    let Some(cluster) = Cluster::of(&[0, 0]).start(test_name!(), |_| unreachable!("the nodes have no ranks"))
    else {
        return;
    };
    // As an indexed job of Kubernetes would.
    let start = |node: usize| {
        let node_text = node.to_string();
        let args =
            ["launch", "--worker", "--nodes", "2", "--node", &node_text, "-n", "1", "--", "sh", "-c", SCRIPT];
        let worker = cluster.command(node, env!("CARGO_BIN_EXE_wholemem")).args(args);
        worker.env("WHOLEMEM_SECRET", "0123456789abcdef").env("WHOLEMEM_ADDR", "n0:29600").spawn()
    };
    let lines = outputs((0..2).map(start).collect());
    let expected = [0, 1]
        .map(|rank| format!("[{rank}] {rank}/2 0/1 {rank}/2 n0:29600 n0 nodes-of-n0:29600 0123456789abcdef"));
    assert_eq!(lines, expected);
}

#[test]
fn a_worker_says_what_is_missing() {
    let error = |variables: &[(&str, String)]| {
        let mut command = program(&["launch", "--worker", "-n", "2", "--", "echo", "started"]);
        command.env_remove("WHOLEMEM_SECRET").env_remove("WHOLEMEM_SECRET_FILE");
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        let run = finish(command);
        assert_eq!((run.code, run.stdout.as_str()), (Some(1), ""), "{run:?}");
        run.stderr
    };
    assert!(
        error(&[]).contains("`SLURM_NODEID` is not set: start the worker with srun, or set `--nodes` and")
    );
    assert!(error(&slurm(0)).contains("need a secret: set `WHOLEMEM_SECRET_FILE`"));
    let mut twice = slurm(0);
    twice.push(("SLURM_STEP_TASKS_PER_NODE", "2(x2)".to_owned()));
    assert!(error(&twice).contains("each node needs one worker"));
}

#[test]
fn a_worker_on_the_only_node_needs_no_secret() {
    let mut command =
        program(&["launch", "--worker", "--nodes", "1", "--node", "0", "-n", "2", "--", "sh", "-c"]);
    command.arg("echo $RANK/$WORLD_SIZE ${WHOLEMEM_ID%%-*}");
    let run = finish(command);
    assert_eq!(run.code, Some(0), "{run:?}");
    let mut lines: Vec<_> = run.stdout.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[0] 0/2 wm1", "[1] 1/2 wm1"]);
}
