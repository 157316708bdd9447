//! `cargo xtask plots`: the README's pictures, drawn from the newest reports in `docs/measured/` by matplotlib.
//!
//! `plots.py` draws them. The same reports give the same bytes, and each picture names the digest of all reports, the script
//! and the version of matplotlib, so that a check without changes needs no matplotlib.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::wheels::{MATPLOTLIB, NUMPY, Wheel};
use crate::{command, generated, python, source_rules};

const REPORTS: &str = "docs/measured";
const PICTURES: &str = "docs/plots";
const SCRIPT: &str = "xtask/src/plots.py";

/// What the environment of the script holds.
const PACKAGES: [Wheel; 2] = [MATPLOTLIB, NUMPY];

const FETCH_LIMIT: Duration = Duration::from_secs(300);

/// Draws the pictures, or checks that what is committed is what would be drawn.
pub(crate) fn generate(check: bool) -> Result<()> {
    let digest = digest()?;
    let committed = pictures(Path::new(PICTURES))?;
    ensure!(!check || !committed.is_empty(), "{PICTURES} has no picture");
    if check && committed.iter().all(|picture| generated::is_current(picture, &digest)) {
        return Ok(());
    }
    let python = python::environment("plots", &PACKAGES, FETCH_LIMIT)?;
    let drawn = command::target_folder()?.join("plots");
    fs::create_dir_all(&drawn)?;
    command::run(Command::new(&python).args(["-B", "-m", "doctest", SCRIPT]))?;
    command::run(Command::new(&python).args([SCRIPT, REPORTS]).arg(&drawn).arg(digest))?;
    for picture in pictures(&drawn)? {
        let name = picture.file_name().context("a picture has a name")?;
        generated::write_or_compare(&Path::new(PICTURES).join(name), &fs::read_to_string(&picture)?, check)?;
    }
    Ok(())
}

/// The digest of everything that the pictures depend on.
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

fn pictures(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    files.retain(|path| path.extension().is_some_and(|extension| extension == "svg"));
    files.sort();
    Ok(files)
}
