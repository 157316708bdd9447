//! Tests of attacks on the listening socket of a leader.

use std::net::{Shutdown, SocketAddr};

use super::*;
use crate::UniqueId;
use crate::handshake::{AttemptOutcome, NodeAttempt};

const SILENCE: Duration = Duration::from_secs(5);

fn acceptor(key: &GroupKey) -> (NodeAcceptor, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    (NodeAcceptor::new(listener, (Rank(0), 3), key.clone(), SILENCE), address)
}

fn attempt(address: SocketAddr, rank: u32, purpose: Purpose) -> NodeAttempt {
    NodeAttempt::begin(address, (purpose, Rank(rank), 3), SILENCE).unwrap().unwrap()
}

/// Advances an attempt and the acceptor until the attempt has an outcome.
fn finish(
    acceptor: &mut NodeAcceptor,
    attempt: &mut NodeAttempt,
    key: &GroupKey,
    accepted: &mut Vec<NodePeer>,
) -> AttemptOutcome {
    loop {
        accepted.extend(acceptor.serve());
        match attempt.step(key, SILENCE) {
            AttemptOutcome::Pending => {}
            outcome => return outcome,
        }
    }
}

/// Serves until a condition holds.
fn serve_until(
    acceptor: &mut NodeAcceptor,
    accepted: &mut Vec<NodePeer>,
    condition: impl Fn(&NodeAcceptor, &[NodePeer]) -> bool,
) {
    while !condition(acceptor, accepted) {
        accepted.extend(acceptor.serve());
    }
}

#[test]
fn a_rank_is_authenticated_beside_a_thousand_half_open_connections() {
    wholemem_os::descriptors::raise_limit();
    let key = UniqueId::create_private().unwrap().key();
    let (mut acceptor, address) = acceptor(&key);
    let mut accepted = Vec::new();
    let half_open: Vec<_> = (0..1000)
        .map(|_| {
            let stream = TcpStream::connect(address).unwrap();
            accepted.extend(acceptor.serve());
            stream
        })
        .collect();
    assert!(acceptor.pending.len() <= MAX_PENDING);
    let began = Instant::now();
    let mut rank = attempt(address, 1, Purpose::Report);
    let outcome = finish(&mut acceptor, &mut rank, &key, &mut accepted);
    assert!(matches!(outcome, AttemptOutcome::Authenticated(peer) if peer.rank == Rank(0)));
    serve_until(&mut acceptor, &mut accepted, |_, accepted| !accepted.is_empty());
    wholemem_testkit::report(&format!("authenticated after {:?}", began.elapsed()));
    assert_eq!(accepted.iter().map(|peer| peer.rank).collect::<Vec<_>>(), [Rank(1)]);
    drop(half_open);
}

#[test]
fn a_rank_with_another_secret_is_refused_on_both_sides() {
    let (key, other) = (UniqueId::create_private().unwrap().key(), UniqueId::create_private().unwrap().key());
    let (mut acceptor, address) = acceptor(&key);
    let mut accepted = Vec::new();
    let mut rank = attempt(address, 1, Purpose::Report);
    assert!(matches!(finish(&mut acceptor, &mut rank, &other, &mut accepted), AttemptOutcome::Failed));
    drop(rank);
    serve_until(&mut acceptor, &mut accepted, |acceptor, _| acceptor.pending.is_empty());
    assert_eq!(accepted.len(), 0);
}

/// Performs a handshake through a relay that records, and returns the bytes that the rank sent.
fn record(acceptor: &mut NodeAcceptor, address: SocketAddr, key: &GroupKey) -> Vec<Vec<u8>> {
    let relay = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut rank = attempt(relay.local_addr().unwrap(), 1, Purpose::Report);
    let (mut inner, _) = relay.accept().unwrap();
    let mut outer = TcpStream::connect(address).unwrap();
    let (mut sent, mut accepted) = (Vec::new(), Vec::new());
    let mut buffer = [0; 256];
    assert!(matches!(rank.step(key, SILENCE), AttemptOutcome::Pending));
    let len = inner.read(&mut buffer).unwrap();
    sent.push(buffer[..len].to_vec());
    outer.write_all(&buffer[..len]).unwrap();
    serve_until(acceptor, &mut accepted, |acceptor, _| {
        acceptor.pending.iter().any(|peer| peer.transcript.is_some())
    });
    let len = outer.read(&mut buffer).unwrap();
    inner.write_all(&buffer[..len]).unwrap();
    let outcome = loop {
        match rank.step(key, SILENCE) {
            AttemptOutcome::Pending => {}
            outcome => break outcome,
        }
    };
    assert!(matches!(outcome, AttemptOutcome::Authenticated(_)));
    let len = inner.read(&mut buffer).unwrap();
    sent.push(buffer[..len].to_vec());
    outer.write_all(&buffer[..len]).unwrap();
    serve_until(acceptor, &mut accepted, |_, accepted| !accepted.is_empty());
    sent
}

#[test]
fn a_replayed_or_changed_handshake_authenticates_no_peer() {
    let key = UniqueId::create_private().unwrap().key();
    let (mut acceptor, address) = acceptor(&key);
    let recorded = record(&mut acceptor, address, &key);
    let mut accepted = Vec::new();
    let mut attacks = vec![recorded.concat()];
    for at in 0..recorded.concat().len() {
        let mut changed = recorded.concat();
        changed[at] ^= 1 << (at % 8);
        attacks.push(changed);
    }
    for bytes in attacks {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(&bytes).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        // Everything that the attacker sends is read, up to the end of the connection.
        accepted.extend(acceptor.serve());
        serve_until(&mut acceptor, &mut accepted, |acceptor, _| acceptor.pending.is_empty());
    }
    assert_eq!(accepted.len(), 0, "a recorded or changed handshake was accepted");
}

#[test]
fn a_probe_is_answered_and_joins_nothing() {
    let key = UniqueId::create_private().unwrap().key();
    let (mut acceptor, address) = acceptor(&key);
    let mut accepted = Vec::new();
    let mut probe = attempt(address, 2, Purpose::Probe);
    let outcome = finish(&mut acceptor, &mut probe, &key, &mut accepted);
    assert!(matches!(outcome, AttemptOutcome::Authenticated(_)));
    drop((probe, outcome));
    serve_until(&mut acceptor, &mut accepted, |acceptor, _| acceptor.pending.is_empty());
    assert_eq!(accepted.len(), 0);
    drop(acceptor);
    let refused = NodeAttempt::begin(address, (Purpose::Probe, Rank(2), 3), SILENCE).unwrap();
    let is_refused = match refused {
        Err(outcome) => matches!(outcome, AttemptOutcome::Refused),
        Ok(mut attempt) => loop {
            match attempt.step(&key, SILENCE) {
                AttemptOutcome::Pending => {}
                outcome => break matches!(outcome, AttemptOutcome::Refused),
            }
        },
    };
    assert!(is_refused, "a closed address refuses connections");
}
