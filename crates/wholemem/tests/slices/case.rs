//! A case: a tensor over some ranks, what every typed call does to it, and the same done to plain vectors.

use std::fmt::Debug;
use std::ops::Range;

use proptest::prelude::*;
use wholemem::{Communicator, Element, Error, Kind, Location, ReduceOp, TensorSpec, WholeTensor};
use wholemem_hal::Backend;

use super::value::Value;

#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) rows_of_each: Vec<u64>,
    pub(crate) width: u64,
    pub(crate) kind: Kind,
    pub(crate) location: Location,
    pub(crate) element_type: usize,
    /// Whether a part of the rows and columns is used instead of the whole.
    pub(crate) view: bool,
    pub(crate) seed: u64,
}

pub(crate) fn cases() -> impl Strategy<Value = Case> {
    let rows = prop::collection::vec(prop_oneof![Just(0_u64), Just(1), 0_u64..40], 1..6);
    let width = prop_oneof![Just(1_u64), Just(16), 1_u64..20];
    let kind = prop_oneof![Just(Kind::Continuous), Just(Kind::Chunked)];
    let location = prop_oneof![Just(Location::Device), Just(Location::Host)];
    (rows, width, kind, location, 0_usize..13, any::<bool>(), any::<u64>()).prop_map(
        |(rows_of_each, width, kind, location, element_type, view, seed)| Case {
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

/// Numbers that a seed makes.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % below.max(1)
    }

    fn values<T: Value>(&mut self, count: usize) -> Vec<T> {
        (0..count).map(|_| T::of(self.roll(7) as u8)).collect()
    }

    /// Indices, and the first position of one that names no row.
    fn indices(&mut self, rows: usize, is_distinct: bool) -> (Vec<i64>, Option<usize>) {
        let count =
            if is_distinct { self.roll(rows as u64 + 1) } else { self.roll(30) * u64::from(rows > 0) };
        let start = self.roll(rows as u64);
        let index = |dice: &mut Self, at: u64| {
            (if is_distinct { (start + at) % rows as u64 } else { dice.roll(rows as u64) }) as i64
        };
        let mut indices: Vec<_> = (0..count).map(|at| index(self, at)).collect();
        if self.roll(4) == 0 && !indices.is_empty() {
            let bad = [-1, rows as i64, i64::MIN, i64::MAX][self.roll(4) as usize];
            let at = self.roll(count) as usize;
            indices[at] = bad;
            return (indices, Some(at));
        }
        (indices, None)
    }
}

impl Case {
    pub(crate) fn play<T: Value + Element + PartialEq + Debug>(&self, backend: &Backend) {
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
        let mut world = World { comms, tensors, width, rows: vec![vec![T::default(); width]; rows] };
        let mut dice = Dice(self.seed | 1);
        world.fill(&mut dice);
        world.write(&mut dice);
        world.gather(&mut dice);
        world.scatter(&mut dice);
        world.add(&mut dice);
        // What is not in the view was never written.
        let zeros = whole[0].read_rows::<T>(0..whole[0].row_count()).unwrap();
        let outside = zeros.iter().filter(|value| **value != T::default()).count();
        let inside = world.rows.concat().iter().filter(|value| **value != T::default()).count();
        assert_eq!(outside, inside, "elements outside the view have changed");
    }

    fn part(&self, tensor: &WholeTensor) -> WholeTensor {
        if !self.view {
            return tensor.clone();
        }
        let rows = tensor.row_count();
        tensor.rows(rows / 4..rows - rows / 5).unwrap().columns(self.width / 3..self.width).unwrap()
    }
}

/// The tensor on each rank, and its rows as plain vectors.
struct World<T> {
    comms: Vec<Communicator>,
    tensors: Vec<WholeTensor>,
    width: usize,
    rows: Vec<Vec<T>>,
}

impl<T: Value + Element + PartialEq + Debug> World<T> {
    /// Every rank sees the rows of the model, all at once and some of them.
    fn expect_rows(&self, dice: &mut Dice, when: &str) {
        for tensor in &self.tensors {
            let end = dice.roll(self.rows.len() as u64 + 1);
            let start = dice.roll(end + 1);
            for Range { start, end } in [0..self.rows.len() as u64, start..end] {
                let expected = self.rows[start as usize..end as usize].concat();
                assert_eq!(tensor.read_rows::<T>(start..end).unwrap(), expected, "{when}");
                let mut seen = vec![T::default(); expected.len()];
                tensor.read_rows_into(start, &mut seen).unwrap();
                assert_eq!(seen, expected, "{when}");
            }
        }
    }

    fn fill(&mut self, dice: &mut Dice) {
        for tensor in &self.tensors {
            let value = T::of(dice.roll(7) as u8);
            tensor.fill_local(value).unwrap();
            let local = tensor.local().map_or(0..0, |local| local.rows);
            for row in &mut self.rows[local.start as usize..local.end as usize] {
                row.fill(value);
            }
        }
        self.expect_rows(dice, "after filling");
    }

    fn write(&mut self, dice: &mut Dice) {
        for tensor in &self.tensors {
            let first = dice.roll(self.rows.len() as u64 + 1) as usize;
            let count = dice.roll((self.rows.len() - first) as u64 + 1) as usize;
            let values = dice.values::<T>(count * self.width);
            tensor.write_rows(first as u64, &values).unwrap();
            for (row, values) in self.rows[first..].iter_mut().zip(values.chunks_exact(self.width)) {
                row.copy_from_slice(values);
            }
        }
        self.expect_rows(dice, "after writing");
    }

    fn answer(&self, indices: &[i64], bad: Option<usize>) -> Result<(), Error> {
        let rows = Some(self.rows.len() as u64);
        bad.map_or(Ok(()), |at| Err(Error::BadIndex { position: at as u64, index: Some(indices[at]), rows }))
    }

    fn gather(&self, dice: &mut Dice) {
        for tensor in &self.tensors {
            let (indices, bad) = dice.indices(self.rows.len(), false);
            let zeros = vec![T::default(); self.width];
            let row = |(at, index): (usize, &i64)| {
                if bad == Some(at) { zeros.clone() } else { self.rows[*index as usize].clone() }
            };
            let expected: Vec<T> = indices.iter().enumerate().flat_map(row).collect();
            let gathered = tensor.gather::<T>(&indices);
            assert_eq!(gathered, self.answer(&indices, bad).map(|()| expected.clone()));
            let mut seen = vec![T::of(1); expected.len()];
            assert_eq!(tensor.gather_into(&indices, &mut seen), self.answer(&indices, bad));
            assert_eq!(seen, expected, "a bad index is a row of zeros");
        }
    }

    /// No index repeats, so that every row has one value.
    fn scatter(&mut self, dice: &mut Dice) {
        for tensor in &self.tensors {
            let (indices, bad) = dice.indices(self.rows.len(), true);
            let values = dice.values::<T>(indices.len() * self.width);
            assert_eq!(tensor.scatter(&indices, &values), self.answer(&indices, bad));
            for (at, (index, values)) in indices.iter().zip(values.chunks_exact(self.width)).enumerate() {
                if bad != Some(at) {
                    self.rows[*index as usize].copy_from_slice(values);
                }
            }
        }
        self.expect_rows(dice, "after scattering");
    }

    /// All ranks at once, and with indices that repeat.
    fn add(&mut self, dice: &mut Dice) {
        let operands: Vec<_> = (self.tensors.iter())
            .map(|_| {
                let (indices, bad) = dice.indices(self.rows.len(), false);
                let values = dice.values::<T>(indices.len() * self.width);
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
            assert_eq!(outcome, self.answer(indices, *bad));
            for (at, (index, values)) in indices.iter().zip(values.chunks_exact(self.width)).enumerate() {
                if *bad == Some(at) {
                    continue;
                }
                for (sum, value) in self.rows[*index as usize].iter_mut().zip(values) {
                    *sum = sum.plus(*value).unwrap();
                }
            }
        }
        self.expect_rows(dice, "after adding");
    }
}
