//! A random test case for gather and scatter: a tensor, indices, and a row buffer with guard bytes around it.

use std::ops::Range;

use proptest::prelude::*;
use wholemem::{
    Communicator, Dtype, Error, IndexType, Indices, Kind, Location, OnBadIndex, Order, Rank, RowBuffer,
    TensorSpec, WholeTensor,
};
use wholemem_hal::{Backend, Granule, HostConfig, PinnedBuffer, Span, Stream};

use super::naive;

/// The value of the guard bytes around the row buffer and between its rows, which calls must not change.
const GUARD: u8 = 0xA5;
const GUARD_LEN: usize = 256;

#[derive(Debug, Clone)]
pub(crate) struct RowCase {
    pub(crate) rows_of_each: Vec<u64>,
    pub(crate) elements: u64,
    pub(crate) kind: Kind,
    pub(crate) location: Location,
    pub(crate) dtype: Dtype,
    pub(crate) dense: Dtype,
    pub(crate) index: IndexType,
    /// The number of unused elements between two rows of the row buffer.
    pub(crate) gap: usize,
    pub(crate) count: usize,
    pub(crate) on_bad: OnBadIndex,
    /// The position of a bad index in the list of indices, and the bad index.
    pub(crate) bad_at: Option<(usize, i64)>,
    pub(crate) large_granule: bool,
    /// The rows and columns of a view that is used instead of the whole tensor, in percent.
    pub(crate) view: Option<(Range<u64>, Range<u64>)>,
    pub(crate) seed: u64,
}

pub(crate) fn cases() -> impl Strategy<Value = RowCase> {
    let rows = prop::collection::vec(prop_oneof![Just(0_u64), Just(1), 0_u64..9, 0_u64..1500], 1..6);
    let elements = prop_oneof![Just(1_u64), Just(3), Just(16), Just(25), 1_u64..80, Just(256)];
    let kinds = (
        prop_oneof![Just(Kind::Continuous), Just(Kind::Chunked)],
        prop_oneof![Just(Location::Device), Just(Location::Host)],
    );
    let dtypes = (0..Dtype::NUMBERS.len(), any::<bool>(), 0..8_usize).prop_map(|(table, converts, other)| {
        let table = Dtype::NUMBERS[table];
        let convertible: Vec<_> =
            Dtype::NUMBERS.into_iter().filter(|dtype| dtype.converts_to(table)).collect();
        (table, if converts { convertible[other % convertible.len()] } else { table })
    });
    let index = prop_oneof![Just(IndexType::I32), Just(IndexType::I64)];
    let bad = prop::option::of((
        0_usize..60,
        prop_oneof![Just(-1_i64), Just(i64::MIN), Just(i64::MAX), Just(i64::from(i32::MIN))],
    ));
    let view = prop::option::of(((0_u64..60, 60_u64..101), (0_u64..50, 50_u64..101)))
        .prop_map(|view| view.map(|(rows, columns)| (rows.0..rows.1, columns.0..columns.1)));
    let on_bad = prop_oneof![Just(OnBadIndex::Note), Just(OnBadIndex::Skip)];
    (
        rows,
        elements,
        kinds,
        dtypes,
        index,
        (0_usize..4, 0_usize..60),
        on_bad,
        bad,
        (any::<bool>(), any::<u64>()),
        view,
    )
        .prop_map(
            |(
                rows_of_each,
                elements,
                (kind, location),
                (dtype, dense),
                index,
                (gap, count),
                on_bad,
                bad_at,
                (large_granule, seed),
                view,
            )| {
                RowCase {
                    rows_of_each,
                    elements,
                    kind,
                    location,
                    dtype,
                    dense,
                    index,
                    gap,
                    count,
                    on_bad,
                    bad_at,
                    large_granule,
                    view,
                    seed,
                }
            },
        )
}

/// A pseudo-random generator with a seed (xorshift).
#[derive(Debug, Clone)]
pub(crate) struct SeededRandom(u64);

impl SeededRandom {
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(stream) | 1)
    }

    pub(crate) fn below(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % below.max(1)
    }
}

/// The ranks of a test case, each rank's handle of the tensor that they share, and the rows that the tensor must contain.
pub(crate) struct TensorModel {
    case: RowCase,
    pub(crate) groups: Vec<Communicator>,
    tensors: Vec<WholeTensor>,
    streams: Vec<Stream>,
    /// The rows that the tensor, or the view that is used instead, must contain.
    rows: Vec<Vec<u8>>,
}

impl RowCase {
    pub(crate) fn model(&self) -> TensorModel {
        let granule = Granule::new(if self.large_granule { 2 << 20 } else { 64 << 10 }).unwrap();
        let ranks = self.rows_of_each.len();
        // There are half as many devices as ranks, so that two ranks share a device.
        let backend = Backend::host(HostConfig::virtual_devices(ranks.div_ceil(2)).granule(granule)).unwrap();
        self.model_on(&backend)
    }

    /// Creates the ranks of the test case on the devices of a backend.
    pub(crate) fn model_on(&self, backend: &Backend) -> TensorModel {
        let count = backend.devices().len();
        let devices: Vec<_> = (0..self.rows_of_each.len())
            .map(|rank| backend.device((rank / 2 % count) as u32).unwrap())
            .collect();
        let groups = Communicator::local(&devices).unwrap();
        let spec = TensorSpec {
            kind: self.kind,
            location: self.location,
            rows_of_each: Some(self.rows_of_each.clone()),
            ..TensorSpec::new(self.dtype, &[self.rows_of_each.iter().sum(), self.elements])
        };
        let tensors = Communicator::on_each(&groups, |group| WholeTensor::create(group, &spec)).unwrap();
        let tensors = tensors.iter().map(|tensor| self.part(tensor)).collect::<Vec<_>>();
        let streams: Vec<_> = devices.iter().map(|device| device.stream().unwrap()).collect();
        let mut model = TensorModel { case: self.clone(), groups, tensors, streams, rows: Vec::new() };
        model.fill();
        model
    }

    fn part(&self, tensor: &WholeTensor) -> WholeTensor {
        let Some((rows, columns)) = &self.view else { return tensor.clone() };
        let of = |range: &Range<u64>, count: u64| range.start * count / 100..(range.end * count / 100);
        let rows = of(rows, tensor.row_count());
        let columns = of(columns, self.elements);
        let columns = if columns.is_empty() { 0..self.elements } else { columns };
        tensor.rows(rows).unwrap().columns(columns).unwrap()
    }
}

impl RowCase {
    fn has_16_bit_floats(&self) -> bool {
        [self.dtype, self.dense].iter().any(|dtype| matches!(dtype, Dtype::F16 | Dtype::Bf16))
    }
}

impl TensorModel {
    /// Fills the tensor with random rows. Every rank writes its own rows through its own device.
    fn fill(&mut self) {
        let (row_len, dtype, halves) =
            (self.tensors[0].row_len(), self.case.dtype, self.case.has_16_bit_floats());
        let mut random = SeededRandom::new(self.case.seed, 1);
        self.rows = (0..self.tensors[0].row_count())
            .map(|_| values(&mut random, dtype, halves, row_len / dtype.len()))
            .collect();
        for (tensor, stream) in self.tensors.iter().zip(&self.streams) {
            if let Some(local) = tensor.local() {
                let rows = self.rows[index(local.rows.start)..index(local.rows.end)].concat();
                tensor.write_rows_on(stream, local.rows.start, &rows).unwrap();
            }
        }
        self.barrier();
        self.expect_rows("after filling");
    }

    fn barrier(&self) {
        Communicator::on_each(&self.groups, |group| group.barrier_on(&self.streams[group.rank().index()]))
            .unwrap();
    }

    /// Checks that every rank reads the expected rows.
    fn expect_rows(&self, step: &str) {
        for (tensor, stream) in self.tensors.iter().zip(&self.streams) {
            let mut seen = vec![0; self.rows.len() * tensor.row_len()];
            tensor.read_rows_on(stream, 0, &mut seen).unwrap();
            assert!(seen == self.rows.concat(), "{step}: rank {} reads wrong rows", tensor.group().rank());
        }
    }

    /// Returns the random indices of a rank, as numbers and in memory.
    fn indices(&self, rank: Rank, round: u64) -> (Vec<i64>, Option<PinnedBuffer>) {
        let mut random = SeededRandom::new(self.case.seed, 100 * round + u64::from(rank.0) + 2);
        let count = if self.rows.is_empty() && self.case.bad_at.is_none() { 0 } else { self.case.count };
        let mut indices: Vec<_> = (0..count).map(|_| random.below(self.rows.len() as u64) as i64).collect();
        if let Some((position, bad)) = self.case.bad_at
            && position < count
        {
            indices[position] = if bad == i64::MAX { self.rows.len() as i64 } else { bad };
        }
        let bytes: Vec<u8> = match self.case.index {
            IndexType::I32 => indices
                .iter_mut()
                .flat_map(|index| {
                    // An index that does not fit in 32 bits is truncated, also in the list of numbers.
                    let short = *index as i32;
                    *index = short.into();
                    short.to_ne_bytes()
                })
                .collect(),
            IndexType::I64 => indices.iter().flat_map(|index| index.to_ne_bytes()).collect(),
        };
        let buffer = (!bytes.is_empty()).then(|| {
            let buffer = PinnedBuffer::create(self.groups[rank.index()].device(), bytes.len()).unwrap();
            buffer.bytes().unwrap().write_at(0, &bytes).unwrap();
            buffer
        });
        (indices, buffer)
    }

    fn operand(&self, span: &Span) -> Indices {
        let indices = match self.case.index {
            IndexType::I32 => Indices::i32(span.clone()),
            IndexType::I64 => Indices::i64(span.clone()),
        };
        indices.on_bad(self.case.on_bad)
    }

    fn is_bad(&self, index: i64) -> bool {
        !usize::try_from(index).is_ok_and(|index| index < self.rows.len())
    }

    /// Returns the expected result of a gather or scatter with these indices: an error if one of them is bad.
    fn expected_result(&self, indices: &[i64]) -> Result<(), Error> {
        match (indices.iter().position(|index| self.is_bad(*index)), self.case.on_bad) {
            (Some(at), OnBadIndex::Note) => Err(Error::BadIndex {
                position: at as u64,
                index: Some(indices[at]),
                rows: Some(self.rows.len() as u64),
            }),
            _ => Ok(()),
        }
    }

    fn dense_layout(&self, count: usize) -> (usize, usize, usize) {
        let row_len = self.tensors[0].row_len() / self.case.dtype.len() * self.case.dense.len();
        let stride = row_len + self.case.gap * self.case.dense.len();
        (row_len, stride, count.saturating_sub(1) * stride + row_len)
    }

    /// Creates a row buffer that contains the given rows, with guard bytes around and between them.
    fn dense(&self, rank: Rank, rows: &[Vec<u8>]) -> (PinnedBuffer, RowBuffer) {
        let (row_len, stride, len) = self.dense_layout(rows.len());
        let buffer = PinnedBuffer::create(self.groups[rank.index()].device(), len + 2 * GUARD_LEN).unwrap();
        let bytes = buffer.bytes().unwrap();
        bytes.fill(GUARD).unwrap();
        for (at, row) in rows.iter().enumerate() {
            bytes.write_at(GUARD_LEN + at * stride, &row[..row_len]).unwrap();
        }
        let dense =
            RowBuffer::new(buffer.all().part(GUARD_LEN, len).unwrap(), self.case.dense).stride(stride);
        (buffer, if self.case.dense == self.case.dtype { dense } else { dense.converted() })
    }

    pub(crate) fn gather(&self, group: &Communicator) {
        let rank = group.rank();
        let (indices, Some(buffer)) = self.indices(rank, 1) else { return };
        let (row_len, stride, _) = self.dense_layout(indices.len());
        let (output, dense) = self.dense(rank, &vec![vec![GUARD; row_len]; indices.len()]);
        let (tensor, stream) = (&self.tensors[rank.index()], &self.streams[rank.index()]);
        assert_eq!(
            tensor.gather_on_sync(stream, &self.operand(&buffer.all()), &dense),
            self.expected_result(&indices)
        );

        let mut expected = vec![GUARD; output.len()];
        for (at, index) in indices.iter().enumerate() {
            let row = if self.is_bad(*index) {
                vec![0; row_len]
            } else {
                naive::convert(&self.rows[*index as usize], self.case.dtype, self.case.dense)
            };
            expected[GUARD_LEN + at * stride..][..row_len].copy_from_slice(&row);
        }
        let mut seen = vec![0; output.len()];
        output.bytes().unwrap().read_at(0, &mut seen).unwrap();
        assert!(seen == expected, "rank {rank}: {}", difference(&seen, &expected));
    }

    /// Tests a gather, scatters and an addition.
    pub(crate) fn all(&mut self) {
        Communicator::on_each(&self.groups, |group| {
            self.gather(group);
            Ok(())
        })
        .unwrap();
        self.scatter();
        self.scatter_fixed();
        self.add(Order::Any);
    }

    /// Returns random rows to scatter, whose elements have the row buffer's type.
    fn input(&self, rank: Rank, round: u64, count: usize) -> Vec<Vec<u8>> {
        let mut random = SeededRandom::new(self.case.seed, 1000 * round + u64::from(rank.0));
        let elements = self.tensors[0].row_len() / self.case.dtype.len();
        (0..count)
            .map(|_| values(&mut random, self.case.dense, self.case.has_16_bit_floats(), elements))
            .collect()
    }

    /// Scatters random rows on every rank, each with its own indices. Returns the valid indices and rows of all ranks, in the
    /// table's element type.
    fn scatter_all(&self, round: u64, scatter_all: ScatterCall, order: Order) -> Vec<(usize, Vec<u8>)> {
        let all = Communicator::on_each(&self.groups, |group| {
            let rank = group.rank();
            let (indices, buffer) = self.indices(rank, round);
            let rows = self.input(rank, round, indices.len());
            let (_buffer, dense) = self.dense(rank, &rows);
            let empty_buffer = PinnedBuffer::create(group.device(), 8)?;
            // A rank without rows makes the call too, because scattering may be collective.
            let operand = buffer.as_ref().map_or_else(
                || self.operand(&empty_buffer.all().part(0, 0).unwrap()),
                |buffer| self.operand(&buffer.all()),
            );
            let (tensor, stream) = (&self.tensors[rank.index()], &self.streams[rank.index()]);
            assert_eq!(
                scatter_all(tensor, stream, &operand, &dense, order),
                self.expected_result(&indices),
                "rank {rank}"
            );
            let good = indices.into_iter().zip(rows).filter(|(index, _)| !self.is_bad(*index));
            let converted = |row: &[u8]| naive::convert(row, self.case.dense, self.case.dtype);
            Ok(good.map(|(index, row)| (index as usize, converted(&row))).collect::<Vec<_>>())
        });
        self.barrier();
        all.unwrap().concat()
    }

    /// Tests a scatter in any order. If several rows have the same index, every element or 16-byte block must come from one of
    /// them.
    pub(crate) fn scatter(&mut self) {
        let scatter_all = self.scatter_all(2, WholeTensor::scatter_on_sync, Order::Any);
        let seen = self.seen();
        // Blocks that cross two cache lines may contain bytes of two rows, but elements may not.
        let aligned = self.tensors[0].stride().is_multiple_of(16) && self.case.view.is_none();
        let converts = self.case.dense != self.case.dtype;
        let piece = if aligned && !converts { 16 } else { self.case.dtype.len() };
        for (at, (row, before)) in seen.iter().zip(&self.rows).enumerate() {
            let mut candidates: Vec<_> =
                scatter_all.iter().filter(|(index, _)| *index == at).map(|(_, row)| row).collect();
            if candidates.is_empty() {
                candidates.push(before);
            }
            for start in (0..row.len()).step_by(piece) {
                let piece = start..row.len().min(start + piece);
                assert!(
                    candidates.iter().any(|one| one[piece.clone()] == row[piece.clone()]),
                    "row {at}, bytes {piece:?}"
                );
            }
        }
        self.rows = seen;
        self.expect_rows("after scattering");
    }

    /// Tests a scatter in a fixed order: of several rows with the same index, the last one remains.
    pub(crate) fn scatter_fixed(&mut self) {
        for (at, row) in self.scatter_all(3, WholeTensor::scatter_on_sync, Order::Fixed) {
            self.rows[at] = row;
        }
        self.expect_rows("after scattering in a fixed order");
    }

    /// Tests a scatter-add of rows. The values are small, so that sums are exact in any order.
    pub(crate) fn add(&mut self, order: Order) {
        let round = if order == Order::Fixed { 4 } else { 5 };
        for (at, row) in self.scatter_all(round, WholeTensor::scatter_add_on_sync, order) {
            naive::add(&mut self.rows[at], &row, self.case.dtype);
        }
        self.expect_rows("after adding");
    }

    /// Returns all rows of the tensor, as rank 0 reads them.
    fn seen(&self) -> Vec<Vec<u8>> {
        let row_len = self.tensors[0].row_len();
        let mut seen = vec![0; self.rows.len() * row_len];
        self.tensors[0].read_rows_on(&self.streams[0], 0, &mut seen).unwrap();
        seen.chunks_exact(row_len).map(<[u8]>::to_vec).collect()
    }
}

type ScatterCall = fn(&WholeTensor, &Stream, &Indices, &RowBuffer, Order) -> Result<(), Error>;

fn index(row: u64) -> usize {
    usize::try_from(row).unwrap()
}

/// Returns random elements. If 16-bit floats are involved, the values are -1, 0 and 1; other floats are multiples of 1/8. So
/// sums of a few hundred floats are exact.
fn values(random: &mut SeededRandom, dtype: Dtype, halves: bool, count: usize) -> Vec<u8> {
    if dtype == Dtype::U8 {
        // Bytes are generated on a fast path, because rows of bytes may have megabytes.
        return (0..count).map(|_| random.below(256) as u8).collect();
    }
    let mut value = || match dtype {
        _ if halves => naive::ExactValue::Float(random.below(3) as f64 - 1.0),
        dtype if dtype.is_float() => naive::ExactValue::Float((random.below(1000) as f64 - 500.0) / 8.0),
        _ => naive::ExactValue::Integer(i128::from(random.below(1000)) * 7919 - 300),
    };
    (0..count).flat_map(|_| naive::write(dtype, value())).collect()
}

fn difference(seen: &[u8], expected: &[u8]) -> String {
    let at = seen.iter().zip(expected).position(|(a, b)| a != b);
    format!("differs at {at:?} of {}", seen.len())
}
