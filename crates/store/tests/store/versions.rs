//! Tests of clients with other protocol versions: the two previous versions are served; others are refused with both versions.

use wholemem_os::{Deadline, PacketSocket};
use wholemem_store::Pack;

use crate::raw_protocol::{PROTOCOL, connect, request, request_kind, request_of, text};
use crate::test_store::TestStore;

/// The numbers of the kinds of answers in the protocol.
const WELCOME: u8 = 0;
const DONE: u8 = 5;
const STATUS: u8 = 6;
const REFUSED: u8 = 7;
/// A new server has taken over.
const RESTARTED: u8 = 8;
const NAME_EVENT: u8 = 9;

/// Sends a request, and returns the answer of the server without its id.
fn answer(socket: &PacketSocket, packet: &[u8], id: u8) -> Vec<u8> {
    socket.send(packet, &[], Deadline::NEVER).unwrap();
    let mut buffer = vec![0; 65_536];
    let (len, _) = socket.recv_with_fds(&mut buffer, 2, Deadline::NEVER).unwrap();
    assert_eq!(buffer[..2], [2, id], "one packet with the id of the request");
    buffer[2..len].to_vec()
}

#[test]
fn clients_of_the_two_previous_versions_are_served() {
    let store = TestStore::start();
    for version in [PROTOCOL - 2, PROTOCOL - 1, PROTOCOL] {
        let socket = connect(&store.socket()).unwrap();
        assert_eq!(answer(&socket, &request(1, request_kind::HELLO, &[version]), 1)[0], WELCOME, "{version}");
        assert_eq!(answer(&socket, &request(2, request_kind::STATUS, &[]), 2)[0], STATUS, "{version}");
    }
}

#[test]
fn a_hello_that_is_sent_again_to_the_next_server_is_welcomed() {
    let store = TestStore::start();
    for version in [PROTOCOL - 2, PROTOCOL - 1, PROTOCOL] {
        let socket = connect(&store.socket()).unwrap();
        let hello = request(1, request_kind::HELLO, &[version]);
        assert_eq!(answer(&socket, &hello, 1)[0], WELCOME, "{version}");
        store.kill("server");
        let mut restarted = [0; 100];
        let (len, _) = socket.recv_with_fds(&mut restarted, 2, Deadline::NEVER).unwrap();
        assert_eq!(restarted[..len], [2, 0, RESTARTED], "{version}");
        // A client that has not read the welcome of the dead server sends its hello again, with the number of dead servers.
        let mut again = hello.clone();
        again[2] = 1;
        assert_eq!(answer(&socket, &again, 1)[0], WELCOME, "{version}");
        assert_eq!(answer(&socket, &request(2, request_kind::STATUS, &[]), 2)[0], STATUS, "{version}");
        assert_eq!(answer(&socket, &hello, 1)[0], REFUSED, "{version}: a second hello");
    }
}

#[test]
fn a_client_of_another_version_is_refused_with_both_versions() {
    let store = TestStore::start();
    for version in [PROTOCOL - 3, PROTOCOL + 1] {
        let socket = connect(&store.socket()).unwrap();
        let refused = answer(&socket, &request(1, request_kind::HELLO, &[version]), 1);
        let versions = [PROTOCOL, version].map(|version| version.to_le_bytes()[0]);
        assert!(refused[0] == REFUSED && refused.ends_with(&versions), "{version}: {refused:?}");
    }
}

#[test]
fn a_client_of_version_5_gets_an_event_for_each_name() {
    let store = TestStore::start();
    let client = store.client();
    client.put("a/old", b"x").unwrap();
    let socket = connect(&store.socket()).unwrap();
    assert_eq!(answer(&socket, &request(1, request_kind::HELLO, &[5]), 1)[0], WELCOME);
    let watched = answer(&socket, &request_of(2, request_kind::WATCH, &text("a/")), 2);
    assert_eq!(watched, [DONE]);
    let pack = Pack::new("a").add("a/old", 1).add("a/new", 1);
    client.create_pack(&pack).unwrap().seal().unwrap();
    let mut events = Vec::new();
    for _ in 0..3 {
        let mut buffer = vec![0; 4096];
        let (len, _) = socket.recv_with_fds(&mut buffer, 2, Deadline::NEVER).unwrap();
        assert_eq!(buffer[..3], [2, 0, NAME_EVENT], "one packet that answers no request");
        let name_len = usize::from(buffer[3]);
        let name = String::from_utf8(buffer[4..4 + name_len].to_vec()).unwrap();
        // The id of the object is a varint. Published events end with their kind, 0, and the version; deleted ones with 1.
        let id_len = buffer[4 + name_len..len].iter().position(|byte| *byte < 0x80).unwrap() + 1;
        events.push((name, buffer[4 + name_len + id_len..len].to_vec()));
    }
    let expected = [("a/old", vec![0, 2]), ("a/new", vec![0, 1]), ("a/old", vec![1])];
    assert_eq!(events, expected.map(|(name, kind)| (name.to_owned(), kind)));
}
