//! `wholemem bench store --in-turns`: rounds that alternate with those of another program, which starts each round.
//!
//! ```text
//!   wholemem  "ready"       ---->  the other program runs a round, while wholemem is idle
//!   wholemem                <----  an empty line
//!   wholemem  its times     ---->  ...
//! ```
//!
//! No process is pinned to a core, because the daemon of the other program is not either.

use anyhow::{Result, ensure};
use serde::Serialize;
use wholemem_command::temporary_store::TemporaryStore;
use wholemem_command::terminal;

use super::{BATCH, check, timed};
use crate::args::StoreArgs;
use crate::case_report::median;

/// The times of the store operations in a round, in microseconds. If a round creates several objects, the times are medians.
#[derive(Debug, Serialize)]
struct StoreRound {
    bytes: usize,
    #[serde(rename = "create+write+seal")]
    create: f64,
    #[serde(rename = "get first")]
    first: f64,
    get: f64,
    delete: f64,
}

/// Runs all rounds of `bench store --in-turns` for all object sizes.
pub(super) fn run(args: &StoreArgs) -> Result<()> {
    let store = TemporaryStore::start()?;
    for size in &args.sizes {
        let mut bytes = vec![0; size.0];
        for round in 0..args.rounds {
            terminal::print("\"ready\"\n")?;
            let mut line = String::new();
            ensure!(
                std::io::stdin().read_line(&mut line)? > 0,
                "stdin was closed before the other program started the next round"
            );
            bytes.fill(round.to_le_bytes()[0]);
            terminal::print_json(&once(&store, &bytes, args.burst)?)?;
        }
    }
    Ok(())
}

fn once(store: &TemporaryStore, bytes: &[u8], burst: u32) -> Result<StoreRound> {
    let (client, other) = (store.connect()?, store.connect()?);
    let names: Vec<_> = (0..burst).map(|number| format!("bench-{number}")).collect();
    let made = names.iter().map(|name| timed(|| Ok(client.put(name, bytes)?)));
    let (made, sealed): (Vec<_>, Vec<_>) = made.collect::<Result<Vec<_>>>()?.into_iter().unzip();
    let mut first = Vec::new();
    for name in &names {
        let (took, object) = timed(|| Ok(other.get(name)?))?;
        first.push(took);
        check(&object, bytes.len(), bytes.first().copied().unwrap_or(0))?;
    }
    let name = &names[0];
    let (cached, ()) = timed(|| Ok((0..BATCH).try_for_each(|_| other.get(name).map(drop))?))?;
    drop(other);
    let deleted = sealed.iter().map(|sealed| Ok(timed(|| Ok(client.delete(sealed.id)?))?.0));
    let deleted = deleted.collect::<Result<Vec<_>>>()?;
    let micros = |time: std::time::Duration| time.as_secs_f64() * 1e6;
    Ok(StoreRound {
        bytes: bytes.len(),
        create: micros(median(&made)),
        first: micros(median(&first)),
        get: micros(cached / BATCH),
        delete: micros(median(&deleted)),
    })
}
