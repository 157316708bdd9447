//! `wholemem launch`.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::process::Stdio;

use wholemem_os::PidFd;
use wholemem_os::pidfd::Signal;

use crate::run::{finish, program, run, timeout};

/// A shell's command as ranks.
fn launch(ranks: &str, script: &str) -> crate::run::Run {
    run(&["launch", "-n", ranks, "--", "sh", "-c", script])
}

fn sorted(text: &str) -> Vec<&str> {
    let mut lines: Vec<_> = text.lines().collect();
    lines.sort_unstable();
    lines
}

#[test]
fn every_rank_has_torchruns_variables_and_its_lines_have_its_rank() {
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
fn the_first_failure_ends_the_rest_and_its_code_is_returned() {
    let run = launch("4", "if [ $RANK = 2 ]; then exit 7; fi; sleep 1000");
    assert_eq!(run.code, Some(7));
    assert_eq!(run.stderr, "error: rank 2 failed: exit status: 7; the others were ended\n");
    let run = launch("1", "kill -9 $$");
    assert_eq!(run.code, Some(137), "as a shell tells it");
    let run = crate::run::run(&["launch", "-n", "1", "--", "/nowhere/at/all"]);
    assert_eq!(run.code, Some(1));
    assert!(run.stderr.contains("[0] error: cannot run `/nowhere/at/all`"), "{run:?}");
}

#[test]
fn what_ranks_write_is_kept_in_files_where_asked() {
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
fn the_secret_is_on_no_command_line() {
    // In the shell itself: a program that is given it to look for would have it on its command line.
    let script = "all=$(cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ')\n\
                  case \"$all\" in *wm1-*) echo told;; *) echo not told;; esac\n\
                  case \"$WHOLEMEM_ID\" in wm1-*) echo known;; esac";
    // A pattern that does not match itself: the script is on the command line of its shell.
    let run = launch("2", &script.replace("wm1-", "[w]m1-"));
    assert_eq!(sorted(&run.stdout), ["[0] known", "[0] not told", "[1] known", "[1] not told"], "{run:?}");
}

/// Starts ranks that say their process ids and wait, and takes hold of the launcher and of them.
fn waiting(script: &str) -> (std::process::Child, BufReader<std::process::ChildStdout>, PidFd, Vec<PidFd>) {
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
fn whatever_ends_the_launcher_ends_the_ranks() {
    for signal in [Signal::KILL, Signal::TERM, Signal::INT] {
        let (mut launcher, _output, watch, ranks) = waiting("echo $$; exec sleep 1000");
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
fn ranks_that_are_stopped_end_too() {
    // Each is stopped before its number is told, by a child that sees it so.
    let until_stopped = "until grep -q 'State:.T' /proc/$$/status; do sleep 0.01; done";
    let script = format!("(kill -STOP $$; {until_stopped}; echo $$) & wait; exec sleep 1000");
    let (mut launcher, _output, watch, _ranks) = waiting(&script);
    watch.signal(Signal::TERM).unwrap();
    assert!(watch.wait_exit(timeout()).unwrap(), "the launcher waits for ranks that are stopped");
    assert_eq!(launcher.wait().unwrap().code(), Some(128 + Signal::TERM.as_raw()));
}

#[test]
fn signals_are_passed_on() {
    let script = "trap 'echo got it; exit 0' USR1; echo $$; while true; do sleep 0.05; done";
    let (mut launcher, output, watch, _ranks) = waiting(script);
    watch.signal(Signal::USR1).unwrap();
    let lines: Vec<_> = output.lines().map(|line| line.unwrap()).collect();
    assert!(launcher.wait().unwrap().success());
    let mut lines: Vec<_> = lines.iter().map(String::as_str).collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[0] got it", "[1] got it", "[2] got it"]);
}

#[test]
fn what_a_rank_leaves_running_is_ended_with_it() {
    // In its group, and in a session of its own whose first process has ended.
    let daemon = "setsid sh -c 'sleep 1000 >/dev/null 2>&1 & echo $!'";
    for script in ["sleep 1000 & echo $!", daemon] {
        let run = launch("1", script);
        assert_eq!(run.code, Some(0));
        let left: u32 = run.stdout.trim().rsplit(' ').next().unwrap().parse().unwrap();
        // It may take the kernel a moment, and its number may be nobody's already.
        if let Ok(left) = PidFd::open(left) {
            assert!(left.wait_exit(timeout()).unwrap(), "it still runs: {script}");
        }
    }
}

#[test]
fn rank_0_reads_what_the_launcher_is_given() {
    let mut command = program(&["launch", "-n", "2", "--", "sh", "-c", "cat"]);
    let mut launcher = command.stdin(Stdio::piped()).spawn().unwrap();
    launcher.stdin.take().unwrap().write_all(b"a line\n").unwrap();
    let output = launcher.wait_with_output().unwrap();
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"[0] a line\n"[..]));
}

#[test]
fn a_rank_that_never_stops_writing_does_not_hide_the_failure_of_another() {
    let script = "if [ $RANK = 0 ]; then exec yes; fi; sleep 0.2; exit 7";
    let mut command = program(&["launch", "-n", "2", "--", "sh", "-c", script]);
    command.stdout(Stdio::null());
    assert_eq!(finish(command).code, Some(7));
}

#[test]
fn more_ranks_are_started_than_files_may_be_open_at_first() {
    let script = format!("ulimit -Sn 64; exec {} launch -n 40 -- true", env!("CARGO_BIN_EXE_wholemem"));
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &script]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let run = finish(command);
    assert_eq!((run.code, &run.stderr[..]), (Some(0), ""));
}

#[test]
fn orphans_that_end_are_not_kept_until_the_run_does() {
    // It is orphaned before it ends, and there is nothing left of it when somebody has taken its end.
    let script = "orphan=$(sh -c 'sleep 0.1 >&- 2>&- & echo $!'); \
                  while [ -e /proc/$orphan ]; do sleep 0.05; done; echo gone";
    let run = launch("2", script);
    assert_eq!(sorted(&run.stdout), ["[0] gone", "[1] gone"], "{run:?}");
}

#[test]
fn a_command_need_not_be_text() {
    let mut command = program(&["launch", "-n", "1", "--", "printf", "%s"]);
    command.arg(OsStr::from_bytes(b"a\xffb"));
    let output = command.output().unwrap();
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"[0] a\xffb\n"[..]));
}

#[test]
fn a_reader_that_stands_still_keeps_no_failure_and_no_signal_waiting() {
    // Rank 0 writes more than a pipe and the launcher hold, and nobody reads it; rank 1 fails then. It leaves somebody
    // in a session of its own, who is ended as well.
    let script = "if [ $RANK = 1 ]; then setsid sleep 1000 & read line < $FIFO; exit 7; fi; \
                  yes | head -c 4000000; sleep 1000";
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let mut command = program(&["launch", "-n", "2", "--", "sh", "-c", script]);
    let mut launcher = command.env("FIFO", &fifo).spawn().unwrap();
    // The pipe is full when nothing more fits: then the ranks go on.
    let stdout = launcher.stdout.take().unwrap();
    let pipe = rustix::pipe::fcntl_getpipe_size(&stdout).unwrap() as u64;
    let deadline = timeout();
    while rustix::io::ioctl_fionread(&stdout).unwrap() + 4096 <= pipe {
        assert!(!deadline.has_passed(), "the pipe is not filled");
        std::thread::yield_now();
    }
    fs::write(&fifo, "go\n").unwrap();
    let mut said = String::new();
    let watch = PidFd::open(launcher.id()).unwrap();
    // It has ended the ranks, and waits for its reader only; a signal ends that too.
    let children = format!("/proc/{0}/task/{0}/children", launcher.id());
    while !fs::read_to_string(&children).unwrap().trim().is_empty() {
        assert!(!deadline.has_passed(), "the ranks are not ended");
        std::thread::yield_now();
    }
    watch.signal(Signal::TERM).unwrap();
    assert!(watch.wait_exit(timeout()).unwrap(), "it waits for its reader");
    assert_eq!(launcher.wait().unwrap().code(), Some(7));
    std::io::Read::read_to_string(&mut launcher.stderr.take().unwrap(), &mut said).unwrap();
    assert!(said.ends_with("error: rank 1 failed: exit status: 7; the others were ended\n"), "{said}");
    drop(stdout);
}
