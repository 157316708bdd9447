//! The third chapter: a named object, whose server is killed with it in hand.

use anyhow::{Result, ensure};
use wholemem_command::own_store::OwnStore;
use wholemem_command::size::Rough;
use wholemem_os::Deadline;

use super::Setting;
use super::stage::{Done, Stage};

/// More would show nothing more.
const MOST: usize = 64 << 20;

const NAME: &str = "tour/weights";

/// Plays the chapter.
pub(super) fn play(stage: &mut Stage, setting: &Setting) -> Result<()> {
    let len = setting.len.min(MOST);
    let mut bytes = vec![0; len];
    setting.pattern.make(0, &mut bytes);
    let (store, client) = stage.step("serve", || {
        let store = OwnStore::start()?;
        let client = store.connect()?;
        Ok(((store, client), Done::new("a keeper and a server run; this process is a client")))
    })?;
    stage.step("put", || {
        let sealed = client.put(NAME, &bytes)?;
        ensure!(sealed.version == 1, "`{NAME}` is version {}", sealed.version);
        let what = format!("{} are sealed under `{NAME}`: nobody can write them any more", Rough(len));
        Ok(((), Done::new(what).moved(len)))
    })?;
    stage.step("kill-server", || {
        let server = store.server()?;
        server.kill()?;
        ensure!(server.wait_exit(Deadline::NEVER)?, "the server lives");
        Ok(((), Done::new("the server got SIGKILL; its keeper holds the memory, and starts another")))
    })?;
    stage.step("get", || {
        let other = store.connect()?;
        let object = other.get(NAME)?;
        ensure!(object.to_vec()? == bytes, "`{NAME}` holds other bytes than were put");
        let epoch = other.status()?.epoch;
        ensure!(epoch == 2, "server number {epoch} serves");
        let what = format!("a new client got `{NAME}` from the next server, all {len} bytes as they were");
        Ok(((), Done::new(what).moved(len)))
    })
}
