//! The operands of gather and scatter besides the table: indices and a row buffer.

use wholemem_hal::{Span, Stream};

use super::plan::{IndexOperand, RowBufferOperand};
use crate::abi::IndexType;
use crate::{Dtype, Result};
use wholemem_os::width::to_usize;

/// The handling of bad indices, which name no row. In either case no row of the table is accessed, and a gather zeroes the row of
/// the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum OnBadIndex {
    /// Bad indices are reported: the smallest position of one is recorded, and returned as an error by the next call or by
    /// [`check`](crate::WholeTensor::check).
    #[default]
    Note,
    /// Bad indices are ignored, and not reported as an error.
    Skip,
}

/// The order in which a scatter writes rows to the same destination row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Order {
    /// No defined order: if several rows have the same destination, each of its elements comes from one of them. If rows are
    /// multiples of 16 bytes, each block of 16 bytes comes from one row.
    #[default]
    Any,
    /// The order as if the ranks ran one after the other, each in the order of positions: the last row remains, and sums are the
    /// same in every run. The call is collective and waits for the result.
    Fixed,
}

/// Row indices of a gather or scatter, in memory that the device can access.
#[derive(Debug, Clone)]
pub struct Indices {
    pub(crate) span: Span,
    pub(crate) kind: IndexType,
    pub(crate) on_bad: OnBadIndex,
}

impl Indices {
    /// Creates row indices of four bytes each from all of `span`.
    #[must_use]
    pub fn i32(span: Span) -> Self {
        Self { span, kind: IndexType::I32, on_bad: OnBadIndex::Note }
    }

    /// Creates row indices of eight bytes each from all of `span`.
    #[must_use]
    pub fn i64(span: Span) -> Self {
        Self { span, kind: IndexType::I64, on_bad: OnBadIndex::Note }
    }

    /// Returns these indices with another handling of bad indices (indices that name no row).
    #[must_use]
    pub fn on_bad(self, on_bad: OnBadIndex) -> Self {
        Self { on_bad, ..self }
    }

    /// Reads the index at a position, after the work that was enqueued on the stream.
    pub(super) fn read(&self, stream: &Stream, position: u64) -> Result<i64> {
        let mut bytes = [0; 8];
        let bytes = &mut bytes[..self.kind.len()];
        let at = to_usize(position) * self.kind.len();
        stream.read(&self.span.part(at, bytes.len())?, bytes)?;
        Ok(self.kind.decode(bytes)[0])
    }

    pub(super) fn operand(&self) -> IndexOperand {
        IndexOperand { address: self.span.address(), len: self.span.len(), kind: self.kind }
    }

    /// Returns the number of indices.
    #[must_use]
    pub fn count(&self) -> u64 {
        (self.span.len() / self.kind.len()) as u64
    }
}

/// Rows at a constant stride in memory that the device can access: the output of a gather, or the input of a scatter.
#[derive(Debug, Clone)]
pub struct RowBuffer {
    pub(crate) span: Span,
    pub(crate) dtype: Dtype,
    pub(crate) stride: Option<usize>,
    pub(crate) convert: bool,
}

impl RowBuffer {
    /// Describes contiguous rows in `span`, with elements of type `dtype`.
    #[must_use]
    pub fn new(span: Span, dtype: Dtype) -> Self {
        Self { span, dtype, stride: None, convert: false }
    }

    /// Returns these rows with a stride: the number of bytes from the start of a row to the start of the next. Bytes between rows
    /// are not accessed.
    #[must_use]
    pub fn stride(self, stride: usize) -> Self {
        Self { stride: Some(stride), ..self }
    }

    /// Returns these rows with conversion, if the table has another element type: floats to floats, rounded to nearest; integers
    /// to integers, truncated to the lower bits.
    #[must_use]
    pub fn converted(self) -> Self {
        Self { convert: true, ..self }
    }

    pub(super) fn operand(&self) -> RowBufferOperand {
        let Self { span, dtype, stride, convert } = self;
        RowBufferOperand {
            address: span.address(),
            len: span.len(),
            dtype: *dtype,
            stride: *stride,
            convert: *convert,
        }
    }
}
