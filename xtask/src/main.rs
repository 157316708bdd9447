//! The checks of this repository behind one command, `cargo xtask test`.
//!
//! | module | what it holds |
//! |---|---|
//! | [`steps`] | the steps in their order, and the loop that runs them all even when one fails |
//! | [`report`] | what a run says at its end: the table, the failures, the count |
//! | [`command`], [`toolchain`] | running other programs, and having rustup fetch the ones that are missing |
//! | [`cargo`], [`miri`], [`python`] | the steps that build and test |
//! | [`source_rules`] | the rules for source files that rustc and clippy do not check |
//! | [`vocabulary`] | names and phrases that were replaced |
//! | [`crate_graph`], [`module_graph`], [`licences`], [`metadata`] | the rules for dependencies, of crates and of modules |
//! | [`abi`], [`bindings`], [`kernels`], [`generated`], [`wheels`] | what is generated and committed, and the pinned tools it takes |
//! | [`package`], [`release`] | the crates as their users get them, and a release with all its artefacts |
//! | [`dist`], [`wheel`], [`wheel_data`], [`deb`] | what is distributed as binaries |
//! | [`wheel_check`], [`empty`] | tests of it where there is no Rust |
//! | [`bundle`] | what a machine with a GPU needs to run the suite and the benches |
//! | [`peers`], [`open_mpi`], [`plots`] | our benches beside those of rivals, and pictures of what was measured |
//! | [`site`] | the documentation as a site |
//! | [`signals`] | that children can be interrupted |
//! | [`tree`], [`leftovers`] | that a run leaves nothing behind: files, shared memory, processes |
//!
//! What it keeps true: it depends on no crate of the workspace, so it runs while they do not compile. Rules are
//! pure functions over values, with tests that show each one failing; only thin functions touch the machine.

#![forbid(unsafe_code)]
#![expect(
    clippy::print_stdout,
    reason = "a report for people, written while the checks run, is the whole output"
)]

mod abi;
mod bindings;
mod bundle;
mod cargo;
mod command;
mod crate_graph;
mod deb;
mod dist;
mod empty;
mod generated;
mod headers;
mod kernels;
mod leaked_resources;
mod licences;
mod metadata;
mod miri;
mod module_graph;
mod open_mpi;
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

/// The chores of this repository.
#[derive(Debug, Parser)]
#[command(bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Run every check, and go on after a failed one, so that one run shows them all.
    Test(TestArguments),
    /// Generate the table of the CUDA driver from NVIDIA's headers, which are fetched.
    Bindings(GenerateArguments),
    /// Generate the C++ form of the structures that kernels share with the host.
    Abi(GenerateArguments),
    /// Compile the kernels to PTX with NVIDIA's compiler, which is fetched.
    Kernels(GenerateArguments),
    /// Gather what a machine with a GPU needs to run the suite and the benches.
    GpuBundle(BundleArguments),
    /// Build the Python wheel with the library, the program and the headers, for any Linux with glibc 2.28 or newer.
    Wheel(DistArguments),
    /// Build the Debian package of the program.
    Deb(DistArguments),
    /// Run a bench beside a rival's, and print ratios.
    #[command(subcommand)]
    Peers(PeerBenchmark),
    /// Draw the README's pictures from `docs/measured/`.
    Plots(GenerateArguments),
    /// Build the documentation as a site below `target/site/`; a link that leads nowhere is a failure.
    Docs(DocsArguments),
    /// Set the version, cut the changelog, build all artefacts, commit and tag; nothing is pushed or published.
    Release(release::ReleaseArguments),
}

#[derive(Args, Debug)]
struct DocsArguments {
    /// Show it in a browser.
    #[arg(long)]
    open: bool,
}

#[derive(Args, Debug)]
struct BundleArguments {
    /// Take the rivals along too, which are larger than all the rest.
    #[arg(long)]
    peers: bool,
}

#[derive(Args, Debug)]
struct DistArguments {
    /// The machine to build for, in place of this one's kind.
    #[arg(long, value_enum)]
    target: Option<Arch>,
    /// The folder to put it into.
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

impl DistArguments {
    fn arch(&self) -> Result<Arch> {
        self.target.map_or_else(Arch::of_this_machine, Ok)
    }

    /// The folder, which is not relative to the root of the repository if it was given.
    fn out(&self, started_in: &Path, default: &str) -> PathBuf {
        self.out.as_ref().map_or_else(|| default.into(), |out| started_in.join(out))
    }
}

#[derive(Args, Debug)]
struct GenerateArguments {
    /// Write nothing; fail if what is committed differs.
    #[arg(long)]
    check: bool,
}

#[derive(Args, Debug)]
struct TestArguments {
    /// Run the sweeps whole instead of as seeded samples.
    #[arg(long)]
    exhaustive: bool,
    /// Fetch torch, which is 3 GB with what it needs, and run the tests that need it.
    #[arg(long)]
    torch: bool,
    /// Run these steps only, in their usual order; `--list` names them.
    #[arg(long, value_name = "STEP", num_args = 1.., value_enum, hide_possible_values = true)]
    only: Vec<Step>,
    /// List the steps instead of running them.
    #[arg(long)]
    list: bool,
}

fn main() -> Result<ExitCode> {
    let task = Arguments::parse().task;
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask has no parent folder")?;
    let started_in = env::current_dir().context("the current folder")?;
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
                panic!("another task");
            };
            assert_eq!(arguments.only, [Step::SourceRules, Step::CrateGraph], "{line}");
        }
    }

    #[test]
    fn an_unknown_step_is_rejected() {
        let refused = Arguments::try_parse_from(["xtask", "test", "--only", "everything"]).unwrap_err();
        assert_eq!(refused.kind(), clap::error::ErrorKind::InvalidValue);
    }
}
