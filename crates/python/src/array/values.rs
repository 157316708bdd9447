//! The values of an array through numpy: indexing, conversion to numbers, comparison and printing.
//!
//! numpy is imported by the first call that needs it; nothing else requires it. Values on a GPU are copied to the host, and
//! the call waits for the work that is enqueued on the array. numpy has no `bfloat16`: such values are converted to
//! `float32`, which represents all of them.

use pyo3::exceptions::PyModuleNotFoundError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyEllipsis, PyInt, PySlice, PyTuple};
use wholemem_hal::Rights;

use super::element::Element;
use super::layout::Layout;
use super::view::{DlDevice, View};
use super::{Array, FrameworkStream};
use crate::error::{Exception, IntoPyResult};
use crate::number::signed;
use crate::wait::run_blocking;

/// The size in bytes above which an array on a GPU is printed without its values, because printing copies all of them.
const PRINTED_FROM_GPU: usize = 1 << 20;

/// Returns the view that an index expression (numpy's basic indexing) selects, and whether it is a single element.
fn indexed(view: &View, key: &Bound<'_, PyAny>) -> PyResult<(View, bool)> {
    let py = key.py();
    let key = key.cast::<PyTuple>().cloned().or_else(|_| PyTuple::new(py, [key]))?;
    let (dims, is_ellipsis) =
        (view.layout.shape.len(), |item: &Bound<'_, PyAny>| item.is_instance_of::<PyEllipsis>());
    let ellipses = key.iter().filter(is_ellipsis).count();
    let used = key.iter().filter(|item| !item.is_none() && !is_ellipsis(item)).count();
    if used > dims || ellipses > 1 {
        let message = format!("{used} indices and {ellipses} ellipses do not fit {dims} dimensions");
        return Err(Exception::new("BadIndex", message).into());
    }
    let (mut offset, mut shape, mut strides) = (0, Vec::new(), Vec::new());
    let mut rest = view.layout.shape.iter().copied().zip(view.layout.strides.iter().copied());
    for item in &key {
        if item.is_none() {
            shape.push(1);
            strides.push(0);
        } else if is_ellipsis(&item) {
            let (lens, steps): (Vec<_>, Vec<_>) = rest.by_ref().take(dims - used).unzip();
            shape.extend(lens);
            strides.extend(steps);
        } else if let Some((len, stride)) = rest.next() {
            offset += match position(&item, len)? {
                Position::At(index) => index * stride,
                Position::Range { start, count, step } => {
                    shape.push(count);
                    // If a slice selects at most one element, its step has no effect, and `stride * step` could overflow.
                    strides.push(if count > 1 { stride * step } else { stride });
                    if count == 0 { 0 } else { start * stride }
                }
            };
        }
    }
    let (lens, steps): (Vec<_>, Vec<_>) = rest.unzip();
    shape.extend(lens);
    strides.extend(steps);
    let is_element = shape.is_empty() && ellipses == 0;
    let element = view.layout.element;
    let layout = Layout::strided(element, shape, strides).into_py()?;
    // Every index is within its dimension, so the first selected element is inside the array.
    let bytes = offset * i64::try_from(element.len()).unwrap_or(1);
    let address = view.address.checked_add_signed(bytes).expect("the array is inside the address space");
    Ok((View { address, layout, ..view.clone() }, is_element))
}

/// The elements that an index expression selects in one dimension.
enum Position {
    At(i64),
    Range { start: i64, count: i64, step: i64 },
}

fn position(item: &Bound<'_, PyAny>, len: i64) -> PyResult<Position> {
    if let Ok(slice) = item.cast::<PySlice>() {
        let found = slice.indices(isize::try_from(len).expect("a length in memory"))?;
        return Ok(Position::Range {
            start: found.start as i64,
            count: signed(found.slicelength),
            step: found.step as i64,
        });
    }
    let is_index = !item.is_instance_of::<PyBool>()
        && (item.is_instance_of::<PyInt>() || item.hasattr("__index__")?)
        && !item.hasattr("__len__")?;
    if !is_index {
        let message = format!("an array cannot be indexed by a `{}`", item.get_type().name()?);
        let hint = "use ints and slices, or index the numpy array: `array.numpy()[...]`";
        return Err(Exception::new("WrongType", message).hint(hint).into());
    }
    let index: i64 = item.extract()?;
    let found = if index < 0 { index + len } else { index };
    if (0..len).contains(&found) {
        return Ok(Position::At(found));
    }
    let message = format!("index {index} is out of range for a dimension of {len} elements");
    Err(Exception::new("BadIndex", message).into())
}

impl View {
    /// Returns a view of the same elements in host memory. Elements on a GPU are copied, after the work that is enqueued on the
    /// stream.
    fn on_host(&self, py: Python<'_>, last: Option<FrameworkStream>) -> PyResult<Self> {
        if self.dl_device.is_host() {
            return Ok(self.clone());
        }
        let device = self.dl_device.device().into_py()?;
        let (before, behind) = self.layout.extent().into_py()?;
        let span = self.span("the array", &device, Rights::Read).into_py()?;
        let stream = last.unwrap_or_else(|| FrameworkStream::default_of(&device)).stream();
        let mut bytes = vec![0; before + behind];
        run_blocking(py, || stream.read(&span, &mut bytes))?;
        let layout = Layout::contiguous(Element::BYTE, &[signed(bytes.len())]).into_py()?;
        let copy = Self::zeroed(layout).into_py()?;
        copy.write_bytes("the copy", &bytes).into_py()?;
        let address = copy.address + before as u64;
        Ok(Self {
            address,
            layout: self.layout.clone(),
            dl_device: DlDevice::CPU,
            readonly: true,
            owner: copy.owner,
        })
    }
}

impl Array {
    /// Returns the elements of the array as a numpy array. `bfloat16` is converted to `float32`.
    fn values<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let numpy = py.import("numpy").map_err(|error| {
            if !error.is_instance_of::<PyModuleNotFoundError>(py) {
                return error;
            }
            let message = "reading the values of an array requires numpy, which is not installed";
            Exception::new("Unsupported", message)
                .hint("install numpy, or use torch: `torch.from_dlpack(array)`")
                .into()
        })?;
        let view = self.view.on_host(py, self.last.get(py))?;
        let element = view.layout.element;
        let (view, is_widened) = match element.bfloat16_bits() {
            Some(half) => (View { layout: Layout { element: half, ..view.layout.clone() }, ..view }, true),
            None => (view, false),
        };
        let values = Self::numpy(&Bound::new(py, Self::new(view))?)?;
        if !is_widened {
            return Ok(values);
        }
        let wide = values.call_method1("astype", (numpy.getattr("uint32")?,))?;
        let wide = wide.call_method1("__lshift__", (16,))?;
        // For an array without dimensions, numpy's `__lshift__` returns a scalar, which `asarray` converts back to an array.
        numpy.call_method1("asarray", (wide,))?.call_method1("view", (numpy.getattr("float32")?,))
    }

    /// Returns the values of the array as numpy prints them.
    fn format_values(&self, py: Python<'_>) -> PyResult<String> {
        let values = self.values(py)?;
        let kwargs = pyo3::types::PyDict::new(py);
        kwargs.set_item("separator", ", ")?;
        kwargs.set_item("prefix", "Array(")?;
        py.import("numpy")?.call_method("array2string", (values,), Some(&kwargs))?.extract()
    }
}

#[pymethods]
impl Array {
    /// Selects a part of the array as a view of the same memory, or as a number if a single element is selected.
    ///
    /// Args:
    ///     key: Ints, slices, ``...`` and ``None``, as for numpy's basic indexing.
    ///
    /// Returns:
    ///     An :class:`Array` that shares the memory, or a Python number.
    ///
    /// Raises:
    ///     wholemem.errors.BadIndex: An index is out of range, or there are too many indices.
    ///     wholemem.errors.WrongType: The key is not an int, slice, ``...`` or ``None``.
    fn __getitem__<'py>(&self, py: Python<'py>, key: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let (view, is_element) = indexed(&self.view, key)?;
        let selected = self.with_view(py, view, self.is_lent).into_py()?;
        if is_element { selected.item(py) } else { Ok(Bound::new(py, selected)?.into_any()) }
    }

    fn __iter__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let (builtins, count) = (slf.py().import("builtins")?, slf.get().__len__()?);
        let numbers = builtins.call_method1("range", (count,))?;
        builtins.call_method1("map", (slf.getattr("__getitem__")?, numbers))
    }

    /// Returns the only element of the array as a Python number. An element on a GPU is copied to the host.
    ///
    /// Raises:
    ///     wholemem.errors.WrongValue: The array does not have exactly one element.
    fn item<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        if self.view.layout.count() != 1 {
            let message =
                format!("an array of {} elements cannot be converted to a number", self.view.layout.count());
            return Err(Exception::new("WrongValue", message)
                .hint("select one element, for example `array[0, 0]`")
                .into());
        }
        self.values(py)?.call_method0("item")
    }

    /// Returns the elements of the array as nested lists of Python numbers. Elements on a GPU are copied to the host.
    fn tolist<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.values(py)?.call_method0("tolist")
    }

    fn __float__(&self, py: Python<'_>) -> PyResult<f64> {
        self.item(py)?.extract()
    }

    fn __int__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        py.import("builtins")?.call_method1("int", (self.item(py)?,))
    }

    fn __bool__(&self, py: Python<'_>) -> PyResult<bool> {
        self.values(py)?.is_truthy()
    }

    /// Compares the array with another array or a number, element by element.
    ///
    /// Args:
    ///     other: An array or a number.
    ///
    /// Returns:
    ///     A numpy array of ``bool``.
    fn __eq__<'py>(&self, py: Python<'py>, other: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        self.compare(other, "equal", py)
    }

    fn __ne__<'py>(&self, py: Python<'py>, other: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        self.compare(other, "not_equal", py)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let View { layout, dl_device, readonly, .. } = &self.view;
        let only = if *readonly { ", readonly" } else { "" };
        let shape = PyTuple::new(py, &layout.shape)?;
        let properties = format!("shape={shape}, dtype={}, device={dl_device}{only}", layout.element.name);
        // `repr` does not raise: if numpy is missing or the GPU fails, the values are omitted.
        let is_shown = dl_device.is_host() || layout.len() <= PRINTED_FROM_GPU;
        match is_shown.then(|| self.format_values(py)) {
            Some(Ok(values)) => Ok(format!("Array({values}, {properties})")),
            _ => Ok(format!("Array({properties})")),
        }
    }
}

impl Array {
    fn compare<'py>(
        &self,
        other: &Bound<'py, PyAny>,
        ufunc: &str,
        py: Python<'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let values = self.values(py)?;
        let other = match other.cast::<Self>() {
            Ok(other) => other.get().values(py)?,
            Err(_) => other.clone(),
        };
        py.import("numpy")?.call_method1(ufunc, (values, other))
    }
}
