//! The entry of every call: it is counted, may be made to fail, and checks that the driver is initialized and, for most
//! functions, that a context is current.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::bindings::*;
use crate::config;

/// The result of a driver function.
pub(crate) type CallResult = Result<(), CUresult>;

/// The precondition of a driver function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Precondition {
    /// No precondition: the function works before `cuInit`.
    None,
    /// `cuInit` was called in this process.
    Init,
    /// A context is current on this thread.
    Context,
    /// `cuInit` was called; the function calls [`count_call`] itself, after the effects that it has even if it fails.
    InitUncounted,
}

/// Defines functions of the driver. Their callers keep the driver's contract for pointer arguments.
macro_rules! api {
    ($($precondition:ident fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        pub(crate) unsafe extern "C" fn $name($($arg: $type),*) -> $crate::bindings::CUresult {
            let name = concat!(stringify!($name), "\0");
            $crate::calls::run_call(name, $crate::calls::Precondition::$precondition, || $body)
        }
    )*};
}
pub(crate) use api;

/// The call to fail, and the call that failed.
#[derive(Debug)]
pub(crate) struct FailurePlan {
    /// The number of calls until one fails; zero means never.
    pub(crate) left: u64,
    pub(crate) code: u32,
    /// The null-terminated name of the function that was made to fail.
    pub(crate) fired: Option<&'static str>,
}

pub(crate) fn plan() -> MutexGuard<'static, FailurePlan> {
    static PLAN: LazyLock<Mutex<FailurePlan>> = LazyLock::new(|| {
        let config = config::get();
        Mutex::new(FailurePlan { left: config.fail_call, code: config.fail_code, fired: None })
    });
    PLAN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The process that called `cuInit`; a forked child has another id.
static INITIALIZED: AtomicU32 = AtomicU32::new(0);

pub(crate) fn set_initialized() {
    INITIALIZED.store(std::process::id(), Ordering::Relaxed);
}

/// Counts a call, and fails it if it is the planned one.
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
    /// The context stack of this thread, as devices; the last is current.
    static CONTEXTS: RefCell<Vec<CUdevice>> = const { RefCell::new(Vec::new()) };
}

/// The device whose context is current.
pub(crate) fn current() -> Result<CUdevice, CUresult> {
    CONTEXTS.with_borrow(|stack| stack.last().copied()).ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)
}

pub(crate) fn push(device: CUdevice) {
    CONTEXTS.with_borrow_mut(|stack| stack.push(device));
}

pub(crate) fn pop() -> Result<CUdevice, CUresult> {
    CONTEXTS.with_borrow_mut(Vec::pop).ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)
}

/// The depth of this thread's context stack.
pub(crate) fn depth() -> usize {
    CONTEXTS.with_borrow(Vec::len)
}

/// Writes a result through a pointer of the caller.
pub(crate) fn write_output<T>(to: *mut T, value: T) -> CallResult {
    if to.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller passes a writable pointer, as the driver's contract requires.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Reads an argument through a pointer of the caller.
pub(crate) fn read_input<T: Copy>(from: *const T) -> Result<T, CUresult> {
    if from.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller passes a pointer to such a value, as the driver's contract requires.
    Ok(unsafe { from.read_unaligned() })
}

/// Returns an error unless the condition holds.
pub(crate) fn ensure(condition: bool, error: CUresult) -> CallResult {
    if condition { Ok(()) } else { Err(error) }
}
