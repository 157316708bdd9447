//! Ranks that are processes: this program started again as each of them.
//!
//! Rank 0 tells its standard output how it goes, a line at a time. The others are silent unless something goes wrong.

use std::io::{BufRead, BufReader, Write};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use wholemem::{Communicator, Group};
use wholemem_hal::BackendKind;

use super::{Course, Told};
use crate::bench::group;
use crate::cli::{BackendChoice, RankRole};
use crate::{backend, failure};

/// How long a rank waits for the others, who may be checking what they moved.
const PATIENCE: Duration = Duration::from_secs(600);

/// What ranks are to do.
#[derive(Debug, Serialize, Deserialize)]
struct Plan {
    on_gpu: bool,
    courses: Vec<Course>,
}

/// Has ranks play courses, and passes on what rank 0 tells.
pub(super) fn play(
    kind: BackendKind,
    courses: &[Course],
    hear: &mut impl FnMut(Told) -> Result<()>,
) -> Result<()> {
    let ranks = courses.first().map_or(0, |course| course.ranks);
    let plan = Plan { on_gpu: kind == BackendKind::Cuda, courses: courses.to_vec() };
    let plan = serde_json::to_string(&plan)?;
    let role = |_| (RankRole::Rows, vec!["--plan".to_owned(), plan.clone()]);
    let mut crew = group::Group::start_with(ranks, role, true)?;
    let mut outputs = Vec::new();
    for child in &mut crew.ranks {
        outputs.push(BufReader::new(child.stdout.take().context("a rank has an output")?));
    }
    let mut done = 0;
    while done < courses.len() {
        match read(&mut outputs[0])? {
            Some(told @ Told::Failed { .. }) => return hear(told),
            Some(told) => {
                done += usize::from(matches!(told, Told::Done(_)));
                hear(told)?;
            }
            None => bail!("rank 0 ended before its work did"),
        }
    }
    for (rank, output) in outputs.iter_mut().enumerate() {
        if let Some(told) = read(output)? {
            hear(told)?;
            bail!("rank {rank} spoke out of turn");
        }
    }
    crew.leave()
}

fn read(output: &mut impl BufRead) -> Result<Option<Told>> {
    let mut line = String::new();
    output.read_line(&mut line)?;
    if line.is_empty() {
        return Ok(None);
    }
    Ok(Some(serde_json::from_str(&line).context("a rank said something unexpected")?))
}

/// Plays one rank.
pub(crate) fn rank(plan: &str) -> Result<()> {
    let plan: Plan = serde_json::from_str(plan).context("this command is for wholemem itself to start")?;
    match join(&plan) {
        Ok(()) => Ok(()),
        Err(error) => {
            let what = format!("{error:#}");
            say(&Told::Failed { what, hint: failure::hint(&error) })
        }
    }
}

fn join(plan: &Plan) -> Result<()> {
    let mut comm = Communicator::from_env()?;
    comm.set_timeout(PATIENCE);
    let is_first = comm.rank().0 == 0;
    let opened = backend::open(if plan.on_gpu { BackendChoice::Cuda } else { BackendChoice::Host })?;
    let devices = u32::try_from(opened.backend.devices().len())?;
    ensure!(devices > 0, "there is no device");
    let device = opened.backend.device(comm.rank().0 % devices)?;
    let group = Group::create(comm, &device)?;
    super::play(&group, &plan.courses, &mut |told| if is_first { say(&told) } else { Ok(()) })
}

fn say(told: &Told) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all((serde_json::to_string(told)? + "\n").as_bytes())?;
    Ok(stdout.flush()?)
}
