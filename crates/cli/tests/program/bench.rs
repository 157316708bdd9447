//! Tests of `wholemem bench`: the keys of the JSON output, the measured times and the errors.

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use serde_json::Value;

use crate::json::{assert_keys, list, object};
use crate::run::{program, run};

fn bench(what: &str, args: &[&str]) -> Value {
    let args = [&["bench", what, "--backend", "host", "--json"], args].concat();
    object(&run(&args))
}

const REPORT: [&str; 6] = ["bench", "backend", "device", "ranks", "verified", "cases"];
const CASE: [&str; 10] =
    ["bytes", "value", "unit", "limit", "of_limit", "median", "limit_median", "best", "limit_best", "rounds"];

fn assert_times(case: &Value) {
    let number = |key: &str| case[key].as_f64().unwrap();
    assert_eq!(case["unit"], "us");
    for [typical, median, best] in [["value", "median", "best"], ["limit", "limit_median", "limit_best"]] {
        assert!(number(best) > 0.0 && number(best) <= number(typical), "{case}");
        assert!(number(best) <= number(median), "{case}");
    }
    // The limit, the value and their ratio are each rounded to a thousandth.
    let ratio = number("limit") / number("value");
    assert!((number("of_limit") - ratio).abs() < 0.002, "{case}");
}

#[test]
fn alloc_is_compared_with_raw_calls_and_verified() {
    let report = bench("alloc", &["--sizes", "64KiB,1MiB", "--rounds", "5"]);
    assert_keys(&report, &REPORT);
    assert_eq!(report["bench"], "alloc");
    assert_eq!(report["backend"], "host");
    assert!(report["device"].is_string());
    assert_eq!(report["ranks"], 1);
    assert_eq!(report["verified"], true);
    let sizes: Vec<_> = list(&report["cases"]).iter().map(|case| &case["bytes"]).collect();
    assert_eq!(sizes, [64 << 10, 1 << 20]);
    for case in list(&report["cases"]) {
        assert_keys(case, &CASE);
        assert_eq!(case["rounds"], 5);
        assert_times(case);
    }
}

#[test]
fn share_is_measured_between_two_processes_and_verified() {
    let report = bench("share", &["--sizes", "64KiB", "--rounds", "5"]);
    assert_keys(&report, &REPORT);
    assert_eq!(report["bench"], "share");
    assert_eq!(report["ranks"], 2);
    assert_eq!(report["verified"], true);
    let [case] = list(&report["cases"]) else { panic!("{report}") };
    assert_keys(case, &[&CASE[..], &["pinned"]].concat());
    assert_eq!(case["bytes"], 64 << 10);
    assert_eq!(case["pinned"], "one core");
    assert_times(case);
}

#[test]
fn the_default_sizes_range_from_one_granule_to_max_size() {
    let report = bench("alloc", &["--max-size", "600KiB", "--rounds", "2"]);
    let sizes: Vec<_> = list(&report["cases"]).iter().map(|case| &case["bytes"]).collect();
    assert_eq!(sizes, [64 << 10, 256 << 10, 640 << 10]);
}

#[test]
fn sizes_are_rounded_to_granules_sorted_and_deduplicated() {
    let report = bench("alloc", &["--sizes", "128KiB,1,64KiB", "--rounds", "1"]);
    let sizes: Vec<_> = list(&report["cases"]).iter().map(|case| &case["bytes"]).collect();
    assert_eq!(sizes, [64 << 10, 128 << 10]);
}

#[test]
fn the_text_report_of_share_has_ratios() {
    let run = run(&["bench", "share", "--backend", "host", "--sizes", "64KiB", "--rounds", "5"]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    let lines: Vec<_> = run.stdout.lines().collect();
    assert!(lines[0].ends_with("2 processes, pinned to one core"), "{}", run.stdout);
    assert_eq!(lines[1], "microseconds; every round was verified");
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let columns = ["size", "wholemem", "raw", "calls", "ratio", "best", "raw", "best", "rounds"];
    assert_eq!(words(lines[3]), columns);
    assert_eq!(words(lines[4])[..2], ["64", "KiB"]);
    assert_eq!(words(lines[4]).last().unwrap(), "5");
}

#[test]
fn a_sweep_that_runs_out_of_memory_reports_the_measured_sizes() {
    let run =
        run(&["bench", "alloc", "--backend", "host", "--sizes", "64KiB,4096TiB", "--rounds", "1", "--json"]);
    assert_eq!(run.code, Some(0), "{run:?}");
    assert!(run.stderr.starts_with("note: stopped before 4096 TiB: cannot fill 4096 TiB"), "{}", run.stderr);
    let report: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(list(&report["cases"]).len(), 1);
    assert!(report["stopped"].as_str().unwrap().starts_with("4096 TiB: cannot fill 4096 TiB"));
}

/// The JSON keys of a case of `bench bootstrap`, `comm` and `death`.
const RANKS_CASE: [&str; 9] = ["ranks", "what", "value", "unit", "limit", "of_limit", "p99", "max", "rounds"];

#[test]
fn bootstrap_is_measured_with_threads_and_with_processes() {
    let report = object(&run(&["bench", "bootstrap", "--ranks", "1,6", "--rounds", "1", "--json"]));
    assert_keys(&report, &REPORT);
    assert_eq!(
        (&report["bench"], &report["ranks"], &report["verified"]),
        (&"bootstrap".into(), &6.into(), &true.into())
    );
    let cases = list(&report["cases"]);
    let what: Vec<_> =
        cases.iter().map(|case| (case["ranks"].as_u64().unwrap(), case["what"].as_str().unwrap())).collect();
    assert_eq!(what, [(1, "threads"), (1, "processes"), (6, "threads"), (6, "processes")]);
    cases.iter().for_each(|case| assert_keys(case, &RANKS_CASE));
}

#[test]
fn barrier_and_all_gather_are_compared_with_a_round_trip() {
    let report =
        object(&run(&["bench", "comm", "--ranks", "2", "--sizes", "8B,100KiB", "--rounds", "3", "--json"]));
    assert_keys(&report, &REPORT);
    let cases = list(&report["cases"]);
    let what: Vec<_> = cases.iter().map(|case| case["what"].as_str().unwrap()).collect();
    assert_eq!(what, ["barrier", "all_gather", "all_gather"]);
    assert!(cases.iter().all(|case| case["limit"].as_f64().unwrap() > 0.0), "{report}");
}

#[test]
fn a_death_is_timed_until_the_last_survivor_detects_it() {
    let report =
        object(&run(&["bench", "death", "--ranks", "3", "--kills", "3", "--resident", "1MiB", "--json"]));
    assert_keys(&report, &REPORT);
    let case = &list(&report["cases"])[0];
    assert_eq!((&case["rounds"], &case["bytes"]), (&3.into(), &(1 << 20).into()));
}

/// The JSON keys of a case of `bench gather` and `bench scatter`.
const ROWS_CASE: [&str; 22] = [
    "row_bytes",
    "index",
    "kind",
    "location",
    "spread",
    "share",
    "ranks",
    "movers",
    "devices",
    "rows",
    "calls",
    "table_bytes",
    "value",
    "unit",
    "limit",
    "of_limit",
    "median",
    "limit_median",
    "best",
    "limit_best",
    "call_us",
    "rounds",
];

fn assert_rates(case: &Value) {
    let number = |key: &str| case[key].as_f64().unwrap();
    assert_keys(case, &ROWS_CASE);
    assert_eq!(case["unit"], "GB/s");
    for [typical, median, best] in [["value", "median", "best"], ["limit", "limit_median", "limit_best"]] {
        assert!(number(typical) > 0.0 && number(best) >= number(typical), "{case}");
        assert!(number(best) >= number(median), "{case}");
    }
    // The limit, the value and their ratio are each rounded to three digits or more.
    let ratio = number("value") / number("limit");
    assert!((number("of_limit") - ratio).abs() <= 0.01 * ratio + 0.001, "{case}");
}

#[test]
fn gather_is_compared_with_a_copy_for_every_combination_of_options() {
    let sizes = ["--row-bytes", "4,12,130,1KiB", "--table", "256KiB", "--rows", "1,200", "--rounds", "2"];
    let types = ["--index", "i32,i64", "--spread", "uniform,zipf", "--kind", "continuous,chunked"];
    let report = bench("gather", &[&sizes[..], &types].concat());
    assert_keys(&report, &REPORT);
    assert_eq!(
        (&report["bench"], &report["ranks"], &report["verified"]),
        (&"gather".into(), &1.into(), &true.into())
    );
    let cases = list(&report["cases"]);
    assert_eq!(cases.len(), 4 * 2 * 2 * 2 * 2);
    cases.iter().for_each(assert_rates);
    let count = |key: &str, value: &str| cases.iter().filter(|case| case[key] == value).count();
    assert_eq!((count("index", "i32"), count("spread", "zipf"), count("kind", "chunked")), (32, 32, 32));
}

#[test]
fn a_report_of_several_ranks_has_the_number_of_devices() {
    let args =
        ["--row-bytes", "100", "--table", "1MiB", "--rounds", "2", "--ranks", "2,5", "--share", "uneven"];
    for what in ["gather", "scatter"] {
        let report = bench(what, &args);
        assert_eq!((&report["bench"], &report["ranks"]), (&what.into(), &5.into()));
        let cases = list(&report["cases"]);
        cases.iter().for_each(assert_rates);
        let ranks: Vec<_> = cases
            .iter()
            .map(|case| ["ranks", "movers", "devices"].map(|key| case[key].as_u64().unwrap()))
            .collect();
        assert_eq!((ranks[0][..2].to_vec(), ranks[1][..2].to_vec()), (vec![2, 2], vec![5, 5]));
        assert!(ranks.iter().all(|[ranks, _, devices]| devices <= ranks));
    }
    let first = bench("gather", &[&args[..], &["--first-only"]].concat());
    assert!(list(&first["cases"]).iter().all(|case| case["movers"] == 1), "{first}");
}

#[test]
fn the_text_report_of_gather_has_rates() {
    let args =
        ["bench", "gather", "--backend", "host", "--row-bytes", "1KiB", "--table", "1MiB", "--rounds", "2"];
    let run = run(&[&args[..], &["--rows", "7"]].concat());
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    let lines: Vec<_> = run.stdout.lines().collect();
    assert!(lines[0].starts_with("gather from a table of 1 MiB, on host ("), "{}", run.stdout);
    let words: Vec<_> = lines[4].split_whitespace().collect();
    assert_eq!(words[..8], ["1", "KiB", "7", "continuous", "device", "i64", "uniform", "1"]);
}

#[test]
fn a_table_that_exceeds_the_memory_is_rejected_with_a_hint() {
    let args = ["bench", "gather", "--backend", "host", "--row-bytes", "1KiB", "--table", "4096TiB"];
    for ranks in ["1", "2"] {
        let run = run(&[&args[..], &["--ranks", ranks]].concat());
        assert_eq!((run.code, run.stdout.as_str()), (Some(1), ""), "{run:?}");
        assert!(run.stderr.starts_with("error: cannot fill "), "{}", run.stderr);
        assert!(run.stderr.contains("\nhint: use a smaller `--size`"), "{}", run.stderr);
    }
}

#[test]
fn a_store_is_compared_with_a_round_trip_and_verified() {
    let report = object(&run(&[
        "bench",
        "store",
        "--json",
        "--sizes",
        "4KiB,1MiB",
        "--packs",
        "50",
        "--clients",
        "1,3",
        "--rounds",
        "3",
    ]));
    assert_keys(&report, &REPORT);
    assert_eq!((&report["bench"], &report["verified"]), (&Value::from("store"), &Value::from(true)));
    let cases: Vec<_> = list(&report["cases"])
        .iter()
        .map(|case| format!("{} {}", case["what"].as_str().unwrap(), case["bytes"]))
        .collect();
    assert_eq!(
        cases,
        [
            "create+write+seal 4096",
            "get first 4096",
            "get cached 4096",
            "delete 4096",
            "create+write+seal 1048576",
            "get first 1048576",
            "get cached 1048576",
            "delete 1048576",
            "attach pack 50",
            "publish to visible null",
            "status null",
            "status null",
        ]
    );
}

#[test]
fn rounds_alternate_with_another_program() {
    let args =
        ["bench", "gather", "--backend", "host", "--row-bytes", "100", "--table", "64KiB", "--rounds", "3"];
    let mut command = program(&[&args[..], &["--rows", "1,50", "--in-turns"]].concat());
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let (mut stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let mut lines = BufReader::new(stdout).lines().map(Result::unwrap);
    for rows in [1, 1, 1, 50, 50, 50] {
        assert_eq!(lines.next().unwrap(), "\"ready\"");
        stdin.write_all(b"\n").unwrap();
        let round: Value = serde_json::from_str(&lines.next().unwrap()).unwrap();
        assert_keys(&round, &["row_bytes", "rows", "calls", "us", "copy_us"]);
        assert_eq!((&round["row_bytes"], &round["rows"]), (&100.into(), &rows.into()));
        assert!(round["us"].as_f64().unwrap() > 0.0, "{round}");
    }
    let report: Value = serde_json::from_str(&lines.next().unwrap()).unwrap();
    assert_eq!(list(&report["cases"]).len(), 2);
    assert!(lines.next().is_none() && child.wait().unwrap().success());
}

#[test]
fn a_closed_stdin_is_an_error_of_in_turns() {
    let args =
        ["bench", "gather", "--backend", "host", "--row-bytes", "100", "--table", "64KiB", "--in-turns"];
    let run = run(&args);
    assert_eq!((run.code, run.stdout.as_str()), (Some(1), "\"ready\"\n"));
    assert_eq!(run.stderr, "error: stdin was closed before the other program started the next round\n");
}
