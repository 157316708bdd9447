//! Developer tasks of this repository: `cargo xtask test` runs all checks, other subcommands generate, build and release.
//!
//! | module | contents |
//! |---|---|
//! | [`steps`] | the ordered steps of `cargo xtask test`, and the loop that runs all of them even if one fails |
//! | [`report`] | the output of a run: a line for each step, the table, the failures, the counts |
//! | [`command`], [`toolchain`] | running other programs, and installing missing components with rustup |
//! | [`cargo`], [`miri`], [`python`] | the steps that build and test |
//! | [`source_rules`] | the rules for source files that rustc and clippy do not check |
//! | [`vocabulary`] | former names and phrases that must not be used again |
//! | [`crate_graph`], [`module_graph`], [`licences`], [`metadata`] | the rules for dependencies between crates and between modules, and for licences |
//! | [`abi`], [`c_header`], [`bindings`], [`kernels`], [`generated`], [`wheels`] | generated files that are committed, and the pinned tools that generate them |
//! | [`package`], [`release`] | tests of the published crates, and a release with all its artefacts |
//! | [`dist`], [`wheel`], [`wheel_data`], [`deb`] | the binary packages: the program, the wheel and the Debian package |
//! | [`install`], [`native`] | the installation of the library for C and C++, and its tests |
//! | [`wheel_check`], [`empty`] | tests of the binary packages in an environment without Rust |
//! | [`bundle`] | the folder with tests and benchmarks for a machine with a GPU |
//! | [`debian`], [`openssh`] | programs from unpacked Debian packages; the ssh server of tests |
//! | [`peers`], [`open_mpi`], [`plots`] | benchmarks that compare wholemem with other libraries, and plots of their results |
//! | [`site`] | the documentation site |
//! | [`sigint`] | restores the default disposition of SIGINT for child processes |
//! | [`working_tree`], [`leaked_resources`] | checks that a run leaves no files, shared memory or processes |
//! | [`shipped`], [`headers`] | checks that shipped binaries have no test hooks, and that the headers for kernels work |
//!
//! xtask depends on no crate of the workspace, so it runs even if they do not compile. Rules are pure functions over values, with
//! tests that show each rule failing; only thin functions do I/O.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "the output is a report for people, printed while the checks run")]

mod abi;
mod bindings;
mod bundle;
mod c_header;
mod cargo;
mod command;
mod crate_graph;
mod deb;
mod debian;
mod dist;
mod empty;
mod generated;
mod headers;
mod install;
mod kernels;
mod leaked_resources;
mod licences;
mod manual_files;
mod metadata;
mod miri;
mod module_graph;
mod native;
mod open_mpi;
mod openssh;
mod package;
mod peers;
mod plots;
mod python;
mod release;
mod report;
mod shipped;
mod sigint;
mod site;
mod source_rules;
mod steps;
mod toolchain;
mod vocabulary;
mod wheel;
mod wheel_check;
mod wheel_data;
mod wheels;
mod working_tree;

use std::env;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};

use dist::Arch;
use peers::PeerBenchmark;
use steps::Step;

/// Developer tasks of this repository.
#[derive(Debug, Parser)]
#[command(bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Run every check; continue after a failure, so that one run reports all failures.
    Test(TestArguments),
    /// Generate the table of CUDA driver functions from NVIDIA's headers, which are downloaded.
    Bindings(GenerateArguments),
    /// Generate the C++ headers with the structures that kernels share with the host, and the C header of the library.
    Abi(GenerateArguments),
    /// Compile the kernels to PTX with NVRTC, which is downloaded.
    Kernels(GenerateArguments),
    /// Pack the tests, the program and the benchmarks that run on a machine with a GPU into one folder.
    GpuBundle(BundleArguments),
    /// Build the Python wheel with the library, the program and the headers, for Linux with glibc 2.28 or newer.
    Wheel(DistArguments),
    /// Build the Debian package of the program.
    Deb(DistArguments),
    /// Build the library for C and C++, and install it with its headers, the files of CMake and pkg-config, and the program.
    Install(install::InstallArguments),
    /// Run a benchmark of wholemem and the same benchmark of another library, and print ratios.
    #[command(subcommand)]
    Peers(PeerBenchmark),
    /// Draw the plots of the README from the reports in `docs/measured/`.
    Plots(GenerateArguments),
    /// Build the documentation site in `target/site/`; a broken link is an error.
    Docs(DocsArguments),
    /// Set the version, date the changelog, build all artefacts, commit and tag; nothing is pushed or published.
    Release(release::ReleaseArguments),
}

#[derive(Args, Debug)]
struct DocsArguments {
    /// Open the built documentation site in a browser.
    #[arg(long)]
    open: bool,
}

#[derive(Args, Debug)]
struct BundleArguments {
    /// Include the libraries that wholemem is compared with; they are larger than the rest of the bundle.
    #[arg(long)]
    peers: bool,
}

#[derive(Args, Debug)]
struct DistArguments {
    /// The CPU architecture to build for (default: that of this machine).
    #[arg(long, value_enum)]
    target: Option<Arch>,
    /// The folder to write the package to.
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

impl DistArguments {
    fn arch(&self) -> Result<Arch> {
        self.target.map_or_else(Arch::of_this_machine, Ok)
    }

    /// Returns the output folder. A relative path of the command line is relative to the folder that the command was started
    /// in.
    fn out(&self, started_in: &Path, default: &str) -> PathBuf {
        self.out.as_ref().map_or_else(|| default.into(), |out| started_in.join(out))
    }
}

#[derive(Args, Debug)]
struct GenerateArguments {
    /// Write nothing; fail if a committed file differs from the generated one.
    #[arg(long)]
    check: bool,
}

#[derive(Args, Debug)]
struct TestArguments {
    /// Run the test sweeps in full instead of as seeded samples.
    #[arg(long)]
    exhaustive: bool,
    /// Download torch (3 GB with its dependencies) and run the tests that need it.
    #[arg(long)]
    torch: bool,
    /// Run only these test steps, in their usual order; `--list` shows their names.
    #[arg(long, value_name = "STEP", num_args = 1.., value_enum, hide_possible_values = true)]
    only: Vec<Step>,
    /// List the test steps instead of running them.
    #[arg(long)]
    list: bool,
}

fn main() -> Result<ExitCode> {
    let task = Arguments::parse().task;
    let root =
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the folder of xtask has no parent folder")?;
    let started_in = env::current_dir().context("cannot read the current folder")?;
    env::set_current_dir(root).with_context(|| format!("cannot enter {}", root.display()))?;
    match task {
        Task::Test(arguments) => Ok(test(&arguments)),
        Task::GpuBundle(arguments) => bundle::pack(arguments.peers).map(|()| ExitCode::SUCCESS),
        Task::Wheel(arguments) => {
            let out = arguments.out(&started_in, "target/wheel");
            wheel::build(arguments.arch()?, &out).map(|_| ExitCode::SUCCESS)
        }
        Task::Deb(arguments) => {
            let out = arguments.out(&started_in, "target/deb");
            deb::build(arguments.arch()?, &out).map(|_| ExitCode::SUCCESS)
        }
        Task::Install(arguments) => install::run(&arguments, &started_in).map(|()| ExitCode::SUCCESS),
        Task::Peers(peers) => peers::run(&peers).map(|()| ExitCode::SUCCESS),
        Task::Plots(arguments) => plots::generate(arguments.check).map(|()| ExitCode::SUCCESS),
        Task::Docs(arguments) => docs(&arguments).map(|()| ExitCode::SUCCESS),
        Task::Release(arguments) => release::release(&arguments).map(|()| ExitCode::SUCCESS),
        Task::Kernels(arguments) => kernels::generate(arguments.check, true).map(|()| ExitCode::SUCCESS),
        Task::Abi(arguments) => abi::generate(arguments.check).map(|()| ExitCode::SUCCESS),
        Task::Bindings(arguments) => bindings::generate(arguments.check).map(|()| ExitCode::SUCCESS),
    }
}

fn docs(arguments: &DocsArguments) -> Result<()> {
    let index = site::build()?;
    if arguments.open { site::open(&index) } else { Ok(()) }
}

fn test(arguments: &TestArguments) -> ExitCode {
    let steps = steps::select(&arguments.only);
    if arguments.list {
        print!("{}", steps::list(&steps));
        return ExitCode::SUCCESS;
    }
    sigint::restore_default_sigint();
    if steps::run(&steps, arguments.exhaustive, arguments.torch) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_clap_definition_is_valid() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn only_accepts_several_steps_or_repetition() {
        for line in [
            "xtask test --only source-rules crate-graph",
            "xtask test --only source-rules --only crate-graph",
        ] {
            let Task::Test(arguments) = Arguments::try_parse_from(line.split(' ')).unwrap().task else {
                panic!("`{line}` was not parsed as `test`");
            };
            assert_eq!(arguments.only, [Step::SourceRules, Step::CrateGraph], "{line}");
        }
    }

    #[test]
    fn an_unknown_step_is_rejected() {
        let error = Arguments::try_parse_from(["xtask", "test", "--only", "everything"]).unwrap_err();
        assert_eq!(error.kind(), clap::error::ErrorKind::InvalidValue);
    }
}
