//! `cargo xtask peers`: runs a benchmark of wholemem and of another library (a peer) in one run, and prints ratios.
//!
//! The scripts `bench/peers/NAME.py` alternate between our program and the peers. This module builds or downloads both and passes
//! them to the script. The GPU bundle contains them for machines that cannot build.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use clap::{Args, Subcommand};

use crate::command;
use crate::open_mpi::OpenMpi;
use crate::wheels::{NUMPY, VINEYARD, WHOLEGRAPH};

/// The available comparisons with other libraries.
#[derive(Debug, Subcommand)]
pub(crate) enum PeerBenchmark {
    /// Gather rows; compared with numpy on the host, with PyTorch and WholeGraph on a GPU.
    Gather(BenchArguments),
    /// All-reduce; compared with Open MPI on the host, with PyTorch's symmetric memory on a GPU.
    Allreduce(BenchArguments),
    /// Create, get and delete objects of a store in host memory; compared with Vineyard.
    Store(StoreArguments),
    /// Store and load arrays from Python; compared with Vineyard's Python client.
    StorePython(StoreArguments),
}

#[derive(Debug, Args)]
pub(crate) struct StoreArguments {
    /// Arguments for the comparison script in `bench/peers/`, such as `--sizes 1048576 --rounds 9 --json FILE`.
    #[arg(last = true, value_name = "ARGUMENTS")]
    rest: Vec<OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct BenchArguments {
    /// Run the comparison on the host even if there is a GPU.
    #[arg(long, conflicts_with = "gpu")]
    host: bool,
    /// Run the comparison on the GPU; PyTorch must be installed.
    #[arg(long)]
    gpu: bool,
    /// Arguments for the comparison script `bench/peers/NAME.py`, such as `--rounds 5 --json FILE`.
    #[arg(last = true, value_name = "ARGUMENTS")]
    rest: Vec<OsString>,
}

const GATHER: &str = "bench/peers/gather.py";
const ALLREDUCE: &str = "bench/peers/allreduce.py";
const STORE: &str = "bench/peers/store.py";
const STORE_PYTHON: &str = "bench/peers/store_python.py";

/// The source of the Open MPI program that the all-reduce is compared with.
const ALLREDUCE_SOURCE: &str = "bench/peers/allreduce.c";

pub(crate) fn run(benchmark: &PeerBenchmark) -> Result<()> {
    match benchmark {
        PeerBenchmark::Gather(arguments) => gather(arguments),
        PeerBenchmark::Allreduce(arguments) => allreduce(arguments),
        PeerBenchmark::Store(arguments) => store("python3".as_ref(), STORE, arguments),
        PeerBenchmark::StorePython(arguments) => store(&crate::python::released()?, STORE_PYTHON, arguments),
    }
}

/// Builds the program `wholemem` and returns its path.
fn build_program() -> Result<PathBuf> {
    let mut build = command::cargo();
    build.args(["build", "--release", "--locked", "--package", "wholemem-cli"]);
    command::run(&mut build)?;
    Ok(command::target_folder()?.join("release/wholemem"))
}

/// Returns the command that runs a comparison script with our program, and whether it runs on a GPU.
fn script(name: &str, arguments: &BenchArguments) -> Result<(Command, bool)> {
    let on_gpu = arguments.gpu || !arguments.host && command::succeeds(&mut Command::new("nvidia-smi"));
    let mut python = Command::new("python3");
    python.arg(name).arg(if on_gpu { "gpu" } else { "host" }).arg("--program").arg(build_program()?);
    Ok((python, on_gpu))
}

fn store(python: &Path, script: &str, arguments: &StoreArguments) -> Result<()> {
    let program = build_program()?;
    let [client, daemon] = VINEYARD.map(crate::wheels::Wheel::folder);
    let mut python = Command::new(python);
    python.arg(script).arg("--program").arg(program);
    python.arg("--vineyard").arg(client?).arg("--vineyardd").arg(daemon?.join("vineyard/bdist/vineyardd"));
    command::run(python.args(&arguments.rest))
}

fn allreduce(arguments: &BenchArguments) -> Result<()> {
    let (mut python, on_gpu) = script(ALLREDUCE, arguments)?;
    if !on_gpu {
        let (mpi, peer_program) =
            (OpenMpi::find_or_fetch()?, command::target_folder()?.join("tools/open-mpi-allreduce"));
        mpi.compile(Path::new(ALLREDUCE_SOURCE), &peer_program)?;
        python.arg("--rival").arg(peer_program).arg("--mpirun").arg(mpi.mpirun()).envs(mpi.environment()?);
    }
    command::run(python.args(&arguments.rest))
}

fn gather(arguments: &BenchArguments) -> Result<()> {
    let (mut python, on_gpu) = script(GATHER, arguments)?;
    let wheels: Vec<_> = if on_gpu { WHOLEGRAPH.to_vec() } else { vec![NUMPY] };
    let folders = wheels.into_iter().map(crate::wheels::Wheel::folder).collect::<Result<Vec<_>>>()?;
    python.env("PYTHONPATH", join_folders(&folders)?);
    if on_gpu {
        python.env("LD_LIBRARY_PATH", join_folders(&library_folders(&folders)?)?);
    }
    command::run(python.args(&arguments.rest))
}

fn join_folders(folders: &[PathBuf]) -> Result<OsString> {
    let whole = folders.iter().map(std::path::absolute).collect::<Result<Vec<_>, _>>()?;
    std::env::join_paths(whole).context("the path of a folder contains a colon")
}

/// Returns the folders with the shared libraries of the compared packages, and with PyTorch's NCCL.
fn library_folders(folders: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let find = "import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])";
    let nccl = command::capture(Command::new("python3").args(["-c", find]))
        .context("cannot find NCCL of PyTorch: the GPU comparison needs PyTorch")?;
    let mut libraries = vec![PathBuf::from(nccl.trim()).join("lib")];
    for folder in folders {
        for entry in fs::read_dir(folder)? {
            libraries.push(entry?.path().join("lib64"));
        }
    }
    libraries.retain(|folder| folder.is_dir());
    Ok(libraries)
}

/// Copies the script of the all-reduce comparison to a folder. Its GPU peer is part of PyTorch, which is not copied.
pub(crate) fn pack_allreduce(folder: &Path) -> Result<()> {
    copy_script(ALLREDUCE, folder)
}

fn copy_script(script: &str, folder: &Path) -> Result<()> {
    let name = Path::new(script).file_name().unwrap_or_default();
    fs::copy(script, folder.join(name)).with_context(|| format!("cannot copy {script}"))?;
    Ok(())
}

/// Copies the script of the gather comparison and its GPU peers to a folder, without development files.
pub(crate) fn pack_gather(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)?;
    copy_script(GATHER, folder)?;
    for wheel in WHOLEGRAPH {
        copy_run_time_files(&wheel.folder()?, folder)?;
    }
    Ok(())
}

fn copy_run_time_files(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let (entry, name) = entry.map(|entry| (entry.path(), entry.file_name()))?;
        if !is_run_time_file(&name.to_string_lossy()) {
            continue;
        }
        if entry.is_dir() {
            copy_run_time_files(&entry, &to.join(name))?;
        } else {
            fs::copy(&entry, to.join(name)).with_context(|| format!("cannot copy {}", entry.display()))?;
        }
    }
    Ok(())
}

/// Returns true if a file or folder of a Python package is needed at run time.
fn is_run_time_file(name: &str) -> bool {
    let is_for_development = ["include", "cmake", "tests", "__pycache__", "bin"].contains(&name);
    let endings = [".pyx", ".pxd", ".cpp", ".hpp", ".h"];
    !is_for_development && !endings.iter().any(|ending| name.ends_with(ending))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn development_files_are_not_packed() {
        for (name, expected) in [
            ("libwholegraph.so", true),
            ("wholememory_binding.abi3.so", true),
            ("__init__.py", true),
            ("VERSION", true),
            ("include", false),
            ("cmake", false),
            ("rmm_cu13-26.10.0.dist-info", true),
            ("stream.pyx", false),
        ] {
            assert_eq!(is_run_time_file(name), expected, "{name}");
        }
    }
}
