//! The steps of `cargo xtask test` in their order, and the loop that runs them.

use std::time::Instant;

use anyhow::Result;
use clap::ValueEnum;

use crate::leftovers::SharedMemory;
use crate::report::{Ended, Outcome, Report};
use crate::toolchain::Skip;
use crate::tree::Tree;
use crate::{
    abi, bindings, cargo, crate_graph, headers, kernels, leftovers, licences, miri, package, plots, python,
    shipped, site, source_rules, tree, vocabulary, wheel_check,
};

/// One check. The order of the variants is the order of a run, and their sentences are what `--list` prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Step {
    /// The sources are formatted
    Fmt,
    /// Source files say what they are, and stay short
    SourceRules,
    /// No text has a name or phrase that was replaced
    Vocabulary,
    /// The crates of the workspace depend on each other downwards only, and the top modules of each have no import cycle
    CrateGraph,
    /// Every dependency may be shipped under our licences
    Licences,
    /// What is generated and committed is what its sources say
    Generated,
    /// The headers for users' kernels compile on the host and find what a plain loop finds
    Headers,
    /// Clippy has nothing to say, neither of the tests nor of what ships
    Clippy,
    /// Every test of every target passes
    Tests,
    /// Every example in the documentation compiles and passes
    Doctests,
    /// The documentation builds without a warning
    Rustdoc,
    /// The published crates build from their tarballs, and the programs of READMEs build and run with these alone
    Package,
    /// The program and the Python package, as they ship, contain no test hooks
    Shipped,
    /// The Python package has its types right, builds, and passes its tests and examples
    Python,
    /// The tests of the Python package that need torch pass, with none skipped for lack of it; with `--torch` only
    Torch,
    /// The wheel and the Debian package are built, and work where there is no Rust
    Wheel,
    /// The documentation is a site in which every link leads somewhere
    Docs,
    /// The modules that can run under Miri have no undefined behaviour there
    Miri,
    /// Everything compiles for 64-bit Arm
    Aarch64,
    /// The run has left nothing in the working tree
    CleanTree,
    /// The run has left no shared memory and no processes
    Leftovers,
}

impl Step {
    /// The name on the command line.
    fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    fn sentence(self) -> String {
        self.to_possible_value().and_then(|value| Some(value.get_help()?.to_string())).unwrap_or_default()
    }

    fn check(self, run: &Run) -> Result<()> {
        match self {
            Self::Fmt => cargo::fmt(),
            Self::SourceRules => source_rules::check(),
            Self::Vocabulary => vocabulary::check(),
            Self::CrateGraph => crate_graph::check(),
            Self::Licences => licences::check(),
            Self::Generated => bindings::check()
                .and_then(|()| abi::check())
                .and_then(|()| kernels::check(run.exhaustive))
                .and_then(|()| plots::generate(true)),
            Self::Headers => headers::check(),
            Self::Clippy => cargo::clippy(),
            Self::Tests => cargo::tests(run.exhaustive),
            Self::Doctests => cargo::doctests(),
            Self::Rustdoc => cargo::rustdoc(),
            Self::Package => package::check(),
            Self::Shipped => shipped::check(),
            Self::Python => python::check(),
            Self::Torch => python::torch(run.torch),
            Self::Wheel => wheel_check::check(run.exhaustive, run.torch),
            Self::Docs => site::build().map(drop),
            Self::Miri => miri::check(),
            Self::Aarch64 => cargo::aarch64(),
            Self::CleanTree => tree::check(&run.tree),
            Self::Leftovers => leftovers::check(&run.shared_memory),
        }
    }
}

/// What the steps of one run need to know: what was asked for, and how the machine looked before.
#[derive(Debug)]
struct Run {
    exhaustive: bool,
    torch: bool,
    tree: Result<Tree>,
    shared_memory: Result<SharedMemory>,
}

/// The steps to run, in their usual order: those named, or all where none is.
pub(crate) fn select(only: &[Step]) -> Vec<Step> {
    Step::value_variants().iter().copied().filter(|step| only.is_empty() || only.contains(step)).collect()
}

/// One line a step: its name and what it checks.
pub(crate) fn list(steps: &[Step]) -> String {
    let width = steps.iter().map(|step| step.name().len()).max().unwrap_or(0);
    steps.iter().map(|step| format!("{:width$}  {}\n", step.name(), step.sentence())).collect()
}

/// Runs the steps, prints as it goes, and says whether none failed.
pub(crate) fn run(steps: &[Step], exhaustive: bool, torch: bool) -> bool {
    let mut report = Report::on_stdout();
    let run = Run { exhaustive, torch, tree: Tree::look(), shared_memory: SharedMemory::look() };
    for (index, step) in steps.iter().enumerate() {
        println!("{}", report.heading(index + 1, steps.len(), &step.name(), &step.sentence()));
        let start = Instant::now();
        let outcome = outcome(step.check(&run));
        let ended = Ended { name: step.name(), outcome, seconds: start.elapsed().as_secs_f64() };
        println!("{}\n", report.ending(&ended));
        report.add(ended);
    }
    print!("{}", report.summary());
    report.all_well()
}

fn outcome(result: Result<()>) -> Outcome {
    match result {
        Ok(()) => Outcome::Passed,
        Err(error) => match error.downcast::<Skip>() {
            Ok(skip) => Outcome::Skipped(skip.to_string()),
            Err(error) => Outcome::Failed(format!("{error:#}")),
        },
    }
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn naming_no_step_selects_all() {
        assert_eq!(select(&[]), Step::value_variants());
    }

    #[test]
    fn named_steps_run_once_and_in_the_usual_order() {
        assert_eq!(select(&[Step::Tests, Step::Fmt, Step::Tests]), [Step::Fmt, Step::Tests]);
    }

    #[test]
    fn the_checks_for_what_a_run_leaves_come_last() {
        assert!(select(&[]).ends_with(&[Step::CleanTree, Step::Leftovers]));
    }

    #[test]
    fn every_step_has_a_name_and_a_sentence() {
        for &step in Step::value_variants() {
            assert_ne!(step.name(), "", "{step:?}");
            assert_ne!(step.sentence(), "", "{step:?}");
        }
    }

    #[test]
    fn the_list_names_steps_as_the_command_line_does() {
        let listed = list(&[Step::CleanTree, Step::Aarch64]);
        assert_eq!(
            listed,
            "clean-tree  The run has left nothing in the working tree\n\
             aarch64     Everything compiles for 64-bit Arm\n"
        );
    }

    #[test]
    fn a_skip_is_told_from_a_failure() {
        let skipped = Err(Skip::new("no rustup").into());
        assert_eq!(outcome(skipped), Outcome::Skipped("no rustup".to_owned()));
        let failed = Err(anyhow!("exit status: 1").context("cannot run git"));
        assert_eq!(outcome(failed), Outcome::Failed("cannot run git: exit status: 1".to_owned()));
        assert_eq!(outcome(Ok(())), Outcome::Passed);
    }
}
