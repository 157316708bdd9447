//! The third chapter: a named object, whose server is killed with it in hand.

use anyhow::{Result, ensure};
use wholemem_command::size::RoundedSize;
use wholemem_command::temporary_store::TemporaryStore;
use wholemem_os::Deadline;

use super::DemoContext;
use super::step::{StepRecorder, StepResult};

/// More would show nothing more.
const MAX_LEN: usize = 64 << 20;

const NAME: &str = "tour/weights";

/// Plays the chapter.
pub(super) fn run(recorder: &mut StepRecorder, context: &DemoContext) -> Result<()> {
    let len = context.len.min(MAX_LEN);
    let mut bytes = vec![0; len];
    context.pattern.generate(0, &mut bytes);
    let (store, client) = recorder.step("serve", || {
        let store = TemporaryStore::start()?;
        let client = store.connect()?;
        Ok(((store, client), StepResult::new("a keeper and a server run; this process is a client")))
    })?;
    recorder.step("put", || {
        let sealed = client.put(NAME, &bytes)?;
        ensure!(sealed.version == 1, "`{NAME}` is version {}", sealed.version);
        let what = format!("{} are sealed under `{NAME}`: nobody can write them any more", RoundedSize(len));
        Ok(((), StepResult::new(what).moved(len)))
    })?;
    recorder.step("kill-server", || {
        let server = store.server()?;
        server.kill()?;
        ensure!(server.wait_exit(Deadline::NEVER)?, "the server lives");
        Ok(((), StepResult::new("the server got SIGKILL; its keeper holds the memory, and starts another")))
    })?;
    recorder.step("get", || {
        let other = store.connect()?;
        let object = other.get(NAME)?;
        ensure!(object.to_vec()? == bytes, "`{NAME}` holds other bytes than were put");
        let epoch = other.status()?.epoch;
        ensure!(epoch == 2, "server number {epoch} serves");
        let what = format!("a new client got `{NAME}` from the next server, all {len} bytes as they were");
        Ok(((), StepResult::new(what).moved(len)))
    })
}
