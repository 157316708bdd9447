//! Fuzzing entry points of the store: functions of arbitrary bytes that panic if an invariant is violated.
//!
//! Tests run the corpora in `fuzz/corpus`, with seeded mutations. No other code uses this module.

use std::collections::BTreeMap;
use std::time::Duration;

use wholemem_os::vm::Protection;
use wholemem_os::{Memfd, SharedMap};

use crate::cells::MappedCells;
use crate::id::{AllocationId, ClientId, ObjectId};
use crate::index::{Geometry, ObjectIndex};
use crate::protocol::frame::{MessageAssembler, Payload, decode, encode};
use crate::protocol::{PROTOCOL, Request, RequestKind, Response};
use crate::server::{
    AllocationPolicy, Budget, BudgetLimits, InheritedState, Input, Output, PinPosition, Server, ServerMemory,
    ServerSettings, StepTime,
};

/// Splits the fuzz input into packets, each prefixed by its length in two bytes.
fn packets(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let ([low, high], after) = rest.split_first_chunk::<2>()?;
        let len = usize::from(u16::from_le_bytes([*low, *high])).min(after.len());
        let (packet, after) = after.split_at(len);
        rest = after;
        Some(packet)
    })
}

/// Decodes the fuzz input as packets of a peer.
///
/// # Panics
/// If a decoded message does not survive encoding and decoding.
pub fn messages(bytes: &[u8]) {
    let mut assembler = MessageAssembler::default();
    for packet in packets(bytes) {
        let Ok(Some(message)) = assembler.push(packet) else { continue };
        if let Ok((request, payload)) = decode::<Request>(&message) {
            let encoded = encode(&request, payload).expect("a decoded message can be encoded");
            assert_eq!(reassemble(&encoded), Some((request, payload.to_vec())));
        }
        if let Ok((response, payload)) = decode::<Response>(&message) {
            let encoded = encode(&response, payload).expect("a decoded message can be encoded");
            assert_eq!(reassemble(&encoded), Some((response, payload.to_vec())));
        }
    }
}

fn reassemble<T: serde::de::DeserializeOwned>(packets: &[Vec<u8>]) -> Option<(T, Vec<u8>)> {
    let mut assembler = MessageAssembler::default();
    let message = packets.iter().find_map(|packet| assembler.push(packet).ok()?)?;
    decode(&message).ok().map(|(decoded, payload)| (decoded, payload.to_vec()))
}

const POLICY: AllocationPolicy =
    AllocationPolicy { quota: 1 << 20, granule: 4 << 10, page: 4 << 10, small: 16 << 10, arena: 64 << 10 };

/// The lengths of all allocations, to check that the server writes no byte outside of them.
#[derive(Default)]
struct AllocationLens(BTreeMap<AllocationId, u64>);

impl ServerMemory for AllocationLens {
    fn write(&mut self, allocation: AllocationId, offset: u64, bytes: &[u8]) -> bool {
        let len = self.0.get(&allocation).copied().expect("the arena exists");
        assert!(offset + bytes.len() as u64 <= len, "a write exceeds the arena");
        true
    }

    fn read_pins(
        &self,
        _: PinPosition,
        _: &mut usize,
        _: &mut dyn FnMut(ClientId, u64) -> usize,
    ) -> Option<PinPosition> {
        None
    }

    fn take_pins(&mut self, _: ClientId) -> Vec<u64> {
        Vec::new()
    }
}

/// Runs the fuzz input as requests of a client against the server's state machine. Requested memory is allocated at once.
///
/// # Panics
/// If the server allocates more than its quota, or frees memory that does not exist.
pub fn requests(bytes: &[u8]) {
    let geometry = Geometry { slots: 16, allocations: 4 };
    let memory = Memfd::create("fuzz", geometry.len()).expect("cannot create the memory");
    let map = SharedMap::create(&memory, Protection::ReadWrite).expect("cannot map the memory");
    let index = ObjectIndex::format(MappedCells::new(map), geometry);
    let settings = ServerSettings {
        host: POLICY,
        device: POLICY,
        devices: Vec::new(),
        user: 0,
        prealloc_limit: POLICY.quota / 4,
    };
    let (mut memory, mut now) = (AllocationLens::default(), StepTime { elapsed: Duration::ZERO, unix: 0 });
    let (mut server, _) = Server::recover(index, &settings, &InheritedState::default(), now, &mut memory);
    let client = ClientId(1);
    let mut budget = Budget::new(0, BudgetLimits::of_server(POLICY.quota, 1 << 10));
    let hello = Request { id: 1, resends: 0, kind: RequestKind::Hello { protocol: PROTOCOL } };
    let mut inputs = vec![
        // The client belongs to the server's own user, so it may send every request.
        Input::Joined { client, account: budget.open(0) },
        Input::Request { client, request: hello, payload: Payload::default(), charge: None },
    ];
    let mut assembler = MessageAssembler::default();
    let messages = packets(bytes).filter_map(|packet| assembler.push(packet).ok()?);
    for message in messages {
        // Enough time passes between two requests for the server to preallocate memory.
        now.elapsed += Duration::from_millis(7);
        inputs.push(Input::Tick);
        if let Ok((request, payload)) = Payload::split::<Request>(message) {
            inputs.push(Input::Request { client, request, payload, charge: None });
        }
        while !inputs.is_empty() {
            for output in server.step(now, inputs.remove(0), &mut memory) {
                match output {
                    Output::Allocate { allocation, len, .. } | Output::Import { allocation, len, .. } => {
                        assert!(
                            memory.0.insert(allocation, len).is_none(),
                            "an allocation was created twice"
                        );
                        inputs.push(Input::Allocated { allocation, outcome: Ok(()) });
                    }
                    Output::Release { allocation } | Output::Reclaim { allocation } => {
                        assert!(memory.0.remove(&allocation).is_some(), "an allocation was freed twice");
                    }
                    Output::CloseForWriting { allocation, .. } => {
                        inputs.push(Input::ClosedForWriting { allocation, outcome: Ok(()) });
                    }
                    Output::Respond { .. }
                    | Output::Admit { .. }
                    | Output::Disconnect { .. }
                    | Output::Watch { .. }
                    | Output::Report { .. }
                    | Output::Notify(_)
                    | Output::Promote { .. } => {}
                }
            }
            assert!(memory.0.values().sum::<u64>() <= POLICY.quota, "the allocations exceed the quota");
        }
    }
    server.step(now, Input::Left { client }, &mut memory);
}

/// Returns the seed corpus of both fuzzing functions: encoded examples of every request.
#[must_use]
pub fn corpus() -> Vec<(&'static str, Vec<u8>)> {
    use crate::protocol::{Answer, ByteRange, Label, MemberSpec, Refusal};
    let label = |name: &str| Label { name: name.to_owned(), meta: vec![1, 2] };
    let object = ObjectId::new(0, 0);
    let create =
        |name: &str, len| RequestKind::Create { label: label(name), len, members: Vec::new(), place: 0 };
    let member = |name: &str| MemberSpec { label: label(name), len: 9000 };
    let pack = RequestKind::Create {
        label: label("p"),
        len: 0,
        members: vec![member("p/a"), member("p/b")],
        place: 0,
    };
    let part = |offset, len| ByteRange { offset, len };
    let adopt = |place, len, part| RequestKind::Adopt { label: label("adopted"), place, len, part };
    let find = RequestKind::Find { name: "small".to_owned(), wait: 5 };
    let request = |id, kind| encode(&Request { id, resends: 0, kind }, &[]).expect("cannot encode a request");
    let small = |id| {
        encode(&Request { id, resends: 0, kind: create("small", 5) }, b"bytes")
            .expect("cannot encode a request")
    };
    let answer = |answer| encode(&Response { id: 7, answer }, &[]).expect("cannot encode a response");
    let encode_packets = |messages: Vec<Vec<Vec<u8>>>| {
        let packets = messages.into_iter().flatten();
        packets
            .flat_map(|packet| {
                let len = u16::try_from(packet.len()).expect("packets of the corpus are short").to_le_bytes();
                len.into_iter().chain(packet)
            })
            .collect::<Vec<u8>>()
    };
    vec![
        ("small", encode_packets(vec![small(2), small(3)])),
        (
            "large",
            encode_packets(vec![
                request(2, create("large", 50_000)),
                request(3, RequestKind::Seal { create: 2 }),
            ]),
        ),
        (
            "abandoned",
            encode_packets(vec![
                request(2, create("large", 50_000)),
                request(3, RequestKind::Abandon { create: 2 }),
            ]),
        ),
        ("pack", encode_packets(vec![request(2, pack), request(3, RequestKind::Seal { create: 2 })])),
        ("delete", encode_packets(vec![small(2), request(3, RequestKind::Delete { object })])),
        (
            "publish",
            encode_packets(vec![
                small(2),
                request(3, RequestKind::Publish { label: label("other"), object, part: None }),
            ]),
        ),
        (
            "adopt",
            encode_packets(vec![
                request(2, adopt(0, 8 << 10, part(4096, 100))),
                request(
                    3,
                    RequestKind::Publish { label: label("beside"), object, part: Some(part(0, 8 << 10)) },
                ),
                request(4, adopt(0, 8 << 10, part(4096, u64::MAX))),
                request(5, adopt(1, 5, part(0, 5))),
            ]),
        ),
        ("find", encode_packets(vec![request(2, find), small(3), request(4, RequestKind::Fetch { object })])),
        (
            "watch",
            encode_packets(vec![
                request(2, RequestKind::Watch { prefix: "s".to_owned() }),
                small(3),
                small(4),
            ]),
        ),
        (
            "await_space",
            encode_packets(vec![
                request(2, create("large", 1 << 19)),
                request(3, RequestKind::AwaitSpace { len: 1 << 20, place: 0, wait: 5 }),
                request(4, RequestKind::Abandon { create: 2 }),
            ]),
        ),
        (
            "goodbye",
            encode_packets(vec![
                request(2, create("large", 50_000)),
                request(3, RequestKind::Goodbye),
                small(4),
            ]),
        ),
        (
            "status",
            encode_packets(vec![
                request(2, RequestKind::Status),
                request(3, RequestKind::PinReleased { object }),
            ]),
        ),
        ("responses", encode_packets(vec![answer(Answer::Restarted), answer(Answer::Found { object })])),
        ("refused", encode_packets(vec![answer(Answer::Refused(Refusal::NoSuchObject { object }))])),
    ]
}
