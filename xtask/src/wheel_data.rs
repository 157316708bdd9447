//! Copies the files that a wheel contains in addition to the library: the program with its manual
//! pages and completions, and the headers for kernels.
//!
//! maturin reads them from the folder `data` of `pyproject.toml`, which must exist. `packaging/build_backend.py` fills it for
//! `pip install .`, and this module for all other builds.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::manual_files;

/// The folder whose files maturin adds to a wheel.
const DATA: &str = "target/wheel-data";

const HEADERS: &str = "crates/wholemem/kernels/include/wholemem";

/// Copies the headers for kernels, and the program if given, to the folder whose files maturin adds to a wheel.
pub(crate) fn stage(program: Option<&Path>) -> Result<()> {
    let data = Path::new(DATA);
    if data.is_dir() {
        fs::remove_dir_all(data)?;
    }
    let headers = data.join("platlib/wholemem/include/wholemem");
    fs::create_dir_all(&headers)?;
    for entry in fs::read_dir(HEADERS).with_context(|| format!("cannot read {HEADERS}"))? {
        let entry = entry?;
        fs::copy(entry.path(), headers.join(entry.file_name()))?;
    }
    if let Some(program) = program {
        manual_files::write(&data.join("data/share"), "site-functions")?;
        fs::create_dir_all(data.join("scripts"))?;
        fs::copy(program, data.join("scripts/wholemem"))?;
    }
    Ok(())
}
