//! Communicators: groups of ranks, each with a device.

use std::borrow::Cow;
use std::ffi::{c_char, c_int, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::sync::Arc;
use std::time::Duration;

use wholemem::{Communicator, Rank};
use wholemem_comm::{Bootstrap, UniqueId};
use wholemem_hal::{Backend, BorrowedMemory, Device, ForeignStreams, Span, Stream};
use wholemem_os::Deadline;

use crate::argument::{self, Output, Plain, invalid};
use crate::call::call;
use crate::device::wm_device_t;
use crate::failure::{Failure, Result};
use crate::handle::handle_type;
use crate::status::{WM_ERROR_RANKS_DISAGREE, wm_status_t};

/// The size of the text of a unique id, with its NUL.
pub const WM_UNIQUE_ID_SIZE: usize = 256;

/// The color of a rank that joins no new group in `wm_communicator_split`.
pub const WM_NO_COLOR: u32 = u32::MAX;

/// The id of a group: one rank creates it, and the program sends it to the other ranks. It contains a secret.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct wm_unique_id_t {
    /// The id as text that ends with a NUL.
    pub text: [c_char; WM_UNIQUE_ID_SIZE],
}

impl std::fmt::Debug for wm_unique_id_t {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("wm_unique_id_t(..)")
    }
}

/// A rank's membership in a group of ranks, each with a device.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct wm_communicator_t {
    /// The number of the handle; 0 is no handle.
    pub value: u64,
}

/// Options of communicators.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct wm_communicator_options_t {
    /// The size of this structure in bytes, which the caller sets.
    pub struct_size: usize,
    /// The time for which each call waits for the other ranks. 0 is the time in `WHOLEMEM_TIMEOUT`, or its default.
    pub timeout_ns: u64,
}

// SAFETY: all fields are integers, and every bit pattern of those is valid.
unsafe impl Plain for wm_communicator_options_t {
    const FIRST_LEN: usize = 16;
}

/// What the objects of a communicator share.
#[derive(Debug)]
pub(crate) struct CommState {
    pub(crate) comm: Communicator,
    streams: ForeignStreams,
    memory: BorrowedMemory,
}

handle_type!(wm_communicator_t, Arc<CommState>, Communicator);

impl CommState {
    fn new(comm: Communicator) -> Result<Arc<Self>> {
        let (streams, memory) = (ForeignStreams::create(comm.device())?, BorrowedMemory::new(comm.device()));
        Ok(Arc::new(Self { comm, streams, memory }))
    }

    /// Returns the stream of a call.
    ///
    /// # Safety
    /// As the header requires: `stream` is null or a stream of the communicator's device, which exists until it is forgotten.
    #[inline]
    pub(crate) unsafe fn stream(&self, stream: *mut c_void) -> Cow<'_, Stream> {
        // SAFETY: the caller guarantees that the handle is that of a stream of the device, which exists until it is forgotten.
        unsafe { self.streams.at(stream.expose_provenance() as u64) }
    }

    /// Returns a stream of the library on the communicator's device, for calls that wait.
    pub(crate) fn own_stream(&self) -> &Stream {
        self.streams.own()
    }

    /// Returns memory of the caller as an operand of work.
    ///
    /// # Safety
    /// As the header requires: the device can access `len` bytes at `address` until the work of the call has run.
    #[inline]
    pub(crate) unsafe fn span(&self, address: *const c_void, len: usize, argument: &str) -> Result<Span> {
        if len > 0 {
            argument::checked(address.cast_mut().cast::<u8>(), argument)?;
        }
        // SAFETY: the caller guarantees that the device can access the bytes until the work has run, and C code holds no references.
        Ok(unsafe { self.memory.part(address.expose_provenance() as u64, len) }?)
    }
}

/// Creates a unique id, with which ranks join a group.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_unique_id_create(id: *mut wm_unique_id_t) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(id, "id") }?;
        let created = UniqueId::create()?.to_string();
        if created.len() >= WM_UNIQUE_ID_SIZE {
            return Err(invalid("the path in `WHOLEMEM_SOCKET_DIR` is too long for a unique id"));
        }
        let mut text = [0; WM_UNIQUE_ID_SIZE];
        argument::copy_text(&created, &mut text);
        output.write(wm_unique_id_t { text });
        Ok(())
    })
}

/// Joins the group of a unique id, and waits until all ranks have joined. Collective.
///
/// `device` is the device of this rank. A zero handle selects CUDA if it works, otherwise the host, and the device whose number is the
/// local rank (`LOCAL_RANK`), or else the rank, modulo the number of devices. `options` may be null.
///
/// Returns `WM_ERROR_TIMEOUT` if a rank does not join in time. The caller frees the communicator with `wm_communicator_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_communicator_create(
    id: *const wm_unique_id_t,
    rank: u32,
    size: u32,
    device: wm_device_t,
    options: *const wm_communicator_options_t,
    communicator: *mut wm_communicator_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(communicator, "communicator") }?;
        // SAFETY: the pointer is null or points to a structure with the size in its first field, as the header requires.
        let timeout = timeout_of(unsafe { argument::options(options, "options") }?)?;
        // SAFETY: the pointer is null or valid, as the header requires.
        let text = unsafe { argument::slice(id, 1, "id") }?[0].text.map(c_char::to_ne_bytes);
        let text = text.as_flattened().split(|byte| *byte == 0).next().unwrap_or_default();
        let text = std::str::from_utf8(text).map_err(|_| invalid("`id` is not a unique id"))?;
        let id: UniqueId = text.parse()?;
        let mut ranks = Bootstrap::create(&id, Rank(rank), size, Deadline::after(timeout))?;
        ranks.set_timeout(timeout);
        output.write(wm_communicator_t::create(create_in_group(ranks, device)?)?);
        Ok(())
    })
}

/// Joins the group for which a launcher started this process: `wholemem launch`, torchrun, srun or mpirun. Collective.
///
/// `device` and `options` are those of `wm_communicator_create`. Returns `WM_ERROR_ENVIRONMENT` if the variables of the launcher are
/// missing or invalid. The caller frees the communicator with `wm_communicator_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_communicator_create_from_env(
    device: wm_device_t,
    options: *const wm_communicator_options_t,
    communicator: *mut wm_communicator_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(communicator, "communicator") }?;
        // SAFETY: the pointer is null or points to a structure with the size in its first field, as the header requires.
        let timeout = timeout_of(unsafe { argument::options(options, "options") }?)?;
        let ranks = Bootstrap::from_env_within(timeout)?;
        output.write(wm_communicator_t::create(create_in_group(ranks, device)?)?);
        Ok(())
    })
}

/// Creates a group within this process: rank `n` has device `devices[n]`, and its communicator is written to `communicators[n]`. The
/// program uses each of them in a thread of its own.
///
/// `devices` and `communicators` have `count` elements. The devices are of one backend, and may repeat. `options` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_communicator_create_local(
    devices: *const wm_device_t,
    count: u32,
    options: *const wm_communicator_options_t,
    communicators: *mut wm_communicator_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or points to a structure with the size in its first field, as the header requires.
        let timeout = timeout_of(unsafe { argument::options(options, "options") }?)?;
        // SAFETY: the pointer is null or points to `count` elements, as the header requires.
        let devices = unsafe { argument::slice(devices, count as usize, "devices") }?;
        if count == 0 {
            return Err(wholemem::Error::NoRanks.into());
        }
        argument::checked(communicators, "communicators")?;
        let devices: Vec<Device> =
            devices.iter().map(|device| Ok((*device.get()?).clone())).collect::<Result<_>>()?;
        let states = join_local(devices, timeout)?;
        let mut handles = Vec::with_capacity(states.len());
        for state in states {
            match wm_communicator_t::create(state) {
                Ok(handle) => handles.push(handle),
                Err(full) => {
                    // They were created by this call, so they are valid.
                    handles.into_iter().for_each(|handle| drop(handle.free()));
                    return Err(full.into());
                }
            }
        }
        // SAFETY: the pointer is valid for `count` elements, as the header requires.
        unsafe { argument::copy_out(&handles, communicators, count as usize, "communicators") }
    })
}

/// Creates the communicators of ranks that are threads. Creating one is a collective call, so each rank needs a thread.
fn join_local(devices: Vec<Device>, timeout: Duration) -> Result<Vec<Arc<CommState>>> {
    let count = u32::try_from(devices.len()).unwrap_or_else(|_| unreachable!("the count was a `u32`"));
    let ranks = Bootstrap::local(count)?;
    std::thread::scope(|scope| {
        let join = |(mut ranks, device): (Bootstrap, Device)| {
            scope.spawn(move || {
                ranks.set_timeout(timeout);
                CommState::new(Communicator::create(ranks, &device)?)
            })
        };
        let threads: Vec<_> = ranks.into_iter().zip(devices).map(join).collect();
        let joined: Vec<_> = threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        joined.into_iter().map(|one| one.unwrap_or_else(|panic| Err(Failure::of_panic(panic)))).collect()
    })
}

/// Creates a communicator for a rank that has joined its group. If the device cannot be opened, the rank leaves the group, and the
/// other ranks get an error.
fn create_in_group(ranks: Bootstrap, device: wm_device_t) -> Result<Arc<CommState>> {
    let device = match device.value {
        0 => Communicator::choose_device(&Backend::auto()?, &ranks)?,
        _ => (*device.get()?).clone(),
    };
    CommState::new(Communicator::create(ranks, &device)?)
}

fn timeout_of(options: Option<wm_communicator_options_t>) -> Result<Duration> {
    match options {
        Some(wm_communicator_options_t { timeout_ns: timeout_ns @ 1.., .. }) => {
            Ok(argument::duration(timeout_ns))
        }
        _ => Ok(Bootstrap::timeout_from_env()?),
    }
}

/// Divides the group: the ranks with the same color form a new group, ordered by key, and by rank if keys are equal. Every rank keeps
/// its device. Collective.
///
/// A rank with the color `WM_NO_COLOR` makes the call too, and gets a zero handle. Both groups can be used. The caller frees the new
/// communicator with `wm_communicator_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_communicator_split(
    communicator: wm_communicator_t,
    color: u32,
    key: u32,
    part: *mut wm_communicator_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(part, "part") }?;
        let color = (color != WM_NO_COLOR).then_some(color);
        output.write(match communicator.get()?.comm.split(color, key)? {
            Some(part) => wm_communicator_t::create(CommState::new(part)?)?,
            None => wm_communicator_t { value: 0 },
        });
        Ok(())
    })
}

/// Leaves the group, and frees the handle. Calls of other threads and other ranks that wait for this rank end with an error, except
/// kernels of GPUs, which end at the timeout. Tables and windows of the communicator stay valid.
#[unsafe(no_mangle)]
pub extern "C" fn wm_communicator_destroy(communicator: wm_communicator_t) -> wm_status_t {
    call(|| {
        let state = communicator.get()?;
        communicator.free()?;
        // Tables and windows also hold the state, so dropping it would not make the rank leave.
        state.comm.bootstrap().leave();
        Ok(())
    })
}

/// Returns the number of this rank in its group, counted from 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_communicator_rank(
    communicator: wm_communicator_t,
    rank: *mut u32,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(rank, "rank") }?;
        output.write(communicator.get()?.comm.rank().0);
        Ok(())
    })
}

/// Returns the number of ranks in the group.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_communicator_size(
    communicator: wm_communicator_t,
    size: *mut u32,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(size, "size") }?;
        output.write(communicator.get()?.comm.size());
        Ok(())
    })
}

/// Returns a new handle of this rank's device. The caller frees it with `wm_device_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_communicator_device(
    communicator: wm_communicator_t,
    device: *mut wm_device_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(device, "device") }?;
        output.write(wm_device_t::create(communicator.get()?.comm.device().clone())?);
        Ok(())
    })
}

/// Returns the time for which calls wait for other ranks, in nanoseconds, or `WM_TIMEOUT_INFINITE`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_communicator_timeout(
    communicator: wm_communicator_t,
    timeout_ns: *mut u64,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(timeout_ns, "timeout_ns") }?;
        let timeout = communicator.get()?.comm.bootstrap().timeout();
        let is_finite = timeout < argument::LONGEST_WAIT;
        let nanoseconds = is_finite.then(|| u64::try_from(timeout.as_nanos()).ok()).flatten();
        output.write(nanoseconds.unwrap_or(argument::WM_TIMEOUT_INFINITE));
        Ok(())
    })
}

/// Waits until all ranks have called this function. Afterwards every rank sees what calls that wait, such as `wm_tensor_scatter`, of
/// any rank have written before. Collective. It does not wait for work on streams: see `wm_communicator_barrier_on`.
#[unsafe(no_mangle)]
pub extern "C" fn wm_communicator_barrier(communicator: wm_communicator_t) -> wm_status_t {
    call(|| Ok(communicator.get()?.comm.barrier()?))
}

/// Waits until the work of `stream` has ended and all ranks have called this function. Work that any rank enqueues afterwards sees the
/// work that all ranks have enqueued before. Collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_communicator_barrier_on(
    communicator: wm_communicator_t,
    stream: *mut c_void,
) -> wm_status_t {
    call(|| {
        let state = communicator.get()?;
        // SAFETY: `stream` is null or a stream of the communicator's device that exists, as the header requires.
        let stream = unsafe { state.stream(stream) };
        Ok(state.comm.barrier_on(&stream)?)
    })
}

/// Returns the error with which the group has failed, if it has failed, without waiting.
#[unsafe(no_mangle)]
pub extern "C" fn wm_communicator_check(communicator: wm_communicator_t) -> wm_status_t {
    call(|| Ok(communicator.get()?.comm.bootstrap().check()?))
}

/// Aborts the group: current and later calls of all ranks return `WM_ERROR_ABORTED`. It may be called while other threads wait in calls
/// on the communicator.
#[unsafe(no_mangle)]
pub extern "C" fn wm_communicator_abort(communicator: wm_communicator_t) -> wm_status_t {
    call(|| {
        communicator.get()?.comm.bootstrap().abort();
        Ok(())
    })
}

/// Gathers `len` bytes of every rank: those of rank `n` are written to `all + n * len`. Collective: `len` is equal on all ranks.
///
/// `all` has space for `len` bytes of every rank. This is for small data of the program, such as addresses or names; it uses sockets.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_communicator_all_gather(
    communicator: wm_communicator_t,
    bytes: *const c_void,
    len: usize,
    all: *mut c_void,
) -> wm_status_t {
    call(|| {
        let state = communicator.get()?;
        // SAFETY: the pointer is null or points to `len` bytes, as the header requires.
        let bytes = unsafe { argument::slice(bytes.cast::<u8>(), len, "bytes") }?;
        if len > 0 {
            argument::checked(all.cast::<u8>(), "all")?;
        }
        let parts = state.comm.bootstrap().all_gather(bytes)?;
        if let Some((rank, part)) = parts.iter().enumerate().find(|(_, part)| part.len() != len) {
            let message = format!("rank {rank} passed {} bytes, and this rank {len}", part.len());
            return Err(Failure::new(WM_ERROR_RANKS_DISAGREE, message));
        }
        let gathered = parts.concat();
        // SAFETY: `all` has space for `len` bytes of every rank, as the header requires.
        unsafe { argument::copy_out(&gathered, all.cast::<u8>(), gathered.len(), "all") }
    })
}

/// Copies the `len` bytes of rank `root` to `bytes` on all ranks. Collective: `root` and `len` are equal on all ranks.
///
/// This is for small data of the program; `wm_broadcast` is for data of devices.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_communicator_broadcast(
    communicator: wm_communicator_t,
    root: u32,
    bytes: *mut c_void,
    len: usize,
) -> wm_status_t {
    call(|| {
        let state = communicator.get()?;
        // SAFETY: the pointer is null or points to `len` bytes of the caller, as the header requires.
        let bytes = unsafe { argument::slice_mut(bytes.cast::<u8>(), len, "bytes") }?;
        let own: &[u8] = if state.comm.rank().0 == root { bytes } else { &[] };
        let sent = state.comm.bootstrap().broadcast(Rank(root), own)?;
        if sent.len() != len {
            let message = format!("rank {root} passed {} bytes, and this rank {len}", sent.len());
            return Err(Failure::new(WM_ERROR_RANKS_DISAGREE, message));
        }
        bytes.copy_from_slice(&sent);
        Ok(())
    })
}

/// Sends `len` bytes to every rank and receives `len` bytes from every rank: the bytes at `sent + n * len` go to rank `n`, and those
/// from rank `n` are written to `received + n * len`. Collective: `len` is equal on all ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_communicator_all_to_all(
    communicator: wm_communicator_t,
    sent: *const c_void,
    len: usize,
    received: *mut c_void,
) -> wm_status_t {
    call(|| {
        let state = communicator.get()?;
        let all = len.checked_mul(state.comm.size() as usize).ok_or_else(|| invalid("`len` is too large"))?;
        // SAFETY: the pointer is null or points to `len` bytes for each rank, as the header requires.
        let sent = unsafe { argument::slice(sent.cast::<u8>(), all, "sent") }?;
        if len > 0 {
            argument::checked(received.cast::<u8>(), "received")?;
        }
        let from_all = state.comm.bootstrap().all_to_all(sent)?;
        // SAFETY: `received` has space for `len` bytes of each rank, as the header requires.
        unsafe { argument::copy_out(&from_all, received.cast::<u8>(), all, "received") }
    })
}

/// Sends a file descriptor of every rank to all ranks: that of rank `n` is written to `all[n]`, as a new descriptor that the caller
/// closes. Collective. `descriptor` stays open and belongs to the caller.
///
/// A rank with -1 sends no descriptor, and its element of `all` is -1. `all` has space for one descriptor of every rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_communicator_all_gather_fd(
    communicator: wm_communicator_t,
    descriptor: c_int,
    all: *mut c_int,
) -> wm_status_t {
    call(|| {
        let state = communicator.get()?;
        argument::checked(all, "all")?;
        // SAFETY: the descriptor is open during the call, as the header requires. Other numbers are errors of the system call.
        let own = (descriptor >= 0).then(|| unsafe { BorrowedFd::borrow_raw(descriptor) });
        let received = state.comm.bootstrap().all_gather_fds(own.as_slice())?;
        let numbers: Vec<c_int> = received
            .into_iter()
            .map(|of_rank| of_rank.into_iter().next().map_or(-1, IntoRawFd::into_raw_fd))
            .collect();
        // SAFETY: `all` has space for one descriptor of every rank, as the header requires.
        unsafe { argument::copy_out(&numbers, all, numbers.len(), "all") }
    })
}

/// Waits until the work that is enqueued on a stream of the communicator's device has run. With a timeout of 0 it only tests.
///
/// Returns `WM_ERROR_TIMED_OUT` if work is still running at the timeout; the work continues.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_stream_synchronize(
    communicator: wm_communicator_t,
    stream: *mut c_void,
    timeout_ns: u64,
) -> wm_status_t {
    call(|| {
        let state = communicator.get()?;
        // SAFETY: `stream` is null or a stream of the communicator's device that exists, as the header requires.
        let stream = unsafe { state.stream(stream) };
        Ok(stream.synchronize(argument::deadline(timeout_ns))?)
    })
}

/// Forgets a stream that was passed to calls on the communicator or on its objects. Call it before you destroy such a stream. Work on
/// the stream may still be running.
#[unsafe(no_mangle)]
pub extern "C" fn wm_stream_forget(communicator: wm_communicator_t, stream: *mut c_void) -> wm_status_t {
    call(|| {
        communicator.get()?.streams.forget(stream.expose_provenance() as u64);
        Ok(())
    })
}
