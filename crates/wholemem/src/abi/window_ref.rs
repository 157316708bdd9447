//! `WindowRef`: the addresses of every rank's part of a window.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The addresses of every rank's part of a window. All fields are zero if there is no window.
///
/// ```text
///   flat      | rank 0 ...... | rank 1 ...... | rank 2 ...... |   base + rank * stride: no memory is read to find a part
///             ^ base          ^ base + stride
///
///   table     [ part 0, part 1, part 2 ]                          for memory that wholemem did not allocate
///                + base  + base  + base
/// ```
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, IntoBytes, FromBytes, Immutable, KnownLayout)]
pub struct WindowRef {
    /// The address of rank 0's part of the window. If there is a table, the offset that is added to each address in the table.
    pub base: u64,
    /// The number of bytes from one rank's part of the window to the next rank's part.
    pub stride: u64,
    /// The address of a table with the address of each rank's part of the window, if the parts are not `stride` bytes apart;
    /// otherwise zero.
    pub table: u64,
}

layout!(WindowRef: 24 { base: 0, stride: 8, table: 16 });

impl WindowRef {
    /// Returns true if this reference is to no window.
    ///
    /// ```
    /// use wholemem::WindowRef;
    ///
    /// let window = WindowRef { base: 0x1000_0000, stride: 0x100_0000, table: 0 };
    /// assert!(!window.is_none());
    /// assert_eq!(window.base + 3 * window.stride, 0x1300_0000); // where rank 3's part begins
    /// ```
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}
