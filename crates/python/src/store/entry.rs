//! What there is to know of objects, and of the store, without holding anything.

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use wholemem_store::ObjectId;

use super::description;
use crate::array::Layout;

/// What there is to know of an object without holding it.
///
/// >>> import numpy
/// >>> from wholemem import store
/// >>> client = store.Client()
/// >>> version = client.put("known", numpy.zeros((4, 5), "float32"))
/// >>> client.stat("known")
/// Entry(name='known', version=1, shape=(4, 5), dtype=float32, device=cpu)
#[pyclass(frozen, module = "wholemem.store")]
#[derive(Debug)]
pub(crate) struct Entry {
    entry: wholemem_store::Entry,
    /// Of a pack there is no one array.
    layout: Option<Layout>,
}

impl Entry {
    pub(super) fn new(mut entry: wholemem_store::Entry) -> Self {
        if entry.pack.is_none() && description::is_empty_pack(&entry.meta, entry.len) {
            entry.pack = Some(entry.id);
        }
        let is_pack = entry.pack == Some(entry.id);
        let layout = description::understand(&entry.meta, entry.len).ok().filter(|_| !is_pack);
        Self { entry, layout }
    }
}

#[pymethods]
impl Entry {
    /// Its name.
    #[getter]
    fn name(&self) -> &str {
        &self.entry.name
    }

    /// Its number, which no other object ever has.
    #[getter]
    fn id(&self) -> u64 {
        self.entry.id.as_u64()
    }

    /// Which object of its name it is.
    #[getter]
    fn version(&self) -> u64 {
        self.entry.version
    }

    /// How many bytes it has.
    #[getter]
    fn nbytes(&self) -> usize {
        self.entry.len
    }

    /// The shape of the array; of a pack there is none.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        self.layout.as_ref().map(|layout| PyTuple::new(py, &layout.shape)).transpose()
    }

    /// The type of its elements; of a pack there is none.
    #[getter]
    fn dtype(&self) -> Option<&'static str> {
        self.layout.as_ref().map(|layout| layout.element.name)
    }

    /// Where it is: ``cpu`` or ``cuda``.
    #[getter]
    fn device(&self) -> &'static str {
        if self.entry.is_cpu { "cpu" } else { "cuda" }
    }

    /// The number of the user who made it.
    #[getter]
    fn owner(&self) -> u32 {
        self.entry.owner
    }

    /// When it was made, as ``time.time`` counts.
    #[getter]
    #[expect(clippy::cast_precision_loss, reason = "milliseconds of many thousand years fit")]
    fn created(&self) -> f64 {
        self.entry.created as f64 / 1e3
    }

    /// The number of the pack that it belongs to, or is.
    #[getter]
    fn pack(&self) -> Option<u64> {
        self.entry.pack.map(ObjectId::as_u64)
    }

    /// Whether it is a pack.
    #[getter]
    fn is_pack(&self) -> bool {
        self.entry.pack == Some(self.entry.id)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let wholemem_store::Entry { name, version, len, .. } = &self.entry;
        let what = match (self.shape(py)?, self.dtype()) {
            (Some(shape), Some(dtype)) => format!("shape={shape}, dtype={dtype}"),
            _ => format!("nbytes={len}"),
        };
        Ok(format!("Entry(name='{name}', version={version}, {what}, device={})", self.device()))
    }
}

/// How full a store is.
///
/// >>> from wholemem import store
/// >>> status = store.Client().status()
/// >>> 0 <= status.host_used <= status.host_quota
/// True
#[pyclass(frozen, get_all, module = "wholemem.store")]
#[derive(Debug)]
pub(crate) struct Status {
    /// How many objects are sealed.
    objects: u64,
    /// How many are being written.
    unsealed: u64,
    /// How many are deleted, and still held by somebody.
    retired: u64,
    /// How many connections there are.
    clients: u64,
    /// How many bytes of host memory are taken.
    host_used: u64,
    /// How many may be.
    host_quota: u64,
    /// How many bytes of device memory are taken.
    device_used: u64,
    /// How many may be.
    device_quota: u64,
    /// How often a server has been started for this store.
    servers: u64,
}

impl Status {
    pub(super) fn new(status: &wholemem_store::Status) -> Self {
        Self {
            objects: status.objects,
            unsealed: status.unsealed,
            retired: status.retired,
            clients: status.clients,
            host_used: status.host.used,
            host_quota: status.host.quota,
            device_used: status.device.used,
            device_quota: status.device.quota,
            servers: status.epoch,
        }
    }
}

#[pymethods]
impl Status {
    fn __repr__(&self) -> String {
        let Self { objects, clients, host_used, host_quota, .. } = self;
        format!(
            "Status(objects={objects}, clients={clients}, host_used={host_used}, host_quota={host_quota})"
        )
    }
}
