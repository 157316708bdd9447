//! The ordered steps of `cargo xtask test`, and the loop that runs them.

use std::time::Instant;

use anyhow::Result;
use clap::ValueEnum;

use crate::leaked_resources::SharedMemoryNames;
use crate::report::{StepOutcome, StepReport, StepResult};
use crate::toolchain::Skip;
use crate::working_tree::WorkingTree;
use crate::{
    abi, bindings, cargo, crate_graph, headers, kernels, leaked_resources, licences, miri, native, package,
    plots, python, shipped, site, source_rules, vocabulary, wheel_check, working_tree,
};

/// A check of `cargo xtask test`. Steps run in the order of the variants; `--list` prints their summaries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Step {
    /// The sources are formatted
    Fmt,
    /// Source files begin with a summary sentence and have at most 600 lines
    SourceRules,
    /// No file uses a former name or phrase of `xtask/vocabulary.txt`
    Vocabulary,
    /// Crates depend on lower crates only, and the top modules of each crate have no import cycle
    CrateGraph,
    /// The licence of every dependency allows distribution under our licences
    Licences,
    /// Committed generated files match their sources
    Generated,
    /// The headers for users' kernels compile on the host and agree with a plain loop; the C header compiles as C and as C++
    Headers,
    /// Clippy reports no warning, for the tests and for the shipped packages
    Clippy,
    /// Every test of every target passes
    Tests,
    /// Every example in the documentation compiles and passes
    Doctests,
    /// The documentation builds without a warning
    Rustdoc,
    /// The published crates build from their tarballs, and the README programs build and run with these crates alone
    Package,
    /// The shipped program, C library and Python package contain no test hooks
    Shipped,
    /// The installed library for C and C++ works: tests and examples with GCC and Clang, sanitizers and valgrind
    Capi,
    /// The Python package passes type checks, builds, and passes its tests and examples
    Python,
    /// The Python tests that need torch pass, and none is skipped for lack of torch; runs with `--torch` only
    Torch,
    /// The wheel and the Debian package build, and work in an environment without Rust
    Wheel,
    /// The documentation site builds without broken links
    Docs,
    /// The modules that Miri supports have no undefined behaviour
    Miri,
    /// The workspace compiles for 64-bit Arm
    Aarch64,
    /// The run left no new or changed files in the working tree
    CleanTree,
    /// The run left no shared memory and no processes
    Leftovers,
}

impl Step {
    /// Returns the name of the step on the command line.
    fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    fn description(self) -> String {
        self.to_possible_value().and_then(|value| Some(value.get_help()?.to_string())).unwrap_or_default()
    }

    fn check(self, run: &RunContext) -> Result<()> {
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
            Self::Capi => native::check(),
            Self::Python => python::check(),
            Self::Torch => python::torch(run.torch),
            Self::Wheel => wheel_check::check(run.exhaustive, run.torch),
            Self::Docs => site::build().map(drop),
            Self::Miri => miri::check(),
            Self::Aarch64 => cargo::aarch64(),
            Self::CleanTree => working_tree::check(&run.tree),
            Self::Leftovers => leaked_resources::check(&run.shared_memory),
        }
    }
}

/// The input of the steps of a test run: its options, and the state of the machine before the run.
#[derive(Debug)]
struct RunContext {
    exhaustive: bool,
    torch: bool,
    tree: Result<WorkingTree>,
    shared_memory: Result<SharedMemoryNames>,
}

/// Returns the steps to run, in their usual order: the named steps, or all steps if none is named.
pub(crate) fn select(only: &[Step]) -> Vec<Step> {
    Step::value_variants().iter().copied().filter(|step| only.is_empty() || only.contains(step)).collect()
}

/// Returns one line for each step, with its name and its description.
pub(crate) fn list(steps: &[Step]) -> String {
    let width = steps.iter().map(|step| step.name().len()).max().unwrap_or(0);
    steps.iter().map(|step| format!("{:width$}  {}\n", step.name(), step.description())).collect()
}

/// Runs the steps, prints progress, and returns true if no step failed.
pub(crate) fn run(steps: &[Step], exhaustive: bool, torch: bool) -> bool {
    let mut report = StepReport::on_stdout();
    let run = RunContext {
        exhaustive,
        torch,
        tree: WorkingTree::read_status(),
        shared_memory: SharedMemoryNames::list(),
    };
    for (index, step) in steps.iter().enumerate() {
        println!("{}", report.heading(index + 1, steps.len(), &step.name(), &step.description()));
        let start = Instant::now();
        let outcome = outcome(step.check(&run));
        let result = StepResult { name: step.name(), outcome, seconds: start.elapsed().as_secs_f64() };
        println!("{}\n", report.result_line(&result));
        report.add(result);
    }
    print!("{}", report.summary());
    report.has_no_failure()
}

fn outcome(result: Result<()>) -> StepOutcome {
    match result {
        Ok(()) => StepOutcome::Passed,
        Err(error) => match error.downcast::<Skip>() {
            Ok(skip) => StepOutcome::Skipped(skip.to_string()),
            Err(error) => StepOutcome::Failed(format!("{error:#}")),
        },
    }
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn without_named_steps_all_are_selected() {
        assert_eq!(select(&[]), Step::value_variants());
    }

    #[test]
    fn named_steps_run_once_and_in_the_usual_order() {
        assert_eq!(select(&[Step::Tests, Step::Fmt, Step::Tests]), [Step::Fmt, Step::Tests]);
    }

    #[test]
    fn the_checks_for_leaked_files_and_resources_come_last() {
        assert!(select(&[]).ends_with(&[Step::CleanTree, Step::Leftovers]));
    }

    #[test]
    fn every_step_has_a_name_and_a_description() {
        for &step in Step::value_variants() {
            assert_ne!(step.name(), "", "{step:?}");
            assert_ne!(step.description(), "", "{step:?}");
        }
    }

    #[test]
    fn the_list_uses_command_line_names() {
        let listed = list(&[Step::CleanTree, Step::Aarch64]);
        assert_eq!(
            listed,
            "clean-tree  The run left no new or changed files in the working tree\n\
             aarch64     The workspace compiles for 64-bit Arm\n"
        );
    }

    #[test]
    fn skips_and_failures_are_different_outcomes() {
        let skipped = Err(Skip::new("no rustup").into());
        assert_eq!(outcome(skipped), StepOutcome::Skipped("no rustup".to_owned()));
        let failed = Err(anyhow!("exit status: 1").context("cannot run git"));
        assert_eq!(outcome(failed), StepOutcome::Failed("cannot run git: exit status: 1".to_owned()));
        assert_eq!(outcome(Ok(())), StepOutcome::Passed);
    }
}
