//! Nodes with an ssh server of their own, for tests of `wholemem launch --hosts`.
//!
//! Keys, accounts and settings of ssh are in a temporary folder: neither the user's `~/.ssh` nor the machine's is read.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;
use wholemem_testkit::Cluster;
use wholemem_testkit::cluster::{NodeCommand, NodeOutput, NodeProcess};

use crate::run::timeout;

/// The server's program, as xtask found it. Its libraries are in the folder that the second variable names.
const SSHD: &str = "WHOLEMEM_TEST_SSHD";
const LIBRARIES: &str = "WHOLEMEM_TEST_SSHD_LIBRARIES";
const PORT: u16 = 2222;

/// The account of the tests: this user under another name.
const ACCOUNT: &str = "tester";

/// Nodes with ssh servers.
pub(crate) struct SshNodes {
    pub(crate) cluster: Cluster,
    folder: TempDir,
}

impl SshNodes {
    /// Starts nodes with ssh servers. Returns `None` and reports that the test was skipped if there is no ssh server, or no
    /// permission to make nodes.
    pub(crate) fn start(count: usize, test: &str) -> Option<Self> {
        let cluster =
            Cluster::of(&vec![0; count]).start(test, |_| unreachable!("the nodes have no ranks"))?;
        let Some(sshd) = sshd() else {
            wholemem_testkit::skipped("there is no ssh server; hint: apt-get install openssh-server");
            return None;
        };
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        write_settings(folder.path());
        let nodes = Self { cluster, folder };
        let servers: Vec<_> = (0..count).map(|node| nodes.start_server(node, &sshd)).collect();
        let deadline = timeout();
        for mut server in servers {
            while !server.stderr().contains("Server listening on") {
                let status = server.wait_until(wholemem_os::Deadline::NOW);
                assert!(status.is_none() && !deadline.has_passed(), "{status:?} {}", server.stderr());
                std::thread::yield_now();
            }
        }
        Some(nodes)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn start_server(&self, node: usize, sshd: &Path) -> NodeProcess {
        // The accounts are replaced in the node only. As root, the server needs an empty folder. Without root it runs as
        // this user, who is not root in a further user namespace: then it changes to no other user.
        let script = "set -e; cd \"$1\"; for file in passwd group shadow; do mount --bind $file /etc/$file; done\n\
                      if [ \"$3\" = 0 ]; then mount -t tmpfs tmpfs /run; mkdir -m 755 /run/sshd; exec \"$2\" -D -e -f sshd\n\
                      else exec unshare --user --map-user=\"$3\" --map-group=\"$4\" -- \"$2\" -D -e -f \"$1/sshd\"; fi";
        let (user, group) = ids();
        let command = self.cluster.command(node, "sh").args(["-c", script, "sh"]);
        let command = command.arg(self.folder.path()).arg(sshd).args([user.to_string(), group.to_string()]);
        let libraries = std::env::var_os(LIBRARIES);
        match libraries {
            Some(libraries) => command.env("LD_LIBRARY_PATH", libraries).spawn(),
            None => command.spawn(),
        }
    }

    /// Returns the command that runs the program on the first node, with the ssh of the tests.
    pub(crate) fn program(&self, args: &[&str]) -> NodeCommand<'_> {
        self.node_program(0, args)
    }

    /// Returns the command that runs the program on a node, with the ssh of the tests.
    pub(crate) fn node_program(&self, node: usize, args: &[&str]) -> NodeCommand<'_> {
        let ssh = format!("ssh -F {}", self.path("client").display());
        let command = self.cluster.command(node, env!("CARGO_BIN_EXE_wholemem")).args(args);
        command.env("WHOLEMEM_SSH", ssh).env("NO_COLOR", "1")
    }

    /// Launches a shell script on hosts.
    pub(crate) fn launch(&self, hosts: &str, script: &str) -> NodeOutput {
        self.program(&["launch", "--hosts", hosts, "--", "sh", "-c", script]).run()
    }

    /// Waits until a process of a node has ended.
    pub(crate) fn wait_for_end(&self, node: usize, pid: &str) {
        // A zombie has ended: its parent may not have reaped it yet.
        let script =
            "while [ -e /proc/$1 ] && ! grep -q 'State:.Z' /proc/$1/status 2>/dev/null; do sleep 0.02; done";
        let output = self.cluster.command(node, "sh").args(["-c", script, "sh", pid]).run();
        assert!(output.status.success(), "{output:?}");
    }

    /// Returns a folder that all nodes see.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }
}

/// Returns the path of the ssh server, if there is one with a client.
fn sshd() -> Option<PathBuf> {
    let client = Command::new("ssh").arg("-V").stderr(Stdio::null()).status();
    client.ok().filter(std::process::ExitStatus::success)?;
    let path = std::env::var_os(SSHD).map_or_else(|| PathBuf::from("/usr/sbin/sshd"), PathBuf::from);
    path.is_file().then_some(path)
}

fn ids() -> (u32, u32) {
    (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw())
}

fn write_settings(folder: &Path) {
    let write = |name: &str, text: String| fs::write(folder.join(name), text).unwrap();
    for key in ["host", "user"] {
        let mut keygen = Command::new("ssh-keygen");
        keygen.args(["-q", "-t", "ed25519", "-N", "", "-C", key, "-f"]).arg(folder.join(key));
        assert!(keygen.status().unwrap().success());
    }
    let public = |key: &str| fs::read_to_string(folder.join(key).with_extension("pub")).unwrap();
    let here = folder.display();
    let (user, group) = ids();
    write("authorized", public("user"));
    write("known", format!("* {}", public("host")));
    let server = "PidFile none\nUsePAM no\nStrictModes no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n\
                  LogLevel INFO\nPrintMotd no\n";
    write(
        "sshd",
        format!("Port {PORT}\nHostKey {here}/host\nAuthorizedKeysFile {here}/authorized\n{server}"),
    );
    let client =
        "IdentitiesOnly yes\nGlobalKnownHostsFile /dev/null\nStrictHostKeyChecking yes\nLogLevel ERROR\n";
    write(
        "client",
        format!(
            "Host *\nUser {ACCOUNT}\nPort {PORT}\nIdentityFile {here}/user\nUserKnownHostsFile {here}/known\n{client}"
        ),
    );
    let separation = "sshd:*:65533:65533::/run/sshd:/usr/sbin/nologin\n";
    write("passwd", format!("{ACCOUNT}:*:{user}:{group}::{here}:/bin/sh\n{separation}"));
    write("group", format!("{ACCOUNT}:*:{group}:\nsshd:*:65533:\n"));
    write("shadow", format!("{ACCOUNT}:*:::::::\n"));
}
