//! `wholemem bench store`: what clients of a store wait for, beside a socket's round trip.
//!
//! Server, keeper and clients are tied to one core, as both ends of the round trip are: across cores a wake-up takes many
//! times longer, and differs from moment to moment. The round trip is one between two processes that carries the same
//! bytes as the request ([`limit`]).

mod alternate;
mod gpu;
mod limit;

use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use wholemem_command::backend::BackendChoice;
use wholemem_command::progress::ProgressDisplay;
use wholemem_command::temporary_store::TemporaryStore;
use wholemem_os::Deadline;
use wholemem_store::{Client, Object, Pack};

use self::limit::EchoPeer;
use super::case_report::{CaseResult, print_cases};
use super::comm::pin;
use crate::args::StoreArgs;

pub use self::limit::echo;

/// How often a cached object is got for one time, since the clock itself takes as long.
const BATCH: u32 = 1000;

pub(super) fn run(args: &StoreArgs) -> Result<()> {
    if args.in_turns {
        return alternate::run(args);
    }
    if args.backend == BackendChoice::Cuda {
        return gpu::run(args);
    }
    let core = pin()?;
    let store = TemporaryStore::start()?;
    let client = store.connect()?;
    let mut limit = EchoPeer::start()?;
    let limits = limit.round_trips(args.rounds)?;
    let mut cases = Vec::new();
    let mut add =
        |clients: u32, what: &str, bytes: Option<usize>, times: &[Duration], limits: &[Duration]| {
            cases.push(CaseResult { bytes, ..CaseResult::of_times(clients, what, "us", times, limits) });
        };
    for size in &args.sizes {
        let _progress = ProgressDisplay::step(&format!("objects of {} bytes", size.0));
        let ObjectTimes { kinds, limits } = by_size(&store, &client, &mut limit, size.0, args.rounds)?;
        for (what, times) in ["create+write+seal", "get first", "get cached", "delete"].iter().zip(&kinds) {
            // Only what is created brings its bytes along.
            let limits = if *what == "create+write+seal" { &limits[0] } else { &limits[1] };
            add(1, what, Some(size.0), times, limits);
        }
    }
    for &objects in &args.packs {
        let _progress = ProgressDisplay::step(&format!("a pack of {objects}"));
        add(
            1,
            "attach pack",
            Some(objects as usize),
            &attach(&store, &client, objects, args.rounds.min(20))?,
            &limits,
        );
    }
    add(2, "publish to visible", None, &publish(&store, &client, args.rounds)?, &limits);
    for &clients in &args.clients {
        let others = (1..clients).map(|_| store.connect()).collect::<Result<Vec<_>>>()?;
        let times = (0..args.rounds).map(|_| timed(|| Ok(client.status()?)));
        let times = times.collect::<Result<Vec<_>>>()?;
        let seen = client.status()?.clients;
        ensure!(seen == others.len() as u64 + 1, "{seen} clients are there");
        let times: Vec<_> = times.iter().map(|(took, _)| *took).collect();
        add(clients, "status", None, &times, &limits);
    }
    drop(client);
    let title =
        format!("a store of the host, everybody pinned to core {core}; bytes of a pack are its objects");
    print_cases("store", &title, "round trip", args.json, &cases)
}

fn timed<T>(run: impl FnOnce() -> Result<T>) -> Result<(Duration, T)> {
    let start = Instant::now();
    let outcome = run()?;
    Ok((start.elapsed(), outcome))
}

/// ObjectTimes of the four things that happen to an object, of one size; and of round trips beside them, of as many bytes and of
/// one.
#[derive(Debug, Default)]
struct ObjectTimes {
    kinds: [Vec<Duration>; 4],
    limits: [Vec<Duration>; 2],
}

fn by_size(
    store: &TemporaryStore,
    client: &Client,
    limit: &mut EchoPeer,
    len: usize,
    rounds: u32,
) -> Result<ObjectTimes> {
    const WARM_UP: u32 = 10;
    const MAX_BYTES: usize = 4 << 30;
    let rounds = rounds.min(u32::try_from(MAX_BYTES / len.max(1)).unwrap_or(u32::MAX)).max(3);
    let mut all = ObjectTimes::default();
    let (times, limits) = (&mut all.kinds, &mut all.limits);
    let mut bytes = vec![0; len];
    // Each by itself: who comes and goes meanwhile would be measured too. And the limit beside it in every round, as the
    // machine changes its speed.
    for round in 0..WARM_UP + rounds {
        bytes.fill(round.to_le_bytes()[0]);
        let (put, sealed) = timed(|| Ok(client.put("bench", &bytes)?))?;
        let bringing = limit.round_trip(&bytes)?;
        check(&client.get("bench")?, len, round.to_le_bytes()[0])?;
        let (deleted, ()) = timed(|| Ok(client.delete(sealed.id)?))?;
        let asking = limit.round_trip(&[])?;
        if round >= WARM_UP {
            times[0].push(put);
            times[3].push(deleted);
            limits[0].push(bringing);
            limits[1].push(asking);
        }
    }
    bytes.fill(7);
    let sealed = client.put("bench", &bytes)?;
    for _ in 0..rounds {
        // One that has mapped nothing yet.
        let other = store.connect()?;
        let (took, object) = timed(|| Ok(other.get("bench")?))?;
        times[1].push(took);
        check(&object, len, 7)?;
    }
    for _ in 0..rounds.min(50) {
        let (took, ()) = timed(|| Ok((0..BATCH).try_for_each(|_| client.get("bench").map(drop))?))?;
        times[2].push(took / BATCH);
    }
    client.delete(sealed.id)?;
    Ok(all)
}

fn check(object: &Object, len: usize, value: u8) -> Result<()> {
    ensure!(object.len() == len, "an object of {len} bytes came as {}", object.len());
    let mut seen = [value; 2];
    if len > 0 {
        object.bytes()?.read_at(0, &mut seen[..1])?;
        object.bytes()?.read_at(len - 1, &mut seen[1..])?;
    }
    ensure!(seen == [value; 2], "an object of {len} bytes holds {seen:?} instead of {value}");
    Ok(())
}

/// How long a client that has mapped nothing takes to have all objects of a pack.
fn attach(store: &TemporaryStore, client: &Client, objects: u32, rounds: u32) -> Result<Vec<Duration>> {
    const LEN: usize = 1024;
    let mut pack = Pack::new("pack");
    for object in 0..objects {
        pack = pack.add(&format!("pack/layers.{object}.weight"), LEN);
    }
    let mut draft = client.create_pack(&pack)?;
    for object in 0..objects as usize {
        draft.write_at(object, 0, &[object.to_le_bytes()[0]; LEN])?;
    }
    let sealed = draft.seal()?;
    let mut times = Vec::new();
    for _ in 0..rounds {
        let other = store.connect()?;
        let (took, held) = timed(|| Ok(other.get_pack("pack")?))?;
        ensure!(held.members().count() == objects as usize, "not all objects of the pack are there");
        let last = objects as usize - 1;
        let mut seen = [0];
        held.bytes(&format!("pack/layers.{last}.weight"))?.read_at(LEN - 1, &mut seen)?;
        ensure!(seen[0] == last.to_le_bytes()[0], "the last object holds {}", seen[0]);
        times.push(took);
    }
    client.delete(sealed.id)?;
    Ok(times)
}

/// How long after it is sent away a small object is got by a process that waits for it.
fn publish(store: &TemporaryStore, client: &Client, rounds: u32) -> Result<Vec<Duration>> {
    let mut times = Vec::new();
    for round in 0..rounds {
        let name = format!("publish-{round}");
        let waiter = store.connect()?;
        let deadline = Deadline::after(Duration::from_secs(60));
        let waiting = {
            let name = name.clone();
            std::thread::spawn(move || -> Result<Instant> {
                waiter.get_within(&name, deadline)?;
                Ok(Instant::now())
            })
        };
        // Until it waits, on a connection of its own.
        while client.status()?.clients < 3 && !waiting.is_finished() {
            std::thread::yield_now();
        }
        let start = Instant::now();
        let sealed = client.put(&name, b"here")?;
        let seen = waiting.join().map_err(|_| anyhow!("the waiter panicked"))??;
        times.push(seen.saturating_duration_since(start));
        client.delete(sealed.id)?;
    }
    Ok(times)
}
