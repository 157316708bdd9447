//! A simulated environment of the state machine, which kills the server after every store to the index: recovery from each prefix
//! of the stores must give the state before the operation or after it.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::pin_scan::PinPosition;
use super::*;
use crate::cells::Cells;
use crate::cells::recorded::{Prefixes, RecordedCells};
use crate::id::{AllocationId, ClientId, ObjectId, SlotState};
use crate::index::{Geometry, ObjectIndex, Region};
use crate::protocol::{Answer, Label, MemberSpec, PROTOCOL, Refusal, Request, RequestKind, Status};
use crate::server::budget::{Budget, tests::unlimited};

pub(super) const GEOMETRY: Geometry = Geometry { slots: 24, allocations: 6 };
pub(super) const POLICY: AllocationPolicy =
    AllocationPolicy { quota: 1 << 20, granule: 4 << 10, page: 4 << 10, small: 16 << 10, arena: 64 << 10 };
pub(super) const USER: u32 = 1000;

pub(super) fn settings(prealloc_limit: u64) -> ServerSettings {
    ServerSettings { host: POLICY, device: POLICY, devices: vec![[1; 16]], user: 0, prealloc_limit }
}

/// The simulated pins of the clients.
#[derive(Debug, Clone, Default)]
pub(super) struct TestPins {
    held: BTreeSet<ObjectId>,
    /// The objects whose simulated pins were cleared.
    released: BTreeSet<ObjectId>,
}

impl TestPins {
    pub(super) fn insert(&mut self, object: ObjectId) {
        self.held.insert(object);
    }

    pub(super) fn clear(&mut self) {
        self.released.append(&mut self.held);
    }
}

/// Simulated memory of the server: the clients' pins, and the bytes that were written to arenas.
#[derive(Debug, Clone, Default)]
pub(super) struct TestMemory {
    pub(super) pins: TestPins,
    pub(super) bytes: BTreeMap<(AllocationId, u64), Vec<u8>>,
    /// The number of scan passes over all pins that the server has made.
    pub(super) scans: Cell<usize>,
}

impl ServerMemory for TestMemory {
    fn write(&mut self, allocation: AllocationId, offset: u64, bytes: &[u8]) -> bool {
        self.bytes.insert((allocation, offset), bytes.to_vec());
        true
    }

    fn read_pins(
        &self,
        _: PinPosition,
        work: &mut usize,
        visit: &mut dyn FnMut(ClientId, u64) -> usize,
    ) -> Option<PinPosition> {
        self.scans.set(self.scans.get() + 1);
        for pin in &self.pins.held {
            *work = work.saturating_sub(visit(ClientId(0), pin.as_u64()));
        }
        None
    }

    /// Returns the pins that were cleared before the client left.
    fn take_pins(&mut self, _: ClientId) -> Vec<u64> {
        self.pins.released.iter().map(|id| id.as_u64()).collect()
    }
}

/// The part of a server's state that recovery must reproduce.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct StateSnapshot {
    objects: Vec<(ObjectId, SlotState, String, u64, Region, u64)>,
    names: BTreeMap<String, ObjectId>,
    found: BTreeMap<String, Option<ObjectId>>,
    used: (u64, u64),
    free_slots: usize,
    unused: Vec<AllocationId>,
}

pub(super) fn snapshot<C: Cells>(server: &Server<C>) -> StateSnapshot {
    let index = server.index();
    let mut objects: Vec<_> = index
        .objects()
        .map(|(id, state, record)| {
            // The version of an object is compared only once the object is sealed.
            let version = if state == SlotState::Sealed { record.version } else { 0 };
            (id, state, record.name, version, record.region, record.len)
        })
        .collect();
    objects.sort();
    let find = |name: &String| {
        let mut candidates = index.candidates(name);
        let named = |id: &ObjectId| index.read(*id).is_some_and(|(_, record)| record.name == *name);
        let found = candidates.find(|found| named(&found.id));
        (name.clone(), found.map(|found| found.id))
    };
    let is_used = |id: &AllocationId| objects.iter().any(|object| object.4.allocation == *id);
    let ledger = server.state.memory.ledger();
    let record = |id: AllocationId| Some((id, ledger.record(id)?));
    let allocations: Vec<_> = ledger.allocations().filter_map(record).collect();
    // Empty arenas are not compared: one is retained for the next object, independently of the last operation.
    let counted = |place| {
        let counted = allocations.iter().filter(|(id, record)| record.place == place && is_used(id));
        counted.map(|(_, record)| record.len).sum()
    };
    StateSnapshot {
        found: server.state.objects.names().keys().map(find).collect(),
        names: server.state.objects.names().clone(),
        used: (counted(0), counted(1)),
        free_slots: server.state.objects.free_slots(),
        unused: allocations
            .iter()
            .filter(|(id, record)| !record.is_arena && !is_used(id))
            .map(|(id, _)| *id)
            .collect(),
        objects,
    }
}

pub(super) fn now() -> StepTime {
    StepTime { elapsed: Duration::from_secs(1), unix: 7 }
}

/// A server whose stores to the index are recorded, with its simulated clients, memory and keeper.
pub(super) struct Simulation {
    pub(super) cells: RecordedCells,
    pub(super) server: Server<RecordedCells>,
    pub(super) memory: TestMemory,
    pub(super) parked: BTreeSet<AllocationId>,
    pub(super) clients: BTreeMap<ClientId, u32>,
    pub(super) budget: Budget,
    /// The prefix of the names that each client watches.
    watchers: BTreeMap<ClientId, String>,
    prealloc_limit: u64,
    time: Duration,
    pub(super) requests: u64,
    pub(super) prefixes: usize,
    pub(super) writable: bool,
}

impl Simulation {
    pub(super) fn new() -> Self {
        Self::with_prealloc_limit(0)
    }

    /// Creates a simulation of a server that may preallocate up to `prealloc_limit` bytes.
    pub(super) fn with_prealloc_limit(prealloc_limit: u64) -> Self {
        let cells = RecordedCells::new(GEOMETRY.cells());
        let index = ObjectIndex::format(cells.clone(), GEOMETRY);
        let mut memory = TestMemory::default();
        let (server, outputs) =
            Server::recover(index, &settings(prealloc_limit), &InheritedState::default(), now(), &mut memory);
        assert!(outputs.is_empty());
        cells.take();
        let (parked, clients) = (BTreeSet::new(), BTreeMap::new());
        Self {
            cells,
            server,
            memory,
            parked,
            clients,
            budget: unlimited(),
            watchers: BTreeMap::new(),
            prealloc_limit,
            time: now().elapsed,
            requests: 0,
            prefixes: 0,
            writable: false,
        }
    }

    pub(super) fn inherited(&self) -> InheritedState {
        let mut budget = unlimited();
        let clients = self.clients.iter().map(|(client, user)| (*client, budget.open(*user)));
        InheritedState { allocations: self.parked.clone(), clients: clients.collect() }
    }

    pub(super) fn recover(&self, cells: RecordedCells) -> (Server<RecordedCells>, Vec<Output>) {
        let index = ObjectIndex::open(cells).expect("the cells are an index");
        Server::recover(
            index,
            &settings(self.prealloc_limit),
            &self.inherited(),
            now(),
            &mut self.memory.clone(),
        )
    }

    /// Runs one step of the server, and recovers from every prefix of the step's stores to the index.
    pub(super) fn step(&mut self, input: Input<'_>) -> Vec<Output> {
        let before = self.cells.snapshot();
        let time = StepTime { elapsed: self.time, ..now() };
        let outputs = self.server.step(time, input, &mut self.memory);
        let prefixes = Prefixes { before, ..self.cells.take() };
        let count = prefixes.stores.len();
        let first = snapshot(&self.recover(prefixes.replay(0)).0);
        let last = snapshot(&self.recover(prefixes.replay(count)).0);
        let mut is_done = first == last;
        for stores in 0..=count {
            let cells = prefixes.replay(stores);
            let begin = cells.snapshot();
            let recovered = snapshot(&self.recover(cells.clone()).0);
            is_done |= recovered == last;
            let expected = if is_done { &last } else { &first };
            assert_eq!(&recovered, expected, "after {stores} of {count} stores");
            self.prefixes += 1;
            // Recovery itself is killed, too, after every seventh of its stores.
            let recovery = Prefixes { before: begin, ..cells.take() };
            for stores in (0..recovery.stores.len()).step_by(7) {
                assert_eq!(&snapshot(&self.recover(recovery.replay(stores)).0), expected);
            }
        }
        self.cells.take();
        outputs
    }

    /// Advances the simulated time, and runs all steps of the server that are due.
    pub(super) fn advance(&mut self, time: Duration) {
        self.time += time;
        self.run(Input::Tick);
    }

    /// Runs a step of the server, and all steps that follow from its outputs. Returns the answers.
    pub(super) fn run(&mut self, input: Input<'_>) -> Vec<Answer> {
        let mut answers = Vec::new();
        let mut outputs = self.step(input);
        while !outputs.is_empty() || self.server.wake_at() == Some(Duration::ZERO) {
            if outputs.is_empty() {
                outputs = self.step(Input::Tick);
                continue;
            }
            let output = outputs.remove(0);
            let follows = match output {
                Output::Respond { response, .. } => {
                    answers.push(response.answer);
                    None
                }
                Output::Allocate { allocation, .. } => {
                    assert!(self.parked.insert(allocation), "an allocation was created twice");
                    Some(Input::Allocated { allocation, outcome: Ok(()) })
                }
                Output::Import { allocation, .. } => {
                    // The simulated keeper also gets memory that fails the check, because the server releases that memory
                    // afterwards.
                    let outcome = if self.writable { Err("it can be written".to_owned()) } else { Ok(()) };
                    self.parked.insert(allocation);
                    Some(Input::Allocated { allocation, outcome })
                }
                Output::CloseForWriting { allocation, .. } => {
                    let outcome = if self.writable { Err(Refusal::StillMapped) } else { Ok(()) };
                    Some(Input::ClosedForWriting { allocation, outcome })
                }
                Output::Release { allocation } | Output::Reclaim { allocation } => {
                    assert!(self.parked.remove(&allocation), "an allocation was freed twice");
                    None
                }
                Output::Watch { client, prefix, .. } => {
                    self.watchers.insert(client, prefix);
                    None
                }
                Output::Notify(change) => {
                    let watchers = &self.watchers;
                    change.for_each_event(|event, names| {
                        let is_watched = |prefix: &&String| {
                            names.iter().chain([&event.name]).any(|name| name.starts_with(*prefix))
                        };
                        let watchers = watchers.values().filter(is_watched);
                        answers.extend(watchers.map(|_| Answer::Event(event.clone())));
                    });
                    None
                }
                Output::Report { .. }
                | Output::Admit { .. }
                | Output::Disconnect { .. }
                | Output::Promote { .. } => None,
            };
            if let Some(input) = follows {
                outputs.extend(self.step(input));
            }
        }
        self.check();
        answers
    }

    /// Checks that a server that recovers now has the same state as the running server.
    pub(super) fn check(&self) {
        let (recovered, outputs) =
            self.recover(Prefixes { before: self.cells.snapshot(), stores: vec![] }.replay(0));
        assert_eq!(snapshot(&recovered), snapshot(&self.server));
        // Recovery releases preallocated memory, because the index does not list it.
        let preallocated: BTreeSet<_> = self.server.state.memory.preallocated_ids().collect();
        let released = outputs.iter().filter_map(|output| match output {
            Output::Release { allocation } => Some(*allocation),
            _ => None,
        });
        assert_eq!(
            released.collect::<BTreeSet<_>>(),
            preallocated,
            "nothing but preallocated memory is released: {outputs:?}"
        );
        let listed: BTreeSet<_> =
            self.server.state.memory.ledger().allocations().chain(preallocated).collect();
        assert_eq!(listed, self.parked);
    }

    pub(super) fn join(&mut self, client: u64) -> ClientId {
        self.join_as(client, USER)
    }

    pub(super) fn join_as(&mut self, client: u64, user: u32) -> ClientId {
        let client = ClientId(client);
        self.clients.insert(client, user);
        let account = self.budget.open(user);
        self.run(Input::Joined { client, account });
        self.request(client, RequestKind::Hello { protocol: PROTOCOL }, &[]);
        client
    }

    pub(super) fn request(&mut self, client: ClientId, kind: RequestKind, payload: &[u8]) -> Vec<Answer> {
        self.requests += 1;
        let request = Request { id: self.requests, resends: 0, kind };
        self.run(Input::Request { client, request, payload: payload.to_vec().into(), charge: None })
    }

    pub(super) fn request_one(&mut self, client: ClientId, kind: RequestKind, payload: &[u8]) -> Answer {
        let mut answers = self.request(client, kind, payload);
        assert_eq!(answers.len(), 1, "{answers:?}");
        answers.remove(0)
    }

    pub(super) fn create(&mut self, client: ClientId, name: &str, len: u64) -> (u64, Answer) {
        let kind = create(name, len, &[], 0);
        let is_small = len < POLICY.small;
        let payload = vec![7; if is_small { usize::try_from(len).unwrap() } else { 0 }];
        let answer = self.request_one(client, kind, &payload);
        (self.requests, answer)
    }

    pub(super) fn status(&mut self, client: ClientId) -> Status {
        match self.request_one(client, RequestKind::Status, &[]) {
            Answer::Status(status) => status,
            other => panic!("{other:?}"),
        }
    }
}

pub(super) fn label(name: &str) -> Label {
    Label { name: name.to_owned(), meta: b"meta".to_vec() }
}

pub(super) fn create(name: &str, len: u64, members: &[(&str, u64)], place: u32) -> RequestKind {
    let members = members.iter().map(|(name, len)| MemberSpec { label: label(name), len: *len }).collect();
    RequestKind::Create { label: label(name), len, members, place }
}

pub(super) fn sealed(answer: &Answer) -> ObjectId {
    match answer {
        Answer::Sealed { object, .. } => *object,
        other => panic!("{other:?}"),
    }
}
