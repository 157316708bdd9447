//! A random test case that makes every typed call on a tensor, and compares the results with a model in plain vectors.

use std::fmt::Debug;
use std::ops::Range;

use proptest::prelude::*;
use wholemem::{Communicator, Element, Error, Kind, Location, ReduceOp, TensorSpec, WholeTensor};
use wholemem_hal::Backend;

use super::value::TestValue;

#[derive(Debug, Clone)]
pub(crate) struct SliceCase {
    pub(crate) rows_of_each: Vec<u64>,
    pub(crate) width: u64,
    pub(crate) kind: Kind,
    pub(crate) location: Location,
    pub(crate) element_type: usize,
    /// True if calls use a view of some rows and columns instead of the whole tensor.
    pub(crate) view: bool,
    pub(crate) seed: u64,
}

pub(crate) fn cases() -> impl Strategy<Value = SliceCase> {
    let rows = prop::collection::vec(prop_oneof![Just(0_u64), Just(1), 0_u64..40], 1..6);
    let width = prop_oneof![Just(1_u64), Just(16), 1_u64..20];
    let kind = prop_oneof![Just(Kind::Continuous), Just(Kind::Chunked)];
    let location = prop_oneof![Just(Location::Device), Just(Location::Host)];
    (rows, width, kind, location, 0_usize..13, any::<bool>(), any::<u64>()).prop_map(
        |(rows_of_each, width, kind, location, element_type, view, seed)| SliceCase {
            rows_of_each,
            width,
            kind,
            location,
            element_type,
            view,
            seed,
        },
    )
}

/// A pseudo-random generator with a seed (xorshift).
struct SeededRandom(u64);

impl SeededRandom {
    fn below(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % below.max(1)
    }

    fn values<T: TestValue>(&mut self, count: usize) -> Vec<T> {
        (0..count).map(|_| T::of(self.below(7) as u8)).collect()
    }

    /// Returns random indices, and the position of a bad index if there is one.
    fn indices(&mut self, rows: usize, is_distinct: bool) -> (Vec<i64>, Option<usize>) {
        let count =
            if is_distinct { self.below(rows as u64 + 1) } else { self.below(30) * u64::from(rows > 0) };
        let start = self.below(rows as u64);
        let index = |random: &mut Self, at: u64| {
            (if is_distinct { (start + at) % rows as u64 } else { random.below(rows as u64) }) as i64
        };
        let mut indices: Vec<_> = (0..count).map(|at| index(self, at)).collect();
        if self.below(4) == 0 && !indices.is_empty() {
            let bad = [-1, rows as i64, i64::MIN, i64::MAX][self.below(4) as usize];
            let at = self.below(count) as usize;
            indices[at] = bad;
            return (indices, Some(at));
        }
        (indices, None)
    }
}

impl SliceCase {
    pub(crate) fn run<T: TestValue + Element + PartialEq + Debug>(&self, backend: &Backend) {
        let count = backend.devices().len();
        let devices: Vec<_> =
            (0..self.rows_of_each.len()).map(|rank| backend.device((rank % count) as u32).unwrap()).collect();
        let comms = Communicator::local(&devices).unwrap();
        let spec = TensorSpec {
            kind: self.kind,
            location: self.location,
            rows_of_each: Some(self.rows_of_each.clone()),
            ..TensorSpec::of::<T>(&[self.rows_of_each.iter().sum(), self.width])
        };
        let whole = Communicator::on_each(&comms, |comm| WholeTensor::create(comm, &spec)).unwrap();
        let tensors: Vec<_> = whole.iter().map(|tensor| self.part(tensor)).collect();
        let (rows, width) = (tensors[0].row_count() as usize, tensors[0].shape()[1] as usize);
        let mut model = TensorModel { comms, tensors, width, rows: vec![vec![T::default(); width]; rows] };
        let mut random = SeededRandom(self.seed | 1);
        model.fill(&mut random);
        model.write(&mut random);
        model.gather(&mut random);
        model.scatter(&mut random);
        model.add(&mut random);
        // Elements of the whole tensor that are outside the view were never written, so they must still be zero.
        let zeros = whole[0].read_rows::<T>(0..whole[0].row_count()).unwrap();
        let outside = zeros.iter().filter(|value| **value != T::default()).count();
        let inside = model.rows.concat().iter().filter(|value| **value != T::default()).count();
        assert_eq!(outside, inside, "elements outside the view changed");
    }

    fn part(&self, tensor: &WholeTensor) -> WholeTensor {
        if !self.view {
            return tensor.clone();
        }
        let rows = tensor.row_count();
        tensor.rows(rows / 4..rows - rows / 5).unwrap().columns(self.width / 3..self.width).unwrap()
    }
}

/// The tensor on each rank, and the rows that it must contain, as plain vectors.
struct TensorModel<T> {
    comms: Vec<Communicator>,
    tensors: Vec<WholeTensor>,
    width: usize,
    rows: Vec<Vec<T>>,
}

impl<T: TestValue + Element + PartialEq + Debug> TensorModel<T> {
    /// Checks that every rank reads the rows of the model: all rows of the tensor, and a random range of them.
    fn expect_rows(&self, random: &mut SeededRandom, step: &str) {
        for tensor in &self.tensors {
            let end = random.below(self.rows.len() as u64 + 1);
            let start = random.below(end + 1);
            for Range { start, end } in [0..self.rows.len() as u64, start..end] {
                let expected = self.rows[start as usize..end as usize].concat();
                assert_eq!(tensor.read_rows::<T>(start..end).unwrap(), expected, "{step}");
                let mut seen = vec![T::default(); expected.len()];
                tensor.read_rows_into(start, &mut seen).unwrap();
                assert_eq!(seen, expected, "{step}");
            }
        }
    }

    fn fill(&mut self, random: &mut SeededRandom) {
        for tensor in &self.tensors {
            let value = T::of(random.below(7) as u8);
            tensor.fill_local(value).unwrap();
            let local = tensor.local().map_or(0..0, |local| local.rows);
            for row in &mut self.rows[local.start as usize..local.end as usize] {
                row.fill(value);
            }
        }
        self.expect_rows(random, "after filling");
    }

    fn write(&mut self, random: &mut SeededRandom) {
        for tensor in &self.tensors {
            let first = random.below(self.rows.len() as u64 + 1) as usize;
            let count = random.below((self.rows.len() - first) as u64 + 1) as usize;
            let values = random.values::<T>(count * self.width);
            tensor.write_rows(first as u64, &values).unwrap();
            for (row, values) in self.rows[first..].iter_mut().zip(values.chunks_exact(self.width)) {
                row.copy_from_slice(values);
            }
        }
        self.expect_rows(random, "after writing");
    }

    fn expected_result(&self, indices: &[i64], bad: Option<usize>) -> Result<(), Error> {
        let rows = Some(self.rows.len() as u64);
        bad.map_or(Ok(()), |at| Err(Error::BadIndex { position: at as u64, index: Some(indices[at]), rows }))
    }

    fn gather(&self, random: &mut SeededRandom) {
        for tensor in &self.tensors {
            let (indices, bad) = random.indices(self.rows.len(), false);
            let zeros = vec![T::default(); self.width];
            let row = |(at, index): (usize, &i64)| {
                if bad == Some(at) { zeros.clone() } else { self.rows[*index as usize].clone() }
            };
            let expected: Vec<T> = indices.iter().enumerate().flat_map(row).collect();
            let gathered = tensor.gather::<T>(&indices);
            assert_eq!(gathered, self.expected_result(&indices, bad).map(|()| expected.clone()));
            let mut seen = vec![T::of(1); expected.len()];
            assert_eq!(tensor.gather_into(&indices, &mut seen), self.expected_result(&indices, bad));
            assert_eq!(seen, expected, "the row of a bad index is zero");
        }
    }

    /// Tests a scatter with distinct indices, so that the result is defined.
    fn scatter(&mut self, random: &mut SeededRandom) {
        for tensor in &self.tensors {
            let (indices, bad) = random.indices(self.rows.len(), true);
            let values = random.values::<T>(indices.len() * self.width);
            assert_eq!(tensor.scatter(&indices, &values), self.expected_result(&indices, bad));
            for (at, (index, values)) in indices.iter().zip(values.chunks_exact(self.width)).enumerate() {
                if bad != Some(at) {
                    self.rows[*index as usize].copy_from_slice(values);
                }
            }
        }
        self.expect_rows(random, "after scattering");
    }

    /// Tests a scatter-add of all ranks at the same time, with repeated indices.
    fn add(&mut self, random: &mut SeededRandom) {
        let operands: Vec<_> = (self.tensors.iter())
            .map(|_| {
                let (indices, bad) = random.indices(self.rows.len(), false);
                let values = random.values::<T>(indices.len() * self.width);
                (indices, bad, values)
            })
            .collect();
        let is_number = T::DTYPE.is_number();
        let outcomes = Communicator::on_each(&self.comms, |comm| {
            let (indices, _, values) = &operands[comm.rank().index()];
            Ok(self.tensors[comm.rank().index()].scatter_add(indices, values))
        });
        for (outcome, (indices, bad, values)) in outcomes.unwrap().into_iter().zip(&operands) {
            if !is_number {
                let refused = Error::OpNotForType { op: ReduceOp::Sum, dtype: T::DTYPE };
                let code = outcome.as_ref().map_err(Error::code);
                assert_eq!(code, Err(refused.code()), "{outcome:?}");
                continue;
            }
            assert_eq!(outcome, self.expected_result(indices, *bad));
            for (at, (index, values)) in indices.iter().zip(values.chunks_exact(self.width)).enumerate() {
                if *bad == Some(at) {
                    continue;
                }
                for (sum, value) in self.rows[*index as usize].iter_mut().zip(values) {
                    *sum = sum.plus(*value).unwrap();
                }
            }
        }
        self.expect_rows(random, "after adding");
    }
}
