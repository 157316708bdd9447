//! The fake driver's modules and kernels. Only the version and the kernel names of PTX are parsed; the kernels of
//! `kernels/` are emulated.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::bindings::*;
use crate::calls::{self, api, ensure, read_input, write_output};
use crate::gpu::{self, Op};
use crate::{config, streams};

/// The maximum number of threads in a block. The constant after it is the maximum on one multiprocessor.
const MAX_THREADS: c_uint = 1024;
const MAX_RESIDENT_THREADS: c_int = 2048;

/// The names of the kernels of gather, scatter and collectives, which are not emulated. With a setting, their launches do nothing.
const SKIPPED: [&str; 13] = [
    "gather_rows",
    "scatter_rows",
    "gather_convert",
    "scatter_convert",
    "scatter_add",
    "all_reduce_ll",
    "all_reduce_one_shot",
    "all_reduce_two_shot",
    "all_gather_ll",
    "all_gather",
    "broadcast_ll",
    "broadcast",
    "barrier",
];

/// An emulated kernel with the arguments of its launch.
#[derive(Debug, Clone)]
pub(crate) enum Kernel {
    Empty,
    FillPattern { words: u64, count: u64, seed: u64 },
    Checksum { words: u64, count: u64, sum: u64 },
    AddIndex { bytes: u64, len: u32, add: u32 },
    WaitThenSet { flag: u64, limit: Duration, byte: u64, value: u8, since: Option<Instant> },
}

impl Kernel {
    /// Returns the emulated kernel with this name and these arguments, or an error if there is none.
    fn from_launch(name: &str, params: *mut *mut c_void) -> Result<Self, CUresult> {
        fn argument<T: Copy>(params: *mut *mut c_void, index: usize) -> Result<T, CUresult> {
            read_input(read_input(params.wrapping_add(index))?.cast::<T>())
        }
        let u64_at = |index| argument::<u64>(params, index);
        Ok(match name {
            "nothing" | "probe" => Self::Empty,
            "fill_pattern" => Self::FillPattern { words: u64_at(0)?, count: u64_at(1)?, seed: u64_at(2)? },
            "checksum" => Self::Checksum { words: u64_at(0)?, count: u64_at(1)?, sum: u64_at(2)? },
            "add_index" => {
                Self::AddIndex { bytes: u64_at(0)?, len: argument(params, 1)?, add: argument(params, 2)? }
            }
            "wait_then_set" => Self::WaitThenSet {
                flag: u64_at(0)?,
                limit: Duration::from_nanos(u64_at(1)?),
                byte: u64_at(2)?,
                value: argument(params, 3)?,
                since: None,
            },
            _ if config::get().skip_kernels && SKIPPED.contains(&name) => Self::Empty,
            _ => return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        })
    }

    /// Returns true if the kernel can run to completion now. A kernel that would spin waits in its queue instead, so
    /// that it does not block other streams.
    pub(crate) fn is_ready(&mut self) -> bool {
        match self {
            Self::WaitThenSet { flag, limit, since, .. } => {
                let start = *since.get_or_insert_with(Instant::now);
                load::<u32>(*flag) != 0 || start.elapsed() >= *limit
            }
            _ => true,
        }
    }

    pub(crate) fn run(self) {
        match self {
            Self::Empty => {}
            Self::FillPattern { words, count, seed } => {
                (0..count).for_each(|index| store(words + 8 * index, mix(seed.wrapping_add(index))));
            }
            Self::Checksum { words, count, sum } => {
                let term = |index: u64| load::<u64>(words + 8 * index).wrapping_mul(2 * index + 1);
                let total = (0..count).map(term).fold(0, u64::wrapping_add);
                store(sum, load::<u64>(sum).wrapping_add(total));
            }
            Self::AddIndex { bytes, len, add } => {
                (0..len).for_each(|index| store(bytes + u64::from(index), index.wrapping_add(add) as u8));
            }
            Self::WaitThenSet { byte, value, .. } => store(byte, value),
        }
    }
}

fn mix(seed: u64) -> u64 {
    let mut x = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn load<T: Copy>(at: u64) -> T {
    // SAFETY: the program that launches a kernel keeps the memory at `at` mapped until the kernel has run. The read is
    // volatile, because other threads write the memory too.
    unsafe { ptr::with_exposed_provenance::<T>(at as usize).read_volatile() }
}

fn store<T: Copy>(at: u64, value: T) {
    // SAFETY: the program that launches a kernel keeps the memory at `at` mapped and writable until the kernel has run.
    // The write is volatile, because other threads write the memory too.
    unsafe { ptr::with_exposed_provenance_mut::<T>(at as usize).write_volatile(value) };
}

/// A loaded CUDA module: its device, and the names of its kernels in order.
#[derive(Debug)]
struct LoadedModule {
    device: CUdevice,
    entries: Vec<String>,
}

#[derive(Debug, Default)]
struct Modules {
    last: usize,
    modules: BTreeMap<usize, LoadedModule>,
}

/// The distance between the handles of two modules. The handle of a function is its module's handle plus its position
/// in the module, counted from 1.
const STEP: usize = 0x1000;

fn modules() -> MutexGuard<'static, Modules> {
    static MODULES: Mutex<Modules> = Mutex::new(Modules { last: 0, modules: BTreeMap::new() });
    MODULES.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn count() -> u64 {
    modules().modules.len() as u64
}

/// Returns the device and the name of the function with this handle.
fn function(handle: CUfunction) -> Result<(CUdevice, String), CUresult> {
    let (module, place) = (handle.addr() / STEP * STEP, handle.addr() % STEP);
    let modules = modules();
    let module = modules.modules.get(&module);
    let found =
        module.and_then(|module| Some((module.device, module.entries.get(place.checked_sub(1)?)?.clone())));
    found.ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
}

/// Enqueues a kernel on a stream, or returns an error if the kernel is not emulated.
fn launch(
    function: CUfunction,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    stream: CUstream,
    params: *mut *mut c_void,
) -> calls::CallResult {
    let (device, name) = self::function(function)?;
    ensure(device == streams::device_of(stream)?, CUresult::CUDA_ERROR_INVALID_HANDLE)?;
    let [blocks, threads] = [grid, block].map(|counts| counts.into_iter().map(u64::from).product::<u64>());
    let is_valid = (1..=u64::from(MAX_THREADS)).contains(&threads) && blocks > 0;
    ensure(is_valid, CUresult::CUDA_ERROR_INVALID_VALUE)?;
    streams::enqueue(stream, Op::Run(Kernel::from_launch(&name, params)?))
}

/// Returns the newest PTX version that a driver of the given version supports.
fn newest_ptx(version: c_int) -> (u32, u32) {
    match (version / 1000, version % 1000 / 10) {
        (..=11, _) => (7, 8),
        (12, minor @ ..=5) => (8, minor.unsigned_abs()),
        (12, 6) => (8, 5),
        (12, _) => (8, 7),
        (13.., minor) => (9, minor.unsigned_abs()),
    }
}

/// Returns the names of the kernels in a PTX text, or the error that loading the text causes.
fn entries(text: &str) -> Result<Vec<String>, (CUresult, String)> {
    let version = text.lines().find_map(|line| line.trim().strip_prefix(".version")).map(str::trim);
    let parsed = version.and_then(|version| version.split_once('.'));
    let parsed = parsed.and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    let Some(version) = parsed else {
        return Err((CUresult::CUDA_ERROR_INVALID_PTX, "`.version` is missing".to_owned()));
    };
    if version > newest_ptx(config::get().version) {
        let message = format!("PTX {}.{} is newer than this driver", version.0, version.1);
        return Err((CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION, message));
    }
    let names = text.lines().filter_map(|line| line.split_once(".entry ")).map(|(_, rest)| {
        rest.trim()
            .split(|character: char| character != '_' && !character.is_alphanumeric())
            .next()
            .unwrap_or_default()
    });
    Ok(names.map(str::to_owned).collect())
}

/// Writes a message to the error log buffer that the caller of the driver passed, if there is one.
fn log(
    message: &str,
    count: c_uint,
    options: *mut CUjit_option,
    values: *mut *mut c_void,
) -> calls::CallResult {
    let (mut buffer, mut buffer_len) = (ptr::null_mut(), 0);
    for index in 0..count as usize {
        let value = read_input(values.wrapping_add(index))?;
        match read_input(options.wrapping_add(index))? {
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER => buffer = value.cast::<u8>(),
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES => buffer_len = value.addr(),
            _ => {}
        }
    }
    if !buffer.is_null() && buffer_len > message.len() {
        // SAFETY: the caller's log buffer has `buffer_len` bytes, which are more than the message has.
        unsafe { ptr::copy_nonoverlapping(message.as_ptr(), buffer, message.len()) };
    }
    Ok(())
}

api! {
    // `cuModuleLoadDataEx` waits for all running work, as in a real driver.
    Context fn cuModuleLoadDataEx(
        module: *mut CUmodule, image: *const c_void, count: c_uint, options: *mut CUjit_option,
        values: *mut *mut c_void,
    ) {
        gpu::wait_for_all();
        ensure(!image.is_null(), CUresult::CUDA_ERROR_INVALID_VALUE)?;
        // SAFETY: `image` is not null, and the caller of the driver function guarantees that it is a null-terminated PTX text.
        let text = unsafe { CStr::from_ptr(image.cast()) }.to_str();
        let text = text.map_err(|_| CUresult::CUDA_ERROR_INVALID_IMAGE)?;
        let entries = match entries(text) {
            Ok(entries) => entries,
            Err((code, message)) => {
                log(&message, count, options, values)?;
                return Err(code);
            }
        };
        let device = calls::current()?;
        let mut modules = modules();
        modules.last += STEP;
        let number = modules.last;
        modules.modules.insert(number, LoadedModule { device, entries });
        write_output(module, ptr::without_provenance_mut(number))
    }

    Context fn cuModuleUnload(module: CUmodule) {
        modules().modules.remove(&module.addr()).map(drop).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
    }

    Context fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char) {
        // SAFETY: the caller of the driver function guarantees that `name` is a C string.
        let name = unsafe { CStr::from_ptr(name) }.to_str().unwrap_or_default();
        let modules = modules();
        let found = modules.modules.get(&module.addr()).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        let place = found.entries.iter().position(|entry| entry == name);
        let place = place.ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
        write_output(function, ptr::without_provenance_mut(module.addr() + place + 1))
    }

    Context fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int, function: CUfunction, threads: c_int, _shared: usize,
    ) {
        self::function(function)?;
        let is_valid = (1..=MAX_THREADS as c_int).contains(&threads);
        ensure(is_valid, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        write_output(blocks, (MAX_RESIDENT_THREADS / threads).min(32))
    }

    Context fn cuLaunchKernel(
        function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, _shared: c_uint, stream: CUstream, params: *mut *mut c_void, _extra: *mut *mut c_void,
    ) {
        launch(function, [grid_x, grid_y, grid_z], [block_x, block_y, block_z], stream, params)
    }

    // A programmatic launch (one that may start before preceding work ends) also runs in stream order, because emulated
    // kernels do not wait for preceding work.
    Context fn cuLaunchKernelEx(
        config: *const CUlaunchConfig, function: CUfunction, params: *mut *mut c_void, _extra: *mut *mut c_void,
    ) {
        let config = read_input(config)?;
        let grid = [config.gridDimX, config.gridDimY, config.gridDimZ];
        let block = [config.blockDimX, config.blockDimY, config.blockDimZ];
        launch(function, grid, block, config.hStream, params)
    }
}
