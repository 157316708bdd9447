//! Processes of this program that run the cases of a benchmark as ranks.
//!
//! Rank 0 writes messages about the progress to its stdout, one JSON object in each line. The other ranks write only errors.

use std::io::{BufRead, BufReader, Write};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use wholemem::{Bootstrap, Communicator};
use wholemem_command::backend::BackendChoice;
use wholemem_command::ranks::{RankProcesses, RankRole};
use wholemem_command::{backend, failure};
use wholemem_hal::BackendKind;

/// The timeout of a rank's operations. It is long, because other ranks may be verifying results meanwhile.
const TIMEOUT: Duration = Duration::from_secs(600);

/// A message of a rank about the progress of its benchmark cases.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum RankMessage<Round, Case> {
    /// The next benchmark round is prepared.
    Ready,
    /// A benchmark round has ended.
    Round(Round),
    /// A benchmark case has ended.
    Done(Case),
    /// The rank has failed with an error.
    Failed { message: String, hint: Option<String> },
}

/// The benchmark cases that ranks run, and whether they run on a GPU.
#[derive(Debug, Serialize, Deserialize)]
struct WorkerPlan<C> {
    on_gpu: bool,
    cases: Vec<C>,
}

/// Starts processes as ranks, which run the benchmark cases, and passes the messages of rank 0 to `on_message`.
pub(super) fn run<C, R, D>(
    (role, ranks): (RankRole, u32),
    kind: BackendKind,
    cases: &[C],
    on_message: &mut impl FnMut(RankMessage<R, D>) -> Result<()>,
) -> Result<()>
where
    C: Serialize + Clone,
    R: DeserializeOwned,
    D: DeserializeOwned,
{
    let plan = WorkerPlan { on_gpu: kind == BackendKind::Cuda, cases: cases.to_vec() };
    let plan = serde_json::to_string(&plan)?;
    let role = |_| (role, vec!["--plan".to_owned(), plan.clone()]);
    let mut workers = RankProcesses::start_with(ranks, role, true)?;
    let mut outputs = Vec::new();
    for child in &mut workers.ranks {
        outputs.push(BufReader::new(child.stdout.take().context("a rank has no stdout")?));
    }
    let mut done = 0;
    while done < cases.len() {
        match read(&mut outputs[0])? {
            Some(message @ RankMessage::Failed { .. }) => return on_message(message),
            Some(message) => {
                done += usize::from(matches!(message, RankMessage::Done(_)));
                on_message(message)?;
            }
            None => bail!("rank 0 exited before its benchmark cases were done"),
        }
    }
    for (rank, output) in outputs.iter_mut().enumerate() {
        if let Some(message) = read(output)? {
            on_message(message)?;
            bail!("rank {rank} sent an unexpected message after its last benchmark case");
        }
    }
    workers.wait_for_exit()
}

fn read<T: DeserializeOwned>(output: &mut impl BufRead) -> Result<Option<T>> {
    let mut line = String::new();
    output.read_line(&mut line)?;
    if line.is_empty() {
        return Ok(None);
    }
    Ok(Some(serde_json::from_str(&line).context("a rank sent an unexpected message")?))
}

/// A function to which a rank passes its messages.
pub(super) type Reporter<'a, R, D> = &'a mut dyn FnMut(RankMessage<R, D>) -> Result<()>;

/// Runs the benchmark cases of `plan` as one rank.
pub(super) fn rank<C, R, D>(
    plan: &str,
    run_cases: impl FnOnce(&Communicator, &[C], Reporter<'_, R, D>) -> Result<()>,
) -> Result<()>
where
    C: DeserializeOwned,
    R: Serialize,
    D: Serialize,
{
    let plan: WorkerPlan<C> =
        serde_json::from_str(plan).context("this command is internal: only wholemem starts it")?;
    match join(&plan, run_cases) {
        Ok(()) => Ok(()),
        Err(error) => {
            let message = format!("{error:#}");
            write_message(&RankMessage::<R, D>::Failed { message, hint: failure::hint(&error) })
        }
    }
}

fn join<C, R: Serialize, D: Serialize>(
    plan: &WorkerPlan<C>,
    run_cases: impl FnOnce(&Communicator, &[C], Reporter<'_, R, D>) -> Result<()>,
) -> Result<()> {
    let mut comm = Bootstrap::from_env()?;
    comm.set_timeout(TIMEOUT);
    let is_first = comm.rank().0 == 0;
    let selected = backend::open(if plan.on_gpu { BackendChoice::Cuda } else { BackendChoice::Host })?;
    let device = Communicator::choose_device(&selected.backend, &comm)?;
    let group = Communicator::create(comm, &device)?;
    run_cases(&group, &plan.cases, &mut |message| if is_first { write_message(&message) } else { Ok(()) })
}

fn write_message(message: &impl Serialize) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all((serde_json::to_string(message)? + "\n").as_bytes())?;
    Ok(stdout.flush()?)
}
