//! Tests of `wholemem launch`.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::process::Stdio;

use wholemem_os::PidFd;
use wholemem_os::pidfd::Signal;

use crate::run::{finish, program, run, timeout};

/// Launches a shell script as several ranks.
fn launch(ranks: &str, script: &str) -> crate::run::Run {
    run(&["launch", "-n", ranks, "--", "sh", "-c", script])
}

fn sorted(text: &str) -> Vec<&str> {
    let mut lines: Vec<_> = text.lines().collect();
    lines.sort_unstable();
    lines
}

#[test]
fn ranks_have_torchrun_variables_and_prefixed_output() {
    let run = launch(
        "3",
        "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR; printf end; echo no >&2",
    );
    assert_eq!(run.code, Some(0), "{run:?}");
    let expected: Vec<_> = (0..3)
        .flat_map(|rank| [format!("[{rank}] {rank}/3 {rank}/3 127.0.0.1"), format!("[{rank}] end")])
        .collect();
    assert_eq!(sorted(&run.stdout), expected);
    assert_eq!(sorted(&run.stderr), ["[0] no", "[1] no", "[2] no"]);
}

#[test]
fn the_first_failure_terminates_all_ranks_and_sets_the_exit_code() {
    let run = launch("4", "if [ $RANK = 2 ]; then exit 7; fi; sleep 1000");
    assert_eq!(run.code, Some(7));
    assert_eq!(run.stderr, "error: rank 2 failed: exit status: 7; the other ranks were terminated\n");
    let run = launch("1", "kill -9 $$");
    assert_eq!(run.code, Some(137), "128 plus the signal, as in a shell");
    let run = crate::run::run(&["launch", "-n", "1", "--", "/nowhere/at/all"]);
    assert_eq!(run.code, Some(1));
    assert!(run.stderr.contains("[0] error: cannot run `/nowhere/at/all`"), "{run:?}");
}

#[test]
fn log_dir_receives_the_output_of_each_rank() {
    let folder = std::env::temp_dir().join(format!("wholemem-launch-{}", std::process::id()));
    let args = [
        "launch",
        "-n",
        "2",
        "--log-dir",
        folder.to_str().unwrap(),
        "--",
        "sh",
        "-c",
        "echo out $RANK; echo err >&2",
    ];
    assert_eq!(run(&args).code, Some(0));
    assert_eq!(fs::read_to_string(folder.join("rank-1.out")).unwrap(), "out 1\n");
    assert_eq!(fs::read_to_string(folder.join("rank-0.err")).unwrap(), "err\n");
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn the_secret_is_not_on_any_command_line() {
    // The script searches with shell builtins only: a `grep` for the secret would have the secret on its own command line.
    let script = "all=$(cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ')\n\
                  case \"$all\" in *wm1-*) echo visible;; *) echo hidden;; esac\n\
                  case \"$WHOLEMEM_ID\" in wm1-*) echo known;; esac";
    // The pattern `[w]m1-` does not match itself, because the script is on the command line of its shell.
    let run = launch("2", &script.replace("wm1-", "[w]m1-"));
    assert_eq!(sorted(&run.stdout), ["[0] hidden", "[0] known", "[1] hidden", "[1] known"], "{run:?}");
}

/// Launches three ranks that print their process ids and wait. Returns the launcher, its output, its pidfd and the pidfds of
/// the ranks.
fn launch_waiting(
    script: &str,
) -> (std::process::Child, BufReader<std::process::ChildStdout>, PidFd, Vec<PidFd>) {
    let mut launcher = program(&["launch", "-n", "3", "--", "sh", "-c", script]).spawn().unwrap();
    let mut output = BufReader::new(launcher.stdout.take().unwrap());
    let mut ranks = Vec::new();
    while ranks.len() < 3 {
        let mut line = String::new();
        assert_ne!(output.read_line(&mut line).unwrap(), 0, "the ranks ended");
        ranks.push(PidFd::open(line.trim().rsplit(' ').next().unwrap().parse().unwrap()).unwrap());
    }
    let watch = PidFd::open(launcher.id()).unwrap();
    (launcher, output, watch, ranks)
}

#[test]
fn ranks_end_when_a_signal_ends_the_launcher() {
    for signal in [Signal::KILL, Signal::TERM, Signal::INT] {
        let (mut launcher, _output, watch, ranks) = launch_waiting("echo $$; exec sleep 1000");
        watch.signal(signal).unwrap();
        assert!(watch.wait_exit(timeout()).unwrap(), "the launcher outlives {signal:?}");
        for rank in &ranks {
            assert!(rank.wait_exit(timeout()).unwrap(), "a rank outlives {signal:?}");
        }
        let code = launcher.wait().unwrap().code();
        assert_eq!(code, (signal != Signal::KILL).then_some(128 + signal.as_raw()), "{signal:?}");
    }
}

#[test]
fn stopped_ranks_are_terminated_too() {
    // A child of each rank stops the rank, waits until the rank is stopped, and only then prints its process id.
    let until_stopped = "until grep -q 'State:.T' /proc/$$/status; do sleep 0.01; done";
    let script = format!("(kill -STOP $$; {until_stopped}; echo $$) & wait; exec sleep 1000");
    let (mut launcher, _output, watch, _ranks) = launch_waiting(&script);
    watch.signal(Signal::TERM).unwrap();
    assert!(watch.wait_exit(timeout()).unwrap(), "the launcher waits for stopped ranks");
    assert_eq!(launcher.wait().unwrap().code(), Some(128 + Signal::TERM.as_raw()));
}

#[test]
fn signals_are_forwarded_to_ranks() {
    let script = "trap 'echo got it; exit 0' USR1; echo $$; while true; do sleep 0.05; done";
    let (mut launcher, output, watch, _ranks) = launch_waiting(script);
    watch.signal(Signal::USR1).unwrap();
    let lines: Vec<_> = output.lines().map(|line| line.unwrap()).collect();
    assert!(launcher.wait().unwrap().success());
    let mut lines: Vec<_> = lines.iter().map(String::as_str).collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[0] got it", "[1] got it", "[2] got it"]);
}

#[test]
fn processes_that_a_rank_leaves_behind_are_killed() {
    // The rank leaves a process in its process group, or in a new session whose leader has exited.
    let daemon = "setsid sh -c 'sleep 1000 >/dev/null 2>&1 & echo $!'";
    for script in ["sleep 1000 & echo $!", daemon] {
        let run = launch("1", script);
        assert_eq!(run.code, Some(0));
        let left: u32 = run.stdout.trim().rsplit(' ').next().unwrap().parse().unwrap();
        // The killed process may take a moment to exit, or may be reaped already.
        if let Ok(left) = PidFd::open(left) {
            assert!(left.wait_exit(timeout()).unwrap(), "the process still runs: {script}");
        }
    }
}

#[test]
fn rank_0_inherits_stdin() {
    let mut command = program(&["launch", "-n", "2", "--", "sh", "-c", "cat"]);
    let mut launcher = command.stdin(Stdio::piped()).spawn().unwrap();
    launcher.stdin.take().unwrap().write_all(b"a line\n").unwrap();
    let output = launcher.wait_with_output().unwrap();
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"[0] a line\n"[..]));
}

#[test]
fn endless_output_of_a_rank_does_not_delay_the_failure_of_another() {
    let script = "if [ $RANK = 0 ]; then exec yes; fi; sleep 0.2; exit 7";
    let mut command = program(&["launch", "-n", "2", "--", "sh", "-c", script]);
    command.stdout(Stdio::null());
    assert_eq!(finish(command).code, Some(7));
}

#[test]
fn the_launcher_raises_the_soft_limit_on_open_files() {
    let script = format!("ulimit -Sn 64; exec {} launch -n 40 -- true", env!("CARGO_BIN_EXE_wholemem"));
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &script]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let run = finish(command);
    assert_eq!((run.code, &run.stderr[..]), (Some(0), ""));
}

#[test]
fn exited_orphans_are_reaped_while_ranks_run() {
    // The process that each rank starts is orphaned before it exits. Its /proc entry disappears when the launcher reaps it.
    let script = "orphan=$(sh -c 'sleep 0.1 >&- 2>&- & echo $!'); \
                  while [ -e /proc/$orphan ]; do sleep 0.05; done; echo gone";
    let run = launch("2", script);
    assert_eq!(sorted(&run.stdout), ["[0] gone", "[1] gone"], "{run:?}");
}

#[test]
fn arguments_of_the_command_may_be_invalid_utf8() {
    let mut command = program(&["launch", "-n", "1", "--", "printf", "%s"]);
    command.arg(OsStr::from_bytes(b"a\xffb"));
    let output = command.output().unwrap();
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"[0] a\xffb\n"[..]));
}

#[test]
fn a_blocked_reader_of_stdout_delays_neither_failures_nor_signals() {
    // Rank 0 writes more than the pipe and the launcher's queue hold, while the test does not read. Rank 1 then fails, and
    // leaves a process in another session, which must be killed as well.
    let script = "if [ $RANK = 1 ]; then setsid sleep 1000 & read line < $FIFO; exit 7; fi; \
                  yes | head -c 4000000; sleep 1000";
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let mut command = program(&["launch", "-n", "2", "--", "sh", "-c", script]);
    let mut launcher = command.env("FIFO", &fifo).spawn().unwrap();
    // When the launcher's stdout pipe is full, the test lets rank 1 continue.
    let stdout = launcher.stdout.take().unwrap();
    let pipe = rustix::pipe::fcntl_getpipe_size(&stdout).unwrap() as u64;
    let deadline = timeout();
    while rustix::io::ioctl_fionread(&stdout).unwrap() + 4096 <= pipe {
        assert!(!deadline.has_passed(), "the pipe is not filled");
        std::thread::yield_now();
    }
    fs::write(&fifo, "go\n").unwrap();
    let mut stderr = String::new();
    let watch = PidFd::open(launcher.id()).unwrap();
    // When the launcher has killed its children, it waits for the reader of stdout. The signal ends that wait.
    let children = format!("/proc/{0}/task/{0}/children", launcher.id());
    while !fs::read_to_string(&children).unwrap().trim().is_empty() {
        assert!(!deadline.has_passed(), "the ranks still run");
        std::thread::yield_now();
    }
    watch.signal(Signal::TERM).unwrap();
    assert!(watch.wait_exit(timeout()).unwrap(), "the launcher waits for its reader");
    assert_eq!(launcher.wait().unwrap().code(), Some(7));
    std::io::Read::read_to_string(&mut launcher.stderr.take().unwrap(), &mut stderr).unwrap();
    assert!(
        stderr.ends_with("error: rank 1 failed: exit status: 7; the other ranks were terminated\n"),
        "{stderr}"
    );
    drop(stdout);
}
