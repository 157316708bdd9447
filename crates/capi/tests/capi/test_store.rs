//! A store for tests: the test binary starts itself again as the keeper and the server of the store.

use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process_group};
use wholemem_capi::device::wm_backend_t;
use wholemem_capi::store::client::*;
use wholemem_hal::BackendKind;
use wholemem_os::{Deadline, PidFd};
use wholemem_store::{ProcessRole, Serve};

use super::support::ok;

const FOLDER: &str = "WHOLEMEM_CAPI_TEST_FOLDER";
const ROLE: &str = "WHOLEMEM_CAPI_TEST_ROLE";
const TEST: &str = "WHOLEMEM_CAPI_TEST_PROCESS";

/// A store in a temporary folder, whose processes are killed when this value is dropped. Its device memory is that of the host backend.
pub(crate) struct TestStore {
    folder: tempfile::TempDir,
    keeper: Child,
}

fn launch(folder: &Path, role: &str, stdin: Stdio, stdout: Stdio) -> std::io::Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--exact", "test_store::store_process", "--nocapture"]).env(FOLDER, folder).env(ROLE, role);
    command.stdin(stdin).stdout(stdout);
    if role == "first" {
        command.env(TEST, std::process::id().to_string()).process_group(0);
    }
    command.spawn()
}

/// The entry point of the keeper and server processes, which is not a test itself. Does nothing in an ordinary test run.
#[test]
fn store_process() {
    let (Some(folder), Ok(role)) = (std::env::var_os(FOLDER), std::env::var(ROLE)) else { return };
    let folder = PathBuf::from(folder);
    // The keeper and the server exit when the test exits, even if the test is killed.
    let test = PidFd::open(std::env::var(TEST).unwrap().parse().unwrap());
    #[expect(clippy::exit, reason = "the test has exited, and no process waits for this one")]
    std::thread::spawn(move || {
        let _ = test.and_then(|test| test.wait_exit(Deadline::NEVER));
        std::process::exit(1);
    });
    let mut serve = Serve::at(folder.join("socket"));
    serve.size = Some(64 << 20);
    serve.device_size = Some(16 << 20);
    serve.devices = Some(BackendKind::Host);
    serve.objects = 4096;
    let start = |role: ProcessRole, socket: OwnedFd| {
        let role = if role == ProcessRole::Server { "server" } else { "keeper" };
        launch(&folder, role, Stdio::from(socket), Stdio::null())
    };
    let outcome = match role.as_str() {
        "first" => serve.run(&start, &mut || std::fs::write(folder.join("ready"), "").unwrap()),
        other => {
            let role = if other == "server" { ProcessRole::Server } else { ProcessRole::Keeper };
            let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
            serve.run_role(role, socket, &start)
        }
    };
    outcome.unwrap();
}

impl TestStore {
    pub(crate) fn start() -> Self {
        let folder = tempfile::tempdir_in("/tmp").unwrap();
        let keeper = launch(folder.path(), "first", Stdio::null(), Stdio::null()).unwrap();
        let mut started = Self { folder, keeper };
        let ready = started.folder.path().join("ready");
        while !ready.exists() {
            assert!(started.keeper.try_wait().unwrap().is_none(), "the store ended before it was ready");
            std::thread::yield_now();
        }
        started
    }

    pub(crate) fn socket(&self) -> CString {
        CString::new(self.folder.path().join("socket").to_str().unwrap()).unwrap()
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Connects to the store, with a backend for objects in device memory.
    pub(crate) fn connect(&self, backend: wm_backend_t) -> wm_store_t {
        let options = wm_store_options_t {
            struct_size: size_of::<wm_store_options_t>(),
            timeout_ns: 30_000_000_000,
            backend,
        };
        let mut store = wm_store_t { value: 0 };
        // SAFETY: the pointers are valid, and the structure has the size in its first field.
        ok(unsafe { wm_store_connect(self.socket().as_ptr(), &raw const options, &raw mut store) });
        store
    }
}

impl Drop for TestStore {
    fn drop(&mut self) {
        // All processes of the store are in one process group.
        let group = i32::try_from(self.keeper.id()).ok().and_then(Pid::from_raw).unwrap();
        let _ = kill_process_group(group, Signal::KILL);
        let _ = self.keeper.wait();
    }
}
