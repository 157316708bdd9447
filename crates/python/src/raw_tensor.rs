//! The one form in which gathers, scatters and collectives take a tensor, whichever framework it belongs to.
//!
//! | source | made by | what keeps the memory |
//! |---|---|---|
//! | DLPack, buffers, raw addresses in numpy's or CUDA's interface | [`RawTensor::of`] a [`View`] | the view's owner, until the work has run |
//! | the C exchange API of a framework | [`Exchange::look`](crate::array::Exchange::look) | the caller, and the framework's stream-ordered allocator |
//!
//! Device, rights, shape, strides and address are checked here and nowhere else. The checks allocate nothing unless they
//! fail: a call from torch makes them before every launch.

use std::sync::Arc;

use wholemem_hal::{Device, Rights, Span};
use wholemem_os::width::to_usize;

use crate::array::{Element, Layout, Owner, Place, View, are_contiguous, extent_of};
use crate::communicator::CommState;
use crate::error::Raised;

/// An address with a layout, a type and a device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawTensor<'a> {
    /// The address of the first element. Zero if there is no memory.
    pub(crate) address: u64,
    pub(crate) shape: &'a [i64],
    /// In elements. Empty if the elements are contiguous.
    pub(crate) stride: &'a [i64],
    pub(crate) dtype: Element,
    pub(crate) device: Place,
    readonly: bool,
    /// Keeps the memory; `None` if the caller does.
    owner: Option<&'a Owner>,
}

impl<'a> RawTensor<'a> {
    /// The memory of a view, which its owner keeps.
    pub(crate) fn of(view: &'a View) -> Self {
        let View { address, layout: Layout { element, shape, strides }, place, readonly, owner } = view;
        let stride: &[i64] = if view.layout.is_contiguous() { &[] } else { strides };
        let (owner, readonly) = (Some(owner), *readonly);
        Self { address: *address, shape, stride, dtype: *element, device: *place, readonly, owner }
    }

    /// Memory that only the caller keeps.
    ///
    /// # Safety
    /// `device` reaches all elements, for reading and writing, until all work has run that is enqueued with a
    /// [span](Self::span) of this tensor, and no `&` or `&mut` to them is used meanwhile. An address of zero stands for no
    /// memory.
    #[inline]
    pub(crate) unsafe fn borrowed(
        address: u64,
        shape: &'a [i64],
        stride: &'a [i64],
        dtype: Element,
        device: Place,
    ) -> Self {
        let stride = if are_contiguous(shape, stride) { &[] } else { stride };
        Self { address, shape, stride, dtype, device, readonly: false, owner: None }
    }

    /// How many elements there are.
    #[inline]
    pub(crate) fn count(&self) -> usize {
        self.shape.iter().map(|len| usize::try_from(*len).unwrap_or(0)).product()
    }

    /// How many bytes the elements take without gaps.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.count() * self.dtype.len()
    }

    /// The memory as work of the communicator's device takes it. `what` names the tensor in errors.
    ///
    /// # Errors
    /// `WrongDevice`, `ReadOnly`; `WrongValue` if the tensor has no memory.
    #[inline]
    pub(crate) fn span(&self, what: &str, state: &CommState, rights: Rights) -> Result<Span, Raised> {
        let device = state.comm.device();
        let Some(owner) = self.owner else {
            let is_reached = self.device == state.place || self.device.is_reached_by(device);
            let (address, len) = self.checked_range(what, device, is_reached, rights)?;
            // SAFETY: the caller of `borrowed` guarantees that the device reaches all elements until the work has run, and that
            // no reference to them is used meanwhile; the range holds the elements and what lies between them.
            return unsafe { state.borrowed_memory.part(address, len) };
        };
        self.owned_span(what, device, owner, rights)
    }

    /// The same for work of any device, of memory that an owner keeps.
    fn owned_span(&self, what: &str, device: &Device, owner: &Owner, rights: Rights) -> Result<Span, Raised> {
        let is_reached = self.device.is_reached_by(device);
        let (address, len) = self.checked_range(what, device, is_reached, rights)?;
        let rights = if self.readonly { Rights::Read } else { Rights::ReadWrite };
        // SAFETY: the producer of the view guarantees that the device reaches the elements while the owner lives. Python's
        // arrays are pointers, so that no reference to the elements exists.
        Ok(unsafe { Span::foreign(device, address, len, rights, Arc::clone(owner)) })
    }

    /// Where the elements begin and how many bytes they take, gaps included, once device and rights are checked.
    #[inline]
    fn checked_range(
        &self,
        what: &str,
        device: &Device,
        is_reached: bool,
        rights: Rights,
    ) -> Result<(u64, usize), Raised> {
        // What has no elements is nowhere.
        if !is_reached && self.count() > 0 {
            let (here, there) = (self.device, Place::of(device));
            let message = format!("{what} is on {here}, and the communicator on {there}");
            return Err(Raised::new("WrongDevice", message).hint(format!("move it to {there} first")));
        }
        self.check_rights(what, rights)?;
        let (before, behind) = match self.stride {
            [] => (0, self.len()),
            stride => extent_of(self.dtype, self.shape, stride)?,
        };
        if self.address == 0 && behind > 0 {
            let message = format!("{what} has no memory");
            return Err(Raised::new("WrongValue", message).hint("give one whose storage was not freed"));
        }
        Ok((self.address - before as u64, before + behind))
    }

    #[inline]
    fn check_rights(&self, what: &str, rights: Rights) -> Result<(), Raised> {
        if !self.readonly || rights != Rights::ReadWrite {
            return Ok(());
        }
        let message = format!("{what} would be written, and is read-only");
        Err(Raised::new("ReadOnly", message).hint("give an array that can be written"))
    }

    /// # Errors
    /// `WrongStride` unless the elements are contiguous.
    #[inline]
    pub(crate) fn check_contiguous(&self, what: &str, rights: Rights) -> Result<(), Raised> {
        if self.stride.is_empty() {
            return Ok(());
        }
        let message =
            format!("{what} is not contiguous: strides {:?} of shape {:?}", self.stride, self.shape);
        Err(Raised::new("WrongStride", message).hint(instead_of_gaps(rights)))
    }

    /// The bytes from one row to the next, where the rows are what follows `dims` dimensions of `row_len` bytes each.
    ///
    /// # Errors
    /// `WrongStride` unless each row is contiguous, and, behind other than one dimension, all of them are.
    pub(crate) fn row_stride(
        &self,
        what: &str,
        dims: usize,
        row_len: usize,
        rights: Rights,
    ) -> Result<usize, Raised> {
        let ([count, inner @ ..], [stride, inner_stride @ ..], 1) = (self.shape, self.stride, dims) else {
            self.check_contiguous(what, rights)?;
            return Ok(row_len);
        };
        if *count <= 1 && are_contiguous(inner, inner_stride) {
            return Ok(row_len);
        }
        let bytes = usize::try_from(*stride).ok().and_then(|stride| stride.checked_mul(self.dtype.len()));
        match bytes {
            Some(bytes) if bytes >= row_len.max(1) && are_contiguous(inner, inner_stride) => Ok(bytes),
            _ => {
                let (stride, shape) = (self.stride, self.shape);
                let message = format!("the rows of {what} have gaps: strides {stride:?} of shape {shape:?}");
                Err(Raised::new("WrongStride", message).hint(instead_of_gaps(rights)))
            }
        }
    }

    /// # Errors
    /// `WrongValue` unless the shape is `outer` followed by `inner`.
    #[inline]
    pub(crate) fn check_shape(&self, what: &str, outer: &[i64], inner: &[i64]) -> Result<(), Raised> {
        // Number by number: `memcmp` of no bytes at a dangling address costs a processor with masked loads 100 ns.
        let is_same = self.shape.len() == outer.len() + inner.len()
            && self.shape.iter().zip(outer.iter().chain(inner)).all(|(len, expected)| len == expected);
        if is_same {
            return Ok(());
        }
        let shape = [outer, inner].concat();
        let message = format!("{what} must have the shape {shape:?}, and has {:?}", self.shape);
        Err(Raised::new("WrongValue", message))
    }

    /// # Errors
    /// `WrongType` unless the elements are of the type of another tensor.
    #[inline]
    pub(crate) fn check_dtype(&self, what: &str, dtype: Element, other: &str) -> Result<(), Raised> {
        if self.dtype == dtype {
            return Ok(());
        }
        let message = format!("{what} holds {}, and {other} {}", self.dtype.name, dtype.name);
        Err(Raised::new("WrongType", message).hint(format!("convert it to {} first", dtype.name)))
    }
}

impl View {
    /// The memory as work of `device` takes it.
    pub(crate) fn span(&self, what: &str, device: &Device, rights: Rights) -> Result<Span, Raised> {
        RawTensor::of(self).owned_span(what, device, &self.owner, rights)
    }

    /// An error unless the elements are contiguous and may be written.
    pub(crate) fn check_writable(&self, what: &str) -> Result<(), Raised> {
        let raw = RawTensor::of(self);
        raw.check_rights(what, Rights::ReadWrite)?;
        raw.check_contiguous(what, Rights::ReadWrite)
    }

    /// An error unless the elements are contiguous, to be read.
    pub(crate) fn check_contiguous(&self, what: &str) -> Result<(), Raised> {
        RawTensor::of(self).check_contiguous(what, Rights::Read)
    }
}

/// What can be done about a tensor with gaps. A contiguous copy is not the memory that was to be written.
fn instead_of_gaps(rights: Rights) -> &'static str {
    match rights {
        Rights::None | Rights::Read => "make it contiguous first",
        Rights::ReadWrite => "give one without gaps, and copy from it",
    }
}

/// All memory that a device reaches and that callers keep: one span, made once, so that a launch allocates no owner.
#[derive(Debug)]
pub(crate) struct BorrowedMemory {
    /// Every address of the device. It never leaves this type as a whole.
    all: Span,
}

impl BorrowedMemory {
    pub(crate) fn new(device: &Device) -> Self {
        // SAFETY: nothing is reached through the whole span: `part` is its only use, and the caller of `part` guarantees for
        // the part that the device reaches it and that no reference to it is used.
        let all = unsafe { Span::foreign(device, 0, usize::MAX, Rights::ReadWrite, Arc::new(())) };
        Self { all }
    }

    /// `len` bytes at an address.
    ///
    /// # Errors
    /// `OutOfRange` for bytes beyond the last address.
    ///
    /// # Safety
    /// The device reaches the bytes, for reading and writing, until all work has run that uses the span, its parts or its
    /// clones; and no `&` or `&mut` to them is used meanwhile.
    unsafe fn part(&self, address: u64, len: usize) -> Result<Span, Raised> {
        Ok(self.all.part(to_usize(address), len)?)
    }
}
