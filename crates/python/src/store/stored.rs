//! Arrays of stored objects: each array holds a pin that keeps its object alive and is released with the last array.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyIterator, PyList};
use wholemem_store::{Client, Object, ObjectId, PackMember, PackObject};

use super::description;
use crate::array::{Array, DlDevice, View};
use crate::error::{Exception, IntoPyResult};

/// The object that a store has under a name: an array, or a pack of arrays.
#[derive(IntoPyObject)]
pub(super) enum StoredValue {
    Array(Array),
    Pack(Pack),
}

impl StoredValue {
    pub(super) fn of(object: Object) -> Result<Self, Exception> {
        let is_empty_pack = || description::is_empty_pack(&object.meta(), object.len());
        if object.is_pack() || (object.is_empty() && is_empty_pack()) {
            return Ok(Self::Pack(Pack::new(object.into_pack()?)?));
        }
        let layout = description::layout_of(&object.meta(), object.len())?;
        let (address, dl_device) = (object.span()?.address(), DlDevice::of(&object.device()));
        Ok(Self::Array(Array::new(View {
            address,
            layout,
            dl_device,
            readonly: true,
            owner: Arc::new(object),
        })))
    }
}

/// Returns the stored object of an array that comes from a store and covers the whole object.
pub(super) fn object_of(view: &View) -> Option<Arc<Object>> {
    let object = Arc::clone(&view.owner).downcast::<Object>().ok()?;
    // The array covers the whole object if it has no gaps, in C or Fortran order.
    let (extent, len) = (view.layout.extent().ok()?, object.len());
    let is_whole = view.layout.len() == len && extent == (0, len);
    (is_whole && view.address == object.span().ok()?.address()).then_some(object)
}

/// Returns the id and metadata of the stored object that an array covers, alone or in a pack, if this client got the object.
pub(super) fn stored_object(client: &Client, view: &View) -> Option<(ObjectId, Vec<u8>)> {
    if let Some(object) = object_of(view) {
        return client.is_source_of(&object).then(|| (object.id(), object.meta()));
    }
    let pack = Arc::clone(&view.owner).downcast::<PackObject>().ok()?;
    let len = view.layout.len();
    // An empty array of a pack is excluded, because it may have the address of another array.
    let is_whole = len > 0 && view.layout.extent().ok()? == (0, len);
    let offset = view.address.checked_sub(pack.whole().span().ok()?.address())?;
    let is_match = |member: &PackMember| member.offset as u64 == offset && member.len == len;
    let found = pack.members().map(|(_, member)| member).find(|member| is_match(member))?;
    (is_whole && client.is_source_of(pack.whole())).then(|| (found.id, found.meta.clone()))
}

/// A pack: an object of the store that contains several arrays in one allocation, as a mapping of names to arrays. The
/// order is that in which the arrays were put.
///
/// >>> import numpy
/// >>> from wholemem import store
/// >>> client = store.Client()
/// >>> version = client.put("model", {"weight": numpy.ones((2, 3)), "bias": numpy.zeros(3)})
/// >>> model = client.get("model")
/// >>> list(model), model["weight"].shape
/// (['weight', 'bias'], (2, 3))
/// >>> model["bias"].data_ptr() == client.get("model/bias").data_ptr()
/// True
#[pyclass(frozen, mapping, module = "wholemem.store")]
#[derive(Debug)]
pub(crate) struct Pack {
    pack: Arc<PackObject>,
    name: String,
    /// The names of the pack's arrays, without the name of the pack, in the order in which the arrays were put.
    members: Vec<String>,
    dl_device: DlDevice,
}

impl Pack {
    fn new(pack: PackObject) -> Result<Self, Exception> {
        let (name, dl_device) = (pack.whole().entry()?.name, DlDevice::of(&pack.whole().device()));
        let own = format!("{name}/");
        let mut members: Vec<(usize, &str)> =
            pack.members().map(|(name, member)| (member.number, name)).collect();
        members.sort_unstable();
        let short = |name: &str| name.strip_prefix(&own).unwrap_or(name).to_owned();
        let members = members.into_iter().map(|(_, name)| short(name)).collect();
        Ok(Self { pack: Arc::new(pack), name, members, dl_device })
    }

    /// Finds an array of the pack by its name, and returns the array's full name and its place in the pack.
    fn find(&self, name: &str) -> Option<(String, &PackMember)> {
        let full = format!("{}/{name}", self.name);
        let found = [full, name.to_owned()];
        found.into_iter().find_map(|full| self.pack.member(&full).map(|member| (full.clone(), member)))
    }

    fn array(&self, name: &str) -> Result<Option<Array>, Exception> {
        let Some((full, member)) = self.find(name) else { return Ok(None) };
        let layout = description::layout_of(&member.meta, member.len)?;
        let (address, dl_device) = (self.pack.span(&full)?.address(), self.dl_device);
        let owner = Arc::clone(&self.pack);
        Ok(Some(Array::new(View { address, layout, dl_device, readonly: true, owner })))
    }

    fn require(&self, name: &str) -> Result<Array, Exception> {
        let missing = || {
            let message = format!("the pack `{}` has no array `{name}`", self.name);
            Exception::new("NotFound", message).hint("`pack.keys()` lists the names").code("no-such-name")
        };
        self.array(name)?.ok_or_else(missing)
    }
}

#[pymethods]
impl Pack {
    /// The name of the pack (an object with several arrays) in the store.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// The size of all arrays of the pack in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.pack.members().map(|(_, member)| member.len).sum()
    }

    fn __len__(&self) -> usize {
        self.members.len()
    }

    fn __contains__(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    fn __getitem__(&self, name: &str) -> PyResult<Array> {
        self.require(name).into_py()
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        PyList::new(py, &self.members)?.try_iter()
    }

    /// Returns the array with the given name from the pack, or a default value.
    ///
    /// Args:
    ///     name: The name without the name of the pack.
    ///     default: The result if there is no such array.
    #[pyo3(signature = (name, default=None))]
    fn get<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        default: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self.array(name).into_py()? {
            Some(array) => Ok(Some(Bound::new(py, array)?.into_any())),
            None => Ok(default),
        }
    }

    /// Returns the names of the arrays of the pack.
    fn keys(&self) -> Vec<String> {
        self.members.clone()
    }

    /// Returns the arrays of the pack.
    fn values(&self) -> PyResult<Vec<Array>> {
        self.members.iter().map(|name| self.require(name)).collect::<Result<_, _>>().into_py()
    }

    /// Returns the names of the pack's arrays, each with its array.
    fn items(&self) -> PyResult<Vec<(String, Array)>> {
        let items = self.members.iter().map(|name| Ok((name.clone(), self.require(name)?)));
        items.collect::<Result<_, Exception>>().into_py()
    }

    fn __repr__(&self) -> String {
        format!("Pack(name='{}', arrays={}, nbytes={})", self.name, self.members.len(), self.nbytes())
    }
}
