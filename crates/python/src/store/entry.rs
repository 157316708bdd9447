//! What there is to know of objects, and of the store, without holding anything.

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use wholemem_store::ObjectId;

use super::description;
use crate::array::Layout;

/// What there is to know of an object: see `wholemem.store.Entry`.
#[pyclass(frozen, module = "wholemem.store")]
#[derive(Debug)]
pub(crate) struct Entry {
    entry: wholemem_store::Entry,
    /// Of a pack there is no one array.
    layout: Option<Layout>,
}

impl Entry {
    pub(super) fn new(entry: wholemem_store::Entry) -> Self {
        let is_pack = entry.pack == Some(entry.id);
        let layout = description::understand(&entry.meta, entry.len).ok().filter(|_| !is_pack);
        Self { entry, layout }
    }
}

#[pymethods]
impl Entry {
    #[getter]
    fn name(&self) -> &str {
        &self.entry.name
    }

    #[getter]
    fn id(&self) -> u64 {
        self.entry.id.as_u64()
    }

    #[getter]
    fn version(&self) -> u64 {
        self.entry.version
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.entry.len
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        self.layout.as_ref().map(|layout| PyTuple::new(py, &layout.shape)).transpose()
    }

    #[getter]
    fn dtype(&self) -> Option<&'static str> {
        self.layout.as_ref().map(|layout| layout.element.name)
    }

    #[getter]
    fn device(&self) -> &'static str {
        if self.entry.is_cpu { "cpu" } else { "cuda" }
    }

    #[getter]
    fn owner(&self) -> u32 {
        self.entry.owner
    }

    /// In seconds of the Unix epoch, as `time.time` counts.
    #[getter]
    #[expect(clippy::cast_precision_loss, reason = "milliseconds of many thousand years fit")]
    fn created(&self) -> f64 {
        self.entry.created as f64 / 1e3
    }

    #[getter]
    fn pack(&self) -> Option<u64> {
        self.entry.pack.map(ObjectId::as_u64)
    }

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

/// How full a store is: see `wholemem.store.Status`.
#[pyclass(frozen, get_all, module = "wholemem.store")]
#[derive(Debug)]
pub(crate) struct Status {
    objects: u64,
    unsealed: u64,
    retired: u64,
    clients: u64,
    host_used: u64,
    host_quota: u64,
    device_used: u64,
    device_quota: u64,
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
