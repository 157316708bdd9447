//! Ranks that a launcher starts on several nodes, and that join their group: processes of the test program itself.

use wholemem_comm::Bootstrap;

/// Set in the processes of the ranks.
const RANK_PROCESS: &str = "WHOLEMEM_TEST_JOINED_RANK";

/// The length of the part of each rank in the data that all ranks gather.
pub(crate) const LEN: usize = 100_000;

/// Returns the shell script that runs the calling test in a rank.
pub(crate) fn script(test: &str) -> String {
    let program = std::env::current_exe().unwrap();
    format!("exec env {RANK_PROCESS}=1 {} {test} --exact --nocapture", program.display())
}

/// Joins the group and reports it if this process is a rank. Returns false if it is not.
#[expect(clippy::print_stdout, reason = "the test reads the output of its ranks")]
pub(crate) fn run_rank() -> bool {
    if std::env::var_os(RANK_PROCESS).is_none() {
        return false;
    }
    let comm = Bootstrap::from_env().unwrap();
    comm.barrier().unwrap();
    let own = comm.rank();
    let part = |rank: u32| vec![rank.to_le_bytes()[0]; LEN];
    let all = comm.all_gather(&part(own.0)).unwrap();
    assert!(all == (0..comm.size()).map(part).collect::<Vec<_>>());
    println!("joined {own} {} {} {}", comm.size(), comm.node_of(own).unwrap(), comm.nodes());
    comm.barrier().unwrap();
    true
}

/// Returns what the ranks have reported: rank, size, node and number of nodes, in the order of the ranks.
pub(crate) fn reports(output: &str) -> Vec<(u32, u32, u32, u32)> {
    let mut reports: Vec<_> = output.lines().filter_map(report).collect();
    reports.sort_unstable();
    reports
}

fn report(line: &str) -> Option<(u32, u32, u32, u32)> {
    let (_, numbers) = line.split_once("joined ")?;
    let mut numbers = numbers.split(' ').map(|number| number.parse().unwrap());
    let mut next = || numbers.next().unwrap();
    Some((next(), next(), next(), next()))
}
