//! The steps of `cargo xtask test` in their order, and the loop that runs them.

use std::time::Instant;

use anyhow::Result;
use clap::ValueEnum;

use crate::leaked_resources::SharedMemoryNames;
use crate::report::{StepOutcome, StepReport, StepResult};
use crate::toolchain::Skip;
use crate::working_tree::WorkingTree;
use crate::{
    abi, bindings, cargo, crate_graph, headers, kernels, leaked_resources, licences, miri, package, plots,
    python, shipped, site, source_rules, vocabulary, wheel_check, working_tree,
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

/// What the steps of one run need to know: what was asked for, and how the machine looked before.
#[derive(Debug)]
struct RunContext {
    exhaustive: bool,
    torch: bool,
    tree: Result<WorkingTree>,
    shared_memory: Result<SharedMemoryNames>,
}

/// The steps to run, in their usual order: those named, or all where none is.
pub(crate) fn select(only: &[Step]) -> Vec<Step> {
    Step::value_variants().iter().copied().filter(|step| only.is_empty() || only.contains(step)).collect()
}

/// One line a step: its name and what it checks.
pub(crate) fn list(steps: &[Step]) -> String {
    let width = steps.iter().map(|step| step.name().len()).max().unwrap_or(0);
    steps.iter().map(|step| format!("{:width$}  {}\n", step.name(), step.description())).collect()
}

/// Runs the steps, prints as it goes, and says whether none failed.
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
            "clean-tree  The run has left nothing in the working tree\n\
             aarch64     Everything compiles for 64-bit Arm\n"
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
