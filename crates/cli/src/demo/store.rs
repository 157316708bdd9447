//! Part 5 of the demo: a named object in a store outlives the store's server process.

use anyhow::{Result, ensure};
use wholemem_command::size::RoundedSize;
use wholemem_command::temporary_store::TemporaryStore;
use wholemem_os::Deadline;

use super::DemoContext;
use super::step::{StepRecorder, StepResult};

/// The maximum length of the object that the demo puts into a store.
const MAX_LEN: usize = 64 << 20;

const NAME: &str = "tour/weights";

/// Runs part 5 of the demo: an object is put into a store, and the store's server is killed.
pub(super) fn run(recorder: &mut StepRecorder, context: &DemoContext) -> Result<()> {
    let len = context.len.min(MAX_LEN);
    let mut bytes = vec![0; len];
    context.pattern.generate(0, &mut bytes);
    let (store, client) = recorder.step("serve", || {
        let store = TemporaryStore::start()?;
        let client = store.connect()?;
        Ok(((store, client), StepResult::new("a keeper and a server are running; this process is a client")))
    })?;
    recorder.step("put", || {
        let sealed = client.put(NAME, &bytes)?;
        ensure!(
            sealed.version == 1,
            "the new object `{NAME}` has version {version} instead of 1",
            version = sealed.version
        );
        let text = format!("{} are sealed as `{NAME}`: no process can write them", RoundedSize(len));
        Ok(((), StepResult::new(text).moved(len)))
    })?;
    recorder.step("kill-server", || {
        let server = store.server()?;
        server.kill()?;
        ensure!(server.wait_exit(Deadline::NEVER)?, "the killed server of the store did not exit");
        Ok((
            (),
            StepResult::new(
                "the server was killed with SIGKILL; its keeper holds the memory and starts another server",
            ),
        ))
    })?;
    recorder.step("get", || {
        let other = store.connect()?;
        let object = other.get(NAME)?;
        ensure!(object.to_vec()? == bytes, "the bytes of the object `{NAME}` have changed");
        let epoch = other.status()?.epoch;
        ensure!(epoch == 2, "the store has had {epoch} server processes, but 2 were expected");
        let text =
            format!("a new client read `{NAME}` from the second server: all {len} bytes are unchanged");
        Ok(((), StepResult::new(text).moved(len)))
    })
}
