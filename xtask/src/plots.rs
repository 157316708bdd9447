//! `cargo xtask plots`: draws the plots of the README from the newest reports in `docs/measured/` with matplotlib.
//!
//! `plots.py` draws them. The same reports give the same bytes. Each plot has the digest of all reports, the script and the
//! version of matplotlib in its first line, so that an up-to-date check does not need matplotlib.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::wheels::{MATPLOTLIB, NUMPY, Wheel};
use crate::{command, generated, python, source_rules};

const REPORTS: &str = "docs/measured";
const PLOTS: &str = "docs/plots";
const SCRIPT: &str = "xtask/src/plots.py";

/// The Python packages that the plot script needs.
const PACKAGES: [Wheel; 2] = [MATPLOTLIB, NUMPY];

const FETCH_LIMIT: Duration = Duration::from_secs(300);

/// Draws the plots of the README. With `check`, compares them with the committed files instead.
pub(crate) fn generate(check: bool) -> Result<()> {
    let digest = digest()?;
    let committed = plot_files(Path::new(PLOTS))?;
    ensure!(!check || !committed.is_empty(), "the folder {PLOTS} contains no committed plot");
    if check && committed.iter().all(|plot| generated::is_current(plot, &digest)) {
        return Ok(());
    }
    let python = python::environment("plots", &PACKAGES, FETCH_LIMIT)?;
    let drawn = command::target_folder()?.join("plots");
    fs::create_dir_all(&drawn)?;
    command::run(Command::new(&python).args(["-B", "-m", "doctest", SCRIPT]))?;
    command::run(Command::new(&python).args([SCRIPT, REPORTS]).arg(&drawn).arg(digest))?;
    for plot in plot_files(&drawn)? {
        let name = plot.file_name().context("the path of a plot has no file name")?;
        generated::write_or_compare(&Path::new(PLOTS).join(name), &fs::read_to_string(&plot)?, check)?;
    }
    Ok(())
}

/// Returns the digest of all inputs of the plots.
fn digest() -> Result<String> {
    let is_drawn = |path: &String| path.starts_with(REPORTS) && path.contains("/peers-");
    let mut parts: Vec<_> = source_rules::tracked()?.into_iter().filter(is_drawn).collect();
    parts.push(SCRIPT.to_owned());
    let mut inputs = vec![PACKAGES.map(|wheel| wheel.pinned()).join(" ").into_bytes()];
    for path in parts {
        inputs.push(fs::read(&path).with_context(|| format!("cannot read {path}"))?);
        inputs.push(path.into_bytes());
    }
    Ok(generated::digest(inputs.iter().map(Vec::as_slice)))
}

fn plot_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    files.retain(|path| path.extension().is_some_and(|extension| extension == "svg"));
    files.sort();
    Ok(files)
}
