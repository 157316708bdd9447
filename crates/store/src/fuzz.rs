//! What a fuzzer feeds: functions over any bytes that panic where a promise about hostile bytes is broken.
//!
//! The corpora in `fuzz/corpus` are played to them in the tests, with changes by a seeded dice. Nothing else uses this.

use std::collections::BTreeMap;
use std::time::Duration;

use wholemem_os::vm::Protection;
use wholemem_os::{Memfd, SharedMap};

use crate::cells::MappedCells;
use crate::id::{AllocationId, ClientId, ObjectId};
use crate::index::{Geometry, Index};
use crate::protocol::frame::{Assembly, Payload, decode, encode};
use crate::protocol::{Ask, PROTOCOL, Request, Response};
use crate::server::{
    Budget, Input, Limits, Now, Output, PinPosition, Server, ServerMemory, Settings, Survivors, Terms,
};

/// Packets, each behind two bytes that say how long it is.
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

/// Bytes as the packets of a peer.
///
/// # Panics
/// When a message is decoded that is not what it is encoded as.
pub fn messages(bytes: &[u8]) {
    let mut assembly = Assembly::default();
    for packet in packets(bytes) {
        let Ok(Some(message)) = assembly.push(packet) else { continue };
        if let Ok((request, payload)) = decode::<Request>(&message) {
            let again = encode(&request, payload).expect("what was a message is one");
            assert_eq!(whole(&again), Some((request, payload.to_vec())));
        }
        if let Ok((response, payload)) = decode::<Response>(&message) {
            let again = encode(&response, payload).expect("what was a message is one");
            assert_eq!(whole(&again), Some((response, payload.to_vec())));
        }
    }
}

fn whole<T: serde::de::DeserializeOwned>(packets: &[Vec<u8>]) -> Option<(T, Vec<u8>)> {
    let mut assembly = Assembly::default();
    let message = packets.iter().find_map(|packet| assembly.push(packet).ok()?)?;
    decode(&message).ok().map(|(decoded, payload)| (decoded, payload.to_vec()))
}

const TERMS: Terms =
    Terms { quota: 1 << 20, granule: 4 << 10, page: 4 << 10, small: 16 << 10, arena: 64 << 10 };

/// The lengths of the allocations there are, so that no byte is written beside them.
#[derive(Default)]
struct AllocationLens(BTreeMap<AllocationId, u64>);

impl ServerMemory for AllocationLens {
    fn write(&mut self, allocation: AllocationId, offset: u64, bytes: &[u8]) -> bool {
        let len = self.0.get(&allocation).copied().expect("an arena that is there");
        assert!(offset + bytes.len() as u64 <= len, "within the arena");
        true
    }

    fn read_pins(
        &self,
        _: PinPosition,
        _: &mut usize,
        _: &mut dyn FnMut(u64) -> usize,
    ) -> Option<PinPosition> {
        None
    }

    fn take_pins(&mut self, _: ClientId) -> Vec<u64> {
        Vec::new()
    }
}

/// Bytes as the requests of a client, whose memory is made at once.
///
/// # Panics
/// When the server takes more than its quota, or releases what it does not have.
pub fn requests(bytes: &[u8]) {
    let geometry = Geometry { slots: 16, allocations: 4 };
    let memory = Memfd::create("fuzz", geometry.len()).expect("memory");
    let map = SharedMap::create(&memory, Protection::ReadWrite).expect("a map");
    let index = Index::format(MappedCells::new(map), geometry);
    let settings =
        Settings { host: TERMS, device: TERMS, devices: Vec::new(), user: 0, ahead: TERMS.quota / 4 };
    let (mut memory, mut now) = (AllocationLens::default(), Now { elapsed: Duration::ZERO, unix: 0 });
    let (mut server, _) = Server::recover(index, &settings, &Survivors::default(), now, &mut memory);
    let client = ClientId(1);
    let mut budget = Budget::new(0, Limits::of_server(TERMS.quota, 1 << 10));
    let hello = Request { id: 1, again: 0, ask: Ask::Hello { protocol: PROTOCOL } };
    let mut inputs = vec![
        // As one who is trusted, and heard in everything.
        Input::Joined { client, account: budget.open(0) },
        Input::Request { client, request: hello, payload: Payload::default(), charge: None },
    ];
    let mut assembly = Assembly::default();
    let messages = packets(bytes).filter_map(|packet| assembly.push(packet).ok()?);
    for message in messages {
        // Long enough for memory to be made ahead.
        now.elapsed += Duration::from_millis(7);
        inputs.push(Input::Tick);
        if let Ok((request, payload)) = Payload::split::<Request>(message) {
            inputs.push(Input::Request { client, request, payload, charge: None });
        }
        while !inputs.is_empty() {
            for output in server.step(now, inputs.remove(0), &mut memory) {
                match output {
                    Output::Allocate { allocation, len, .. } | Output::Import { allocation, len, .. } => {
                        assert!(memory.0.insert(allocation, len).is_none(), "memory is made once");
                        inputs.push(Input::Allocated { allocation, outcome: Ok(()) });
                    }
                    Output::Release { allocation } | Output::Reclaim { allocation } => {
                        assert!(memory.0.remove(&allocation).is_some(), "memory is released once");
                    }
                    Output::CloseForWriting { allocation, .. } => {
                        inputs.push(Input::ClosedForWriting { allocation, outcome: Ok(()) });
                    }
                    Output::Respond { .. }
                    | Output::Admit { .. }
                    | Output::Disconnect { .. }
                    | Output::Watch { .. }
                    | Output::Notify(_)
                    | Output::Promote { .. } => {}
                }
            }
            assert!(memory.0.values().sum::<u64>() <= TERMS.quota, "within the quota");
        }
    }
    server.step(now, Input::Left { client }, &mut memory);
}

/// A corpus of both: a few of every request there is, encoded.
#[must_use]
pub fn corpus() -> Vec<(&'static str, Vec<u8>)> {
    use crate::protocol::{Answer, Label, Member, Part, Refusal};
    let label = |name: &str| Label { name: name.to_owned(), meta: vec![1, 2] };
    let object = ObjectId::new(0, 0);
    let create = |name: &str, len| Ask::Create { label: label(name), len, members: Vec::new(), place: 0 };
    let member = |name: &str| Member { label: label(name), len: 9000 };
    let pack =
        Ask::Create { label: label("p"), len: 0, members: vec![member("p/a"), member("p/b")], place: 0 };
    let part = |offset, len| Part { offset, len };
    let adopt = |place, len, part| Ask::Adopt { label: label("adopted"), place, len, part };
    let find = Ask::Find { name: "small".to_owned(), wait: 5 };
    let request = |id, ask| encode(&Request { id, again: 0, ask }, &[]).expect("a request");
    let small = |id| encode(&Request { id, again: 0, ask: create("small", 5) }, b"bytes").expect("a request");
    let answer = |answer| encode(&Response { id: 7, answer }, &[]).expect("a response");
    let play = |messages: Vec<Vec<Vec<u8>>>| {
        let packets = messages.into_iter().flatten();
        packets
            .flat_map(|packet| {
                let len = u16::try_from(packet.len()).expect("packets of the corpus are short").to_le_bytes();
                len.into_iter().chain(packet)
            })
            .collect::<Vec<u8>>()
    };
    vec![
        ("small", play(vec![small(2), small(3)])),
        ("large", play(vec![request(2, create("large", 50_000)), request(3, Ask::Seal { create: 2 })])),
        (
            "abandoned",
            play(vec![request(2, create("large", 50_000)), request(3, Ask::Abandon { create: 2 })]),
        ),
        ("pack", play(vec![request(2, pack), request(3, Ask::Seal { create: 2 })])),
        ("delete", play(vec![small(2), request(3, Ask::Delete { object })])),
        (
            "publish",
            play(vec![small(2), request(3, Ask::Publish { label: label("other"), object, part: None })]),
        ),
        (
            "adopt",
            play(vec![
                request(2, adopt(0, 8 << 10, part(4096, 100))),
                request(3, Ask::Publish { label: label("beside"), object, part: Some(part(0, 8 << 10)) }),
                request(4, adopt(0, 8 << 10, part(4096, u64::MAX))),
                request(5, adopt(1, 5, part(0, 5))),
            ]),
        ),
        ("find", play(vec![request(2, find), small(3), request(4, Ask::Fetch { object })])),
        ("watch", play(vec![request(2, Ask::Watch { prefix: "s".to_owned() }), small(3), small(4)])),
        (
            "room",
            play(vec![
                request(2, create("large", 1 << 19)),
                request(3, Ask::AwaitRoom { len: 1 << 20, place: 0, wait: 5 }),
                request(4, Ask::Abandon { create: 2 }),
            ]),
        ),
        ("goodbye", play(vec![request(2, create("large", 50_000)), request(3, Ask::Goodbye), small(4)])),
        ("status", play(vec![request(2, Ask::Status), request(3, Ask::Kick { object })])),
        ("answers", play(vec![answer(Answer::Restarted), answer(Answer::Found { object })])),
        ("refused", play(vec![answer(Answer::Refused(Refusal::NoSuchObject { object }))])),
    ]
}
