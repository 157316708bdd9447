//! What a wheel has beside the library: the program and the headers for kernels.
//!
//! maturin takes them from a folder, `data` in `pyproject.toml`, which has to exist. `packaging/build_backend.py` fills it for
//! `pip install .`, and this module for all else.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

/// The folder that maturin adds to a wheel.
const DATA: &str = "target/wheel-data";

const HEADERS: &str = "crates/wholemem/kernels/include/wholemem";

/// Puts what a wheel has beside the library where maturin takes it from.
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
        fs::create_dir_all(data.join("scripts"))?;
        fs::copy(program, data.join("scripts/wholemem"))?;
    }
    Ok(())
}
