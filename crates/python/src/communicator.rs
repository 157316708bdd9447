//! Implements `wholemem.Communicator`, which joins ranks into a group, each with a device.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyType;
use wholemem::{Rank, SymmetricMemory};
use wholemem_comm::{Bootstrap, UniqueId};
use wholemem_hal::{BorrowedMemory, CudaMallocBuffer, Device, ForeignStreams, Stream};
use wholemem_os::{Deadline, ForkEpoch};

use crate::array::{DlDevice, Layout, View};
use crate::device::DeviceName;
use crate::error::{Exception, IntoPyResult};
use crate::handle::Handle;
use crate::number::{optional_unsigned, unsigned};
use crate::stream::CallStream;
use crate::wait::run_blocking;

/// The state of a communicator until it is closed. The communicator's tables and windows share the state.
#[derive(Debug)]
pub(crate) struct CommState {
    pub(crate) comm: wholemem::Communicator,
    /// The stream of calls without a `stream` argument.
    pub(crate) stream: Stream,
    /// The group's symmetric memory, created by the first call that needs it.
    pub(crate) symmetric: OnceLock<SymmetricMemory>,
    /// The streams of a framework by handle. torch never destroys its streams.
    pub(crate) streams: ForeignStreams,
    /// Creates spans of memory that callers keep alive, without allocating an owner for each.
    pub(crate) borrowed_memory: BorrowedMemory,
    /// The device of this rank, as DLPack describes it.
    pub(crate) dl_device: DlDevice,
}

impl CommState {
    fn new(comm: wholemem::Communicator) -> Result<Self, Exception> {
        let streams = ForeignStreams::create(comm.device())?;
        let stream = streams.own().clone();
        let (borrowed_memory, dl_device) = (BorrowedMemory::new(comm.device()), DlDevice::of(comm.device()));
        Ok(Self { comm, stream, symmetric: OnceLock::new(), streams, borrowed_memory, dl_device })
    }

    /// Allocates memory that this rank's device can access.
    pub(crate) fn allocate(&self, layout: Layout) -> Result<View, Exception> {
        let device = self.comm.device();
        if DlDevice::of(device) == DlDevice::CPU || layout.len() == 0 {
            return View::zeroed(layout);
        }
        let buffer = CudaMallocBuffer::create(device, layout.len())?;
        View::of_span(buffer.all(), DlDevice::of(device), layout)
    }
}

/// A rank's membership in a group of ranks. Each rank has one device; several ranks may share a device.
///
/// A rank is usually a process; :meth:`local` makes threads ranks. All ranks make collective calls in the same order. If a
/// rank exits or does not respond, calls raise an exception with its number. As a context manager, it leaves the group at the
/// end. Tables and windows that were created through it stay valid until they are dropped.
///
/// >>> import wholemem
/// >>> (comm,) = wholemem.Communicator.local(1, device="cpu")
/// >>> with comm:
/// ...     comm.barrier()
/// ...     print(comm)
/// Communicator(rank=0, size=1, device=cpu)
#[pyclass(frozen, weakref, module = "wholemem")]
#[derive(Debug)]
pub(crate) struct Communicator {
    rank: u32,
    size: u32,
    device: Device,
    epoch: ForkEpoch,
    state: Mutex<Option<Arc<CommState>>>,
    handle: Handle,
}

impl Communicator {
    fn new(comm: wholemem::Communicator) -> Result<Self, Exception> {
        let (rank, size, device) = (comm.rank().0, comm.size(), comm.device().clone());
        let (state, epoch) = (CommState::new(comm)?, ForkEpoch::current()?);
        Ok(Self {
            rank,
            size,
            device,
            epoch,
            state: Mutex::new(Some(Arc::new(state))),
            handle: Handle::default(),
        })
    }

    /// Returns the state of the communicator, or an error if the communicator was closed or this process is a forked child.
    pub(crate) fn state(&self) -> Result<Arc<CommState>, Exception> {
        // A forked child is detected before the mutex is locked: in a child, a thread that was not forked may hold the mutex.
        if !self.epoch.is_current() {
            return Err(wholemem_comm::Error::Forked.into());
        }
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.clone().ok_or_else(|| wholemem_comm::Error::Closed.into())
    }
}

/// Returns the timeout of waits for other ranks: `seconds`, or the value of `WHOLEMEM_TIMEOUT`.
fn timeout_of(seconds: Option<f64>) -> Result<Duration, Exception> {
    let Some(seconds) = seconds else { return Ok(Bootstrap::timeout_from_env()?) };
    let duration = Duration::try_from_secs_f64(seconds).ok().filter(|duration| !duration.is_zero());
    duration
        .ok_or_else(|| Exception::new("WrongValue", format!("a timeout of {seconds} seconds is not valid")))
}

/// Creates a communicator on the named device for a rank that has joined its group.
fn create_in_group(ranks: Bootstrap, name: DeviceName) -> Result<Communicator, Exception> {
    // If the device cannot be opened, this rank leaves the group, and the other ranks get an error.
    let device = name.device_of(&name.open()?, &ranks)?;
    Communicator::new(wholemem::Communicator::create(ranks, &device)?)
}

#[pymethods]
impl Communicator {
    /// Joins the group for which a launcher started this process: ``wholemem launch``, torchrun, srun or mpirun.
    ///
    /// Ranks on several nodes join over TCP, with a secret and the address of rank 0. Tables, windows and collectives on arrays need one
    /// node.
    ///
    /// Args:
    ///     device: ``cpu``, ``cuda`` or ``cuda:1``. Without a number, it is the launcher's local rank (``LOCAL_RANK``), else the
    ///         rank, modulo the number of visible devices. ``None`` selects the backend too.
    ///     timeout: Seconds to wait for other ranks, now and in later calls. ``None`` uses ``WHOLEMEM_TIMEOUT``.
    ///
    /// Returns:
    ///     The communicator of this rank.
    ///
    /// Raises:
    ///     wholemem.errors.BadEnvironment: The launcher's variables are missing or invalid, or ranks on several nodes have no secret or no address.
    ///     wholemem.errors.Timeout: A rank did not join in time.
    ///     wholemem.errors.WrongDevice: The device does not exist.
    #[classmethod]
    #[pyo3(signature = (*, device=None, timeout=None))]
    fn from_env(
        _class: &Bound<'_, PyType>,
        py: Python<'_>,
        device: Option<DeviceName>,
        timeout: Option<f64>,
    ) -> PyResult<Self> {
        let (name, timeout) = (device.unwrap_or_default(), timeout_of(timeout).into_py()?);
        run_blocking(py, || create_in_group(Bootstrap::from_env_within(timeout)?, name))
    }

    /// Joins the group of a unique id, and returns when all ranks have joined.
    ///
    /// Args:
    ///     unique_id: The id that one rank created with :func:`unique_id`.
    ///     rank: The number of this rank.
    ///     size: The number of ranks.
    ///     device: ``cpu``, ``cuda`` or ``cuda:1``. ``None`` selects one.
    ///     timeout: Seconds to wait for other ranks, now and in later calls. ``None`` uses ``WHOLEMEM_TIMEOUT``.
    ///
    /// Returns:
    ///     The communicator of this rank.
    ///
    /// Raises:
    ///     wholemem.errors.RanksDisagree: Ranks were given different sizes, or the same number.
    ///     wholemem.errors.Timeout: A rank did not join in time.
    ///     wholemem.errors.WrongDevice: The device does not exist.
    #[classmethod]
    #[pyo3(signature = (unique_id, rank, size, *, device=None, timeout=None))]
    fn create(
        _class: &Bound<'_, PyType>,
        py: Python<'_>,
        unique_id: &str,
        #[pyo3(from_py_with = unsigned)] rank: u32,
        #[pyo3(from_py_with = unsigned)] size: u32,
        device: Option<DeviceName>,
        timeout: Option<f64>,
    ) -> PyResult<Self> {
        let (name, timeout) = (device.unwrap_or_default(), timeout_of(timeout).into_py()?);
        let id: UniqueId = unique_id.parse().into_py()?;
        run_blocking(py, || {
            let mut ranks = Bootstrap::create(&id, Rank(rank), size, Deadline::after(timeout))?;
            ranks.set_timeout(timeout);
            create_in_group(ranks, name)
        })
    }

    /// Creates a communicator of the ranks of a ``torch.distributed`` process group, which is used only to exchange the
    /// unique id.
    ///
    /// Args:
    ///     group: The process group. ``None`` is the default group.
    ///     device: ``cpu``, ``cuda`` or ``cuda:1``. ``None`` selects one.
    ///     timeout: Seconds to wait for other ranks, now and in later calls. ``None`` uses ``WHOLEMEM_TIMEOUT``.
    ///
    /// Returns:
    ///     The communicator of this rank.
    ///
    /// Raises:
    ///     wholemem.errors.BadEnvironment: The ranks are on several nodes.
    ///     wholemem.errors.Timeout: A rank did not join in time.
    #[classmethod]
    #[pyo3(signature = (group=None, *, device=None, timeout=None))]
    fn from_torch<'py>(
        class: &Bound<'py, PyType>,
        group: Option<Bound<'py, PyAny>>,
        device: Option<Bound<'py, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let join = class.py().import("wholemem.rendezvous")?.getattr("through_torch")?;
        join.call1((class, group, device, timeout))
    }

    /// Creates a group whose ranks are threads of this process, and returns the communicator of each rank.
    ///
    /// Args:
    ///     size: The number of ranks.
    ///     device: ``cpu``, ``cuda`` or ``cuda:1``. Without a number, ranks use the devices round-robin.
    ///     timeout: Seconds to wait for other ranks. ``None`` uses ``WHOLEMEM_TIMEOUT``.
    ///
    /// Returns:
    ///     One communicator for each rank.
    ///
    /// Raises:
    ///     wholemem.errors.WrongDevice: The device does not exist.
    ///     wholemem.errors.WrongValue: ``size`` is 0.
    #[classmethod]
    #[pyo3(signature = (size, *, device=None, timeout=None))]
    fn local(
        _class: &Bound<'_, PyType>,
        py: Python<'_>,
        #[pyo3(from_py_with = unsigned)] size: u32,
        device: Option<DeviceName>,
        timeout: Option<f64>,
    ) -> PyResult<Vec<Self>> {
        let (name, timeout) = (device.unwrap_or_default(), timeout_of(timeout).into_py()?);
        run_blocking(py, || {
            if size == 0 {
                return Err(wholemem::Error::NoRanks.into());
            }
            let backend = name.open()?;
            let devices: Vec<_> =
                (0..size).map(|rank| name.device_of_thread(&backend, rank)).collect::<Result<_, _>>()?;
            let ranks = Bootstrap::local(size)?;
            // Creating a communicator is a collective call, so each rank needs a thread.
            std::thread::scope(|scope| {
                let join = |(mut ranks, device): (Bootstrap, Device)| {
                    scope.spawn(move || {
                        ranks.set_timeout(timeout);
                        Communicator::new(wholemem::Communicator::create(ranks, &device)?)
                    })
                };
                let threads: Vec<_> = ranks.into_iter().zip(devices).map(join).collect();
                let panicked = |_| Err(Exception::new("Error", "the thread of a rank panicked"));
                threads
                    .into_iter()
                    .map(|thread| thread.join().unwrap_or_else(panicked))
                    .collect::<Result<_, Exception>>()
            })
        })
    }

    /// Splits the group: the ranks with the same color form a new group, in which every rank keeps its device. Every rank must
    /// call this method.
    ///
    /// Args:
    ///     color: The color of this rank. A rank with ``None`` joins no new group.
    ///     key: Ranks of a new group are ordered by key, and by rank if keys are equal.
    ///
    /// Returns:
    ///     The communicator of the new group, or ``None`` without a color. Both groups can be used.
    ///
    /// Raises:
    ///     wholemem.errors.PeerLost: A rank exited.
    ///     wholemem.errors.Timeout: A rank did not call in time.
    #[pyo3(signature = (color, key=0))]
    fn split(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = optional_unsigned)] color: Option<u32>,
        #[pyo3(from_py_with = unsigned)] key: u32,
    ) -> PyResult<Option<Self>> {
        let state = self.state().into_py()?;
        run_blocking(py, || state.comm.split(color, key)?.map(Self::new).transpose())
    }

    /// The number of this rank in the group, counted from 0.
    #[getter]
    fn rank(&self) -> u32 {
        self.rank
    }

    /// The number of ranks in the group.
    #[getter]
    pub(crate) fn size(&self) -> u32 {
        self.size
    }

    /// The device of this rank.
    #[getter]
    fn device(&self) -> String {
        DlDevice::of(&self.device).to_string()
    }

    /// The integer handle by which torch operators refer to this communicator: see ``wholemem._handles``.
    #[getter(_handle)]
    fn handle(slf: &Bound<'_, Self>) -> PyResult<u64> {
        slf.get().handle.of(slf)
    }

    /// True if this communicator was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.epoch.is_current() && self.state.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Waits until all ranks have called this method, and makes the earlier writes of each rank visible to all ranks.
    ///
    /// Args:
    ///     stream: The CUDA stream whose earlier work is included. ``None`` is the default stream.
    ///
    /// Raises:
    ///     wholemem.errors.PeerLost: A rank exited.
    ///     wholemem.errors.Timeout: A rank did not call in time.
    #[pyo3(signature = (*, stream=None))]
    fn barrier(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let state = self.state().into_py()?;
        let on = CallStream::of(&state, stream)?;
        run_blocking(py, || -> Result<(), Exception> {
            on.finish()?;
            Ok(state.comm.barrier_on(&on.stream)?)
        })
    }

    /// The number of collectives whose data were staged so far, because their arrays are not in a window and not registered.
    #[getter]
    fn staged_calls(&self) -> PyResult<u64> {
        let state = self.state().into_py()?;
        Ok(state.symmetric.get().map_or(0, |symmetric| symmetric.staged_calls()))
    }

    /// Raises the error with which the group of ranks failed, if it has failed. Does not wait for other ranks.
    ///
    /// Raises:
    ///     wholemem.errors.PeerLost: A rank exited.
    ///     wholemem.errors.Aborted: A rank aborted the group.
    ///     wholemem.errors.Timeout: A call timed out.
    fn check(&self) -> PyResult<()> {
        let state = self.state().into_py()?;
        // If ranks have made different calls, that is the error, although a rank may have left the group because of it.
        state.symmetric.get().map_or(Ok(()), |symmetric| symmetric.check()).into_py()?;
        state.comm.bootstrap().check().into_py()
    }

    /// Aborts the group on all ranks: the calls of every rank end with an error. Any thread may call this method.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let state = self.state().into_py()?;
        // The GIL is released, because waiting threads that `abort` wakes up may need it.
        py.detach(|| state.comm.bootstrap().abort());
        Ok(())
    }

    /// Leaves the group. Calls of other ranks that wait for this rank end with an error; their GPU kernels end at the
    /// timeout. Memory of the group stays valid.
    fn close(&self, py: Python<'_>) {
        if self.epoch.is_current() {
            // Leaving the group joins a thread, which takes time, so neither the GIL nor the mutex is held meanwhile.
            py.detach(|| {
                let state = self.state.lock().unwrap_or_else(PoisonError::into_inner).take();
                // Tables and windows also hold the state, so dropping the state here would not make the rank leave.
                if let Some(state) = state {
                    state.comm.bootstrap().leave();
                }
            });
        }
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyAny>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        let closed = if self.closed() { ", closed" } else { "" };
        format!("Communicator(rank={}, size={}, device={}{closed})", self.rank, self.size, self.device())
    }
}

/// Creates a unique id, with which ranks join a group. One rank creates the id and sends it to the other ranks.
///
/// Returns:
///     The id as text. It contains a secret.
#[pyfunction]
pub(crate) fn unique_id() -> PyResult<String> {
    UniqueId::create().map(|id| id.to_string()).into_py()
}
