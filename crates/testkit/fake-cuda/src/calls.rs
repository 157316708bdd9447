//! What every call goes through: it is counted, may be made to fail, and needs a driver that was initialized and, for
//! most, a current context.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::bindings::*;
use crate::config;

/// What a function answers.
pub(crate) type Answer = Result<(), CUresult>;

/// What a function asks for before it does anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needs {
    /// Nothing: it works before `cuInit`.
    Nothing,
    /// `cuInit`, in this very process.
    Init,
    /// A context that is current on this thread.
    Context,
    /// `cuInit`; it asks [`pass`] itself, once it has done what it does whatever it answers.
    Late,
}

/// Defines functions of the driver. Their pointers are what the caller's contract with the driver says they are.
macro_rules! api {
    ($($needs:ident fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        pub(crate) unsafe extern "C" fn $name($($arg: $type),*) -> $crate::bindings::CUresult {
            let name = concat!(stringify!($name), "\0");
            $crate::calls::answer(name, $crate::calls::Needs::$needs, || $body)
        }
    )*};
}
pub(crate) use api;

/// Which call is to fail, and which did.
#[derive(Debug)]
pub(crate) struct Plan {
    /// How many calls until one fails; zero for never.
    pub(crate) left: u64,
    pub(crate) code: u32,
    /// The function that was made to fail, ended by a zero.
    pub(crate) fired: Option<&'static str>,
}

pub(crate) fn plan() -> MutexGuard<'static, Plan> {
    static PLAN: LazyLock<Mutex<Plan>> = LazyLock::new(|| {
        let config = config::get();
        Mutex::new(Plan { left: config.fail_call, code: config.fail_code, fired: None })
    });
    PLAN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The process that called `cuInit`: a forked child is another.
static INITIALIZED: AtomicU32 = AtomicU32::new(0);

pub(crate) fn initialized() {
    INITIALIZED.store(std::process::id(), Ordering::Relaxed);
}

/// Counts a call, and fails it if that is the plan.
pub(crate) fn pass(name: &'static str) -> Answer {
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

pub(crate) fn answer(name: &'static str, needs: Needs, body: impl FnOnce() -> Answer) -> CUresult {
    let checked = || {
        if needs != Needs::Late {
            pass(name)?;
        }
        if needs != Needs::Nothing && INITIALIZED.load(Ordering::Relaxed) != std::process::id() {
            return Err(CUresult::CUDA_ERROR_NOT_INITIALIZED);
        }
        if needs == Needs::Context {
            current()?;
        }
        body()
    };
    checked().err().unwrap_or(CUresult::CUDA_SUCCESS)
}

thread_local! {
    /// The devices whose contexts were made current on this thread, the current one last.
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

/// How many contexts are on this thread's stack.
pub(crate) fn depth() -> usize {
    CONTEXTS.with_borrow(Vec::len)
}

/// Answers through a pointer of the caller's.
pub(crate) fn put<T>(to: *mut T, value: T) -> Answer {
    if to.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller of the driver passes a pointer to which it may be written, as its contract says.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Takes what a pointer of the caller's points to.
pub(crate) fn get<T: Copy>(from: *const T) -> Result<T, CUresult> {
    if from.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller of the driver passes a pointer to such a value, as its contract says.
    Ok(unsafe { from.read_unaligned() })
}

/// Refuses, unless a condition holds.
pub(crate) fn ensure(held: bool, otherwise: CUresult) -> Answer {
    if held { Ok(()) } else { Err(otherwise) }
}
