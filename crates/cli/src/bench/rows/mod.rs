//! `wholemem bench gather` and `scatter`: rows of a table moved by their indices, beside a plain copy of as many bytes.
//!
//! ```text
//!   a pair      [ dense rows | indices ]   [ dense rows ]        ours, and the plain copy
//!   a lap       all pairs: prepared -> each timed in its turn -> each checked (scatter: and undone)
//! ```
//!
//! The table is a [pattern](wholemem_hal::pattern), so that every row is known by its number, and indices are a function
//! of their position: what a call moved is checked whole, on the device, without keeping either. Between its preparation
//! and its turn a pair leaves the caches, as the others of the lap come through them.
//!
//! One rank plays in this process. Several are processes, each with its part of the table, and all move rows at once,
//! so that what they reach of the others' is memory that was passed between processes.

mod content;
mod course;
mod indices;
mod lap;
mod report;
mod table;
mod turns;

use anyhow::{Result, anyhow, ensure};
use serde::{Deserialize, Serialize};
use wholemem::{Bootstrap, Communicator};
use wholemem_hal::{Backend, BackendKind, Device, HostConfig};

use self::course::{Course, Room};
pub(crate) use self::report::Measured;
use self::turns::Turns;
use super::crew;
use super::sample::{Pair, Summary};
use crate::cli::{LocationChoice, RankRole, RowsArgs};
use crate::progress::Progress;
use crate::{backend, memory};

/// What is done with rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Op {
    Gather,
    Scatter,
}

/// What is told while rows are moved.
type Told = crew::Told<Pair, Summary>;

pub(super) fn run(op: Op, args: &RowsArgs) -> Result<()> {
    let opened = backend::open(args.backend)?;
    let device = opened.backend.device(0)?;
    let courses = Course::all(op, args, &room(&device, &args.location)?)?;
    let mut cases = Vec::new();
    let turns = args.in_turns.then_some(Turns);
    ensure!(turns.is_none() || args.ranks == [1], "turns are taken by one rank, not by several");
    for crew in courses.chunk_by(|one, next| one.ranks == next.ranks) {
        cases.extend(measure(&device, crew, turns)?);
    }
    report::tell(op, &device, &cases, args.json || args.in_turns)
}

/// A measurement for the tour: so many ranks, one table, rows of 1 KiB.
pub(crate) fn tour(op: Op, device: &Device, ranks: u32, table: usize) -> Result<Measured> {
    let room = Room { table, ..room(device, &[])? };
    let mut cases = measure(device, &[Course::of_the_tour(op, ranks, &room)], None)?;
    cases.pop().ok_or_else(|| anyhow!("nothing was measured"))
}

/// How much there is for a table, and for what is moved.
fn room(device: &Device, locations: &[LocationChoice]) -> Result<Room> {
    let kind = device.backend().kind();
    let mut room = Room::on(kind, device.available()?);
    if kind == BackendKind::Cuda && locations.contains(&LocationChoice::Host) {
        let machine = Backend::host(HostConfig::default())?.device(0)?;
        room.table = room.table.min(Room::on(BackendKind::Host, machine.available()?).table);
    }
    Ok(room)
}

/// Measures courses of one number of ranks.
fn measure(device: &Device, courses: &[Course], turns: Option<Turns>) -> Result<Vec<Measured>> {
    let mut measured = Vec::new();
    let mut shown: Option<Progress> = None;
    let mut hear = |told: Told| -> Result<()> {
        let Some(course) = courses.get(measured.len()) else { return Ok(()) };
        match told {
            Told::Ready => return turns.map_or(Ok(()), Turns::wait),
            Told::Round(pair) => {
                turns.map_or(Ok(()), |turns| turns.end(course, pair))?;
                let rounds = course.rounds as usize;
                shown.get_or_insert_with(|| Progress::of_rounds(&course.label(), rounds)).advance(1);
            }
            Told::Done(summary) => {
                shown = None;
                measured.push(Measured::new(course, device, &summary));
            }
            Told::Failed { what, hint } => return Err(crate::failure::PeerFailed { what, hint }.into()),
        }
        Ok(())
    };
    let Some(first) = courses.first() else { return Ok(Vec::new()) };
    let most = courses.iter().map(Course::footprint).max().unwrap_or(0);
    memory::ensure_room(device, most)?;
    if first.ranks == 1 {
        let comm = Bootstrap::local(1)?.pop().ok_or_else(|| anyhow!("a group of one rank has none"))?;
        play(&Communicator::create(comm, device)?, courses, &mut hear)?;
    } else {
        crew::play((RankRole::Rows, first.ranks), device.backend().kind(), courses, &mut hear)?;
    }
    ensure!(measured.len() == courses.len(), "{} of {} were measured", measured.len(), courses.len());
    Ok(measured)
}

/// Plays one rank.
pub(crate) fn rank(plan: &str) -> Result<()> {
    crew::rank(plan, |group, courses: &[Course], mut tell| play(group, courses, &mut tell))
}

/// Plays courses as one rank, and tells how it goes.
fn play(group: &Communicator, courses: &[Course], tell: &mut impl FnMut(Told) -> Result<()>) -> Result<()> {
    for same in courses.chunk_by(Course::has_the_table_of) {
        let Some(first) = same.first() else { continue };
        let table = table::Table::create(group, first)?;
        for course in same {
            let summary = lap::play(&table, course, tell)?;
            tell(Told::Done(summary))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{IndexChoice, KindChoice, Share, Spread};

    fn devices(count: usize) -> Vec<Device> {
        let backend = Backend::host(HostConfig::virtual_devices(1)).unwrap();
        vec![backend.device(0).unwrap(); count]
    }

    fn course(op: Op, ranks: u32) -> Course {
        let room = Room { table: 1 << 18, payload: 1 << 16, most_rows: 1 << 20, ring: 1 << 20 };
        Course { rounds: 3, ..Course::of_the_tour(op, ranks, &room) }
    }

    /// Plays courses by threads, and counts what rank 0 tells.
    fn played(ranks: u32, courses: &[Course]) -> Result<(usize, usize)> {
        let groups = Communicator::local(&devices(ranks as usize))?;
        let told = std::thread::scope(|scope| {
            let threads: Vec<_> = groups
                .iter()
                .map(|group| {
                    scope.spawn(move || {
                        let (mut rounds, mut done) = (0, 0);
                        play(group, courses, &mut |told| {
                            match told {
                                Told::Ready => {}
                                Told::Round(_) => rounds += 1,
                                Told::Done(_) => done += 1,
                                Told::Failed { what, .. } => panic!("{what}"),
                            }
                            Ok(())
                        })
                        .map(|()| (rounds, done))
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Result<Vec<_>>>()
        })?;
        Ok(told[0])
    }

    #[test]
    fn every_length_type_and_spread_is_moved_and_checked() {
        let mut courses = Vec::new();
        for op in [Op::Gather, Op::Scatter] {
            for (row_len, rows) in [(4, 1000), (12, 33), (100, 1), (130, 7), (1024, 100)] {
                let (index, spread) = if row_len < 100 {
                    (IndexChoice::I32, Spread::Zipf)
                } else {
                    (IndexChoice::I64, Spread::Uniform)
                };
                let of_length = Course { index, spread, ..course(op, 1).of_rows(row_len, rows, 1 << 18) };
                courses.push(of_length);
            }
        }
        assert_eq!(played(1, &courses).unwrap(), (3 * courses.len(), courses.len()));
    }

    #[test]
    fn ranks_divide_a_table_and_all_or_one_of_them_move_its_rows() {
        let mut courses = Vec::new();
        for op in [Op::Gather, Op::Scatter] {
            for share in [Share::Even, Share::Uneven, Share::First, Share::Last] {
                for (kind, first_only) in [(KindChoice::Continuous, false), (KindChoice::Chunked, true)] {
                    let of_length = course(op, 3).of_rows(100, 50, 1 << 18);
                    courses.push(Course { share, kind, first_only, ..of_length });
                }
            }
        }
        assert_eq!(played(3, &courses).unwrap(), (3 * courses.len(), courses.len()));
    }

    /// Plays a course on a table one of whose rows is another's.
    fn played_on_a_wrong_table(op: Op, wrong: u64) -> String {
        let group = &Communicator::local(&devices(1)).unwrap()[0];
        // Every row is asked for, some often.
        let course = course(op, 1).of_rows(100, 2000, 1 << 12);
        let table = table::Table::create(group, &course).unwrap();
        let stream = group.device().stream().unwrap();
        let mut row = [0; 100];
        table.tensor.read_rows_on(&stream, wrong - 1, &mut row).unwrap();
        table.tensor.write_rows_on(&stream, wrong, &row).unwrap();
        lap::play(&table, &course, &mut |_| Ok(())).unwrap_err().to_string()
    }

    #[test]
    fn a_gather_from_a_wrong_row_is_found_out() {
        let error = played_on_a_wrong_table(Op::Gather, 7);
        assert!(error.starts_with("gathering 2000 rows of 100 B: position "), "{error}");
        assert!(error.ends_with(", which is row 7, is wrong from its byte 0 on"), "{error}");
    }

    #[test]
    fn a_row_that_a_scatter_does_not_reach_must_stay_as_it_was() {
        let group = &Communicator::local(&devices(1)).unwrap()[0];
        let course = course(Op::Scatter, 1).of_rows(100, 1, 1 << 18);
        let course = Course { calls: 1, pairs: 1, rounds: 1, ..course };
        let table = table::Table::create(group, &course).unwrap();
        let stream = group.device().stream().unwrap();
        lap::play(&table, &course, &mut |_| Ok(())).unwrap();
        // Of two thousand rows, some that nobody writes.
        table.tensor.write_rows_on(&stream, 1000, &[7; 1000]).unwrap();
        let error = lap::play(&table, &course, &mut |_| Ok(())).unwrap_err().to_string();
        assert!(error.starts_with("rows that nobody scattered to have changed among 0.."), "{error}");
    }
}
