//! A store for a test: the test binary starts itself again as the keeper and the server of the store.

use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Resource, Rlimit, kill_process_group, setrlimit};
use wholemem_hal::BackendKind;
use wholemem_os::pidfd::Signal;
use wholemem_os::{Deadline, PidFd};
use wholemem_store::{Client, ProcessRole, Serve, Status, Watch};
use wholemem_testkit::MemoryGroup;

const FOLDER: &str = "WHOLEMEM_STORE_TEST_FOLDER";
const ROLE: &str = "WHOLEMEM_STORE_TEST_ROLE";
const TEST: &str = "WHOLEMEM_STORE_TEST_PROCESS";

/// Waits until the descriptor of a watch is readable, as an event loop does.
pub(crate) fn wait_until_readable(watch: &Watch) {
    let timeout = Timespec { tv_sec: 60, tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(watch, PollFlags::IN)], Some(&timeout)), Ok(1));
}

/// A store in a temporary folder, whose processes are killed when this value is dropped.
pub(crate) struct TestStore {
    folder: tempfile::TempDir,
    keeper: Child,
    /// The standard output of the keeper, held open because the test harness of the keeper exits if it cannot print.
    _stdout: BufReader<ChildStdout>,
}

fn serve(folder: &Path) -> Serve {
    let mut serve = Serve::at(folder.join("socket"));
    serve.size = Some(256 << 20);
    serve.device_size = Some(64 << 20);
    let devices = std::fs::read_to_string(folder.join("devices")).unwrap();
    serve.devices = Some(if devices == "cuda" { BackendKind::Cuda } else { BackendKind::Host });
    serve.objects = 16 << 10;
    serve.parent = std::fs::read_to_string(folder.join("parent")).ok().map(|id| id.parse().unwrap());
    serve
}

fn launch(folder: &Path, role: &str, stdin: Stdio, stdout: Stdio) -> std::io::Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["--exact", "test_store::store_process", "--nocapture"])
        .env(FOLDER, folder)
        .env(ROLE, role)
        .stdin(stdin)
        .stdout(stdout);
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
    let name = if role == "server" { "server" } else { "keeper" };
    // The keeper and the server exit when the test exits, even if the test is killed.
    let test = PidFd::open(std::env::var(TEST).unwrap().parse().unwrap());
    #[expect(clippy::exit, reason = "the test has exited, and no process waits for this one")]
    std::thread::spawn(move || {
        let _ = test.and_then(|test| test.wait_exit(Deadline::NEVER));
        std::process::exit(1);
    });
    if let Ok(limit) = std::fs::read_to_string(folder.join("limit")) {
        let limit = Some(limit.parse().unwrap());
        setrlimit(Resource::Nofile, Rlimit { current: limit, maximum: limit }).unwrap();
    }
    if let (Ok(group), "first") = (std::fs::read_to_string(folder.join("group")), role.as_str()) {
        MemoryGroup::join(Path::new(&group));
    }
    if let (Ok(len), "server") = (std::fs::read_to_string(folder.join("longest")), role.as_str()) {
        // Servers that the kernel kills must not write core dumps.
        for (resource, limit) in [(Resource::Core, 0), (Resource::Fsize, len.parse().unwrap())] {
            setrlimit(resource, Rlimit { current: Some(limit), maximum: Some(limit) }).unwrap();
        }
    }
    // The process id is written atomically, because other processes read the file at any time.
    std::fs::write(folder.join("new"), std::process::id().to_string()).unwrap();
    std::fs::rename(folder.join("new"), folder.join(name)).unwrap();
    let serve = serve(&folder);
    let start = |role: ProcessRole, socket: OwnedFd| {
        let role = if role == ProcessRole::Server { "server" } else { "keeper" };
        launch(&folder, role, Stdio::from(socket), Stdio::null())
    };
    let outcome = match role.as_str() {
        "first" => serve.run(&start, &mut || println!("ready")),
        other => {
            let role = if other == "server" { ProcessRole::Server } else { ProcessRole::Keeper };
            let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
            serve.run_role(role, socket, &start)
        }
    };
    outcome.unwrap();
}

impl TestStore {
    /// Returns the status of the store once the server has freed deleted objects without pins, which takes several steps.
    pub(crate) fn settled(&self, client: &Client) -> Status {
        let deadline = Deadline::after(Duration::from_secs(60));
        loop {
            let status = client.status().unwrap();
            if status.retired == 0 || deadline.has_passed() {
                return status;
            }
        }
    }

    pub(crate) fn start() -> Self {
        Self::start_with("host")
    }

    /// Starts a store with device memory of the GPU if `devices` is `cuda`, else of the host backend.
    pub(crate) fn start_with(devices: &str) -> Self {
        Self::start_in(tempfile::tempdir_in("/tmp").unwrap(), devices)
    }

    /// Starts a store that ends when the given process exits.
    pub(crate) fn start_for(process: &Child) -> Self {
        let folder = tempfile::tempdir_in("/tmp").unwrap();
        std::fs::write(folder.path().join("parent"), process.id().to_string()).unwrap();
        Self::start_in(folder, "host")
    }

    /// Starts a store whose processes have a limit of open descriptors.
    pub(crate) fn start_limited(descriptors: u64) -> Self {
        let folder = tempfile::tempdir_in("/tmp").unwrap();
        std::fs::write(folder.path().join("limit"), descriptors.to_string()).unwrap();
        Self::start_in(folder, "host")
    }

    /// Starts a store whose processes run in a cgroup with a memory limit.
    pub(crate) fn start_in_group(group: &MemoryGroup) -> Self {
        let folder = tempfile::tempdir_in("/tmp").unwrap();
        std::fs::write(folder.path().join("group"), group.folder().to_str().unwrap()).unwrap();
        Self::start_in(folder, "host")
    }

    /// Starts a store whose servers are killed by the kernel (`SIGXFSZ`) if they allocate more than `longest` bytes at once.
    pub(crate) fn start_with_file_limit(longest: u64) -> Self {
        let folder = tempfile::tempdir_in("/tmp").unwrap();
        std::fs::write(folder.path().join("longest"), longest.to_string()).unwrap();
        Self::start_in(folder, "host")
    }

    fn start_in(folder: tempfile::TempDir, devices: &str) -> Self {
        std::fs::write(folder.path().join("devices"), devices).unwrap();
        let mut keeper = launch(folder.path(), "first", Stdio::null(), Stdio::piped()).unwrap();
        let mut stdout = BufReader::new(keeper.stdout.take().unwrap());
        let mut lines = stdout.by_ref().lines().map_while(Result::ok);
        assert!(lines.any(|line| line.ends_with("ready")), "the server is ready");
        Self { folder, keeper, _stdout: stdout }
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    pub(crate) fn client(&self) -> Client {
        Client::connect(self.socket()).unwrap()
    }

    /// Returns the process id of the current server or keeper of the store.
    pub(crate) fn process(&self, name: &str) -> u32 {
        std::fs::read_to_string(self.folder.path().join(name)).unwrap().parse().unwrap()
    }

    /// Kills the server or the keeper of the store, and waits until it is replaced.
    pub(crate) fn kill(&self, name: &str) {
        let before = self.process(name);
        if let Ok(process) = PidFd::open(before) {
            process.kill().unwrap();
        }
        self.wait_for_another(name, before);
    }

    /// Waits until the keeper holds the descriptor of the index. Does not wait if the server is dead.
    pub(crate) fn wait_until_protected(&self, server: u32) {
        let files = |pid: u32| {
            let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten();
            let links = fds.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
            links.filter(|link| link.to_string_lossy().contains("memfd:wholemem-index")).count()
        };
        let deadline = Deadline::after(Duration::from_secs(60));
        while files(self.process("keeper")) == 0 && files(server) > 0 {
            assert!(!deadline.has_passed(), "the new keeper has not received the descriptors");
            std::thread::yield_now();
        }
    }

    /// Lets every user connect to the store.
    pub(crate) fn open_to_all(&self) {
        for (path, mode) in [(self.folder.path().to_owned(), 0o755), (self.socket(), 0o666)] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        }
    }

    /// Kills the process whose exit ends the store, and waits for the keeper to exit.
    pub(crate) fn stop(&mut self, mut process: Child) {
        process.kill().unwrap();
        process.wait().unwrap();
        let ended = self.keeper.wait().unwrap();
        assert!(ended.success(), "{ended}");
    }

    /// Kills the process whose exit ends the store, and the keeper too.
    pub(crate) fn kill_with(&mut self, mut process: Child) {
        for child in [&mut process, &mut self.keeper] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Stops all processes of the store with a signal, and waits until every thread of the server has stopped.
    pub(crate) fn freeze(&self) {
        self.signal(Signal::STOP);
        let is_stopped = |task: std::io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
            stat.rsplit_once(") ").unwrap().1.starts_with('T')
        };
        let tasks = format!("/proc/{}/task", self.process("server"));
        let deadline = Deadline::after(Duration::from_secs(60));
        while !std::fs::read_dir(&tasks).unwrap().all(is_stopped) {
            assert!(!deadline.has_passed(), "the server does not stop");
            std::thread::yield_now();
        }
    }

    /// Continues the processes of the store after [`Self::freeze`].
    pub(crate) fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    /// Sends a signal to all processes of the store, as a terminal does.
    pub(crate) fn signal(&self, signal: Signal) {
        let group = i32::try_from(self.keeper.id()).ok().and_then(Pid::from_raw).unwrap();
        kill_process_group(group, signal).unwrap();
    }

    pub(crate) fn wait_for_another(&self, name: &str, before: u32) {
        let deadline = Deadline::after(Duration::from_secs(60));
        while self.process(name) == before {
            assert!(!deadline.has_passed(), "the {name} was not replaced");
            std::thread::yield_now();
        }
    }
}

impl Drop for TestStore {
    fn drop(&mut self) {
        // All processes of the store are in one process group, even after replacements, so that one signal kills all before any
        // of them can start another.
        let group = i32::try_from(self.keeper.id()).ok().and_then(Pid::from_raw).unwrap();
        let _ = kill_process_group(group, Signal::KILL);
        let _ = self.keeper.wait();
    }
}
