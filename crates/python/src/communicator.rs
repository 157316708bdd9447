//! Ranks that have devices, as Python joins them: see `wholemem.Communicator` there.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyType;
use wholemem::{Rank, SymmetricMemory};
use wholemem_comm::{Bootstrap, UniqueId};
use wholemem_hal::{CudaMallocBuffer, Device, Stream};
use wholemem_os::{Deadline, ForkEpoch};

use crate::array::{Layout, Place, View};
use crate::device::DeviceName;
use crate::error::{Raised, Raises};
use crate::handle::Handle;
use crate::number::natural;
use crate::raw_tensor::BorrowedMemory;
use crate::stream::{CallStream, Streams};
use crate::wait::waiting;
use crate::window::Windows;

/// What a communicator has until it is closed, and what was made through it keeps.
#[derive(Debug)]
pub(crate) struct CommState {
    pub(crate) comm: wholemem::Communicator,
    /// Where work runs for which the caller names no stream.
    pub(crate) stream: Stream,
    /// What the ranks meet through, made by the first call that needs it.
    pub(crate) symmetric: OnceLock<SymmetricMemory>,
    pub(crate) windows: Windows,
    pub(crate) streams: Streams,
    /// Memory that callers keep, as the device reaches it.
    pub(crate) borrowed_memory: BorrowedMemory,
    /// Where the device is.
    pub(crate) place: Place,
}

impl CommState {
    fn new(comm: wholemem::Communicator) -> Result<Self, Raised> {
        let stream = comm.device().stream()?;
        let streams = Streams::new()?;
        let (borrowed_memory, place) = (BorrowedMemory::new(comm.device()), Place::of(comm.device()));
        Ok(Self {
            comm,
            stream,
            symmetric: OnceLock::new(),
            windows: Windows::default(),
            streams,
            borrowed_memory,
            place,
        })
    }

    /// New memory where this rank's device reaches it.
    pub(crate) fn make(&self, layout: Layout) -> Result<View, Raised> {
        let device = self.comm.device();
        if Place::of(device) == Place::CPU || layout.len() == 0 {
            return View::zeroed(layout);
        }
        let buffer = CudaMallocBuffer::create(device, layout.len())?;
        View::of_span(buffer.all(), Place::of(device), layout)
    }
}

/// A rank's membership in a group of ranks, each with a device.
///
/// Ranks are processes as a rule, or threads of one. What they do together, all of them call, in the same order. A rank
/// that dies or does not come is an exception that names it. Used as a context, it leaves the group at the end; memory
/// that was made through it stays until it is dropped.
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
    fn new(comm: wholemem::Communicator) -> Result<Self, Raised> {
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

    /// The group, unless it was closed, or this is a forked child.
    pub(crate) fn state(&self) -> Result<Arc<CommState>, Raised> {
        // Before the lock, which in a child may be held by a thread that is not there.
        if !self.epoch.is_current() {
            return Err(wholemem_comm::Error::Forked.into());
        }
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.clone().ok_or_else(|| wholemem_comm::Error::Closed.into())
    }
}

/// How long to wait for other ranks: as long as asked for, or as the environment says.
fn patience(seconds: Option<f64>) -> Result<Duration, Raised> {
    let Some(seconds) = seconds else { return Ok(Bootstrap::timeout_from_env()?) };
    let duration = Duration::try_from_secs_f64(seconds).ok().filter(|duration| !duration.is_zero());
    duration.ok_or_else(|| Raised::new("WrongValue", format!("cannot wait for {seconds} seconds")))
}

/// The group of ranks that have found each other.
fn group_of(ranks: Bootstrap, name: DeviceName) -> Result<Communicator, Raised> {
    // A rank without a device leaves, and the others are told.
    let device = name.device_of(&name.open()?, &ranks)?;
    Communicator::new(wholemem::Communicator::create(ranks, &device)?)
}

#[pymethods]
impl Communicator {
    /// Joins the group that a launcher started this process for: ``wholemem launch``, torchrun, srun or mpirun.
    ///
    /// If no ``device`` is given, or one without a number, the number is the launcher's local rank (``LOCAL_RANK``), else the
    /// rank, modulo the number of visible devices. ``timeout`` is in seconds, also for later calls; if none is given,
    /// ``WHOLEMEM_TIMEOUT`` says it. Ranks on several nodes are refused.
    #[classmethod]
    #[pyo3(signature = (*, device=None, timeout=None))]
    fn from_env(
        _class: &Bound<'_, PyType>,
        py: Python<'_>,
        device: Option<DeviceName>,
        timeout: Option<f64>,
    ) -> PyResult<Self> {
        let (name, timeout) = (device.unwrap_or_default(), patience(timeout).raised()?);
        waiting(py, || group_of(Bootstrap::from_env_within(timeout)?, name))
    }

    /// Joins the group of an id, and returns when all ranks have. ``timeout`` is in seconds, also for later calls.
    #[classmethod]
    #[pyo3(signature = (unique_id, rank, size, *, device=None, timeout=None))]
    fn create(
        _class: &Bound<'_, PyType>,
        py: Python<'_>,
        unique_id: &str,
        #[pyo3(from_py_with = natural)] rank: u32,
        #[pyo3(from_py_with = natural)] size: u32,
        device: Option<DeviceName>,
        timeout: Option<f64>,
    ) -> PyResult<Self> {
        let (name, timeout) = (device.unwrap_or_default(), patience(timeout).raised()?);
        let id: UniqueId = unique_id.parse().raised()?;
        waiting(py, || {
            let mut ranks = Bootstrap::create(&id, Rank(rank), size, Deadline::after(timeout))?;
            ranks.set_timeout(timeout);
            group_of(ranks, name)
        })
    }

    /// Joins with the ranks of a group of ``torch.distributed``; of the default one, if none is given.
    #[classmethod]
    #[pyo3(signature = (group=None, *, device=None, timeout=None))]
    fn from_torch<'py>(
        class: &Bound<'py, PyType>,
        group: Option<Bound<'py, PyAny>>,
        device: Option<Bound<'py, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let meet = class.py().import("wholemem.rendezvous")?.getattr("through_torch")?;
        meet.call1((class, group, device, timeout))
    }

    /// A group within this process: a communicator for each thread that is a rank.
    #[classmethod]
    #[pyo3(signature = (size, *, device=None, timeout=None))]
    fn local(
        _class: &Bound<'_, PyType>,
        py: Python<'_>,
        #[pyo3(from_py_with = natural)] size: u32,
        device: Option<DeviceName>,
        timeout: Option<f64>,
    ) -> PyResult<Vec<Self>> {
        let (name, timeout) = (device.unwrap_or_default(), patience(timeout).raised()?);
        waiting(py, || {
            if size == 0 {
                return Err(wholemem::Error::NoRanks.into());
            }
            let backend = name.open()?;
            let devices: Vec<_> =
                (0..size).map(|rank| name.device_of_thread(&backend, rank)).collect::<Result<_, _>>()?;
            let ranks = Bootstrap::local(size)?;
            // Making a group is what all ranks do together.
            std::thread::scope(|scope| {
                let join = |(mut ranks, device): (Bootstrap, Device)| {
                    scope.spawn(move || {
                        ranks.set_timeout(timeout);
                        Communicator::new(wholemem::Communicator::create(ranks, &device)?)
                    })
                };
                let threads: Vec<_> = ranks.into_iter().zip(devices).map(join).collect();
                let panicked = |_| Err(Raised::new("Error", "a thread has panicked"));
                threads
                    .into_iter()
                    .map(|thread| thread.join().unwrap_or_else(panicked))
                    .collect::<Result<_, Raised>>()
            })
        })
    }

    /// This rank.
    #[getter]
    fn rank(&self) -> u32 {
        self.rank
    }

    /// How many ranks there are.
    #[getter]
    pub(crate) fn size(&self) -> u32 {
        self.size
    }

    /// This rank's device.
    #[getter]
    fn device(&self) -> String {
        Place::of(&self.device).to_string()
    }

    /// The number by which torch's operators find this object: see ``wholemem._handles``.
    #[getter(_handle)]
    fn handle(slf: &Bound<'_, Self>) -> PyResult<u64> {
        slf.get().handle.of(slf)
    }

    /// Whether this rank has left.
    #[getter]
    fn closed(&self) -> bool {
        self.epoch.is_current() && self.state.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Waits until all ranks are here, and what they have done so far, on that stream too, can be seen by all.
    #[pyo3(signature = (*, stream=None))]
    fn barrier(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let state = self.state().raised()?;
        let on = CallStream::of(&state, stream)?;
        waiting(py, || -> Result<(), Raised> {
            on.finish()?;
            Ok(state.comm.barrier_on(&on.stream)?)
        })
    }

    /// Raises what keeps the group from going on, if anything does, without waiting.
    fn check(&self) -> PyResult<()> {
        let state = self.state().raised()?;
        state.comm.bootstrap().check().raised()?;
        state.symmetric.get().map_or(Ok(()), |symmetric| symmetric.check()).raised()
    }

    /// Ends the group for all ranks, from whichever thread.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let state = self.state().raised()?;
        // Those who wait are woken by it, and may want the interpreter's lock.
        py.detach(|| state.comm.bootstrap().abort());
        Ok(())
    }

    /// Leaves the group. What waits for its ranks ends, but for kernels on GPUs, which wait their time. Memory stays.
    fn close(&self, py: Python<'_>) {
        if self.epoch.is_current() {
            // Leaving takes a thread its time, which needs no lock of ours or of the interpreter.
            py.detach(|| {
                let state = self.state.lock().unwrap_or_else(PoisonError::into_inner).take();
                // Tables and windows have it too, and may stay for long.
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

/// What ranks find each other by: made by one of them, and passed on to the others.
#[pyfunction]
pub(crate) fn unique_id() -> PyResult<String> {
    UniqueId::create().map(|id| id.to_string()).raised()
}
