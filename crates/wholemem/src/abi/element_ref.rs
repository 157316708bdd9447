//! `ElementRef`: the description of a table from which a user's kernel computes the address of any element of the table or a
//! view.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::GlobalRef;

/// The addresses of the elements of a table, from which a kernel creates a `PtrGen`.
///
/// A `GlobalRef` gives the addresses of rows, but not the length of a row, which is needed to number elements through the rows.
/// In a view of some columns, rows are shorter than the stride:
///
/// ```text
///   columns 3 and 4 of 8, of elements of 4 bytes: stride = 32, row_len = 8
///
///   memory   . . . 0 1 . . .   . . . 2 3 . . .   . . . 4 5 . . .        elements by their number in the view
/// ```
#[doc(alias = "WholeChunkedMemoryHandle")]
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, IntoBytes, FromBytes, Immutable, KnownLayout)]
pub struct ElementRef {
    /// The addresses of the table's rows.
    pub rows: GlobalRef,
    /// The number of bytes in a row: fewer than the stride in a view of some columns.
    pub row_len: u64,
}

layout!(ElementRef: 72 { rows: 0, row_len: 64 });

impl ElementRef {
    /// Returns the row of a byte and the offset in that row. Bytes are numbered through all rows as if the rows were contiguous.
    #[must_use]
    pub fn locate(&self, byte: u64) -> (u64, u64) {
        (byte / self.row_len, byte % self.row_len)
    }
}

#[cfg(test)]
mod tests {
    use wholemem_hal::{Backend, HostConfig};

    use crate::{Communicator, Dtype, TensorSpec, WholeTensor};

    #[test]
    fn the_elements_of_a_view_are_counted_in_its_own_columns() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let groups = Communicator::local(&[device]).unwrap();
        let table = WholeTensor::create(&groups[0], &TensorSpec::new(Dtype::I32, &[10, 8])).unwrap();
        let view = table.columns(3..5).unwrap().element_ref();
        assert_eq!((view.row_len, view.rows.stride), (8, 32));
        let place = |element: u64| {
            let (row, byte) = view.locate(element * 4);
            (view.rows.base + row * view.rows.stride + byte - table.global_ref().base) / 4
        };
        assert_eq!([0, 1, 2, 3].map(place), [3, 4, 11, 12]);
        assert_eq!(table.element_ref(), table.memory().element_ref());
    }
}
