//! Scatters in a fixed order: every row is sent to the rank that owns its place, which applies the rows in order.
//!
//! ```text
//!   rank 0   [ row 5, row 90, row 5 ] --+--> rank 0 (rows 0..50):    5 of rank 0, 5 of rank 0, 7 of rank 1
//!   rank 1   [ row 7, row 90 ] ---------+--> rank 1 (rows 50..100): 90 of rank 0, 90 of rank 1
//! ```
//!
//! The owner reads the affected rows once, applies all updates to its copy in (rank, position) order, and writes each row back
//! once. No two writes of a kernel are to the same row, so the result does not depend on scheduling.

use std::collections::HashMap;
use std::ops::Range;

use wholemem_comm::Rank;
use wholemem_hal::{PinnedBuffer, Stream};
use wholemem_os::Deadline;

use super::plan::plan;
use super::{Indices, OnBadIndex, Op, RowBuffer};
use crate::communicator::{CallTerms, agree, bytes_of, exchange_terms};
use crate::dtype::{add, convert};
use crate::{Dtype, Error, Result, WholeTensor};
use wholemem_os::width::to_usize;

/// The most bytes of rows that a rank sends in one exchange.
const MOST_AT_ONCE: u64 = 256 << 20;

/// What a rank brings along: rows of the table's own type, one after the other, and the row that each is for.
#[derive(Debug, Default)]
struct Load {
    /// `None` for a bad index.
    places: Vec<Option<u64>>,
    /// The first position of an index that names none, and that index.
    bad: Option<(u64, i64)>,
    rows: Vec<u8>,
}

impl WholeTensor {
    /// Scatters or adds in (rank, position) order. Collective; a rank with invalid operands takes part with its error.
    pub(super) fn put_in_order(
        &self,
        stream: &Stream,
        op: Op,
        operands: Result<(&Indices, &RowBuffer)>,
    ) -> Result<()> {
        let comm = self.group().bootstrap();
        // Whatever is wrong on this rank alone, it takes part until all know of it.
        let on_bad = operands.as_ref().map_or(OnBadIndex::Note, |(indices, _)| indices.on_bad);
        let load = self.check().and_then(|()| {
            let (indices, input) = operands?;
            self.pack(stream, op, indices, input)
        });
        let call = if op == Op::ScatterAdd { "add" } else { "put" };
        let same = || bytes_of(&self.identity());
        let terms = |load: &Load| CallTerms { own: vec![load.places.len() as u64], same: same() };
        let owns = exchange_terms(comm, call, load.as_ref().map(terms).map_err(Clone::clone))?;
        let counts: Vec<_> = owns.into_iter().flatten().collect();
        let load = load?;
        let mut applied = Ok(());
        for round in rounds(&counts, (MOST_AT_ONCE / self.row_len() as u64).max(1)) {
            let mine = round[comm.rank().index()].clone();
            let parts = self.parts(&load, mine);
            let parts: Vec<_> = parts.iter().map(Vec::as_slice).collect();
            let received = comm.all_to_allv(&parts)?;
            // After a failure the others are still waited for, and nothing more is applied.
            applied = applied.and_then(|()| self.apply(stream, op, &received));
        }
        agree(comm, applied)?;
        match (load.bad, on_bad) {
            (Some((position, index)), OnBadIndex::Note) => {
                Err(Error::BadIndex { position, index: Some(index), rows: Some(self.row_count()) })
            }
            _ => Ok(()),
        }
    }

    /// Reads indices and rows.
    fn pack(&self, stream: &Stream, op: Op, indices: &Indices, input: &RowBuffer) -> Result<Load> {
        let dtype = self.dtype();
        let request = plan(op, &self.table(), &indices.place(), &input.place(), 0)?;
        let Some(request) = request else { return Ok(Load::default()) };
        let (count, stride) = (to_usize(request.rows().count), to_usize(request.rows().rows_stride));
        let dense_len = to_usize(self.elements()) * input.dtype.len();
        let mut index_bytes = vec![0; indices.span.len()];
        stream.read(&indices.span, &mut index_bytes)?;
        let mut dense = vec![0; (count - 1) * stride + dense_len];
        stream.read(&input.span.part(0, dense.len())?, &mut dense)?;
        let numbers = indices.kind.decode(&index_bytes);
        let place = |index: &i64| u64::try_from(*index).ok().filter(|row| *row < self.row_count());
        let places: Vec<_> = numbers.iter().map(place).collect();
        let bad = places.iter().position(Option::is_none).map(|at| (at as u64, numbers[at]));
        let tight: Vec<u8> =
            (0..count).flat_map(|row| &dense[row * stride..][..dense_len]).copied().collect();
        let rows = convert(&tight, input.dtype, dtype)
            .ok_or(Error::NotConvertible { from: input.dtype, to: dtype })?;
        Ok(Load { places, bad, rows })
    }

    /// What goes to each rank: how many rows, for which places, and their bytes.
    fn parts(&self, load: &Load, positions: Range<u64>) -> Vec<Vec<u8>> {
        let partition = self.memory().partition();
        let mut places = vec![Vec::new(); partition.ranks() as usize];
        let mut rows = places.clone();
        for position in positions {
            let position = to_usize(position);
            let Some(place) = load.places[position] else { continue };
            let owner = partition.owner(place + self.first_row()).expect("the place is a row of the tensor");
            places[owner.index()].extend(place.to_le_bytes());
            rows[owner.index()].extend(&load.rows[position * self.row_len()..][..self.row_len()]);
        }
        let part = |(places, rows): (Vec<u8>, Vec<u8>)| {
            [&(places.len() as u64 / 8).to_le_bytes()[..], &places, &rows].concat()
        };
        places.into_iter().zip(rows).map(part).collect()
    }

    /// Applies what the ranks have sent, in their order.
    fn apply(&self, stream: &Stream, op: Op, received: &[Vec<u8>]) -> Result<()> {
        let row_len = self.row_len();
        let mut slots = HashMap::new();
        let mut places = Vec::new();
        let mut incoming = Vec::new();
        for (rank, part) in (0..).map(Rank).zip(received) {
            for (place, row) in entries(rank, part, row_len)? {
                let slot = *slots.entry(place).or_insert_with(|| {
                    places.push(place);
                    places.len() - 1
                });
                incoming.push((slot, row));
            }
        }
        if places.is_empty() {
            return Ok(());
        }
        let device = self.group().device();
        let index_bytes: Vec<u8> = places.iter().flat_map(|place| place.to_ne_bytes()).collect();
        let index_buffer = PinnedBuffer::create(device, index_bytes.len())?;
        stream.write(&index_buffer.all(), &index_bytes)?;
        let indices = Indices::i64(index_buffer.all()).on_bad(OnBadIndex::Skip);
        let buffer = PinnedBuffer::create(device, places.len() * row_len)?;
        let dense = RowBuffer::new(buffer.all(), self.dtype());
        let mut rows = vec![0; buffer.len()];
        if op == Op::ScatterAdd {
            self.launch(stream, Op::Gather, &indices, &dense, self.memory().bad_index_flag())?;
            stream.read(&buffer.all(), &mut rows)?;
        }
        merge(op, self.dtype(), &mut rows, &incoming);
        stream.write(&buffer.all(), &rows)?;
        self.launch(stream, Op::Scatter, &indices, &dense, self.memory().bad_index_flag())?;
        Ok(stream.synchronize(Deadline::NEVER)?)
    }
}

/// Puts rows into their slots one after the other, or adds them there.
fn merge(op: Op, dtype: Dtype, rows: &mut [u8], incoming: &[(usize, &[u8])]) {
    for (slot, row) in incoming {
        let target = &mut rows[slot * row.len()..][..row.len()];
        if op == Op::ScatterAdd { add(target, row, dtype) } else { target.copy_from_slice(row) }
    }
}

/// The places and rows of a part that a rank has sent.
fn entries(rank: Rank, part: &[u8], row_len: usize) -> Result<impl Iterator<Item = (u64, &[u8])>> {
    let what = "the rows that it sends have another length";
    let malformed = || Error::from(wholemem_comm::Error::Protocol { rank, what });
    let (count, rest) = part.split_first_chunk::<8>().ok_or_else(malformed)?;
    let count = to_usize(u64::from_le_bytes(*count));
    let places_len = count.checked_mul(8).ok_or_else(malformed)?;
    let (places, rows) = rest.split_at_checked(places_len).ok_or_else(malformed)?;
    if count.checked_mul(row_len) != Some(rows.len()) {
        return Err(malformed());
    }
    let (places, _) = places.as_chunks::<8>();
    Ok(places.iter().map(|place| u64::from_le_bytes(*place)).zip(rows.chunks_exact(row_len)))
}

/// Which positions each rank sends in each exchange: all at once where it is not too much, otherwise rank after rank, so
/// that the order stays.
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
    fn little_is_sent_at_once_and_much_rank_after_rank() {
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
    fn rows_are_merged_in_the_order_they_come_in() {
        let incoming: [(usize, &[u8]); 3] = [(0, &[1, 1]), (1, &[2, 2]), (0, &[3, 3])];
        let mut rows = [10; 4];
        merge(Op::Scatter, Dtype::U8, &mut rows, &incoming);
        assert_eq!(rows, [3, 3, 2, 2]);
        merge(Op::ScatterAdd, Dtype::U8, &mut rows, &incoming);
        assert_eq!(rows, [7, 7, 4, 4]);
    }

    #[test]
    fn a_part_that_is_cut_short_is_an_error() {
        let part = [&2_u64.to_le_bytes()[..], &7_u64.to_le_bytes(), &9_u64.to_le_bytes(), b"abcdef"].concat();
        let entries = |part: &[u8]| {
            entries(Rank(1), part, 3)
                .map(|entries| entries.map(|(at, row)| (at, row.to_vec())).collect::<Vec<_>>())
        };
        assert_eq!(entries(&part), Ok(vec![(7, b"abc".to_vec()), (9, b"def".to_vec())]));
        let what = "the rows that it sends have another length";
        let malformed = Error::Comm(wholemem_comm::Error::Protocol { rank: Rank(1), what });
        for len in [0, 7, 8, 23, 24, 29] {
            assert_eq!(entries(&part[..len]), Err(malformed.clone()), "{len}");
        }
        assert_eq!(entries(&u64::MAX.to_le_bytes()), Err(malformed));
        assert_eq!(entries(&[0; 8]), Ok(Vec::new()));
    }
}
