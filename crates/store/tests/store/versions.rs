//! Clients of other versions of the protocol: the version before is served, others are refused with the versions.

use wholemem_os::{Deadline, PacketSocket};

use crate::served::Served;
use crate::wire::{PROTOCOL, connect, question, request};

/// The numbers of answers.
const WELCOME: u8 = 0;
const STATUS: u8 = 6;
const REFUSED: u8 = 7;

/// The answer to the next request: what follows its id.
fn answer(wire: &PacketSocket, packet: &[u8], id: u8) -> Vec<u8> {
    wire.send(packet, &[], Deadline::NEVER).unwrap();
    let mut room = vec![0; 65_536];
    let (len, _) = wire.recv_with_fds(&mut room, 2, Deadline::NEVER).unwrap();
    assert_eq!(room[..2], [2, id], "one packet, with the id of the request");
    room[2..len].to_vec()
}

#[test]
fn a_client_of_the_version_before_is_served_like_one_of_this() {
    let served = Served::start();
    for version in [PROTOCOL - 1, PROTOCOL] {
        let wire = connect(&served.socket()).unwrap();
        assert_eq!(answer(&wire, &request(1, question::HELLO, &[version]), 1)[0], WELCOME, "{version}");
        assert_eq!(answer(&wire, &request(2, question::STATUS, &[]), 2)[0], STATUS, "{version}");
    }
}

#[test]
fn a_client_of_another_version_is_told_both() {
    let served = Served::start();
    for version in [PROTOCOL - 2, PROTOCOL + 1] {
        let wire = connect(&served.socket()).unwrap();
        let refused = answer(&wire, &request(1, question::HELLO, &[version]), 1);
        let versions = [PROTOCOL, version].map(|version| version.to_le_bytes()[0]);
        assert!(refused[0] == REFUSED && refused.ends_with(&versions), "{version}: {refused:?}");
    }
}
