//! How many threads run a kernel, by what it is asked.
//!
//! Host functions take the whole request in one call and do not look at the shape.

use wholemem_hal::LaunchShape;

use crate::ops::plan::Request;

/// Threads of a block.
const THREADS: u32 = 256;

/// Bytes that a thread moves at a time, and how many such pieces it has under way.
const PIECE: u64 = 16;
const PIECES: u64 = 4;

/// The most blocks of a line.
const MOST_BLOCKS: u64 = (1 << 31) - 1;

/// The shape for a request: enough blocks that each thread has four pieces to move.
pub(crate) fn shape(request: &Request) -> LaunchShape {
    let (rows, per_row) = match request {
        Request::Rows(rows) => (rows, rows.row_len.div_ceil(PIECE)),
        Request::Elements(request) => (&request.rows, request.elements),
    };
    let blocks = rows.count.saturating_mul(per_row).div_ceil(u64::from(THREADS) * PIECES);
    LaunchShape::line(u32::try_from(blocks.clamp(1, MOST_BLOCKS)).unwrap_or(1), THREADS)
}
