//! What there is to know of objects, and of the store, without holding anything.

use std::borrow::Cow;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
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
#[pyclass(frozen, eq, module = "wholemem.store")]
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    name: String,
    id: u64,
    version: u64,
    meta: Vec<u8>,
    len: usize,
    is_cpu: bool,
    owner: u32,
    /// In milliseconds of the Unix epoch.
    created: u64,
    pack: Option<u64>,
    /// Of a pack there is no one array.
    layout: Option<Layout>,
}

/// What an entry is made of where it was pickled; its layout is in what is said of it.
type EntryValues<'a> = (String, u64, u64, Cow<'a, [u8]>, usize, bool, u32, u64, Option<u64>);

impl Entry {
    pub(super) fn new(entry: wholemem_store::Entry) -> Self {
        let is_empty_pack = entry.pack.is_none() && description::is_empty_pack(&entry.meta, entry.len);
        let pack = if is_empty_pack { Some(entry.id) } else { entry.pack };
        let (id, pack) = (entry.id.as_u64(), pack.map(ObjectId::as_u64));
        let wholemem_store::Entry { name, version, meta, len, is_cpu, owner, created, .. } = entry;
        Self { name, id, version, meta, len, is_cpu, owner, created, pack, layout: None }.understood()
    }

    /// The object it is of. An entry that was unpickled may have any number.
    pub(super) fn object_id(&self) -> PyResult<ObjectId> {
        let no_id = || PyValueError::new_err(format!("{} is not the id of an object", self.id));
        ObjectId::from_u64(self.id).ok_or_else(no_id)
    }

    fn understood(mut self) -> Self {
        let is_pack = self.is_pack();
        self.layout = description::understand(&self.meta, self.len).ok().filter(|_| !is_pack);
        self
    }
}

#[pymethods]
impl Entry {
    /// Its name.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// Its number, which no other object ever has.
    #[getter]
    fn id(&self) -> u64 {
        self.id
    }

    /// Which object of its name it is.
    #[getter]
    fn version(&self) -> u64 {
        self.version
    }

    /// How many bytes it has.
    #[getter]
    fn nbytes(&self) -> usize {
        self.len
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
        if self.is_cpu { "cpu" } else { "cuda" }
    }

    /// The number of the user who made it.
    #[getter]
    fn owner(&self) -> u32 {
        self.owner
    }

    /// When it was made, as ``time.time`` counts.
    #[getter]
    #[expect(clippy::cast_precision_loss, reason = "milliseconds of many thousand years fit")]
    fn created(&self) -> f64 {
        self.created as f64 / 1e3
    }

    /// The number of the pack that it belongs to, or is.
    #[getter]
    fn pack(&self) -> Option<u64> {
        self.pack
    }

    /// Whether it is a pack.
    #[getter]
    fn is_pack(&self) -> bool {
        self.pack == Some(self.id)
    }

    fn __hash__(&self) -> u64 {
        self.id
    }

    /// One that was pickled.
    #[staticmethod]
    #[pyo3(signature = (*values))]
    fn _restored(values: &Bound<'_, PyTuple>) -> PyResult<Self> {
        let (name, id, version, meta, len, is_cpu, owner, created, pack) =
            values.extract::<EntryValues<'_>>()?;
        let meta = meta.into_owned();
        Ok(Self { name, id, version, meta, len, is_cpu, owner, created, pack, layout: None }.understood())
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let Self { name, id, version, meta, len, is_cpu, owner, created, pack, layout: _ } = slf.get();
        let meta = PyBytes::new(slf.py(), meta);
        let values = (name, id, version, meta, len, is_cpu, owner, created, pack).into_pyobject(slf.py())?;
        Ok((slf.get_type().getattr("_restored")?, values))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let Self { name, version, len, .. } = self;
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
#[pyclass(frozen, eq, hash, get_all, module = "wholemem.store")]
#[derive(Debug, PartialEq, Eq, Hash)]
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
    /// One that was pickled.
    #[staticmethod]
    #[pyo3(signature = (*values))]
    fn _restored(values: &Bound<'_, PyTuple>) -> PyResult<Self> {
        let [objects, unsealed, retired, clients, host_used, host_quota, device_used, device_quota, servers] =
            values.as_any().extract::<[u64; 9]>()?;
        Ok(Self {
            objects,
            unsealed,
            retired,
            clients,
            host_used,
            host_quota,
            device_used,
            device_quota,
            servers,
        })
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let Self {
            objects,
            unsealed,
            retired,
            clients,
            host_used,
            host_quota,
            device_used,
            device_quota,
            servers,
        } = slf.get();
        let values =
            [objects, unsealed, retired, clients, host_used, host_quota, device_used, device_quota, servers];
        Ok((slf.get_type().getattr("_restored")?, PyTuple::new(slf.py(), values)?))
    }

    fn __repr__(&self) -> String {
        let Self { objects, clients, host_used, host_quota, .. } = self;
        format!(
            "Status(objects={objects}, clients={clients}, host_used={host_used}, host_quota={host_quota})"
        )
    }
}
