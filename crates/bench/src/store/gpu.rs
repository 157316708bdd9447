//! Measures packs (several objects in one memory) on a GPU: the time until a client with an initialized CUDA context has mapped
//! all objects of a pack.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use wholemem_command::progress::ProgressDisplay;
use wholemem_command::size::RoundedSize;
use wholemem_command::temporary_store::TemporaryStore;
use wholemem_command::terminal;
use wholemem_hal::{Backend, BackendKind, Device};
use wholemem_os::Deadline;
use wholemem_store::{Client, Pack, PackObject};

use super::limit::EchoPeer;
use super::timed;
use crate::args::StoreArgs;
use crate::case_report::{CaseResult, print_cases};

const ROUNDS: u32 = 20;

pub(super) fn run(args: &StoreArgs) -> Result<()> {
    let backend = Backend::open(BackendKind::Cuda)?;
    let device = backend.device(0)?;
    // Creating a stream initializes CUDA in this process, outside of the measured time.
    let stream = device.stream()?;
    let before = device.available()?;
    let store = TemporaryStore::start_on("cuda")?;
    let client = store.connect_with(&backend)?;
    let taken = before.saturating_sub(device.available()?);
    let mut cases = Vec::new();
    let limits = EchoPeer::start()?.round_trips(args.rounds)?;
    for &objects in &args.packs {
        let _progress = ProgressDisplay::step(&format!("a pack of {objects} on the GPU"));
        let len = (args.pack_bytes.0 / objects as usize).max(256) / 256 * 256;
        let mut pack = Pack::new("pack").on(&device);
        for object in 0..objects {
            pack = pack.add(&name(object), len);
        }
        let draft = client.create_pack(&pack)?;
        for object in 0..objects as usize {
            let span = draft.span(object)?.context("the draft has no device memory")?;
            stream.fill(&span.part(len - 256, 256)?, object.to_le_bytes()[0])?;
        }
        stream.synchronize(Deadline::NEVER)?;
        let sealed = draft.seal()?;
        let times = (0..args.rounds.min(ROUNDS)).map(|_| attach(&store, &backend, &device, objects, len));
        let times = times.collect::<Result<Vec<_>>>()?;
        let what = format!("attach {objects} objects, {}", RoundedSize(len * objects as usize));
        cases.push(CaseResult {
            bytes: Some(len * objects as usize),
            ..CaseResult::of_times(1, &what, "us", &times, &limits)
        });
        client.delete(sealed.id)?;
    }
    terminal::note(&format!("the server of the store uses {} of GPU memory", RoundedSize(taken)));
    let title =
        format!("packs of a store on {}, mapped by a client with an initialized context", device.info().name);
    print_cases("store", &title, "round trip", args.json, &cases)
}

fn name(object: u32) -> String {
    format!("pack/layers.{object}.weight")
}

/// Returns the time until a new client, which has mapped nothing before, has mapped all objects of a pack on a GPU.
fn attach(
    store: &TemporaryStore,
    backend: &Backend,
    device: &Device,
    objects: u32,
    len: usize,
) -> Result<Duration> {
    let other: Client = store.connect_with(backend)?;
    let (took, held): (_, PackObject) = timed(|| Ok(other.get_pack("pack")?))?;
    ensure!(
        held.members().count() == objects as usize,
        "the pack has {count} objects instead of {objects}",
        count = held.members().count()
    );
    let stream = device.stream()?;
    for object in [0, objects / 2, objects - 1] {
        let mut seen = [0];
        stream.read(&held.span(&name(object))?.part(len - 1, 1)?, &mut seen)?;
        ensure!(
            seen[0] == object.to_le_bytes()[0],
            "object {object} of the pack ends with the wrong byte {last}",
            last = seen[0]
        );
    }
    Ok(took)
}
