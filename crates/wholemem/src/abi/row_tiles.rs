//! How the rows of a request are divided into tiles: the second argument of the kernels of gather and scatter.

use super::IndexType;

/// How the rows of a request are cut into tiles, as `kernels/include/ops/tiles.cuh` has it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct RowTiles {
    pub(crate) tiles: u64,
    pub(crate) row_units: u64,
    pub(crate) magic: u64,
    pub(crate) shift: u32,
    pub(crate) units: u32,
    pub(crate) unit_magic: u32,
    pub(crate) parts: u32,
    pub(crate) width: u32,
    pub(crate) edges: u32,
    pub(crate) index_len: u32,
    pub(crate) reserved: u32,
}

impl RowTiles {
    pub(crate) const LEN: usize = 56;

    /// Encodes it as a kernel reads it.
    pub(crate) fn to_bytes(self) -> [u8; Self::LEN] {
        let Self {
            tiles,
            row_units,
            magic,
            shift,
            units,
            unit_magic,
            parts,
            width,
            edges,
            index_len,
            reserved,
        } = self;
        let mut bytes = [0; Self::LEN];
        let (words, halves) = bytes.split_at_mut(24);
        for (place, word) in words.chunks_exact_mut(8).zip([tiles, row_units, magic]) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        let rest = [shift, units, unit_magic, parts, width, edges, index_len, reserved];
        for (place, half) in halves.chunks_exact_mut(4).zip(rest) {
            place.copy_from_slice(&half.to_ne_bytes());
        }
        bytes
    }

    /// Decodes the type of the indices.
    pub(crate) fn index_type(bytes: &[u8]) -> Option<IndexType> {
        match u32::from_ne_bytes(bytes.get(48..52)?.try_into().ok()?) {
            4 => Some(IndexType::I32),
            8 => Some(IndexType::I64),
            _ => None,
        }
    }
}

const _: () = assert!(size_of::<RowTiles>() == RowTiles::LEN);
