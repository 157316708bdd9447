//! Tests of `wholemem bench allreduce`, `allgather`, `broadcast` and `barrier`.

use serde_json::Value;

use crate::json::{assert_keys, list, object};
use crate::run::run;

const REPORT: [&str; 6] = ["bench", "backend", "device", "ranks", "verified", "cases"];

/// The JSON keys of every case (`CASE`), and the further keys of cases that move bytes (`MOVES`) and that reduce (`REDUCES`).
const CASE: [&str; 14] = [
    "ranks", "mode", "calls", "slots", "value", "unit", "limit", "of_limit", "best", "caller", "flag",
    "copy", "rounds", "flag_by",
];
const MOVES: [&str; 3] = ["bytes", "algorithm", "buffers"];
const REDUCES: [&str; 3] = ["dtype", "op", "place"];

fn bench(what: &str, args: &[&str]) -> Value {
    let usual = [
        "bench",
        what,
        "--backend",
        "host",
        "--json",
        "--rounds",
        "2",
        "--ranks",
        "2",
        "--calls",
        "10",
        "--any-core",
    ];
    let report = object(&run(&[&usual, args].concat()));
    assert_eq!((&report["bench"], &report["backend"]), (&what.into(), &"host".into()));
    assert_eq!((&report["ranks"], &report["verified"]), (&2.into(), &true.into()));
    report
}

fn assert_times(case: &Value) {
    let number = |key: &str| case[key].as_f64().unwrap();
    assert_eq!(
        (&case["unit"], &case["mode"], &case["flag_by"]),
        (&"us".into(), &"eager".into(), &"ping-pong".into())
    );
    assert!(number("best") > 0.0 && number("best") <= number("value"), "{case}");
    assert!(number("flag") > 0.0, "{case}");
    // The three numbers are each rounded to a thousandth, so their sum is only approximately right.
    assert!((number("limit") - number("flag") - number("copy")).abs() < 0.002, "{case}");
    assert!((number("of_limit") - number("limit") / number("value")).abs() < 0.01, "{case}");
}

#[test]
fn allreduce_is_measured_with_windows_and_staged_in_place_and_out_of_place() {
    let report = bench("allreduce", &["--sizes", "8,64KiB", "--dtype", "f32,bf16"]);
    assert_keys(&report, &REPORT);
    let cases = list(&report["cases"]);
    assert_eq!(cases.len(), 2 * 2 * 2 * 2);
    for case in cases {
        assert_keys(case, &[&CASE[..], &MOVES, &REDUCES].concat());
        assert_times(case);
    }
    let count = |key: &str, value: &str| cases.iter().filter(|case| case[key] == value).count();
    let counts = [("buffers", "staged"), ("place", "in"), ("dtype", "bf16"), ("algorithm", "packets")];
    assert_eq!(counts.map(|(key, value)| count(key, value)), [8; 4]);
}

#[test]
fn allgather_broadcast_and_barrier_are_measured() {
    for what in ["allgather", "broadcast"] {
        let report = bench(what, &["--sizes", "8,10KiB", "--algorithm", "one-shot"]);
        let cases = list(&report["cases"]);
        assert_eq!(cases.len(), 4);
        for case in cases {
            assert_keys(case, &[&CASE[..], &MOVES].concat());
            assert_times(case);
            assert_eq!(case["algorithm"], "one-shot");
        }
    }
    let report = bench("barrier", &[]);
    let [case] = list(&report["cases"]) else { panic!("{report}") };
    assert_keys(case, &CASE);
    assert_times(case);
    assert_eq!(case["copy"], 0.0);
}

#[test]
fn tuning_measures_every_algorithm_and_prints_thresholds() {
    let report = bench("allreduce", &["--tune", "--sizes", "64,8KiB,128KiB"]);
    assert_keys(&report, &[&REPORT[..], &["tuning"]].concat());
    let [best] = list(&report["tuning"]) else { panic!("{report}") };
    assert_keys(best, &["ranks", "packets", "one_shot_staged", "one_shot_window"]);
    // The packets algorithm supports only short inputs, so its threshold is below 128 KiB.
    assert!(best["packets"].as_u64().unwrap() < 128 << 10, "{best}");
    assert_eq!(list(&report["cases"]).len(), 3 * 3 * 2);
}

#[test]
fn the_text_report_of_broadcast_has_one_line_per_case() {
    let args = [
        "bench",
        "broadcast",
        "--backend",
        "host",
        "--ranks",
        "3",
        "--sizes",
        "1KiB",
        "--rounds",
        "1",
        "--calls",
        "9",
    ];
    let run = run(&args);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    let lines: Vec<_> = run.stdout.lines().collect();
    assert!(lines[0].starts_with("broadcast, on host ("), "{}", run.stdout);
    let words: Vec<_> = lines[4].split_whitespace().collect();
    assert_eq!(words[..6], ["3", "1", "KiB", "window", "packets", "eager"]);
}

#[test]
fn graph_mode_is_rejected_on_the_host() {
    let run = run(&["bench", "barrier", "--backend", "host", "--mode", "graph"]);
    assert_eq!(run.code, Some(1));
    assert!(run.stderr.contains("`--mode graph` needs a GPU"), "{}", run.stderr);
}
