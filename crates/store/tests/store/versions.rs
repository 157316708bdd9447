//! Tests of clients with other protocol versions: the previous version is served; others are refused with both versions.

use wholemem_os::{Deadline, PacketSocket};

use crate::raw_protocol::{PROTOCOL, connect, request, request_kind};
use crate::test_store::TestStore;

/// The numbers of the kinds of answers in the protocol.
const WELCOME: u8 = 0;
const STATUS: u8 = 6;
const REFUSED: u8 = 7;

/// Sends a request, and returns the answer of the server without its id.
fn answer(socket: &PacketSocket, packet: &[u8], id: u8) -> Vec<u8> {
    socket.send(packet, &[], Deadline::NEVER).unwrap();
    let mut buffer = vec![0; 65_536];
    let (len, _) = socket.recv_with_fds(&mut buffer, 2, Deadline::NEVER).unwrap();
    assert_eq!(buffer[..2], [2, id], "one packet with the id of the request");
    buffer[2..len].to_vec()
}

#[test]
fn a_client_of_the_previous_version_is_served() {
    let store = TestStore::start();
    for version in [PROTOCOL - 1, PROTOCOL] {
        let socket = connect(&store.socket()).unwrap();
        assert_eq!(answer(&socket, &request(1, request_kind::HELLO, &[version]), 1)[0], WELCOME, "{version}");
        assert_eq!(answer(&socket, &request(2, request_kind::STATUS, &[]), 2)[0], STATUS, "{version}");
    }
}

#[test]
fn a_client_of_another_version_is_refused_with_both_versions() {
    let store = TestStore::start();
    for version in [PROTOCOL - 2, PROTOCOL + 1] {
        let socket = connect(&store.socket()).unwrap();
        let refused = answer(&socket, &request(1, request_kind::HELLO, &[version]), 1);
        let versions = [PROTOCOL, version].map(|version| version.to_le_bytes()[0]);
        assert!(refused[0] == REFUSED && refused.ends_with(&versions), "{version}: {refused:?}");
    }
}
