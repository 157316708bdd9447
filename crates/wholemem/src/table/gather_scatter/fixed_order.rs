//! Scatter in a fixed order: every row is sent to the rank that owns the destination row, which applies all rows in order.
//!
//! ```text
//!   rank 0   [ row 5, row 90, row 5 ] --+--> rank 0 (rows 0..50):    5 of rank 0, 5 of rank 0, 7 of rank 1
//!   rank 1   [ row 7, row 90 ] ---------+--> rank 1 (rows 50..100): 90 of rank 0, 90 of rank 1
//! ```
//!
//! The owner reads the destination rows once, applies all updates to its copy in (rank, position) order, and writes each row back
//! once. No two writes of a kernel are to the same row, so the result does not depend on scheduling.

use std::collections::HashMap;
use std::ops::Range;

use wholemem_comm::Rank;
use wholemem_hal::{PinnedBuffer, Stream};
use wholemem_os::Deadline;

use super::plan::plan;
use super::{Indices, OnBadIndex, RowBuffer, RowOp};
use crate::communicator::{CallTerms, agree, bytes_of, exchange_terms};
use crate::dtype::{add, convert};
use crate::{Dtype, Error, Result, WholeTensor};
use wholemem_os::width::to_usize;

/// The maximum number of bytes of rows that a rank sends in one exchange of a fixed-order scatter.
const MAX_EXCHANGE_LEN: u64 = 256 << 20;

/// The rows that a rank sends in a fixed-order scatter: contiguous, in the table's element type, each with the number of its
/// destination row.
#[derive(Debug, Default)]
struct OutgoingRows {
    /// The number of the destination row of each row; `None` for an index that names no row.
    row_numbers: Vec<Option<u64>>,
    /// The first position of an index that names no row, and that index.
    bad: Option<(u64, i64)>,
    rows: Vec<u8>,
}

impl WholeTensor {
    /// Scatters or adds rows in the order of ranks and positions. Collective: a rank with invalid operands passes its error, and
    /// all ranks fail.
    pub(super) fn scatter_in_order(
        &self,
        stream: &Stream,
        op: RowOp,
        operands: Result<(&Indices, &RowBuffer)>,
    ) -> Result<()> {
        let comm = self.group().bootstrap();
        // A rank with an error takes part in the call until the exchange of terms has sent the error to all ranks.
        let on_bad = operands.as_ref().map_or(OnBadIndex::Note, |(indices, _)| indices.on_bad);
        let outgoing = self.check().and_then(|()| {
            let (indices, input) = operands?;
            self.read_operands(stream, op, indices, input)
        });
        let call = if op == RowOp::ScatterAdd { "add" } else { "put" };
        let same = || bytes_of(&self.identity());
        let terms = |outgoing: &OutgoingRows| CallTerms {
            own: vec![outgoing.row_numbers.len() as u64],
            same: same(),
        };
        let owns = exchange_terms(comm, call, outgoing.as_ref().map(terms).map_err(Clone::clone))?;
        let counts: Vec<_> = owns.into_iter().flatten().collect();
        let outgoing = outgoing?;
        let mut applied = Ok(());
        for round in rounds(&counts, (MAX_EXCHANGE_LEN / self.row_len() as u64).max(1)) {
            let own_positions = round[comm.rank().index()].clone();
            let parts = self.parts(&outgoing, own_positions);
            let parts: Vec<_> = parts.iter().map(Vec::as_slice).collect();
            let received = comm.all_to_allv(&parts)?;
            // After a failure this rank still takes part in all exchanges of rows, but applies no more rows.
            applied = applied.and_then(|()| self.apply(stream, op, &received));
        }
        agree(comm, applied)?;
        match (outgoing.bad, on_bad) {
            (Some((position, index)), OnBadIndex::Note) => {
                Err(Error::BadIndex { position, index: Some(index), rows: Some(self.row_count()) })
            }
            _ => Ok(()),
        }
    }

    /// Reads the indices and rows of a scatter from the memory of its operands.
    fn read_operands(
        &self,
        stream: &Stream,
        op: RowOp,
        indices: &Indices,
        input: &RowBuffer,
    ) -> Result<OutgoingRows> {
        let dtype = self.dtype();
        let request = plan(op, &self.table(), &indices.operand(), &input.operand(), 0)?;
        let Some(request) = request else { return Ok(OutgoingRows::default()) };
        let (count, stride) = (to_usize(request.rows().count), to_usize(request.rows().rows_stride));
        let dense_len = to_usize(self.elements()) * input.dtype.len();
        let mut index_bytes = vec![0; indices.span.len()];
        stream.read(&indices.span, &mut index_bytes)?;
        let mut dense = vec![0; (count - 1) * stride + dense_len];
        stream.read(&input.span.part(0, dense.len())?, &mut dense)?;
        let numbers = indices.kind.decode(&index_bytes);
        let row_number = |index: &i64| u64::try_from(*index).ok().filter(|row| *row < self.row_count());
        let row_numbers: Vec<_> = numbers.iter().map(row_number).collect();
        let bad = row_numbers.iter().position(Option::is_none).map(|at| (at as u64, numbers[at]));
        let contiguous: Vec<u8> =
            (0..count).flat_map(|row| &dense[row * stride..][..dense_len]).copied().collect();
        let rows = convert(&contiguous, input.dtype, dtype)
            .ok_or(Error::NotConvertible { from: input.dtype, to: dtype })?;
        Ok(OutgoingRows { row_numbers, bad, rows })
    }

    /// Encodes one message for each rank: the number of rows that this rank sends to it, their row numbers, and their
    /// bytes.
    fn parts(&self, outgoing: &OutgoingRows, positions: Range<u64>) -> Vec<Vec<u8>> {
        let partition = self.memory().partition();
        let mut row_numbers = vec![Vec::new(); partition.ranks() as usize];
        let mut rows = row_numbers.clone();
        for position in positions {
            let position = to_usize(position);
            let Some(row_number) = outgoing.row_numbers[position] else { continue };
            let owner = partition
                .owner(row_number + self.first_row())
                .expect("the number is that of a row of the tensor");
            row_numbers[owner.index()].extend(row_number.to_le_bytes());
            rows[owner.index()].extend(&outgoing.rows[position * self.row_len()..][..self.row_len()]);
        }
        let part = |(row_numbers, rows): (Vec<u8>, Vec<u8>)| {
            [&(row_numbers.len() as u64 / 8).to_le_bytes()[..], &row_numbers, &rows].concat()
        };
        row_numbers.into_iter().zip(rows).map(part).collect()
    }

    /// Copies or adds the rows that all ranks have sent to this rank's own rows, in the order of ranks.
    fn apply(&self, stream: &Stream, op: RowOp, received: &[Vec<u8>]) -> Result<()> {
        let row_len = self.row_len();
        let mut slots = HashMap::new();
        let mut row_numbers = Vec::new();
        let mut incoming = Vec::new();
        for (rank, part) in (0..).map(Rank).zip(received) {
            for (row_number, row) in entries(rank, part, row_len)? {
                let slot = *slots.entry(row_number).or_insert_with(|| {
                    row_numbers.push(row_number);
                    row_numbers.len() - 1
                });
                incoming.push((slot, row));
            }
        }
        if row_numbers.is_empty() {
            return Ok(());
        }
        let device = self.group().device();
        let index_bytes: Vec<u8> =
            row_numbers.iter().flat_map(|row_number| row_number.to_ne_bytes()).collect();
        let index_buffer = PinnedBuffer::create(device, index_bytes.len())?;
        stream.write(&index_buffer.all(), &index_bytes)?;
        let indices = Indices::i64(index_buffer.all()).on_bad(OnBadIndex::Skip);
        let buffer = PinnedBuffer::create(device, row_numbers.len() * row_len)?;
        let dense = RowBuffer::new(buffer.all(), self.dtype());
        let mut rows = vec![0; buffer.len()];
        if op == RowOp::ScatterAdd {
            self.launch(stream, RowOp::Gather, &indices, &dense, self.memory().bad_index_flag())?;
            stream.read(&buffer.all(), &mut rows)?;
        }
        merge(op, self.dtype(), &mut rows, &incoming);
        stream.write(&buffer.all(), &rows)?;
        self.launch(stream, RowOp::Scatter, &indices, &dense, self.memory().bad_index_flag())?;
        Ok(stream.synchronize(Deadline::NEVER)?)
    }
}

/// Copies or adds each row of `incoming` to its slot in `rows`, in order.
fn merge(op: RowOp, dtype: Dtype, rows: &mut [u8], incoming: &[(usize, &[u8])]) {
    for (slot, row) in incoming {
        let target = &mut rows[slot * row.len()..][..row.len()];
        if op == RowOp::ScatterAdd { add(target, row, dtype) } else { target.copy_from_slice(row) }
    }
}

/// Decodes a message that `rank` sent into row numbers and rows.
fn entries(rank: Rank, part: &[u8], row_len: usize) -> Result<impl Iterator<Item = (u64, &[u8])>> {
    let what = "its message with rows has an invalid length";
    let malformed = || Error::from(wholemem_comm::Error::Protocol { rank, what });
    let (count, rest) = part.split_first_chunk::<8>().ok_or_else(malformed)?;
    let count = to_usize(u64::from_le_bytes(*count));
    let numbers_len = count.checked_mul(8).ok_or_else(malformed)?;
    let (row_numbers, rows) = rest.split_at_checked(numbers_len).ok_or_else(malformed)?;
    if count.checked_mul(row_len) != Some(rows.len()) {
        return Err(malformed());
    }
    let (row_numbers, _) = row_numbers.as_chunks::<8>();
    Ok(row_numbers.iter().map(|row_number| u64::from_le_bytes(*row_number)).zip(rows.chunks_exact(row_len)))
}

/// Returns the positions whose rows each rank sends in each exchange: all in one exchange if no rank has more than `most` rows,
/// otherwise one rank after the other, which preserves the order.
fn rounds(counts: &[u64], most: u64) -> Vec<Vec<Range<u64>>> {
    if counts.iter().all(|count| *count <= most) {
        return vec![counts.iter().map(|count| 0..*count).collect()];
    }
    let mut rounds = Vec::new();
    for (rank, &count) in counts.iter().enumerate() {
        let mut start = 0;
        while start < count {
            let end = count.min(start + most);
            rounds
                .push((0..counts.len()).map(|other| if other == rank { start..end } else { 0..0 }).collect());
            start = end;
        }
    }
    rounds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_scatters_are_exchanged_one_rank_after_the_other() {
        assert_eq!(rounds(&[3, 0, 5], 5), [vec![0..3, 0..0, 0..5]]);
        let none = 0..0;
        assert_eq!(
            rounds(&[3, 0, 6], 5),
            [
                vec![0..3, none.clone(), none.clone()],
                vec![none.clone(), none.clone(), 0..5],
                vec![none.clone(), none, 5..6],
            ]
        );
    }

    #[test]
    fn rows_are_merged_in_the_order_of_arrival() {
        let incoming: [(usize, &[u8]); 3] = [(0, &[1, 1]), (1, &[2, 2]), (0, &[3, 3])];
        let mut rows = [10; 4];
        merge(RowOp::Scatter, Dtype::U8, &mut rows, &incoming);
        assert_eq!(rows, [3, 3, 2, 2]);
        merge(RowOp::ScatterAdd, Dtype::U8, &mut rows, &incoming);
        assert_eq!(rows, [7, 7, 4, 4]);
    }

    #[test]
    fn a_truncated_message_is_an_error() {
        let part = [&2_u64.to_le_bytes()[..], &7_u64.to_le_bytes(), &9_u64.to_le_bytes(), b"abcdef"].concat();
        let entries = |part: &[u8]| {
            entries(Rank(1), part, 3)
                .map(|entries| entries.map(|(at, row)| (at, row.to_vec())).collect::<Vec<_>>())
        };
        assert_eq!(entries(&part), Ok(vec![(7, b"abc".to_vec()), (9, b"def".to_vec())]));
        let what = "its message with rows has an invalid length";
        let malformed = Error::Comm(wholemem_comm::Error::Protocol { rank: Rank(1), what });
        for len in [0, 7, 8, 23, 24, 29] {
            assert_eq!(entries(&part[..len]), Err(malformed.clone()), "{len}");
        }
        assert_eq!(entries(&u64::MAX.to_le_bytes()), Err(malformed));
        assert_eq!(entries(&[0; 8]), Ok(Vec::new()));
    }
}
