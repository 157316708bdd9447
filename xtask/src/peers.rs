//! `cargo xtask peers`: a bench of ours beside a rival's, in one run, with ratios.
//!
//! What runs is `bench/peers/NAME.py`, which starts our program in turn with the rivals; here it is given both. A machine
//! with a GPU that cannot build takes them along in the bundle.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use clap::{Args, Subcommand};

use crate::command;
use crate::wheels::{NUMPY, WHOLEGRAPH};

/// What is compared.
#[derive(Debug, Subcommand)]
pub(crate) enum Peers {
    /// Gathering rows, beside numpy on a host, and beside PyTorch and WholeGraph on a GPU.
    Gather(GatherArguments),
}

#[derive(Debug, Args)]
pub(crate) struct GatherArguments {
    /// On the host, also where there is a GPU.
    #[arg(long, conflicts_with = "gpu")]
    host: bool,
    /// On the GPU; PyTorch must be there already.
    #[arg(long)]
    gpu: bool,
    /// What is passed on to `bench/peers/gather.py`, such as `--row-bytes 64,1024 --rounds 5 --json FILE`.
    #[arg(last = true, value_name = "ARGUMENTS")]
    rest: Vec<OsString>,
}

const SCRIPT: &str = "bench/peers/gather.py";

pub(crate) fn run(peers: &Peers) -> Result<()> {
    let Peers::Gather(arguments) = peers;
    let on_gpu = arguments.gpu || !arguments.host && command::succeeds(&mut Command::new("nvidia-smi"));
    let mut build = command::cargo();
    build.args(["build", "--release", "--locked", "--package", "wholemem-cli"]);
    command::run(&mut build)?;
    let program = command::target_folder()?.join("release/wholemem");

    let wheels: Vec<_> = if on_gpu { WHOLEGRAPH.to_vec() } else { vec![NUMPY] };
    let folders = wheels.into_iter().map(crate::wheels::Wheel::folder).collect::<Result<Vec<_>>>()?;
    let mut python = Command::new("python3");
    python.arg(SCRIPT).arg(if on_gpu { "gpu" } else { "host" }).arg("--program").arg(program);
    python.args(&arguments.rest).env("PYTHONPATH", joined(&folders)?);
    if on_gpu {
        python.env("LD_LIBRARY_PATH", joined(&libraries(&folders)?)?);
    }
    command::run(&mut python)
}

fn joined(folders: &[PathBuf]) -> Result<OsString> {
    let whole = folders.iter().map(std::path::absolute).collect::<Result<Vec<_>, _>>()?;
    std::env::join_paths(whole).context("a folder has a colon in its name")
}

/// Where the rivals' libraries are: in their own folders, and NCCL beside PyTorch.
fn libraries(folders: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let find = "import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])";
    let nccl = command::capture(Command::new("python3").args(["-c", find]))
        .context("PyTorch's NCCL was not found: the comparison on a GPU needs PyTorch")?;
    let mut libraries = vec![PathBuf::from(nccl.trim()).join("lib")];
    for folder in folders {
        for entry in fs::read_dir(folder)? {
            libraries.push(entry?.path().join("lib64"));
        }
    }
    libraries.retain(|folder| folder.is_dir());
    Ok(libraries)
}

/// Copies the script and the rivals for a GPU to a folder, without what only their developers need.
pub(crate) fn pack(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)?;
    fs::copy(SCRIPT, folder.join("gather.py")).with_context(|| format!("cannot copy {SCRIPT}"))?;
    for wheel in WHOLEGRAPH {
        copy_needed(&wheel.folder()?, folder)?;
    }
    Ok(())
}

fn copy_needed(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let (entry, name) = entry.map(|entry| (entry.path(), entry.file_name()))?;
        if !is_needed(&name.to_string_lossy()) {
            continue;
        }
        if entry.is_dir() {
            copy_needed(&entry, &to.join(name))?;
        } else {
            fs::copy(&entry, to.join(name)).with_context(|| format!("cannot copy {}", entry.display()))?;
        }
    }
    Ok(())
}

/// Whether a file or a folder is needed to run.
fn is_needed(name: &str) -> bool {
    let for_developers = ["include", "cmake", "tests", "__pycache__", "bin"].contains(&name);
    let endings = [".pyx", ".pxd", ".cpp", ".hpp", ".h"];
    !for_developers && !endings.iter().any(|ending| name.ends_with(ending))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_only_developers_need_stays_behind() {
        for (name, needed) in [
            ("libwholegraph.so", true),
            ("wholememory_binding.abi3.so", true),
            ("__init__.py", true),
            ("VERSION", true),
            ("include", false),
            ("cmake", false),
            ("rmm_cu13-26.10.0.dist-info", true),
            ("stream.pyx", false),
        ] {
            assert_eq!(is_needed(name), needed, "{name}");
        }
    }
}
