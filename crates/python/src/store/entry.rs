//! Describes the objects and the status of a store. A description does not keep an object alive.

use std::borrow::Cow;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use wholemem_store::ObjectId;

use super::description;
use crate::array::Layout;

/// The description of an object of the store. The description does not keep the object alive.
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
    /// The time at which the object was created, in milliseconds since the Unix epoch.
    created: u64,
    pack: Option<u64>,
    /// The layout of the object's array; `None` if the object is a pack (several arrays).
    layout: Option<Layout>,
}

/// The pickled fields of the description of an object. The layout of the array is parsed from the metadata.
type EntryValues<'a> = (String, u64, u64, Cow<'a, [u8]>, usize, bool, u32, u64, Option<u64>);

impl Entry {
    pub(super) fn new(entry: wholemem_store::Entry) -> Self {
        let is_empty_pack = entry.pack.is_none() && description::is_empty_pack(&entry.meta, entry.len);
        let pack = if is_empty_pack { Some(entry.id) } else { entry.pack };
        let (id, pack) = (entry.id.as_u64(), pack.map(ObjectId::as_u64));
        let wholemem_store::Entry { name, version, meta, len, is_cpu, owner, created, .. } = entry;
        Self { name, id, version, meta, len, is_cpu, owner, created, pack, layout: None }.with_layout()
    }

    /// Returns the id of the object. An unpickled entry may have an invalid id.
    pub(super) fn object_id(&self) -> PyResult<ObjectId> {
        let no_id = || PyValueError::new_err(format!("{} is not the id of an object", self.id));
        ObjectId::from_u64(self.id).ok_or_else(no_id)
    }

    fn with_layout(mut self) -> Self {
        let is_pack = self.is_pack();
        self.layout = description::layout_of(&self.meta, self.len).ok().filter(|_| !is_pack);
        self
    }
}

#[pymethods]
impl Entry {
    /// The name of the object in the store.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// The id of the object, which is never reused.
    #[getter]
    fn id(&self) -> u64 {
        self.id
    }

    /// The version of the object: one more than that of the previous object with the same name.
    #[getter]
    fn version(&self) -> u64 {
        self.version
    }

    /// The size of the object in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.len
    }

    /// The shape of the object's array; ``None`` if the object is a pack (several arrays).
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        self.layout.as_ref().map(|layout| PyTuple::new(py, &layout.shape)).transpose()
    }

    /// The element type of the object's array; ``None`` if the object is a pack (several arrays).
    #[getter]
    fn dtype(&self) -> Option<&'static str> {
        self.layout.as_ref().map(|layout| layout.element.name)
    }

    /// The kind of device that holds the object's memory: ``cpu`` or ``cuda``.
    #[getter]
    fn device(&self) -> &'static str {
        if self.is_cpu { "cpu" } else { "cuda" }
    }

    /// The Linux user id of the creator of the object.
    #[getter]
    fn owner(&self) -> u32 {
        self.owner
    }

    /// The time at which the object was created, in seconds since the Unix epoch, as ``time.time`` returns.
    #[getter]
    #[expect(clippy::cast_precision_loss, reason = "milliseconds of many thousand years are exact")]
    fn created(&self) -> f64 {
        self.created as f64 / 1e3
    }

    /// The id of the pack (several arrays in one allocation), if the object is a pack or belongs to one; otherwise
    /// ``None``.
    #[getter]
    fn pack(&self) -> Option<u64> {
        self.pack
    }

    /// True if the object is a pack (several arrays in one allocation).
    #[getter]
    fn is_pack(&self) -> bool {
        self.pack == Some(self.id)
    }

    fn __hash__(&self) -> u64 {
        self.id
    }

    /// Creates the description of an object from its pickled values.
    #[staticmethod]
    #[pyo3(signature = (*values))]
    fn _restored(values: &Bound<'_, PyTuple>) -> PyResult<Self> {
        let (name, id, version, meta, len, is_cpu, owner, created, pack) =
            values.extract::<EntryValues<'_>>()?;
        let meta = meta.into_owned();
        Ok(Self { name, id, version, meta, len, is_cpu, owner, created, pack, layout: None }.with_layout())
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let Self { name, id, version, meta, len, is_cpu, owner, created, pack, layout: _ } = slf.get();
        let meta = PyBytes::new(slf.py(), meta);
        let values = (name, id, version, meta, len, is_cpu, owner, created, pack).into_pyobject(slf.py())?;
        Ok((slf.get_type().getattr("_restored")?, values))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let Self { name, version, len, .. } = self;
        let content = match (self.shape(py)?, self.dtype()) {
            (Some(shape), Some(dtype)) => format!("shape={shape}, dtype={dtype}"),
            _ => format!("nbytes={len}"),
        };
        Ok(format!("Entry(name='{name}', version={version}, {content}, device={})", self.device()))
    }
}

/// The status of a store: the numbers of objects and clients, and the memory in use.
///
/// >>> from wholemem import store
/// >>> status = store.Client().status()
/// >>> 0 <= status.host_used <= status.host_quota
/// True
#[pyclass(frozen, eq, hash, get_all, module = "wholemem.store")]
#[derive(Debug, PartialEq, Eq, Hash)]
pub(crate) struct Status {
    /// The number of sealed objects in the store.
    objects: u64,
    /// The number of drafts (objects that are not sealed yet) in the store.
    unsealed: u64,
    /// The number of deleted objects of the store that clients still hold.
    retired: u64,
    /// The number of client connections to the store.
    clients: u64,
    /// The host memory that the store uses, in bytes.
    host_used: u64,
    /// The quota of the store for host memory, in bytes.
    host_quota: u64,
    /// The device memory that the store uses, in bytes.
    device_used: u64,
    /// The quota of the store for device memory, in bytes.
    device_quota: u64,
    /// The number of server processes that were started for this store.
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
    /// Creates the status of a store from its pickled values.
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
