//! Tests of `wholemem launch --hosts` over real ssh servers in network namespaces.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, PipeReader};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use wholemem_os::PidFd;
use wholemem_os::pidfd::Signal;
use wholemem_testkit::cluster::NodeProcess;
use wholemem_testkit::test_name;

use crate::joined;
use crate::run::{program, run, timeout};
use crate::ssh_nodes::SshNodes;

fn lines(text: &str) -> BTreeSet<&str> {
    text.lines().collect()
}

/// Starts a script on hosts that prints the process id of each rank. Returns the launcher, its output, and the ids of the
/// processes with their nodes.
fn launch_waiting(
    nodes: &SshNodes,
    hosts: &str,
    count: usize,
    script: &str,
) -> (NodeProcess, BufReader<PipeReader>, Vec<(usize, String)>) {
    let (output, there) = std::io::pipe().unwrap();
    let launcher =
        nodes.program(&["launch", "--hosts", hosts, "--", "sh", "-c", script]).stdout(there).spawn();
    let mut output = BufReader::new(output);
    let mut ranks = Vec::new();
    while ranks.len() < count {
        let mut line = String::new();
        assert_ne!(output.read_line(&mut line).unwrap(), 0, "the ranks ended: {}", launcher.stderr());
        // `[2 n1] 77`
        let words: Vec<_> = line.split_whitespace().collect();
        let node = words[1].trim_matches(['n', ']']).parse().unwrap();
        ranks.push((node, words[2].to_owned()));
    }
    (launcher, output, ranks)
}

#[test]
fn ranks_run_on_all_hosts_with_the_variables_of_the_group() {
    let Some(nodes) = SshNodes::start(3, test_name!()) else { return };
    let before: Vec<_> = (0..3).map(|node| nodes.cluster.counters(node)).collect();
    let script = "echo $(cat /proc/sys/kernel/hostname) $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE \
                  $GROUP_RANK/$GROUP_WORLD_SIZE $MASTER_ADDR $PWD; echo no >&2; cat; printf end";
    let output = nodes.launch("n0,n1:2,n2:1", script);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let folder = std::env::current_dir().unwrap();
    let folder = folder.display();
    let expected = [
        format!("[0 n0] n0 0/4 0/1 0/3 n0 {folder}"),
        format!("[1 n1] n1 1/4 0/2 1/3 n0 {folder}"),
        format!("[2 n1] n1 2/4 1/2 1/3 n0 {folder}"),
        format!("[3 n2] n2 3/4 0/1 2/3 n0 {folder}"),
    ];
    let ends = ["[0 n0] end", "[1 n1] end", "[2 n1] end", "[3 n2] end"];
    assert_eq!(lines(&output.stdout), expected.iter().map(String::as_str).chain(ends).collect());
    assert_eq!(output.stdout.lines().count(), 8);
    assert_eq!(lines(&output.stderr), BTreeSet::from(["[0 n0] no", "[1 n1] no", "[2 n1] no", "[3 n2] no"]));
    for (node, before) in before.iter().enumerate().skip(1) {
        let after = nodes.cluster.counters(node);
        assert!(
            after.sent > before.sent && after.received > before.received,
            "node {node}: {before:?} {after:?}"
        );
    }
}

#[test]
fn ranks_on_several_hosts_form_a_group() {
    if joined::run_rank() {
        return;
    }
    let Some(nodes) = SshNodes::start(3, test_name!()) else { return };
    let before: Vec<_> = (0..3).map(|node| nodes.cluster.counters(node)).collect();
    for interface in ["eth0", "fd77::/64", "10.77.0.0/16"] {
        let script = joined::script(test_name!());
        let args = ["launch", "--hosts", "n0,n1:2,n2:1", "--", "sh", "-c", &script];
        let launcher = nodes.program(&args).env("WHOLEMEM_INTERFACE", interface);
        let output = launcher.env("WHOLEMEM_TIMEOUT", "60").env("WHOLEMEM_PORT_RANGE", "21000-21010").run();
        assert_eq!(output.status.code(), Some(0), "{interface}: {output:?}");
        let reports = joined::reports(&output.stdout);
        assert_eq!(reports, [(0, 4, 0, 3), (1, 4, 1, 3), (2, 4, 1, 3), (3, 4, 2, 3)], "{output:?}");
    }
    for (node, before) in before.iter().enumerate() {
        let after = nodes.cluster.counters(node);
        let received = after.received - before.received;
        assert!(received > 3 * joined::LEN as u64, "node {node} has received {received} bytes");
    }
}

#[test]
fn the_secret_and_the_address_are_equal_on_all_ranks_and_on_no_command_line() {
    let Some(nodes) = SshNodes::start(2, test_name!()) else { return };
    // The script searches with shell builtins only: other programs would have the secret on their own command line.
    let script = "secret=$(cat $WHOLEMEM_SECRET_FILE); echo ${#secret} $WHOLEMEM_ADDR $WHOLEMEM_RENDEZVOUS $secret \
                  $WHOLEMEM_TIMEOUT${WHOLEMEM_ID-none}${WHOLEMEM_SECRET-none}$PASSED$NOT_PASSED\n\
                  all=$(cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' ' ')\n\
                  case \"$all\" in *$secret*) echo visible;; *) echo hidden;; esac\n\
                  stat -Lc %a $WHOLEMEM_SECRET_FILE";
    let args = ["launch", "-n", "2", "--hosts", "n0,n1", "--env", "PASSED", "--", "sh", "-c", script];
    let mut first = BTreeSet::new();
    for _ in 0..2 {
        let launcher =
            nodes.program(&args).env("WHOLEMEM_TIMEOUT", "7").env("WHOLEMEM_ID", "of another group");
        let launcher =
            launcher.env("WHOLEMEM_SECRET", "of another group").env("PASSED", "p").env("NOT_PASSED", "n");
        let output = launcher.run();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        let texts = output.stdout.lines().map(|line| line.split_once("] ").unwrap().1);
        let texts: BTreeSet<_> = texts.map(str::to_owned).collect();
        assert_eq!(texts.len(), 3, "all ranks print the same: {output:?}");
        assert!(texts.contains("hidden") && texts.contains("600"), "{texts:?}");
        let text = texts.iter().find(|text| text.starts_with("64 n0:")).unwrap();
        assert!(text.ends_with(" 7nonenonep"), "{text}");
        let words: Vec<_> = text.split(' ').collect();
        assert_ne!(words[1], "n0:0");
        // Another launch has another run and another secret.
        assert!(first.insert(words[2].to_owned()) && first.insert(words[3].to_owned()), "{text}");
    }
    // A given address is not replaced.
    let launcher =
        nodes.program(&["launch", "--hosts", "n0,n1", "--", "sh", "-c", "echo $WHOLEMEM_ADDR $MASTER_ADDR"]);
    let output = launcher.env("WHOLEMEM_ADDR", "[fd77::1]:7").run();
    assert_eq!(
        lines(&output.stdout),
        BTreeSet::from(["[0 n0] [fd77::1]:7 fd77::1", "[1 n1] [fd77::1]:7 fd77::1"])
    );
}

#[test]
fn a_host_may_be_an_ipv6_address_with_a_user() {
    let Some(nodes) = SshNodes::start(2, test_name!()) else { return };
    let output = nodes.launch("tester@[fd77::1],[fd77::2]:2", "echo $WHOLEMEM_ADDR");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let mut addresses: Vec<_> = output.stdout.lines().collect();
    addresses.sort_unstable();
    for (line, prefix) in addresses.iter().zip(["[0 fd77::1] ", "[1 fd77::2] ", "[2 fd77::2] "]) {
        assert!(line.strip_prefix(prefix).is_some_and(|text| text.starts_with("[fd77::1]:")), "{output:?}");
    }
    assert_eq!(addresses.len(), 3);
}

#[test]
fn the_first_failure_terminates_the_ranks_of_all_hosts_and_sets_the_exit_code() {
    let Some(nodes) = SshNodes::start(2, test_name!()) else { return };
    let script = "if [ $RANK = 2 ]; then exit 7; fi; exec sleep 1000";
    let output = nodes.launch("n0:2,n1:2", script);
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    let expected = "error: rank 2 on n1 failed: exit status: 7; the other ranks were terminated\n";
    assert_eq!(output.stderr, expected);
    // 255 is also the exit code of ssh for its own errors.
    let output = nodes.launch("n0,n1", "[ $RANK = 0 ] && exec sleep 1000; exit 255");
    assert_eq!(output.status.code(), Some(255), "{output:?}");
    assert!(output.stderr.starts_with("error: rank 1 on n1 failed: exit status: 255"), "{output:?}");
    let output = nodes.launch("n0,n1", "[ $RANK = 0 ] && exec sleep 1000; kill -9 $$");
    assert_eq!(output.status.code(), Some(137), "128 plus the signal, as in a shell: {output:?}");
}

#[test]
fn signals_are_forwarded_to_the_ranks_of_all_hosts() {
    let Some(nodes) = SshNodes::start(2, test_name!()) else { return };
    let script = "trap 'echo got it; exit 0' USR1; echo $$; while true; do sleep 0.05; done";
    let (mut launcher, output, _) = launch_waiting(&nodes, "n0,n1:2", 3, script);
    launcher.signal(Signal::USR1);
    let lines: BTreeSet<_> = output.lines().map(Result::unwrap).collect();
    assert_eq!(launcher.wait().code(), Some(0), "{}", launcher.stderr());
    assert!(lines.iter().eq(["[0 n0] got it", "[1 n1] got it", "[2 n1] got it"]), "{lines:?}");
}

#[test]
fn ctrl_c_and_the_death_of_the_launcher_end_the_ranks_of_all_hosts() {
    let Some(nodes) = SshNodes::start(2, test_name!()) else { return };
    for signal in [Signal::INT, Signal::TERM, Signal::KILL] {
        // A process that a rank leaves in another session ends too.
        let script = "setsid sleep 1000 & echo $!; echo $$; exec sleep 1000";
        let (mut launcher, _output, processes) = launch_waiting(&nodes, "n0,n1:2", 6, script);
        launcher.signal(signal);
        let code = launcher.wait().code();
        assert_eq!(code, (signal != Signal::KILL).then_some(128 + signal.as_raw()), "{signal:?}");
        for (node, pid) in processes {
            nodes.wait_for_end(node, &pid);
        }
    }
}

#[test]
fn a_broken_connection_ends_the_ranks_of_all_hosts() {
    let Some(nodes) = SshNodes::start(2, test_name!()) else { return };
    // On n1, the ranks ignore SIGTERM, so that they are killed after the grace period.
    let script = "[ $GROUP_RANK = 1 ] && trap '' TERM; echo $$; while true; do sleep 0.05; done";
    let (mut launcher, _output, ranks) = launch_waiting(&nodes, "n0,n1", 2, script);
    // Kills the ssh client that is connected to n1: the command line ends with the command of the agent.
    let kill = "for pid in $(cat /proc/$1/task/*/children); do \
                case $(tr '\\0' ' ' < /proc/$pid/cmdline) in *' -- n1 '*) kill -9 $pid;; esac; done";
    let output = nodes.cluster.command(0, "sh").args(["-c", kill, "sh", &launcher.pid().to_string()]).run();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(launcher.wait().code(), Some(1));
    let error = "error: the connection to n1 ended before its ranks: ssh: signal: 9 (SIGKILL)\n";
    assert_eq!(launcher.stderr(), error);
    for (node, pid) in ranks {
        nodes.wait_for_end(node, &pid);
    }
}

#[test]
fn a_host_that_cannot_run_the_program_is_reported_and_no_rank_starts() {
    let Some(nodes) = SshNodes::start(2, test_name!()) else { return };
    let write = |name: &str, text: &str| {
        let path = nodes.folder().join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let hello = |version: &str| {
        format!(
            "#!/bin/sh\nprintf '\\036{{\"Hello\":{{\"version\":\"{version}\",\"ports\":[1,2]}}}}\\n'\ncat >/dev/null\n"
        )
    };
    let real = env!("CARGO_BIN_EXE_wholemem");
    let only_on_n0 = |other: &str| {
        format!("#!/bin/sh\n[ $(cat /proc/sys/kernel/hostname) = n0 ] && exec {real} \"$@\"\n{other}\n")
    };
    let missing = only_on_n0("exit 127");
    let cases = [
        (
            write("missing", &missing),
            "cannot start `PROGRAM` on n1: it was not found; `--program` sets its path there",
        ),
        (
            "/nowhere/wholemem".to_owned(),
            "cannot start `PROGRAM` on n0: it was not found; `--program` sets its path there",
        ),
        (
            write("old", &hello("0.0.1")),
            "`PROGRAM` on n0 is version 0.0.1, and this program is version VERSION",
        ),
        (
            write("other", "#!/bin/sh\nexit 2\n"),
            "the connection to n0 ended before `PROGRAM agent` answered: exit status: 2; all hosts need version VERSION of wholemem",
        ),
    ];
    for (program, expected) in cases {
        let expected = expected.replace("PROGRAM", &program).replace("VERSION", env!("CARGO_PKG_VERSION"));
        // Both hosts have the same failure in most cases, and either may be reported.
        let args = ["launch", "--hosts", "n0,n1", "--program", &program, "--", "echo", "started"];
        let output = nodes.program(&args).run();
        assert_eq!((output.status.code(), output.stdout.as_str()), (Some(1), ""), "{output:?}");
        let n1 = expected.replace("n0", "n1");
        assert!(output.stderr.contains(&expected) || output.stderr.contains(&n1), "{expected}: {output:?}");
    }
    let output = nodes.launch("n0,nowhere", "echo started");
    assert_eq!((output.status.code(), output.stdout.as_str()), (Some(1), ""), "{output:?}");
    assert!(output.stderr.ends_with("error: cannot connect to nowhere: ssh failed\n"), "{output:?}");
    // The command itself is missing.
    let args = ["launch", "--hosts", "n0,n1", "--", "/nowhere/at/all"];
    let output = nodes.program(&args).run();
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stderr.contains("] error: cannot run `/nowhere/at/all`"), "{output:?}");
}

#[test]
fn log_dir_receives_the_output_of_each_rank() {
    let Some(nodes) = SshNodes::start(2, test_name!()) else { return };
    let folder = nodes.folder().join("logs");
    let args = ["launch", "--hosts", "n0,n1", "--log-dir", folder.to_str().unwrap()];
    let output = nodes.program(&args).args(["--", "sh", "-c", "echo out $RANK; echo err >&2"]).run();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(fs::read_to_string(folder.join("rank-1.out")).unwrap(), "out 1\n");
    assert_eq!(fs::read_to_string(folder.join("rank-0.err")).unwrap(), "err\n");
}

#[test]
fn wrong_options_are_refused_before_ssh_is_started() {
    for (hosts, expected) in [("a,-oProxyCommand=x", "is not a host"), ("fd00::1", "without brackets")] {
        let run = run(&["launch", "--hosts", hosts, "--ssh", "false", "--", "true"]);
        assert_eq!(run.code, Some(1), "{run:?}");
        assert!(run.stderr.contains(expected), "{run:?}");
    }
    let run = run(&["launch", "--hosts", "a", "--ssh", "false", "--env", "UNSET_HERE", "--", "true"]);
    assert_eq!(
        (run.code, run.stderr.as_str()),
        (Some(1), "error: `--env UNSET_HERE`: the variable is not set\n")
    );
    let run = crate::run::run(&["launch", "--hosts", "a", "--ssh", "/nowhere/ssh", "--", "true"]);
    assert_eq!(run.code, Some(1), "{run:?}");
    assert!(run.stderr.contains("cannot run `/nowhere/ssh`"), "{run:?}");
}

#[test]
fn a_signal_ends_the_launch_while_ssh_connects() {
    let folder = tempfile::tempdir().unwrap();
    let (ssh, started) = (folder.path().join("ssh"), folder.path().join("started"));
    fs::write(&ssh, format!("#!/bin/sh\n: > {}\nexec sleep 1000\n", started.display())).unwrap();
    fs::set_permissions(&ssh, fs::Permissions::from_mode(0o755)).unwrap();
    let mut launcher =
        program(&["launch", "--hosts", "a,b", "--ssh", ssh.to_str().unwrap(), "--", "true"]).spawn().unwrap();
    let deadline = timeout();
    while !started.exists() {
        assert!(!deadline.has_passed(), "ssh is not started");
        std::thread::yield_now();
    }
    let watch = PidFd::open(launcher.id()).unwrap();
    watch.signal(Signal::INT).unwrap();
    assert!(watch.wait_exit(timeout()).unwrap(), "the launcher waits for ssh");
    assert_eq!(launcher.wait().unwrap().code(), Some(130));
}

#[test]
fn a_blocked_reader_of_stdout_does_not_keep_a_signal_from_ending_the_launch() {
    let Some(nodes) = SshNodes::start(2, test_name!()) else { return };
    // Rank 1 writes more than all buffers on the way hold, while the test does not read.
    let script = "echo $$; [ $RANK = 0 ] && exec sleep 1000; exec yes";
    let (mut launcher, output, ranks) = launch_waiting(&nodes, "n0,n1", 2, script);
    // The pipe may be full with fewer bytes than its size, so another writer of it tells.
    let writer = format!("/proc/self/fd/{}", output.get_ref().as_raw_fd());
    let writer = fs::OpenOptions::new().write(true).open(writer).unwrap();
    let deadline = timeout();
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    while poll(&mut [PollFd::new(&writer, PollFlags::OUT)], Some(&now)).unwrap() > 0 {
        assert!(!deadline.has_passed(), "the pipe is not filled");
        std::thread::yield_now();
    }
    // The first signal may come before the launcher's queue is full: then it only reaches the ranks.
    let status = loop {
        launcher.signal(Signal::TERM);
        let soon = wholemem_os::Deadline::after(std::time::Duration::from_millis(200));
        if let Some(status) = launcher.wait_until(soon) {
            break status;
        }
        assert!(!deadline.has_passed(), "the launcher waits for its reader");
    };
    assert_eq!(status.code(), Some(143), "{}", launcher.stderr());
    for (node, pid) in ranks {
        nodes.wait_for_end(node, &pid);
    }
}

#[test]
fn a_host_that_no_longer_answers_is_lost() {
    // ssh gives up after 15 seconds, and the server of the host when it cannot send.
    if !wholemem_testkit::exhaustive() {
        return;
    }
    let Some(nodes) = SshNodes::start(2, test_name!()) else { return };
    let (mut launcher, _output, ranks) = launch_waiting(&nodes, "n0,n1", 2, "echo $$; exec sleep 1000");
    nodes.cluster.cut_between(0, 1);
    assert_eq!(launcher.wait().code(), Some(1), "{}", launcher.stderr());
    assert!(
        launcher.stderr().contains("error: the connection to n1 ended before its ranks"),
        "{}",
        launcher.stderr()
    );
    nodes.wait_for_end(0, &ranks.iter().find(|(node, _)| *node == 0).unwrap().1);
    nodes.cluster.heal_between(0, 1);
    nodes.wait_for_end(1, &ranks.iter().find(|(node, _)| *node == 1).unwrap().1);
}
