//! `RawTensor`: the common form in which gathers, scatters and collectives receive a tensor of any framework.
//!
//! | source | created by | the memory is kept alive by |
//! |---|---|---|
//! | DLPack, buffers, numpy's or CUDA's array interface | [`RawTensor::of`] a [`View`] | the view's owner, until the work has run |
//! | the C exchange API of a framework | [`Exchange::inspect`](crate::array::Exchange::inspect) | the caller, and the framework's stream-ordered allocator |
//!
//! Device, rights, shape, strides and address are checked only here. The checks allocate nothing unless they fail, because
//! calls from torch run them before every launch.

use std::sync::Arc;

use wholemem_hal::{Device, Rights, Span};

use crate::array::{DlDevice, Element, Layout, Owner, View, are_contiguous, extent_of};
use crate::communicator::CommState;
use crate::error::Exception;

/// A tensor of any framework: an address with a shape, strides, an element type and a device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawTensor<'a> {
    /// The address of the tensor's first element. Zero if the tensor has no memory.
    pub(crate) address: u64,
    pub(crate) shape: &'a [i64],
    /// The strides of the tensor in elements. Empty if the elements are contiguous.
    pub(crate) stride: &'a [i64],
    pub(crate) dtype: Element,
    pub(crate) device: DlDevice,
    readonly: bool,
    /// The owner that keeps the tensor's memory alive; `None` if the caller keeps it alive.
    owner: Option<&'a Owner>,
}

impl<'a> RawTensor<'a> {
    /// Creates a raw tensor from a view, whose owner keeps the memory alive.
    pub(crate) fn of(view: &'a View) -> Self {
        let View { address, layout: Layout { element, shape, strides }, dl_device, readonly, owner } = view;
        let stride: &[i64] = if view.layout.is_contiguous() { &[] } else { strides };
        let (owner, readonly) = (Some(owner), *readonly);
        Self { address: *address, shape, stride, dtype: *element, device: *dl_device, readonly, owner }
    }

    /// Creates a raw tensor of memory that the caller keeps alive.
    ///
    /// # Safety
    /// `device` can read and write all elements until all work that is enqueued with a [span](Self::span) of this tensor has
    /// run, and no `&` or `&mut` to them is used meanwhile. An address of zero means that there is no memory.
    #[inline]
    pub(crate) unsafe fn borrowed(
        address: u64,
        shape: &'a [i64],
        stride: &'a [i64],
        dtype: Element,
        device: DlDevice,
    ) -> Self {
        let stride = if are_contiguous(shape, stride) { &[] } else { stride };
        Self { address, shape, stride, dtype, device, readonly: false, owner: None }
    }

    /// Returns the number of elements of the tensor.
    #[inline]
    pub(crate) fn count(&self) -> usize {
        self.shape.iter().map(|len| usize::try_from(*len).unwrap_or(0)).product()
    }

    /// Returns the size of the tensor's elements in bytes, without the gaps between them.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.count() * self.dtype.len()
    }

    /// Returns the memory of the tensor as an operand of work on the communicator's device. `argument` names the tensor in
    /// errors.
    ///
    /// # Errors
    /// `WrongDevice`, `ReadOnly`; `WrongValue` if the tensor has no memory.
    #[inline]
    pub(crate) fn span(&self, argument: &str, state: &CommState, rights: Rights) -> Result<Span, Exception> {
        let device = state.comm.device();
        let Some(owner) = self.owner else {
            let is_accessible = self.device == state.dl_device || self.device.is_accessible_from(device);
            let (address, len) = self.checked_range(argument, device, is_accessible, rights)?;
            // SAFETY: the caller of `borrowed` guarantees that the device can access all elements until the work has run, and that
            // no reference to them is used meanwhile. The range covers the elements and the gaps between them.
            return Ok(unsafe { state.borrowed_memory.part(address, len) }?);
        };
        self.owned_span(argument, device, owner, rights)
    }

    /// Returns the memory of a tensor with an owner as an operand of work on any device.
    fn owned_span(
        &self,
        argument: &str,
        device: &Device,
        owner: &Owner,
        rights: Rights,
    ) -> Result<Span, Exception> {
        let is_accessible = self.device.is_accessible_from(device);
        let (address, len) = self.checked_range(argument, device, is_accessible, rights)?;
        let rights = if self.readonly { Rights::Read } else { Rights::ReadWrite };
        // SAFETY: the producer of the tensor guarantees that the device can access the elements while `owner` lives. Python
        // accesses arrays through pointers, so no reference to the elements exists.
        Ok(unsafe { Span::foreign(device, address, len, rights, Arc::clone(owner)) })
    }

    /// Checks that the device can access the tensor and that its rights suffice. Returns the tensor's first address and length in
    /// bytes, including gaps.
    #[inline]
    fn checked_range(
        &self,
        argument: &str,
        device: &Device,
        is_accessible: bool,
        rights: Rights,
    ) -> Result<(u64, usize), Exception> {
        // A tensor without elements is accepted on any device, because none of its memory is accessed.
        if !is_accessible && self.count() > 0 {
            let (here, there) = (self.device, DlDevice::of(device));
            let message = format!("{argument} is on {here}, but the communicator is on {there}");
            return Err(Exception::new("WrongDevice", message).hint(format!("move it to {there} first")));
        }
        self.check_rights(argument, rights)?;
        let (before, behind) = match self.stride {
            [] => (0, self.len()),
            stride => extent_of(self.dtype, self.shape, stride)?,
        };
        if self.address == 0 && behind > 0 {
            let message = format!("{argument} has no memory");
            return Err(
                Exception::new("WrongValue", message).hint("pass a tensor whose storage was not freed")
            );
        }
        Ok((self.address - before as u64, before + behind))
    }

    #[inline]
    fn check_rights(&self, argument: &str, rights: Rights) -> Result<(), Exception> {
        if !self.readonly || rights != Rights::ReadWrite {
            return Ok(());
        }
        let message = format!("cannot write to {argument}: it is read-only");
        Err(Exception::new("ReadOnly", message).hint("pass a writable array"))
    }

    /// Returns an error unless the elements of the tensor are contiguous.
    ///
    /// # Errors
    /// `WrongStride` unless the elements are contiguous.
    #[inline]
    pub(crate) fn check_contiguous(&self, argument: &str, rights: Rights) -> Result<(), Exception> {
        if self.stride.is_empty() {
            return Ok(());
        }
        let message = format!(
            "{argument} is not contiguous: it has strides {:?} and shape {:?}",
            self.stride, self.shape
        );
        Err(Exception::new("WrongStride", message).hint(contiguity_hint(rights)))
    }

    /// Returns the stride of the tensor's rows in bytes. The first `dims` dimensions select a row, which has `row_len` bytes.
    ///
    /// # Errors
    /// `WrongStride` unless each row is contiguous and, if `dims` is not 1, the whole tensor is.
    pub(crate) fn row_stride(
        &self,
        argument: &str,
        dims: usize,
        row_len: usize,
        rights: Rights,
    ) -> Result<usize, Exception> {
        let ([count, inner @ ..], [stride, inner_stride @ ..], 1) = (self.shape, self.stride, dims) else {
            self.check_contiguous(argument, rights)?;
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
                let message = format!(
                    "the rows of {argument} are not contiguous: it has strides {stride:?} and shape {shape:?}"
                );
                Err(Exception::new("WrongStride", message).hint(contiguity_hint(rights)))
            }
        }
    }

    /// Returns an error unless the tensor has the expected shape.
    ///
    /// # Errors
    /// `WrongValue` unless the shape is `outer` followed by `inner`.
    #[inline]
    pub(crate) fn check_shape(&self, argument: &str, outer: &[i64], inner: &[i64]) -> Result<(), Exception> {
        // Shapes are compared element by element: with masked loads, `memcmp` of zero bytes at a dangling address takes 100 ns on
        // some CPUs.
        let is_same = self.shape.len() == outer.len() + inner.len()
            && self.shape.iter().zip(outer.iter().chain(inner)).all(|(len, expected)| len == expected);
        if is_same {
            return Ok(());
        }
        let shape = [outer, inner].concat();
        let message = format!("{argument} must have the shape {shape:?}, but has {:?}", self.shape);
        Err(Exception::new("WrongValue", message))
    }

    /// Returns an error unless the tensor has the element type of another tensor.
    ///
    /// # Errors
    /// `WrongType` unless the element type is `dtype`.
    #[inline]
    pub(crate) fn check_dtype(&self, argument: &str, dtype: Element, other: &str) -> Result<(), Exception> {
        if self.dtype == dtype {
            return Ok(());
        }
        let message = format!("{argument} has the type {}, but {other} has {}", self.dtype.name, dtype.name);
        Err(Exception::new("WrongType", message).hint(format!("convert it to {} first", dtype.name)))
    }
}

impl View {
    /// Returns the memory of the view as an operand of work on `device`.
    pub(crate) fn span(&self, argument: &str, device: &Device, rights: Rights) -> Result<Span, Exception> {
        RawTensor::of(self).owned_span(argument, device, &self.owner, rights)
    }

    /// Returns an error unless the elements of the array are contiguous and writable.
    pub(crate) fn check_writable(&self, argument: &str) -> Result<(), Exception> {
        let raw = RawTensor::of(self);
        raw.check_rights(argument, Rights::ReadWrite)?;
        raw.check_contiguous(argument, Rights::ReadWrite)
    }

    /// Returns an error unless the elements of the array are contiguous.
    pub(crate) fn check_contiguous(&self, argument: &str) -> Result<(), Exception> {
        RawTensor::of(self).check_contiguous(argument, Rights::Read)
    }
}

/// Returns the hint for a tensor that is not contiguous. A contiguous copy does not help if the tensor is the output.
fn contiguity_hint(rights: Rights) -> &'static str {
    match rights {
        Rights::None | Rights::Read => "make it contiguous first",
        Rights::ReadWrite => "pass a contiguous tensor, and copy from it",
    }
}
