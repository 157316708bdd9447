//! Tests of `wholemem demo`.

use crate::json::{assert_keys, list, object};
use crate::run::run;

const STEPS: [&str; 17] = [
    "create",
    "send",
    "import",
    "fill",
    "verify",
    "kill",
    "verify-again",
    "give-back",
    "join",
    "lose",
    "gather",
    "scatter",
    "reduce",
    "serve",
    "put",
    "kill-server",
    "get",
];

#[test]
fn the_text_report_names_the_backend_and_every_step() {
    let run = run(&["demo", "--backend", "host", "--size", "64KiB", "--seed", "7"]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    let mut lines = run.stdout.lines();
    let title = concat!("wholemem ", env!("CARGO_PKG_VERSION"), " on the host backend");
    assert_eq!(lines.next(), Some(title));
    assert_eq!(lines.next(), Some(""));
    let named: Vec<_> =
        lines.by_ref().take(1 + STEPS.len()).map(|line| line.split_whitespace().next().unwrap()).collect();
    assert_eq!(named[0], "step");
    assert_eq!(named[1..], STEPS);
    let summary = "all checks passed; repeat with `--size 64KiB --seed 7`";
    assert_eq!(lines.collect::<Vec<_>>(), ["", summary]);
    assert!(run.stdout.contains("verified all 65536 bytes"), "{}", run.stdout);
}

#[test]
fn without_a_gpu_the_first_line_has_the_reason() {
    let run = run(&["demo", "--size", "64KiB"]);
    assert_eq!(run.code, Some(0), "{run:?}");
    let first = run.stdout.lines().next().unwrap();
    let fallback = " on the host backend (no GPU: ";
    assert!(first.contains(fallback) || first.ends_with(" on the cuda backend"), "{first}");
}

#[test]
fn json_has_every_step() {
    let report = object(&run(&["demo", "--backend", "host", "--size", "1MiB", "--json"]));
    assert_keys(&report, &["demo", "backend", "seed", "bytes", "steps", "ok"]);
    assert_eq!(report["demo"], "tour");
    assert_eq!(report["backend"], "host");
    assert_eq!(report["bytes"], 1 << 20);
    assert_eq!(report["ok"], true);
    assert!(report["seed"].is_u64());
    let steps = list(&report["steps"]);
    assert_eq!(steps.iter().map(|step| &step["step"]).collect::<Vec<_>>(), STEPS);
    for step in steps {
        assert_keys(step, &["step", "seconds", "ok"]);
        assert_eq!(step["ok"], true);
        assert!(step["seconds"].as_f64().unwrap() > 0.0, "{step}");
    }
}

#[test]
fn the_seed_is_an_option_and_random_by_default() {
    let seed = |args: &[&str]| {
        let args = [&["demo", "--backend", "host", "--size", "64KiB", "--json"], args].concat();
        object(&run(&args))["seed"].as_u64().unwrap()
    };
    assert_eq!(seed(&["--seed", "42"]), 42);
    assert_ne!(seed(&[]), seed(&[]));
}

#[test]
fn a_size_is_rounded_up_to_granules() {
    let report = object(&run(&["demo", "--backend", "host", "--size", "65537", "--json"]));
    assert_eq!(report["bytes"], 128 << 10);
}
