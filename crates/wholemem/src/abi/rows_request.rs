//! The requests of gather and scatter: the first argument of their kernels.

use super::GlobalRef;
use crate::dtype::Dtype;

/// The type of indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IndexType {
    /// Signed, four bytes.
    I32,
    /// Signed, eight bytes.
    I64,
}

impl IndexType {
    /// The length of an index in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "an index is never empty")]
    pub fn len(self) -> usize {
        match self {
            Self::I32 => 4,
            Self::I64 => 8,
        }
    }

    /// Decodes indices from memory.
    pub(crate) fn decode(self, bytes: &[u8]) -> Vec<i64> {
        match self {
            Self::I32 => bytes.as_chunks().0.iter().map(|index| i32::from_ne_bytes(*index).into()).collect(),
            Self::I64 => bytes.as_chunks().0.iter().map(|index| i64::from_ne_bytes(*index)).collect(),
        }
    }
}

/// A copy of rows between a table and a dense array, as bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowsRequest {
    /// The table.
    pub table: GlobalRef,
    /// The address of the indices.
    pub indices: u64,
    /// The number of indices.
    pub count: u64,
    /// The address of the dense array, which a gather writes and a scatter reads.
    pub rows: u64,
    /// Bytes from one row to the next in the dense array.
    pub rows_stride: u64,
    /// Bytes of a row in the table.
    pub row_len: u64,
    /// The address of the record of bad indices, four words, of which the first becomes the smallest position of a bad index;
    /// zero for no record.
    pub bad: u64,
}

const _: () = assert!(size_of::<RowsRequest>() == RowsRequest::LEN);

impl RowsRequest {
    /// Its length in bytes.
    pub const LEN: usize = 112;

    /// Encodes it as a kernel reads it.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let Self { table, indices, count, rows, rows_stride, row_len, bad } = self;
        let mut bytes = [0; Self::LEN];
        bytes[..64].copy_from_slice(&table.to_bytes());
        for (place, word) in
            bytes[64..].chunks_exact_mut(8).zip([indices, count, rows, rows_stride, row_len, bad])
        {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    /// Decodes a request from the first bytes; `None` if there are too few.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (table, words) = bytes.split_first_chunk::<64>()?;
        let word = |at: usize| Some(u64::from_ne_bytes(words.get(at * 8..at * 8 + 8)?.try_into().ok()?));
        Some(Self {
            table: GlobalRef::from_bytes(table),
            indices: word(0)?,
            count: word(1)?,
            rows: word(2)?,
            rows_stride: word(3)?,
            row_len: word(4)?,
            bad: word(5)?,
        })
    }
}

/// A copy of rows element by element, with conversion or addition.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ElementsRequest {
    /// The rows.
    pub rows: RowsRequest,
    /// The number of elements of a row.
    pub elements: u64,
    /// The type of the table's elements.
    pub table_dtype: u32,
    /// The type of the dense array's elements.
    pub rows_dtype: u32,
}

const _: () = assert!(size_of::<ElementsRequest>() == ElementsRequest::LEN);

impl ElementsRequest {
    /// Its length in bytes.
    pub const LEN: usize = 128;

    /// Encodes it as a kernel reads it.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..112].copy_from_slice(&self.rows.to_bytes());
        bytes[112..120].copy_from_slice(&self.elements.to_ne_bytes());
        bytes[120..124].copy_from_slice(&self.table_dtype.to_ne_bytes());
        bytes[124..].copy_from_slice(&self.rows_dtype.to_ne_bytes());
        bytes
    }

    /// Decodes a request; `None` if there are too few bytes.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (rows, rest) = bytes.split_at_checked(RowsRequest::LEN)?;
        let (elements, types) = rest.split_first_chunk::<8>()?;
        let (table, rest) = types.split_first_chunk::<4>()?;
        let (dense, _) = rest.split_first_chunk::<4>()?;
        Some(Self {
            rows: RowsRequest::from_bytes(rows)?,
            elements: u64::from_ne_bytes(*elements),
            table_dtype: u32::from_ne_bytes(*table),
            rows_dtype: u32::from_ne_bytes(*dense),
        })
    }

    /// The types of the table's and of the dense array's elements.
    #[must_use]
    pub fn dtypes(&self) -> Option<(Dtype, Dtype)> {
        Some((Dtype::from_code(self.table_dtype)?, Dtype::from_code(self.rows_dtype)?))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn requests_are_read_as_they_were_written(words: [u64; 9], types: [u32; 2]) {
            let [base, stride, indices, count, rows, rows_stride, row_len, bad, elements] = words;
            let table = GlobalRef::continuous(base, count, stride);
            let rows = RowsRequest { table, indices, count, rows, rows_stride, row_len, bad };
            prop_assert_eq!(RowsRequest::from_bytes(&rows.to_bytes()), Some(rows));
            let request = ElementsRequest { rows, elements, table_dtype: types[0], rows_dtype: types[1] };
            prop_assert_eq!(ElementsRequest::from_bytes(&request.to_bytes()), Some(request));
            prop_assert_eq!(ElementsRequest::from_bytes(&request.to_bytes()[..127]), None);
        }
    }
}
