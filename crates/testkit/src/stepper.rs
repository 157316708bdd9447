//! A tracer (ptrace) that counts the system calls of a process, and kills or stops it at the nth call of an operation.
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
//! It traces every thread of the victim, including new ones. The number of calls of an operation and their order
//! between threads differ from run to run, so a sweep over n covers the calls statistically, not each one exactly.

#![allow(unsafe_code, reason = "`ptrace` is unsafe")]

use std::ffi::c_int;
use std::io::{Error, ErrorKind};
use std::ptr;

use libc::pid_t;

/// An unknown `prctl` option that marks the beginning and the end of the operation.
const MARK: c_int = 0x574d_4d4b;

/// The stop kind of `PTRACE_GET_SYSCALL_INFO` before a call is made.
const ENTRY: u8 = 1;

/// Marks the beginning, and later the end, of the traced operation.
pub fn mark() {
    // SAFETY: the kernel refuses an unknown option without an effect.
    unsafe { libc::prctl(MARK, 0_usize, 0_usize, 0_usize, 0_usize) };
}

/// Allows any process of this user to trace this process, if the kernel's Yama module restricts tracing.
pub fn allow() {
    // SAFETY: takes no pointer; a kernel without this restriction refuses the call.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0_usize, 0_usize, 0_usize) };
}

/// A traced process. It is killed if the tracer exits first.
#[derive(Debug)]
pub struct Stepper {
    pid: pid_t,
}

/// The action at the chosen call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TraceAction {
    /// Kills the process.
    Kill,
    /// Stops all threads until the tracer ends the process.
    Freeze,
}

/// The result of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceResult {
    /// The number of calls of the operation that were traced.
    pub calls: u64,
    /// The system call number at which the process was killed; `None` if it was killed at the end mark or not at all.
    pub killed_at: Option<i64>,
}

impl Stepper {
    /// Attaches to a process that waits for the tracer, and resumes it.
    ///
    /// # Panics
    /// If the kernel refuses.
    #[must_use]
    pub fn attach(pid: u32) -> Self {
        let pid = pid_t::try_from(pid).expect("a process id");
        let options = libc::PTRACE_O_TRACECLONE | libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_EXITKILL;
        let tasks =
            std::fs::read_dir(format!("/proc/{pid}/task")).expect("cannot list the threads of the process");
        for task in tasks {
            let task = task.expect("a thread").file_name();
            let task: pid_t = task.to_str().and_then(|name| name.parse().ok()).expect("a number");
            request(libc::PTRACE_SEIZE, task, usize::try_from(options).expect("small"))
                .expect("cannot trace the process");
            request(libc::PTRACE_INTERRUPT, task, 0).expect("cannot interrupt a thread");
            let (stopped, _) = wait(task);
            assert_eq!(stopped, Some(task), "the thread must stop");
            request(libc::PTRACE_SYSCALL, task, 0).expect("cannot resume a thread");
        }
        Self { pid }
    }

    /// Traces the process until the action applies: at the `nth` call (counted from 1) between its two marks, or at the
    /// second mark. Without an `nth`, counts the calls and lets the process run to its exit.
    #[must_use]
    pub fn trace(&self, nth: Option<u64>, action: TraceAction) -> TraceResult {
        self.trace_after(0, nth, action)
    }

    /// Traces a process without marks: kills it at the `nth` call from now on, or traces it to its exit.
    #[must_use]
    pub fn trace_without_marks(&self, nth: u64) -> TraceResult {
        self.trace_after(1, Some(nth), TraceAction::Kill)
    }

    fn trace_after(&self, mut marks: u32, nth: Option<u64>, action: TraceAction) -> TraceResult {
        let mut trace = TraceResult { calls: 0, killed_at: None };
        loop {
            let (Some(task), status) = wait(-1) else { return trace };
            if !libc::WIFSTOPPED(status) {
                if task == self.pid {
                    return trace;
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
                        trace.calls += 1;
                    }
                    let reached = nth.is_some_and(|nth| marks == 1 && trace.calls == nth);
                    if reached || nth.is_some() && marks == 2 {
                        trace.killed_at = reached.then_some(call);
                        if action == TraceAction::Freeze {
                            self.freeze(task);
                            return trace;
                        }
                        // SAFETY: takes no pointer; the process id cannot have been reused, because the process has not
                        // been reaped.
                        unsafe { libc::kill(self.pid, libc::SIGKILL) };
                        continue;
                    }
                }
            } else if event == 0 {
                deliver = signal;
            }
            // A thread that was killed meanwhile no longer exists.
            let _ = request(libc::PTRACE_SYSCALL, task, usize::try_from(deliver).unwrap_or(0));
        }
    }
}

impl Stepper {
    /// Kills the process and waits until it is dead. A dead traced thread exists until its tracer has waited for it.
    pub fn end(self) {
        // SAFETY: takes no pointer; the process id cannot have been reused, because the process has not been reaped.
        unsafe { libc::kill(self.pid, libc::SIGKILL) };
        while let (Some(task), status) = wait(-1) {
            if task == self.pid && !libc::WIFSTOPPED(status) {
                return;
            }
        }
    }

    /// Interrupts all threads except the stopped one, and resumes none.
    fn freeze(&self, stopped: pid_t) {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid)).into_iter().flatten();
        let tasks = tasks.filter_map(|task| task.ok()?.file_name().to_str()?.parse::<pid_t>().ok());
        for task in tasks.filter(|task| *task != stopped) {
            let _ = request(libc::PTRACE_INTERRUPT, task, 0);
        }
    }
}

/// The number and the first argument of the call that a stopped thread is about to make.
fn entered(task: pid_t) -> Option<(i64, u64)> {
    // The kernel's layout: the kind of stop, then three words, then the number and the arguments.
    let mut info = [0u64; 16];
    let len = size_of_val(&info);
    // SAFETY: the kernel writes at most `len` bytes, and every bit pattern is a valid integer.
    let written = unsafe { libc::ptrace(libc::PTRACE_GET_SYSCALL_INFO, task, len, ptr::from_mut(&mut info)) };
    let kind = info[0].to_ne_bytes()[0];
    (written > 0 && kind == ENTRY).then(|| (info[3].cast_signed(), info[4]))
}

fn request(kind: libc::c_uint, task: pid_t, data: usize) -> Result<(), Error> {
    // SAFETY: none of these requests takes an address; `data` is a number.
    let result = unsafe { libc::ptrace(kind, task, ptr::null_mut::<u8>(), data) };
    if result == -1 { Err(Error::last_os_error()) } else { Ok(()) }
}

/// Waits for a thread of the process; `None` if there is none left.
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
