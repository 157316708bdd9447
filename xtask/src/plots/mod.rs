//! `cargo xtask plots`: the README's pictures, drawn from what is kept in `docs/measured/`.
//!
//! A picture is a function of a report: the same file gives the same bytes, and the step `generated` sees when one was
//! changed without the other. Of several reports of a backend the newest is drawn, by the name of its folder.

mod allreduce;
mod svg;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::generated;
use svg::{Figure, Series, Style};

const REPORTS: &str = "docs/measured";
const PICTURES: &str = "docs/plots";

/// From the text of a report.
type Draw = fn(&str) -> Result<Figure>;

/// What `cargo xtask peers` writes, and how it is drawn.
const KINDS: [(&str, Draw); 2] = [("gather", gather), ("allreduce", allreduce::figure)];

/// Draws, or only looks that what is there would be drawn.
pub(crate) fn generate(check: bool) -> Result<()> {
    for (name, figure) in KINDS {
        for (backend, path) in newest(Path::new(REPORTS), &format!("peers-{name}.json"))? {
            let text = fs::read_to_string(&path)?;
            let figure = figure(&text).with_context(|| format!("cannot draw {}", path.display()))?;
            let picture = Path::new(PICTURES).join(format!("{name}-{backend}.svg"));
            generated::put(&picture, &svg::draw(&figure), check)?;
        }
    }
    Ok(())
}

/// The newest report of each backend.
fn newest(folder: &Path, name: &str) -> Result<BTreeMap<String, PathBuf>> {
    let mut folders = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    folders.sort();
    let mut reports = BTreeMap::new();
    for path in folders.iter().map(|folder| folder.join(name)).filter(|path| path.is_file()) {
        let report: Value = serde_json::from_str(&fs::read_to_string(&path)?)
            .with_context(|| format!("{} is no JSON", path.display()))?;
        let backend = report["backend"].as_str().context("a report names its backend")?;
        reports.insert(backend.to_owned(), path);
    }
    Ok(reports)
}

/// The figure of a report of gathers: by row size, calls of many rows only.
fn gather(report: &str) -> Result<Figure> {
    let report: Value = serde_json::from_str(report)?;
    ensure!(report["verified"] == true, "what was measured was not checked");
    let mut cases: BTreeMap<u64, &Value> = BTreeMap::new();
    for case in report["cases"].as_array().context("a report has cases")? {
        let row = case["row_bytes"].as_u64().context("a case has `row_bytes`")?;
        let rows = case["rows"].as_u64().context("a case has `rows`")?;
        let kept = cases.entry(row).or_insert(case);
        if kept["rows"].as_u64() < Some(rows) {
            *kept = case;
        }
    }
    let points = |pick: &dyn Fn(&Value) -> Option<f64>| -> Vec<(u64, f64)> {
        cases.iter().filter_map(|(row, case)| Some((*row, pick(case)?))).collect()
    };
    let mut series = vec![Series {
        name: "plain copy".to_owned(),
        style: Style::Limit,
        points: points(&|case| case["limit"].as_f64()),
    }];
    let names = report["peers"].as_object().context("a report has peers")?;
    let mut versions = Vec::new();
    for (number, (name, version)) in names.iter().enumerate() {
        // Of a name and its kind the first word, and of a version what is not about its build.
        let first = name.split(' ').next().unwrap_or_default();
        let version = version.as_str().unwrap_or_default().split('+').next().unwrap_or_default();
        versions.push(format!("{first} {version}").trim_end().to_owned());
        series.push(Series {
            name: name.clone(),
            style: Style::Peer(number),
            points: points(&|case| case["value"][name].as_f64()),
        });
    }
    series.push(Series {
        name: "wholemem".to_owned(),
        style: Style::Ours,
        points: points(&|case| case["value"]["wholemem"].as_f64()),
    });
    let device = report["device"].as_str().unwrap_or_default();
    let machine = report["machine"].as_str().unwrap_or(device);
    versions.dedup();
    let table = report["table_bytes"].as_u64().context("a report has `table_bytes`")? >> 30;
    Ok(Figure {
        title: format!("Gathering random rows of a {table} GiB table"),
        subtitle: format!("GB/s of payload by row size; {machine}; {}", versions.join(", ")),
        axis: "bytes of a row",
        series,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = r#"{
        "bench": "peers-gather", "backend": "host", "device": "NUMA node 0", "table_bytes": 4294967296,
        "peers": {"numpy": "2.3.5"}, "verified": true, "cases": [
            {"row_bytes": 64, "rows": 1, "limit": 9.0, "value": {"wholemem": 0.1, "numpy": 0.2}},
            {"row_bytes": 64, "rows": 1000, "limit": 8.0, "value": {"wholemem": 1.5, "numpy": 1.0}},
            {"row_bytes": 1024, "rows": 1000, "limit": 8.0, "value": {"wholemem": 4.0, "numpy": 2.0}}]}"#;

    #[test]
    fn a_figure_has_the_limit_the_peers_and_us_for_calls_of_many_rows() {
        let figure = gather(REPORT).unwrap();
        let series: Vec<_> =
            figure.series.iter().map(|series| (series.name.as_str(), series.points.as_slice())).collect();
        assert_eq!(
            series,
            [
                ("plain copy", &[(64, 8.0), (1024, 8.0)][..]),
                ("numpy", &[(64, 1.0), (1024, 2.0)]),
                ("wholemem", &[(64, 1.5), (1024, 4.0)]),
            ]
        );
        assert_eq!(figure.title, "Gathering random rows of a 4 GiB table");
        assert_eq!(figure.subtitle, "GB/s of payload by row size; NUMA node 0; numpy 2.3.5");
    }

    #[test]
    fn what_was_not_checked_is_not_drawn() {
        let report = REPORT.replace("\"verified\": true", "\"verified\": false");
        assert_eq!(gather(&report).unwrap_err().to_string(), "what was measured was not checked");
    }
}
