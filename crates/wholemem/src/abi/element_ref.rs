//! `ElementRef`: from which a user's kernel computes the address of any element of a table or a view.
//!
//! ```text
//!   columns 3 and 4 of 8, of elements of 4 bytes: stride = 32, row_len = 8
//!
//!   memory   . . . 0 1 . . .   . . . 2 3 . . .   . . . 4 5 . . .        elements by their number in the view
//! ```
//!
//! A [`GlobalRef`] gives the addresses of rows, but not the length of a row, which is needed to number elements through the
//! rows.

use super::GlobalRef;

/// The addresses of the elements of a table: `wholemem::ElementRef` of `wholemem/global_ref.cuh`, from which a kernel creates a
/// `PtrGen`.
#[doc(alias = "WholeChunkedMemoryHandle")]
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ElementRef {
    /// The addresses of its rows.
    pub rows: GlobalRef,
    /// Bytes of a row: fewer than the stride in a view of some columns.
    pub row_len: u64,
}

const _: () = assert!(size_of::<ElementRef>() == ElementRef::LEN);

impl ElementRef {
    /// Its length in bytes.
    pub const LEN: usize = 72;

    /// The row of a byte, numbered through all rows as if they were contiguous, and its offset in that row.
    #[must_use]
    pub fn locate(&self, byte: u64) -> (u64, u64) {
        (byte / self.row_len, byte % self.row_len)
    }

    /// Encodes it as a kernel reads it.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..64].copy_from_slice(&self.rows.to_bytes());
        bytes[64..].copy_from_slice(&self.row_len.to_ne_bytes());
        bytes
    }

    /// Decodes what [`to_bytes`](Self::to_bytes) encoded.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; Self::LEN]) -> Self {
        let (mut rows, mut row_len) = ([0; 64], [0; 8]);
        rows.copy_from_slice(&bytes[..64]);
        row_len.copy_from_slice(&bytes[64..]);
        Self { rows: GlobalRef::from_bytes(&rows), row_len: u64::from_ne_bytes(row_len) }
    }
}

#[cfg(test)]
mod tests {
    use wholemem_hal::{Backend, HostConfig};

    use super::*;
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

    #[test]
    fn bytes_are_read_as_they_were_written() {
        let rows = GlobalRef::continuous(4096, 10, 32).part(1, 5, 8);
        let elements = ElementRef { rows, row_len: 8 };
        assert_eq!(ElementRef::from_bytes(&elements.to_bytes()), elements);
    }
}
