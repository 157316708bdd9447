//! The operands of gather and scatter beside the table: indices and a buffer of rows.

use wholemem_hal::{Span, Stream};

use super::plan::{DensePlace, IndexPlace};
use crate::abi::IndexType;
use crate::{Dtype, Result};
use wholemem_os::width::to_usize;

/// What becomes of an index that names no row. Either way nothing is read or written for it, but that a gather zeroes
/// its row of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum OnBadIndex {
    /// The smallest position is noted, and is the error of the next call or of [`check`](crate::WholeTensor::check).
    #[default]
    Note,
    /// Nobody is told.
    Skip,
}

/// What becomes of rows that are scattered to the same place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Order {
    /// Each element is one of theirs, and of rows that are multiples of 16 bytes each 16 bytes are. Sums are made in any
    /// order.
    #[default]
    Any,
    /// As if the ranks came one after the other, and the positions of each in order: the last row stays, and sums are
    /// the same in every run. Collective, and the call waits.
    Fixed,
}

/// Indices of rows, in memory that the device reaches.
#[derive(Debug, Clone)]
pub struct Indices {
    pub(crate) span: Span,
    pub(crate) kind: IndexType,
    pub(crate) on_bad: OnBadIndex,
}

impl Indices {
    /// All four-byte numbers of `span`.
    #[must_use]
    pub fn i32(span: Span) -> Self {
        Self { span, kind: IndexType::I32, on_bad: OnBadIndex::Note }
    }

    /// All eight-byte numbers of `span`.
    #[must_use]
    pub fn i64(span: Span) -> Self {
        Self { span, kind: IndexType::I64, on_bad: OnBadIndex::Note }
    }

    /// The same indices, with another treatment of bad ones.
    #[must_use]
    pub fn on_bad(self, on_bad: OnBadIndex) -> Self {
        Self { on_bad, ..self }
    }

    /// The index at a position that there is. It waits for the stream.
    pub(super) fn read(&self, stream: &Stream, position: u64) -> Result<i64> {
        let mut bytes = [0; 8];
        let bytes = &mut bytes[..self.kind.len()];
        let at = to_usize(position) * self.kind.len();
        stream.read(&self.span.part(at, bytes.len())?, bytes)?;
        Ok(self.kind.decode(bytes)[0])
    }

    pub(super) fn place(&self) -> IndexPlace {
        IndexPlace { address: self.span.address(), len: self.span.len(), kind: self.kind }
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        (self.span.len() / self.kind.len()) as u64
    }
}

/// Rows at equal distances, in memory that the device reaches: what a gather writes and a scatter reads.
#[derive(Debug, Clone)]
pub struct RowBuffer {
    pub(crate) span: Span,
    pub(crate) dtype: Dtype,
    pub(crate) stride: Option<usize>,
    pub(crate) convert: bool,
}

impl RowBuffer {
    /// Rows of elements of a type, one directly after the other.
    #[must_use]
    pub fn new(span: Span, dtype: Dtype) -> Self {
        Self { span, dtype, stride: None, convert: false }
    }

    /// The same rows, `stride` bytes from the beginning of one to that of the next. What lies between is not touched.
    #[must_use]
    pub fn stride(self, stride: usize) -> Self {
        Self { stride: Some(stride), ..self }
    }

    /// The same rows, converted on their way if the table's elements are of another type: floats to floats, rounded to
    /// the nearest; integers to integers, of which the lower bits stay.
    #[must_use]
    pub fn converted(self) -> Self {
        Self { convert: true, ..self }
    }

    pub(super) fn place(&self) -> DensePlace {
        let Self { span, dtype, stride, convert } = self;
        DensePlace {
            address: span.address(),
            len: span.len(),
            dtype: *dtype,
            stride: *stride,
            convert: *convert,
        }
    }
}
