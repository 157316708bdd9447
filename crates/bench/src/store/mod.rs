//! `wholemem bench store`: measures the time of clients' requests to a store, compared with a round trip over a socket.
//!
//! Server, keeper, clients and both ends of the round trip are pinned to one core: a wake-up across cores takes many times
//! longer, and its time varies. The round trip is between two processes and carries the same bytes as the request ([`limit`]).

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

/// The number of gets of a cached object that are timed together, because one get takes no longer than reading the clock.
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
            // Of the measured operations, only the creation of an object sends its bytes.
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
        ensure!(seen == others.len() as u64 + 1, "the store reports a wrong number of clients: {seen}");
        let times: Vec<_> = times.iter().map(|(took, _)| *took).collect();
        add(clients, "status", None, &times, &limits);
    }
    drop(client);
    let title = format!(
        "a store of host memory, all processes pinned to core {core}; the bytes of a pack are its number of objects"
    );
    print_cases("store", &title, "round trip", args.json, &cases)
}

fn timed<T>(run: impl FnOnce() -> Result<T>) -> Result<(Duration, T)> {
    let start = Instant::now();
    let outcome = run()?;
    Ok((start.elapsed(), outcome))
}

/// The times of the four measured operations on objects of one size (`kinds`), and of the round trips with as many bytes and
/// with one byte (`limits`).
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
    // While these operations are measured, no other client connects or disconnects. The round trip is measured in every round,
    // because the speed of the machine changes.
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
        // A new client has not mapped any memory of the store.
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
    ensure!(
        object.len() == len,
        "the benchmark put an object of {len} bytes into the store, but got one of {found} bytes",
        found = object.len()
    );
    let mut seen = [value; 2];
    if len > 0 {
        object.bytes()?.read_at(0, &mut seen[..1])?;
        object.bytes()?.read_at(len - 1, &mut seen[1..])?;
    }
    ensure!(
        seen == [value; 2],
        "the first and last byte of an object of {len} bytes are {seen:?} instead of {value}"
    );
    Ok(())
}

/// Returns the times until a new client, which has mapped nothing before, has mapped all objects of a pack (several objects in
/// one memory).
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
        ensure!(
            held.members().count() == objects as usize,
            "the pack has {count} objects instead of {objects}",
            count = held.members().count()
        );
        let last = objects as usize - 1;
        let mut seen = [0];
        held.bytes(&format!("pack/layers.{last}.weight"))?.read_at(LEN - 1, &mut seen)?;
        ensure!(
            seen[0] == last.to_le_bytes()[0],
            "the last object of the pack ends with the wrong byte {byte}",
            byte = seen[0]
        );
        times.push(took);
    }
    client.delete(sealed.id)?;
    Ok(times)
}

/// Returns the times from the put of an object until a client that waits for the object's name has it.
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
        // Waits until the client that will get the object is connected.
        while client.status()?.clients < 3 && !waiting.is_finished() {
            std::thread::yield_now();
        }
        let start = Instant::now();
        let sealed = client.put(&name, b"here")?;
        let seen = waiting.join().map_err(|_| anyhow!("the thread that waits for the object panicked"))??;
        times.push(seen.saturating_duration_since(start));
        client.delete(sealed.id)?;
    }
    Ok(times)
}
