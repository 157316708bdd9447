//! The figure of a report of all-reduces: how many times faster than the rival, by size.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::svg::{Figure, Series, Style};

/// Draws two ranks, out of place, in graphs where there are some.
pub(super) fn figure(report: &str) -> Result<Figure> {
    let report: Value = serde_json::from_str(report)?;
    ensure!(report["verified"] == true, "what was measured was not checked");
    let mode = if report["backend"] == "cuda" { "graph" } else { "eager" };
    let cases = report["cases"].as_array().context("a report has cases")?;
    let drawn = |case: &&Value| case["ranks"] == 2 && case["place"] == "out" && case["mode"] == mode;
    let points = |buffers: &str| -> Vec<(u64, f64)> {
        let cases = cases.iter().filter(drawn).filter(|case| case["buffers"] == buffers);
        cases.filter_map(|case| Some((case["bytes"].as_u64()?, case["ratio"].as_f64()?))).collect()
    };
    let first = cases.iter().find(drawn).context("a report has cases of two ranks")?;
    let peers = first["peers"].as_object().context("a case has peers")?;
    let rival = peers.keys().next().and_then(|name| name.split(" one").next()).unwrap_or_default();
    let (window, staged) = (points("window"), points("staged"));
    let even = window.iter().map(|(bytes, _)| (*bytes, 1.0)).collect();
    let machine = report["machine"].as_str().unwrap_or_default();
    let dtype = report["dtype"].as_str().unwrap_or_default();
    Ok(Figure {
        title: format!("All-reduce of two ranks, beside {rival}"),
        subtitle: format!("times faster, by size; sum of {dtype}; {machine}"),
        axis: "bytes of each rank",
        series: vec![
            Series { name: rival.to_owned(), style: Style::Limit, points: even },
            Series { name: "wholemem, staged".to_owned(), style: Style::Peer(0), points: staged },
            Series { name: "wholemem, window".to_owned(), style: Style::Ours, points: window },
        ],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = r#"{
        "bench": "peers-allreduce", "backend": "host", "machine": "two cores", "dtype": "f32", "verified": true, "cases": [
            {"ranks": 2, "bytes": 4, "buffers": "window", "place": "out", "mode": "eager", "ratio": 1.5, "peers": {"open mpi": 1}},
            {"ranks": 2, "bytes": 4, "buffers": "staged", "place": "out", "mode": "eager", "ratio": 1.1, "peers": {"open mpi": 1}},
            {"ranks": 2, "bytes": 4, "buffers": "window", "place": "in", "mode": "eager", "ratio": 9.0, "peers": {"open mpi": 1}},
            {"ranks": 8, "bytes": 4, "buffers": "window", "place": "out", "mode": "eager", "ratio": 9.0, "peers": {"open mpi": 1}}]}"#;

    #[test]
    fn a_figure_has_the_rival_at_one_and_us_by_our_buffers() {
        let figure = figure(REPORT).unwrap();
        let series: Vec<_> =
            figure.series.iter().map(|series| (series.name.as_str(), series.points.as_slice())).collect();
        let expected = [
            ("open mpi", &[(4, 1.0)][..]),
            ("wholemem, staged", &[(4, 1.1)]),
            ("wholemem, window", &[(4, 1.5)]),
        ];
        assert_eq!(series, expected);
        assert_eq!(figure.subtitle, "times faster, by size; sum of f32; two cores");
    }

    #[test]
    fn what_was_not_checked_is_not_drawn() {
        let report = REPORT.replace("\"verified\": true", "\"verified\": false");
        assert_eq!(figure(&report).unwrap_err().to_string(), "what was measured was not checked");
    }
}
