//! The requests of gather and scatter, which are the first argument of their kernels.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes};

use super::GlobalRef;
use crate::dtype::Dtype;

/// A gather or scatter that copies rows as bytes between a table and a dense array.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, IntoBytes, FromBytes, Immutable, KnownLayout)]
pub struct RowsRequest {
    /// The table that a gather reads and a scatter writes.
    pub table: GlobalRef,
    /// The address of the row indices, which are signed integers of four or eight bytes.
    pub indices: u64,
    /// The number of row indices.
    pub count: u64,
    /// The address of the dense array, which a gather writes and a scatter reads.
    pub rows: u64,
    /// The number of bytes from one row to the next in the dense array.
    pub rows_stride: u64,
    /// The number of bytes in a row of the table.
    pub row_len: u64,
    /// The address of the record in which kernels store the first index that names no row: a `u64` for each `BadIndexWord`; zero
    /// for no record.
    pub bad: u64,
}

layout!(RowsRequest: 112 {
    table: 0, indices: 64, count: 72, rows: 80, rows_stride: 88, row_len: 96, bad: 104,
});

/// A gather, scatter or scatter-add that handles rows element by element, because it converts or adds elements.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, IntoBytes, TryFromBytes, Immutable, KnownLayout)]
pub struct ElementsRequest {
    /// The rows to copy, convert or add.
    pub rows: RowsRequest,
    /// The number of elements in a row.
    pub elements: u64,
    /// The type of the table's elements.
    pub table_dtype: Dtype,
    /// The type of the dense array's elements.
    pub rows_dtype: Dtype,
}

layout!(ElementsRequest: 128 { rows: 0, elements: 112, table_dtype: 120, rows_dtype: 124 });

/// The integer type of row indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IndexType {
    /// A signed integer of four bytes.
    I32,
    /// A signed integer of eight bytes.
    I64,
}

impl IndexType {
    /// Returns the length of one index in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "an index is never empty")]
    pub fn len(self) -> usize {
        match self {
            Self::I32 => 4,
            Self::I64 => 8,
        }
    }

    /// Returns the integer type of indices of `len` bytes; `None` if there is no such type.
    pub(crate) fn of_len(len: u32) -> Option<Self> {
        [Self::I32, Self::I64].into_iter().find(|kind| kind.len() == len as usize)
    }

    /// Decodes the indices in `bytes`.
    pub(crate) fn decode(self, bytes: &[u8]) -> Vec<i64> {
        match self {
            Self::I32 => bytes.as_chunks().0.iter().map(|index| i32::from_ne_bytes(*index).into()).collect(),
            Self::I64 => bytes.as_chunks().0.iter().map(|index| i64::from_ne_bytes(*index)).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_with_a_type_that_does_not_exist_is_not_read() {
        let table = GlobalRef::continuous(4096, 10, 32);
        let rows = RowsRequest { table, indices: 1, count: 2, rows: 3, rows_stride: 4, row_len: 5, bad: 6 };
        let (table_dtype, rows_dtype) = (Dtype::Bf16, Dtype::F64);
        let request = ElementsRequest { rows, elements: 7, table_dtype, rows_dtype };
        let mut bytes = request.as_bytes().to_vec();
        assert_eq!(ElementsRequest::try_read_from_bytes(&bytes).ok(), Some(request));
        assert!(ElementsRequest::try_read_from_bytes(&bytes[..127]).is_err());
        bytes[124] = 200;
        assert!(ElementsRequest::try_read_from_bytes(&bytes).is_err());
    }

    #[test]
    fn an_index_has_four_or_eight_bytes() {
        assert_eq!([4, 8].map(IndexType::of_len), [Some(IndexType::I32), Some(IndexType::I64)]);
        assert_eq!([0, 2, 16].map(IndexType::of_len), [None; 3]);
    }
}
