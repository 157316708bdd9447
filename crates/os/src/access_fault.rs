//! A signal handler for `SIGSEGV` and `SIGBUS` that reports the name of the memory in which a fault occurred, and
//! then calls the previous handler.
//!
//! A process that writes to read-only memory is killed, and neither the kernel nor a debugger reports what the memory
//! was. With the handler [installed](install), a fault in [named](NamedRange) memory is first reported on standard
//! error:
//!
//! ```text
//! wholemem: write to byte 40 of `weights`, which is read-only (address 0x7f52c8a00028)
//! ```
//!
//! Guarantees: the handler neither allocates nor locks, and does not change what happens to the process: the previous
//! handler or the kernel's default action follows. If another handler is installed later and does not pass on the
//! fault address, faults are not reported; Python's `faulthandler` is such a handler.

use std::fmt::{self, Write};
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::Result;
use crate::call::call_libc;

/// The maximum number of bytes that are stored of the name of a memory range.
const NAME_LEN: usize = 200;

/// The number of slots for named memory ranges in one segment of their table.
const SLOTS: usize = 64;

const SIGNALS: [libc::c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];

static IS_INSTALLED: AtomicBool = AtomicBool::new(false);

/// The action of each signal before this module installed its handler.
static PREVIOUS: [OnceLock<libc::sigaction>; 2] = [OnceLock::new(), OnceLock::new()];

static TABLE: TableSegment = TableSegment::new();

/// A segment of the table of named memory ranges. Segments are appended to the table and never freed.
struct TableSegment {
    slots: [RangeSlot; SLOTS],
    next: AtomicPtr<TableSegment>,
}

/// A slot for one named memory range. Its owner changes it while a signal handler may read it, so it is a seqlock.
struct RangeSlot {
    is_used: AtomicBool,
    /// True if this process has removed its access to the memory range.
    is_revoked: AtomicBool,
    /// The sequence number of the seqlock: odd while the owner changes the slot.
    version: AtomicU32,
    start: AtomicUsize,
    /// The length of the memory range in bytes; zero if the slot is empty.
    len: AtomicUsize,
    name: [AtomicU64; NAME_LEN / 8],
}

impl TableSegment {
    const fn new() -> Self {
        Self { slots: [const { RangeSlot::new() }; SLOTS], next: AtomicPtr::new(ptr::null_mut()) }
    }

    fn next(&self) -> Option<&'static Self> {
        // SAFETY: `next` is null, or points to a segment that `append` leaked, which is never freed.
        unsafe { self.next.load(Ordering::Acquire).as_ref() }
    }

    /// Returns the next segment of the table, and appends one if this segment is the last.
    fn append(&self) -> &'static Self {
        if let Some(next) = self.next() {
            return next;
        }
        let new = Box::into_raw(Box::new(Self::new()));
        let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
        match self.next.compare_exchange(ptr::null_mut(), new, success, failure) {
            // SAFETY: `new` is the segment created above, which is leaked now and never freed.
            Ok(_) => unsafe { &*new },
            Err(other) => {
                // SAFETY: `new` is from `Box::into_raw` above, and no other code has it, since another thread's
                // segment was appended instead.
                drop(unsafe { Box::from_raw(new) });
                // SAFETY: `other` is not null, so it is a segment that another thread leaked, which is never freed.
                unsafe { &*other }
            }
        }
    }
}

impl RangeSlot {
    const fn new() -> Self {
        Self {
            is_used: AtomicBool::new(false),
            is_revoked: AtomicBool::new(false),
            version: AtomicU32::new(0),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            name: [const { AtomicU64::new(0) }; NAME_LEN / 8],
        }
    }

    fn try_claim(&self) -> bool {
        self.is_used.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Stores a memory range and its name in the slot, which the caller owns.
    fn set(&self, start: usize, len: usize, name: &[u8]) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        for (word, at) in self.name.iter().zip((0..).step_by(8)) {
            let bytes = std::array::from_fn(|n| name.get(at + n).copied().unwrap_or(0));
            word.store(u64::from_ne_bytes(bytes), Ordering::Relaxed);
        }
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }

    /// Returns the location of an address in the named memory range, or `None` if the address is outside of the range
    /// or the slot is being changed.
    fn find(&self, address: usize) -> Option<NamedLocation> {
        let version = self.version.load(Ordering::Acquire);
        let (start, len) = (self.start.load(Ordering::Relaxed), self.len.load(Ordering::Relaxed));
        let offset = address.checked_sub(start).filter(|offset| *offset < len)?;
        let mut name = [0; NAME_LEN];
        for (word, bytes) in self.name.iter().zip(name.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        fence(Ordering::Acquire);
        let is_same = version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version;
        let is_revoked = self.is_revoked.load(Ordering::Relaxed);
        is_same.then_some(NamedLocation { offset, name, is_revoked })
    }
}

/// The location of an address in a named memory range.
struct NamedLocation {
    offset: usize,
    name: [u8; NAME_LEN],
    is_revoked: bool,
}

impl NamedLocation {
    fn name(&self) -> &str {
        let end = self.name.iter().position(|byte| *byte == 0).unwrap_or(NAME_LEN);
        let name = &self.name[..end];
        // A name that was truncated may end within a UTF-8 character, so only its valid beginning is returned.
        std::str::from_utf8(name)
            .unwrap_or_else(|error| std::str::from_utf8(&name[..error.valid_up_to()]).unwrap_or_default())
    }
}

fn find(address: usize) -> Option<NamedLocation> {
    let mut segment = Some(&TABLE);
    while let Some(current) = segment {
        if let Some(location) = current.slots.iter().find_map(|slot| slot.find(address)) {
            return Some(location);
        }
        segment = current.next();
    }
    None
}

/// A memory range with a name for the fault reports of this module. Dropping the value removes the name.
pub struct NamedRange(&'static RangeSlot);

impl NamedRange {
    /// Registers a name for `len` bytes of read-only memory, truncated to 200 bytes. Returns `None` if the fault
    /// handler is not installed or `len` is zero.
    #[must_use]
    pub fn register(start: NonNull<u8>, len: usize, name: &str) -> Option<Self> {
        if !is_installed() || len == 0 {
            return None;
        }
        let mut segment = &TABLE;
        let slot = loop {
            match segment.slots.iter().find(|slot| slot.try_claim()) {
                Some(slot) => break slot,
                None => segment = segment.append(),
            }
        };
        slot.is_revoked.store(false, Ordering::Relaxed);
        slot.set(start.addr().get(), len, name.as_bytes());
        Some(Self(slot))
    }
}

impl Drop for NamedRange {
    fn drop(&mut self) {
        self.0.set(0, 0, &[]);
        self.0.is_used.store(false, Ordering::Release);
    }
}

impl fmt::Debug for NamedRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NamedRange")
            .field("start", &self.0.start)
            .field("len", &self.0.len)
            .finish_non_exhaustive()
    }
}

/// Records that this process has removed its access to a memory range, so that faults in named memory that begins in
/// the range are reported with that reason.
pub(crate) fn mark_revoked(start: NonNull<u8>, len: usize) {
    let begin = start.addr().get();
    let mut segment = Some(&TABLE);
    while let Some(current) = segment {
        for slot in &current.slots {
            let at = slot.start.load(Ordering::Relaxed);
            if at >= begin && at - begin < len {
                slot.is_revoked.store(true, Ordering::Relaxed);
            }
        }
        segment = current.next();
    }
}

/// Returns whether the handler of memory faults is installed.
#[must_use]
#[inline]
pub fn is_installed() -> bool {
    IS_INSTALLED.load(Ordering::Relaxed)
}

/// Installs the handler of memory faults once per process; later calls have no effect. Only memory that is named
/// after the installation is reported.
///
/// # Errors
/// The error of `sigaction`.
#[doc(alias = "sigaction")]
pub fn install() -> Result<()> {
    static INSTALLING: Mutex<()> = Mutex::new(());
    let _installing = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    if is_installed() {
        return Ok(());
    }
    for (signal, previous) in SIGNALS.into_iter().zip(&PREVIOUS) {
        let mut current = MaybeUninit::uninit();
        call_libc("sigaction", || {
            // SAFETY: with a null new action, `sigaction` only writes the current action to `current`, which is
            // writable.
            unsafe { libc::sigaction(signal, ptr::null(), current.as_mut_ptr()) }.into()
        })?;
        // SAFETY: the successful `sigaction` above has initialised `current`.
        let mut action = unsafe { current.assume_init() };
        // The previous action is stored before the new handler can run, since the handler reads it.
        let _ = previous.set(action);
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_fault;
        action.sa_sigaction = handler as usize;
        // With SA_ONSTACK the handler runs on the alternate signal stack, if the thread has one: the thread's own
        // stack may have overflowed.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        call_libc("sigaction", || {
            // SAFETY: `action` is initialised, and its handler is async-signal-safe: it loads atomics, writes to
            // standard error, and calls `sigaction` and the previous handler.
            unsafe { libc::sigaction(signal, &raw const action, ptr::null_mut()) }.into()
        })?;
    }
    IS_INSTALLED.store(true, Ordering::Release);
    Ok(())
}

/// A buffer on the stack for one line of text, since a signal handler must not allocate.
struct StackLine {
    bytes: [u8; 400],
    len: usize,
}

impl Write for StackLine {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = self.len + text.len();
        self.bytes.get_mut(self.len..end).ok_or(fmt::Error)?.copy_from_slice(text.as_bytes());
        self.len = end;
        Ok(())
    }
}

extern "C" fn on_fault(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: `info` is valid until the handler returns: the kernel passes a `siginfo_t` to a handler with
    // `SA_SIGINFO`.
    let siginfo = unsafe { &*info };
    let code = siginfo.si_code;
    // Only a signal of a memory fault has an address; a signal that a process sent has none.
    if code > 0 {
        // SAFETY: the positive code means that the kernel raised the signal for a fault, and stored the address in
        // `siginfo`.
        let address = unsafe { siginfo.si_addr() }.addr();
        if let Some(location) = find(address) {
            report(signal, address, &location);
        }
    }
    chain(signal, code, info, context);
}

fn report(signal: libc::c_int, address: usize, location: &NamedLocation) {
    let mut line = StackLine { bytes: [0; 400], len: 0 };
    let (offset, name) = (location.offset, location.name());
    let _ = if location.is_revoked {
        writeln!(
            line,
            "wholemem: access to byte {offset} of `{name}`, which this process has inherited and does not hold \
             (address {address:#x})"
        )
    } else if signal == libc::SIGSEGV {
        writeln!(
            line,
            "wholemem: write to byte {offset} of `{name}`, which is read-only (address {address:#x})"
        )
    } else {
        writeln!(
            line,
            "wholemem: the kernel has no page for byte {offset} of `{name}` (address {address:#x})"
        )
    };
    // The line is written with one system call, without the lock of `std::io::stderr`.
    // SAFETY: descriptor 2 is only borrowed; if it is closed, the write fails.
    let stderr = unsafe { std::os::fd::BorrowedFd::borrow_raw(2) };
    let _ = rustix::io::write(stderr, &line.bytes[..line.len]);
}

/// Runs the action that the signal had before this module installed its handler.
fn chain(signal: libc::c_int, code: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let at = SIGNALS.iter().position(|known| *known == signal);
    let previous = at.and_then(|at| PREVIOUS[at].get());
    let handler = previous.map_or(libc::SIG_DFL, |previous| previous.sa_sigaction);
    let is_default = handler == libc::SIG_DFL || (handler == libc::SIG_IGN && code > 0);
    if is_default {
        // SAFETY: all zeros is a valid `sigaction`: the default action, no flags, no signals blocked.
        let default = unsafe { MaybeUninit::<libc::sigaction>::zeroed().assume_init() };
        // SAFETY: `default` is initialised, and the old action is not requested.
        unsafe { libc::sigaction(signal, &raw const default, ptr::null_mut()) };
        if code <= 0 {
            // A signal that a process sent is not repeated when the handler returns, so it is raised again. It stays
            // blocked until the handler returns.
            // SAFETY: `raise` is async-signal-safe.
            unsafe { libc::raise(signal) };
        }
        // When the handler returns, a faulting instruction is executed again, or the raised signal is delivered. Either way the
        // default action ends the process.
        return;
    }
    if handler == libc::SIG_IGN {
        return;
    }
    if previous.is_some_and(|previous| previous.sa_flags & libc::SA_SIGINFO != 0) {
        // SAFETY: the previous handler was installed with `SA_SIGINFO`, so it has these three parameters.
        let handler = unsafe {
            std::mem::transmute::<usize, extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void)>(
                handler,
            )
        };
        handler(signal, info, context);
    } else {
        // SAFETY: the previous handler was installed without `SA_SIGINFO`, so its only parameter is the signal
        // number.
        let handler = unsafe { std::mem::transmute::<usize, extern "C" fn(libc::c_int)>(handler) };
        handler(signal);
    }
}

#[cfg(test)]
mod tests {
    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;
    use crate::fork::child::{self, ExitStatus};
    use crate::vm::Protection;
    use crate::{Memfd, SharedMap};

    /// The `si_code` of a `SIGSEGV` for an access that the rights of the mapping do not allow.
    const SEGV_ACCERR: libc::c_int = 2;

    /// Runs a function in a forked child, and returns what the child wrote to standard error and how it ended.
    fn run_in_child(run: impl FnOnce() -> u8) -> (String, ExitStatus) {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let child = child::fork(|| {
            let Ok(()) = rustix::stdio::dup2_stderr(&writer) else { return 90 };
            run()
        });
        drop(writer);
        let status = child.wait();
        (std::io::read_to_string(std::fs::File::from(reader)).unwrap(), status)
    }

    fn read_only(len: usize) -> SharedMap {
        SharedMap::create(&Memfd::create("test", len).unwrap(), Protection::Read).unwrap()
    }

    fn write_to(map: &SharedMap, offset: usize) {
        // SAFETY: the tests pass an offset within the mapping.
        let at = unsafe { map.address().add(offset) };
        // SAFETY: the write to read-only memory is invalid on purpose: the kernel kills the child process of the
        // test.
        unsafe { at.write_volatile(1) };
    }

    #[test]
    fn a_write_to_named_memory_is_reported_and_kills_the_process() {
        let maps = [read_only(8192), read_only(8192)];
        let address = maps[1].address().addr().get() + 4100;
        let outcome = run_in_child(|| {
            if install().is_err() {
                return 91;
            }
            // Registers more names than one segment of the table holds.
            let name = |n: usize| NamedRange::register(maps[0].address(), 8192, &format!("number {n}"));
            let named: Vec<_> = (0..3 * SLOTS).map_while(name).collect();
            let Some(_last) = NamedRange::register(maps[1].address(), 8192, "the other") else {
                return 92;
            };
            if named.len() == 3 * SLOTS {
                write_to(&maps[1], 4100);
            }
            93
        });
        let expected = format!(
            "wholemem: write to byte 4100 of `the other`, which is read-only (address {address:#x})\n"
        );
        assert_eq!(outcome, (expected, ExitStatus::Killed(libc::SIGSEGV)));
    }

    #[test]
    fn a_write_to_memory_without_a_name_is_not_reported() {
        let map = read_only(8192);
        let outcome = run_in_child(|| {
            if install().is_err() {
                return 91;
            }
            drop(NamedRange::register(map.address(), 8192, "gone"));
            write_to(&map, 0);
            93
        });
        assert_eq!(outcome, (String::new(), ExitStatus::Killed(libc::SIGSEGV)));
    }

    #[test]
    fn a_sent_signal_is_not_reported_and_kills_the_process() {
        let outcome = run_in_child(|| {
            // The signal handler of the Rust runtime ignores the first `SIGBUS` that a process sends, so the test
            // removes it.
            // SAFETY: the call restores the kernel's default action.
            unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
            if install().is_err() {
                return 91;
            }
            // SAFETY: `raise` is called in a child process, which it is meant to kill.
            unsafe { libc::raise(libc::SIGBUS) };
            93
        });
        assert_eq!(outcome, (String::new(), ExitStatus::Killed(libc::SIGBUS)));
    }

    #[test]
    fn the_previous_handler_runs_after_the_report() {
        extern "C" fn previous(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
            // SAFETY: the kernel passes a valid `siginfo_t` to a handler that was installed with `SA_SIGINFO`.
            let code = unsafe { (*info).si_code };
            // SAFETY: `_exit` is async-signal-safe.
            unsafe { libc::_exit(signal + code) }
        }
        let map = read_only(4096);
        let outcome = run_in_child(|| {
            // SAFETY: all zeros is a valid `sigaction` structure.
            let mut action = unsafe { MaybeUninit::<libc::sigaction>::zeroed().assume_init() };
            let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = previous;
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO;
            // SAFETY: `action` is initialised, and its handler only exits the process.
            let code = unsafe { libc::sigaction(libc::SIGSEGV, &raw const action, ptr::null_mut()) };
            if code != 0 || install().is_err() {
                return 91;
            }
            let _named = NamedRange::register(map.address(), 4096, "first");
            write_to(&map, 7);
            93
        });
        let address = map.address().addr().get() + 7;
        let expected =
            format!("wholemem: write to byte 7 of `first`, which is read-only (address {address:#x})\n");
        assert_eq!(outcome, (expected, ExitStatus::Exited(libc::SIGSEGV + SEGV_ACCERR)));
    }
}
