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

/// An unknown `prctl` option. A traced process calls `prctl` with it to mark the beginning and the end of the traced
/// operation.
const MARK: c_int = 0x574d_4d4b;

/// The value by which `PTRACE_GET_SYSCALL_INFO` says that a thread is stopped before a system call is made.
const ENTRY: u8 = 1;

/// Marks the beginning, and at the second call the end, of the operation that a tracer counts system calls in.
pub fn mark() {
    // SAFETY: `MARK` is an option that the kernel does not know, so the kernel refuses the call without an effect.
    unsafe { libc::prctl(MARK, 0_usize, 0_usize, 0_usize, 0_usize) };
}

/// Allows any process of the same user to trace this process, if the kernel's Yama module restricts tracing.
pub fn allow() {
    // SAFETY: `PR_SET_PTRACER` takes no pointer. A kernel without the Yama module refuses the call without an effect.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0_usize, 0_usize, 0_usize) };
}

/// A traced process. If the tracer exits first, the kernel kills the traced process.
#[derive(Debug)]
pub struct Stepper {
    pid: pid_t,
}

/// The action of a tracer at the chosen system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TraceAction {
    /// Kills the traced process.
    Kill,
    /// Stops all threads of the traced process until the tracer ends the process.
    Freeze,
}

/// The result of tracing the system calls of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceResult {
    /// The number of system calls of the operation that were counted.
    pub calls: u64,
    /// The number (as in `SYS_read`) of the system call at which the process was killed or stopped; `None` if this
    /// happened at the end mark or not at all.
    pub killed_at: Option<i64>,
}

impl Stepper {
    /// Starts to trace a process, which waits for the tracer, and resumes it.
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

    /// Traces the process until the action applies: at the `nth` system call (counted from 1) between its two marks, or
    /// at the second mark. Without an `nth`, counts the system calls and lets the process run to its exit.
    #[must_use]
    pub fn trace(&self, nth: Option<u64>, action: TraceAction) -> TraceResult {
        self.trace_after(0, nth, action)
    }

    /// Traces a process that makes no marks: kills it at its `nth` system call from now on, or traces it to its exit if
    /// it makes fewer.
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
                        // SAFETY: `kill` takes no pointer, and `self.pid` cannot have been reused, because the process
                        // has not been reaped.
                        unsafe { libc::kill(self.pid, libc::SIGKILL) };
                        continue;
                    }
                }
            } else if event == 0 {
                deliver = signal;
            }
            // An error is ignored: a thread that was killed meanwhile no longer exists.
            let _ = request(libc::PTRACE_SYSCALL, task, usize::try_from(deliver).unwrap_or(0));
        }
    }
}

impl Stepper {
    /// Kills the traced process and waits until it is dead. A dead thread exists until its tracer has waited for it.
    pub fn end(self) {
        // SAFETY: `kill` takes no pointer, and `self.pid` cannot have been reused, because the process has not been
        // reaped.
        unsafe { libc::kill(self.pid, libc::SIGKILL) };
        while let (Some(task), status) = wait(-1) {
            if task == self.pid && !libc::WIFSTOPPED(status) {
                return;
            }
        }
    }

    /// Interrupts all threads of the traced process except `stopped`, and resumes none.
    fn freeze(&self, stopped: pid_t) {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid)).into_iter().flatten();
        let tasks = tasks.filter_map(|task| task.ok()?.file_name().to_str()?.parse::<pid_t>().ok());
        for task in tasks.filter(|task| *task != stopped) {
            let _ = request(libc::PTRACE_INTERRUPT, task, 0);
        }
    }
}

/// Returns the number and the first argument of the system call that a stopped thread is about to make.
fn entered(task: pid_t) -> Option<(i64, u64)> {
    // The kernel writes the kind of the stop, the instruction and stack pointers, and then the system call's number and
    // arguments.
    let mut info = [0u64; 16];
    let len = size_of_val(&info);
    // SAFETY: the kernel writes at most `len` bytes to `info`, and every bit pattern is a valid integer.
    let written = unsafe { libc::ptrace(libc::PTRACE_GET_SYSCALL_INFO, task, len, ptr::from_mut(&mut info)) };
    let kind = info[0].to_ne_bytes()[0];
    (written > 0 && kind == ENTRY).then(|| (info[3].cast_signed(), info[4]))
}

fn request(kind: libc::c_uint, task: pid_t, data: usize) -> Result<(), Error> {
    // SAFETY: none of the ptrace requests used here takes an address; `data` is a number.
    let result = unsafe { libc::ptrace(kind, task, ptr::null_mut::<u8>(), data) };
    if result == -1 { Err(Error::last_os_error()) } else { Ok(()) }
}

/// Waits for an event of a traced thread. Returns `None` if no thread is left.
fn wait(task: pid_t) -> (Option<pid_t>, c_int) {
    let mut status = 0;
    loop {
        // SAFETY: `status` is a writable integer for the result of `waitpid`.
        let found = unsafe { libc::waitpid(task, &raw mut status, libc::__WALL) };
        match found {
            -1 if Error::last_os_error().kind() == ErrorKind::Interrupted => {}
            -1 => return (None, 0),
            found => return (Some(found), status),
        }
    }
}
