//! The step `miri`: runs tests under Miri, which detects undefined behaviour.
//!
//! Miri lacks memfd, futexes between processes and CUDA, so only modules that do not use them are tested. A filter that matches
//! no test is an error, because it means that a module was renamed and is no longer tested.

use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use anyhow::{Result, anyhow};

use crate::{command, report, toolchain};

/// The packages that are tested under Miri, and substrings of the names of the tests to run. Long runs come first, so that no
/// core is idle at the end.
const RUNS: &[(&str, &[&str])] = &[
    ("wholemem-store", &["index::record::"]),
    ("wholemem-store", &["id::", "index::layout::", "server::machine::ledger::"]),
    ("wholemem-os", &["shared::", "size::", "packet::wire::"]),
    ("wholemem-hal", &["suballocator::", "granule::", "rights::", "launch::"]),
    (
        "wholemem",
        &["copies_write_exactly_their_bytes", "short_indices_address_rows", "short_reductions_match"],
    ),
];

/// The number of proptest cases under Miri. It is small in exhaustive runs too, because Miri is about a hundred times slower
/// than native code.
const PROPTEST_CASES: &str = "16";

/// Runs the tests of the listed packages under Miri, as many packages at a time as the machine has cores, because Miri uses one
/// core for each.
pub(crate) fn check() -> Result<()> {
    toolchain::need_miri()?;
    let next = AtomicUsize::new(0);
    let work = || {
        let mut findings = Vec::new();
        while let Some((package, filters)) = RUNS.get(next.fetch_add(1, Ordering::Relaxed)) {
            findings.extend(run(package, filters).unwrap_or_else(|error| vec![format!("{error:#}")]));
        }
        findings
    };
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let findings = thread::scope(|scope| {
        let workers: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        workers
            .into_iter()
            .map(|worker| worker.join().map_err(|_| anyhow!("a thread that runs tests under Miri panicked")))
            .collect::<Result<Vec<_>>>()
    })?;
    report::no_findings(findings.concat())
}

/// Runs tests of a package under Miri, and returns the findings.
fn run(package: &str, filters: &[&str]) -> Result<Vec<String>> {
    let mut miri = Command::new("rustup");
    miri.args(["run", "nightly", "cargo", "miri", "test", "--locked", "-p", package, "--lib", "--"])
        .args(filters)
        .env("MIRIFLAGS", "-Zmiri-disable-isolation")
        .env("PROPTEST_CASES", PROPTEST_CASES);
    let (status, output) = command::tee(&mut miri)?;
    command::check_status(&miri, status)?;
    Ok(filters_without_tests(package, filters, &output))
}

/// Returns a finding for each test name filter that matched no passed test, in a run that succeeded.
fn filters_without_tests(package: &str, filters: &[&str], output: &str) -> Vec<String> {
    if passed(output) == 0 {
        return vec![format!("no test of {package} ran under Miri for the filters {}", filters.join(", "))];
    }
    let names: Vec<_> = output.lines().filter_map(passed_test).collect();
    filters
        .iter()
        .filter(|filter| !names.iter().any(|name| name.contains(**filter)))
        .map(|filter| format!("no test of {package} ran under Miri for the filter {filter}"))
        .collect()
}

/// Returns the number of passed tests in the summary lines of cargo's output.
fn passed(output: &str) -> u64 {
    output
        .lines()
        .filter_map(|line| {
            line.strip_prefix("test result: ok. ")?.split_once(" passed")?.0.parse::<u64>().ok()
        })
        .sum()
}

/// Returns the name of the test in a line `test NAME ... ok`.
fn passed_test(line: &str) -> Option<&str> {
    line.strip_prefix("test ")?.strip_suffix(" ... ok")
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\nrunning 3 tests\n\
        test shared::tests::a_copy_is_whole ... ok\n\
        test shared::tests::a_range_past_the_end_is_refused ... ok\n\
        test size::tests::a_map_is_made ... ignored\n\n\
        test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 7 filtered out; finished in 0.31s\n\n";

    #[test]
    fn a_run_in_which_every_filter_matches_has_no_finding() {
        assert_eq!(filters_without_tests("wholemem-os", &["shared"], OUTPUT), Vec::<String>::new());
    }

    #[test]
    fn a_filter_that_only_matches_ignored_tests_is_found() {
        assert_eq!(
            filters_without_tests("wholemem-os", &["shared", "size"], OUTPUT),
            ["no test of wholemem-os ran under Miri for the filter size"]
        );
    }

    #[test]
    fn a_run_without_tests_is_found() {
        let output = "running 0 tests\n\n\
            test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 9 filtered out; finished in 0.02s\n";
        for output in [output, ""] {
            assert_eq!(
                filters_without_tests("wholemem-hal", &["suballocator", "granule"], output),
                ["no test of wholemem-hal ran under Miri for the filters suballocator, granule"]
            );
        }
    }

    #[test]
    fn passed_tests_of_all_summaries_are_summed() {
        assert_eq!(passed(&format!("{OUTPUT}{OUTPUT}")), 4);
    }
}
