//! A process walked from system call to system call, and killed or frozen at the nth of a recorded operation.
//!
//! ```text
//!   victim                                stepper, in another process
//!   "ready" ------------------------->    attach
//!   <--------------------------------     "go"
//!   mark()                                counts from here, over all threads
//!   the operation                         kills at the nth call, before it is made
//!   mark()                                kills here if there were fewer
//! ```
//!
//! It sees every thread of the victim, also those made later. How many calls an operation makes, and in which order its
//! threads make them, differs from run to run: a sweep over n walks them all many times over, and none in particular.

#![allow(unsafe_code, reason = "`ptrace` is unsafe")]

use std::ffi::c_int;
use std::io::{Error, ErrorKind};
use std::ptr;

use libc::pid_t;

/// A request that no kernel knows: what marks the beginning and the end of the operation.
const MARK: c_int = 0x574d_4d4b;

/// The kinds of stop that `PTRACE_GET_SYSCALL_INFO` tells apart; this is the one before a call is made.
const ENTRY: u8 = 1;

/// Marks the beginning, and later the end, of the operation to be walked.
pub fn mark() {
    // SAFETY: an unknown request is refused, and does nothing.
    unsafe { libc::prctl(MARK, 0_usize, 0_usize, 0_usize, 0_usize) };
}

/// Lets any process of this user be the stepper of this one, where the kernel asks for that.
pub fn allow() {
    // SAFETY: takes no pointer; where the kernel knows no such restriction, it is refused.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0_usize, 0_usize, 0_usize) };
}

/// A process that is being walked. It is killed if the stepper ends before it.
#[derive(Debug)]
pub struct Stepper {
    pid: pid_t,
}

/// What is done to the process at the chosen call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It is killed.
    Kill,
    /// All its threads stand still until the stepper ends, when it is killed.
    Freeze,
}

/// How a walk ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Walk {
    /// How many calls of the operation were seen.
    pub calls: u64,
    /// The number of the call at which it was killed; `None` if that was at the end, or not at all.
    pub killed_at: Option<i64>,
}

impl Stepper {
    /// Takes hold of a process that waits for us, and lets it run on.
    ///
    /// # Panics
    /// When the kernel refuses.
    #[must_use]
    pub fn attach(pid: u32) -> Self {
        let pid = pid_t::try_from(pid).expect("a process id");
        let options = libc::PTRACE_O_TRACECLONE | libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_EXITKILL;
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("the process lives");
        for task in tasks {
            let task = task.expect("a thread").file_name();
            let task: pid_t = task.to_str().and_then(|name| name.parse().ok()).expect("a number");
            request(libc::PTRACE_SEIZE, task, usize::try_from(options).expect("small"))
                .expect("the process can be walked");
            request(libc::PTRACE_INTERRUPT, task, 0).expect("a thread can be interrupted");
            let (stopped, _) = wait(task);
            assert_eq!(stopped, Some(task), "a thread stops");
            request(libc::PTRACE_SYSCALL, task, 0).expect("a thread can go on");
        }
        Self { pid }
    }

    /// Walks the process until it meets its fate: at the `nth` call (counted from 1) between its two marks, or at the
    /// second mark. Without an `nth` it counts the calls and lets the process live to its end.
    #[must_use]
    pub fn walk(&self, nth: Option<u64>, fate: Fate) -> Walk {
        self.walk_after(0, nth, fate)
    }

    /// The same for a process that makes no marks: it is killed at the `nth` call from now on, or walked to its end.
    #[must_use]
    pub fn walk_on(&self, nth: u64) -> Walk {
        self.walk_after(1, Some(nth), Fate::Kill)
    }

    fn walk_after(&self, mut marks: u32, nth: Option<u64>, fate: Fate) -> Walk {
        let mut walk = Walk { calls: 0, killed_at: None };
        loop {
            let (Some(task), status) = wait(-1) else { return walk };
            if !libc::WIFSTOPPED(status) {
                if task == self.pid {
                    return walk;
                }
                continue;
            }
            let (signal, event) = (libc::WSTOPSIG(status), status >> 16);
            let mut deliver = 0;
            if signal == libc::SIGTRAP | 0x80 {
                if let Some((call, first)) = entered(task) {
                    let is_mark = call == libc::SYS_prctl && first == u64::from(MARK.cast_unsigned());
                    if is_mark {
                        marks += 1;
                    } else if marks == 1 {
                        walk.calls += 1;
                    }
                    let reached = nth.is_some_and(|nth| marks == 1 && walk.calls == nth);
                    if reached || nth.is_some() && marks == 2 {
                        walk.killed_at = reached.then_some(call);
                        if fate == Fate::Freeze {
                            self.freeze(task);
                            return walk;
                        }
                        // SAFETY: takes no pointer; the process is ours to kill, and cannot be another, as nobody has
                        // waited for it.
                        unsafe { libc::kill(self.pid, libc::SIGKILL) };
                        continue;
                    }
                }
            } else if event == 0 {
                deliver = signal;
            }
            // A thread that was killed meanwhile is gone.
            let _ = request(libc::PTRACE_SYSCALL, task, usize::try_from(deliver).unwrap_or(0));
        }
    }
}

impl Stepper {
    /// Kills the process, and waits until it is gone. A walked thread that died is there until its stepper has seen it.
    pub fn end(self) {
        // SAFETY: takes no pointer; the process is ours to kill, and cannot be another, as nobody has waited for it.
        unsafe { libc::kill(self.pid, libc::SIGKILL) };
        while let (Some(task), status) = wait(-1) {
            if task == self.pid && !libc::WIFSTOPPED(status) {
                return;
            }
        }
    }

    /// Interrupts all threads but the one that is stopped already, and lets none go on.
    fn freeze(&self, stopped: pid_t) {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid)).into_iter().flatten();
        let tasks = tasks.filter_map(|task| task.ok()?.file_name().to_str()?.parse::<pid_t>().ok());
        for task in tasks.filter(|task| *task != stopped) {
            let _ = request(libc::PTRACE_INTERRUPT, task, 0);
        }
    }
}

/// The number and first argument of the call that a stopped thread is about to make.
fn entered(task: pid_t) -> Option<(i64, u64)> {
    // As the kernel lays it out: the kind of stop, then three words, then the number and the arguments.
    let mut info = [0u64; 16];
    let len = size_of_val(&info);
    // SAFETY: the kernel writes at most `len` bytes, and any bits are numbers.
    let written = unsafe { libc::ptrace(libc::PTRACE_GET_SYSCALL_INFO, task, len, ptr::from_mut(&mut info)) };
    let kind = info[0].to_ne_bytes()[0];
    (written > 0 && kind == ENTRY).then(|| (info[3].cast_signed(), info[4]))
}

fn request(what: libc::c_uint, task: pid_t, data: usize) -> Result<(), Error> {
    // SAFETY: none of the requests made here takes an address; `data` is a number.
    let answer = unsafe { libc::ptrace(what, task, ptr::null_mut::<u8>(), data) };
    if answer == -1 { Err(Error::last_os_error()) } else { Ok(()) }
}

/// Waits for a thread of the process; `None` when there is none left.
fn wait(task: pid_t) -> (Option<pid_t>, c_int) {
    let mut status = 0;
    loop {
        // SAFETY: `status` is writable.
        let found = unsafe { libc::waitpid(task, &raw mut status, libc::__WALL) };
        match found {
            -1 if Error::last_os_error().kind() == ErrorKind::Interrupted => {}
            -1 => return (None, 0),
            found => return (Some(found), status),
        }
    }
}
