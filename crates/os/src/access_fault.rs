//! A handler of `SIGSEGV` and `SIGBUS` that names the memory behind the fault, and then chains to the handler before it.
//!
//! A process that writes read-only memory is killed, and neither the kernel nor a debugger says what the memory was. With
//! the handler [installed](install), memory that was [named](NamedRange) is named on standard error first:
//!
//! ```text
//! wholemem: write to byte 40 of `weights`, which is read-only (address 0x7f52c8a00028)
//! ```
//!
//! What it keeps true: the handler allocates nothing and takes no lock. It changes nothing of what happens to the process:
//! the handler that was there before runs next, or the kernel's own action. What it will not do: name memory where another
//! handler was installed later and does not pass the fault's address on; Python's `faulthandler` is such a one.

use std::fmt::{self, Write};
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::Result;
use crate::call::call_libc;

/// How many bytes of a name are kept.
const NAME_LEN: usize = 200;

/// How many ranges a part of the table has.
const SLOTS: usize = 64;

const SIGNALS: [libc::c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];

static IS_INSTALLED: AtomicBool = AtomicBool::new(false);

/// What was there before, by signal.
static PREVIOUS: [OnceLock<libc::sigaction>; 2] = [OnceLock::new(), OnceLock::new()];

static TABLE: Part = Part::new();

/// A part of the table of named ranges. Parts are appended and never freed.
struct Part {
    slots: [Slot; SLOTS],
    next: AtomicPtr<Part>,
}

/// A named range, which its owner changes while a handler may read it: a sequence lock.
struct Slot {
    is_taken: AtomicBool,
    /// Whether all access to it was taken away.
    is_revoked: AtomicBool,
    /// Odd while it is being changed.
    version: AtomicU32,
    start: AtomicUsize,
    /// Zero for none.
    len: AtomicUsize,
    name: [AtomicU64; NAME_LEN / 8],
}

impl Part {
    const fn new() -> Self {
        Self { slots: [const { Slot::new() }; SLOTS], next: AtomicPtr::new(ptr::null_mut()) }
    }

    fn next(&self) -> Option<&'static Self> {
        // SAFETY: null, or a part that `append` leaked.
        unsafe { self.next.load(Ordering::Acquire).as_ref() }
    }

    /// The part behind this one, which is made if there is none.
    fn append(&self) -> &'static Self {
        if let Some(next) = self.next() {
            return next;
        }
        let fresh = Box::into_raw(Box::new(Self::new()));
        let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
        match self.next.compare_exchange(ptr::null_mut(), fresh, success, failure) {
            // SAFETY: leaked above, and never freed.
            Ok(_) => unsafe { &*fresh },
            Err(other) => {
                // SAFETY: leaked above, and another thread's part was appended in its place.
                drop(unsafe { Box::from_raw(fresh) });
                // SAFETY: not null, so it is a part that another thread leaked.
                unsafe { &*other }
            }
        }
    }
}

impl Slot {
    const fn new() -> Self {
        Self {
            is_taken: AtomicBool::new(false),
            is_revoked: AtomicBool::new(false),
            version: AtomicU32::new(0),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            name: [const { AtomicU64::new(0) }; NAME_LEN / 8],
        }
    }

    fn take(&self) -> bool {
        self.is_taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Called by the owner of the slot alone.
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

    /// Where an address lies in the range, and the name, unless it is being changed.
    fn find(&self, address: usize) -> Option<Found> {
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
        is_same.then_some(Found { offset, name, is_revoked })
    }
}

/// A place in a named range.
struct Found {
    offset: usize,
    name: [u8; NAME_LEN],
    is_revoked: bool,
}

impl Found {
    fn name(&self) -> &str {
        let end = self.name.iter().position(|byte| *byte == 0).unwrap_or(NAME_LEN);
        let name = &self.name[..end];
        // A long name may have been cut within a character.
        std::str::from_utf8(name)
            .unwrap_or_else(|error| std::str::from_utf8(&name[..error.valid_up_to()]).unwrap_or_default())
    }
}

fn find(address: usize) -> Option<Found> {
    let mut part = Some(&TABLE);
    while let Some(here) = part {
        if let Some(found) = here.slots.iter().find_map(|slot| slot.find(address)) {
            return Some(found);
        }
        part = here.next();
    }
    None
}

/// Memory with a name, until it is dropped.
pub struct NamedRange(&'static Slot);

impl NamedRange {
    /// Names `len` bytes at an address that can be read and not written; `None` where the handler is not installed. At most
    /// 200 bytes of the name are kept.
    #[must_use]
    pub fn register(start: NonNull<u8>, len: usize, name: &str) -> Option<Self> {
        if !is_installed() || len == 0 {
            return None;
        }
        let mut part = &TABLE;
        let slot = loop {
            match part.slots.iter().find(|slot| slot.take()) {
                Some(slot) => break slot,
                None => part = part.append(),
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
        self.0.is_taken.store(false, Ordering::Release);
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

/// All access to a range was taken away: faults in named memory that begins there are reported as such from now on.
pub(crate) fn mark_revoked(start: NonNull<u8>, len: usize) {
    let begin = start.addr().get();
    let mut part = Some(&TABLE);
    while let Some(here) = part {
        for slot in &here.slots {
            let at = slot.start.load(Ordering::Relaxed);
            if at >= begin && at - begin < len {
                slot.is_revoked.store(true, Ordering::Relaxed);
            }
        }
        part = here.next();
    }
}

/// Whether the handler is installed.
#[must_use]
#[inline]
pub fn is_installed() -> bool {
    IS_INSTALLED.load(Ordering::Relaxed)
}

/// Installs the handler, once for the process; later calls do nothing. Only memory that is named from then on is found.
///
/// # Errors
/// What `sigaction` said.
#[doc(alias = "sigaction")]
pub fn install() -> Result<()> {
    static INSTALLING: Mutex<()> = Mutex::new(());
    let _installing = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    if is_installed() {
        return Ok(());
    }
    for (signal, previous) in SIGNALS.into_iter().zip(&PREVIOUS) {
        let mut found = MaybeUninit::uninit();
        call_libc("sigaction", || {
            // SAFETY: only asks; the place is writable.
            unsafe { libc::sigaction(signal, ptr::null(), found.as_mut_ptr()) }.into()
        })?;
        // SAFETY: the call above has written it.
        let mut action = unsafe { found.assume_init() };
        // Before the handler can run.
        let _ = previous.set(action);
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_fault;
        action.sa_sigaction = handler as usize;
        // On the stack for signals, where a thread has one: its own may have overflowed.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        call_libc("sigaction", || {
            // SAFETY: the handler does only what a handler may: it loads atomics, writes to standard error, and calls
            // `sigaction` and the previous handler.
            unsafe { libc::sigaction(signal, &raw const action, ptr::null_mut()) }.into()
        })?;
    }
    IS_INSTALLED.store(true, Ordering::Release);
    Ok(())
}

/// A line on the stack: a handler must not allocate.
struct Line {
    bytes: [u8; 400],
    len: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = self.len + text.len();
        self.bytes.get_mut(self.len..end).ok_or(fmt::Error)?.copy_from_slice(text.as_bytes());
        self.len = end;
        Ok(())
    }
}

extern "C" fn on_fault(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel gives a handler with `SA_SIGINFO` this structure, and it stays until the handler returns.
    let told = unsafe { &*info };
    let code = told.si_code;
    // Only a fault has an address; a signal that a process sent has none.
    if code > 0 {
        // SAFETY: the kernel has written the address of a fault.
        let address = unsafe { told.si_addr() }.addr();
        if let Some(found) = find(address) {
            report(signal, address, &found);
        }
    }
    chain(signal, code, info, context);
}

fn report(signal: libc::c_int, address: usize, found: &Found) {
    let mut line = Line { bytes: [0; 400], len: 0 };
    let (offset, name) = (found.offset, found.name());
    let _ = if found.is_revoked {
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
    // One write, without the lock of `std::io::stderr`.
    // SAFETY: the descriptor is only borrowed; where it is closed, the write fails.
    let stderr = unsafe { std::os::fd::BorrowedFd::borrow_raw(2) };
    let _ = rustix::io::write(stderr, &line.bytes[..line.len]);
}

/// Does what would have been done without this handler.
fn chain(signal: libc::c_int, code: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let at = SIGNALS.iter().position(|known| *known == signal);
    let previous = at.and_then(|at| PREVIOUS[at].get());
    let handler = previous.map_or(libc::SIG_DFL, |previous| previous.sa_sigaction);
    let is_default = handler == libc::SIG_DFL || (handler == libc::SIG_IGN && code > 0);
    if is_default {
        // SAFETY: all zero is a valid structure: the default action, no flags, no signals blocked.
        let default = unsafe { MaybeUninit::<libc::sigaction>::zeroed().assume_init() };
        // SAFETY: the structure is whole; the old action is not asked for.
        unsafe { libc::sigaction(signal, &raw const default, ptr::null_mut()) };
        if code <= 0 {
            // It was sent, and does not happen again by itself. It is blocked until the handler returns.
            // SAFETY: async-signal-safe.
            unsafe { libc::raise(signal) };
        }
        // A fault happens again when the handler returns.
        return;
    }
    if handler == libc::SIG_IGN {
        return;
    }
    if previous.is_some_and(|previous| previous.sa_flags & libc::SA_SIGINFO != 0) {
        // SAFETY: a handler that was installed with this flag has this signature.
        let handler = unsafe {
            std::mem::transmute::<usize, extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void)>(
                handler,
            )
        };
        handler(signal, info, context);
    } else {
        // SAFETY: a handler that was installed without the flag has this signature.
        let handler = unsafe { std::mem::transmute::<usize, extern "C" fn(libc::c_int)>(handler) };
        handler(signal);
    }
}

#[cfg(test)]
mod tests {
    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;
    use crate::fork::child::{self, Status};
    use crate::vm::Protection;
    use crate::{Memfd, SharedMap};

    /// The kernel's code of a write that a map does not allow.
    const SEGV_ACCERR: libc::c_int = 2;

    /// What a child writes to standard error, and how it ends.
    fn told(run: impl FnOnce() -> u8) -> (String, Status) {
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
        // SAFETY: the offset is within the map.
        let at = unsafe { map.address().add(offset) };
        // SAFETY: it is not valid, which is what the test is for: the child ends here.
        unsafe { at.write_volatile(1) };
    }

    #[test]
    fn a_write_to_named_memory_is_named_and_ends_as_it_would() {
        let maps = [read_only(8192), read_only(8192)];
        let address = maps[1].address().addr().get() + 4100;
        let told = told(|| {
            if install().is_err() {
                return 91;
            }
            // More than a part of the table has.
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
        assert_eq!(told, (expected, Status::Killed(libc::SIGSEGV)));
    }

    #[test]
    fn memory_without_a_name_is_not_named() {
        let map = read_only(8192);
        let told = told(|| {
            if install().is_err() {
                return 91;
            }
            drop(NamedRange::register(map.address(), 8192, "gone"));
            write_to(&map, 0);
            93
        });
        assert_eq!(told, (String::new(), Status::Killed(libc::SIGSEGV)));
    }

    #[test]
    fn a_signal_that_was_sent_ends_as_it_would() {
        let told = told(|| {
            // Rust's own handler lets one such signal pass.
            // SAFETY: asks for the kernel's own action.
            unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
            if install().is_err() {
                return 91;
            }
            // SAFETY: ends this child.
            unsafe { libc::raise(libc::SIGBUS) };
            93
        });
        assert_eq!(told, (String::new(), Status::Killed(libc::SIGBUS)));
    }

    #[test]
    fn the_handler_that_was_there_before_runs_next() {
        extern "C" fn previous(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
            // SAFETY: the kernel gives a handler with `SA_SIGINFO` this structure.
            let code = unsafe { (*info).si_code };
            // SAFETY: async-signal-safe.
            unsafe { libc::_exit(signal + code) }
        }
        let map = read_only(4096);
        let told = told(|| {
            // SAFETY: all zero is a valid structure.
            let mut action = unsafe { MaybeUninit::<libc::sigaction>::zeroed().assume_init() };
            let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = previous;
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO;
            // SAFETY: the structure is whole, and the handler only exits.
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
        assert_eq!(told, (expected, Status::Exited(libc::SIGSEGV + SEGV_ACCERR)));
    }
}
