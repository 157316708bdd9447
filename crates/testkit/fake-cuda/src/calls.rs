//! The entry of every function of the fake CUDA driver: counts and records the call, makes it fail if a test requested that, and
//! checks that the driver is initialized and, for most functions, that a context is current.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::bindings::*;
use crate::config;

/// The result of a function of the fake driver.
pub(crate) type CallResult = Result<(), CUresult>;

/// The condition that must hold when a function of the fake driver is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Precondition {
    /// No precondition: the function works before `cuInit`.
    None,
    /// `cuInit` must have been called in this process.
    Init,
    /// `cuInit` must have been called, and a context must be current on the calling thread.
    Context,
    /// `cuInit` must have been called. The function calls [`count_call`] itself, after the effects that it has even if
    /// it fails.
    InitUncounted,
}

/// Defines functions of the fake driver. Callers of these functions pass pointer arguments that are valid as the CUDA
/// driver requires.
macro_rules! api {
    ($($precondition:ident fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        pub(crate) unsafe extern "C" fn $name($($arg: $type),*) -> $crate::bindings::CUresult {
            let name = concat!(stringify!($name), "\0");
            $crate::calls::run_call(name, $crate::calls::Precondition::$precondition, || $body)
        }
    )*};
}
pub(crate) use api;

/// Determines which call of a driver function fails, and records the call that failed.
#[derive(Debug)]
pub(crate) struct FailurePlan {
    /// The number of calls up to and including the one that fails; zero means that no call fails.
    pub(crate) left: u64,
    pub(crate) code: u32,
    /// The null-terminated name of the driver function that was made to fail.
    pub(crate) fired: Option<&'static str>,
}

pub(crate) fn plan() -> MutexGuard<'static, FailurePlan> {
    static PLAN: LazyLock<Mutex<FailurePlan>> = LazyLock::new(|| {
        let config = config::get();
        Mutex::new(FailurePlan { left: config.fail_call, code: config.fail_code, fired: None })
    });
    PLAN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The id of the process that called `cuInit`. A forked child has another id, so the driver is not initialized in the
/// child.
static INITIALIZED: AtomicU32 = AtomicU32::new(0);

pub(crate) fn set_initialized() {
    INITIALIZED.store(std::process::id(), Ordering::Relaxed);
}

/// Counts a call of a driver function, and returns an error if this call was selected to fail.
pub(crate) fn count_call(name: &'static str) -> CallResult {
    let mut plan = plan();
    match plan.left {
        0 => Ok(()),
        1 => {
            (plan.left, plan.fired) = (0, Some(name));
            Err(cudaError_enum(plan.code))
        }
        more => {
            plan.left = more - 1;
            Ok(())
        }
    }
}

pub(crate) fn run_call(
    name: &'static str,
    precondition: Precondition,
    body: impl FnOnce() -> CallResult,
) -> CUresult {
    RECORDING.with_borrow_mut(|recording| {
        if recording.is_active {
            recording.names.push(name);
        }
    });
    let checked = || {
        if precondition != Precondition::InitUncounted {
            count_call(name)?;
        }
        if precondition != Precondition::None && INITIALIZED.load(Ordering::Relaxed) != std::process::id() {
            return Err(CUresult::CUDA_ERROR_NOT_INITIALIZED);
        }
        if precondition == Precondition::Context {
            current()?;
        }
        body()
    };
    checked().err().unwrap_or(CUresult::CUDA_SUCCESS)
}

thread_local! {
    /// The context stack of this thread, as device numbers. The last context is current.
    static CONTEXTS: RefCell<Vec<CUdevice>> = const { RefCell::new(Vec::new()) };
}

/// The driver functions that a thread has called.
#[derive(Debug)]
struct CallRecording {
    is_active: bool,
    /// The null-terminated names of the functions, in the order of the calls.
    names: Vec<&'static str>,
}

thread_local! {
    static RECORDING: RefCell<CallRecording> =
        const { RefCell::new(CallRecording { is_active: false, names: Vec::new() }) };
}

/// Begins a new recording of the calls that this thread makes, or ends the recording.
pub(crate) fn record(is_active: bool) {
    RECORDING.with_borrow_mut(|recording| {
        recording.is_active = is_active;
        if is_active {
            recording.names.clear();
        }
    });
}

/// Returns the name of the driver function that this thread called in the recorded call with this number, counted from 0.
pub(crate) fn recorded(index: usize) -> Option<&'static str> {
    RECORDING.with_borrow(|recording| recording.names.get(index).copied())
}

/// Returns the device whose context is current on this thread.
pub(crate) fn current() -> Result<CUdevice, CUresult> {
    CONTEXTS.with_borrow(|stack| stack.last().copied()).ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)
}

pub(crate) fn push(device: CUdevice) {
    CONTEXTS.with_borrow_mut(|stack| stack.push(device));
}

pub(crate) fn pop() -> Result<CUdevice, CUresult> {
    CONTEXTS.with_borrow_mut(Vec::pop).ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)
}

/// Returns the number of contexts on this thread's context stack.
pub(crate) fn depth() -> usize {
    CONTEXTS.with_borrow(Vec::len)
}

/// Writes a result through the pointer `to`, which a caller of the driver passed.
pub(crate) fn write_output<T>(to: *mut T, value: T) -> CallResult {
    if to.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: `to` is not null, and the caller of the driver function guarantees that a pointer for a result of type `T` is
    // writable.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Reads an argument through the pointer `from`, which a caller of the driver passed.
pub(crate) fn read_input<T: Copy>(from: *const T) -> Result<T, CUresult> {
    if from.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: `from` is not null, and the caller of the driver function guarantees that it points to a value of type `T`.
    Ok(unsafe { from.read_unaligned() })
}

/// Returns `error` unless `condition` is true.
pub(crate) fn ensure(condition: bool, error: CUresult) -> CallResult {
    if condition { Ok(()) } else { Err(error) }
}
