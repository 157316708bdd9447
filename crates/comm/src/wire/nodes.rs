//! The payloads of the messages with which the ranks of several nodes join a group.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use super::frame::{JoinUpdate, decode_fault, decode_join_update, encode_fault, encode_join_update};
use super::{FieldReader, Malformed};
use crate::Rank;
use crate::fault::GroupFault;
use crate::topology::NodeRanks;

/// The report of a leader to the root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeReport {
    /// The address at which the leader accepts connections from other nodes.
    pub(crate) address: SocketAddr,
    pub(crate) update: JoinUpdate,
}

/// The reply of the root to the leaders, which forward it to the ranks of their nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AssemblyReply {
    /// All ranks have joined: the ranks of each node.
    Complete(Vec<NodeRanks>),
    Failed(GroupFault),
    /// Another process has joined as this rank before.
    Taken(Rank),
}

const COMPLETE: u8 = 1;
const FAILED: u8 = 2;
const TAKEN: u8 = 3;

/// Encodes an address in 18 bytes: an IPv6 address, or an IPv4 address mapped to one, and the port. Scope ids are not
/// sent, because they are numbers of the sending node.
fn encode_address(address: SocketAddr) -> Vec<u8> {
    let ip = match address.ip() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    [&ip.octets()[..], &address.port().to_le_bytes()].concat()
}

fn decode_address(reader: &mut FieldReader<'_>) -> Result<SocketAddr, Malformed> {
    let ip = Ipv6Addr::from(reader.array::<16>()?);
    Ok(SocketAddr::new(ip.to_canonical(), reader.u16()?))
}

pub(crate) fn encode_report(report: &NodeReport) -> Vec<u8> {
    [encode_address(report.address), encode_join_update(&report.update)].concat()
}

pub(crate) fn decode_report(bytes: &[u8]) -> Result<NodeReport, Malformed> {
    let mut reader = FieldReader(bytes);
    let address = decode_address(&mut reader)?;
    Ok(NodeReport { address, update: decode_join_update(reader.0)? })
}

pub(crate) fn encode_reply(reply: &AssemblyReply) -> Vec<u8> {
    match reply {
        AssemblyReply::Complete(nodes) => {
            let count = |len: usize| u32::try_from(len).expect("at most one for each rank").to_le_bytes();
            let mut bytes = vec![COMPLETE];
            bytes.extend(count(nodes.len()));
            for node in nodes {
                bytes.extend(encode_address(node.address));
                bytes.extend(node.leader.0.to_le_bytes());
                bytes.extend(count(node.ranks.len()));
                bytes.extend(node.ranks.iter().flat_map(|rank| rank.0.to_le_bytes()));
            }
            bytes
        }
        AssemblyReply::Failed(fault) => [vec![FAILED], encode_fault(Some(fault))].concat(),
        AssemblyReply::Taken(rank) => [&[TAKEN][..], &rank.0.to_le_bytes()].concat(),
    }
}

pub(crate) fn decode_reply(bytes: &[u8]) -> Result<AssemblyReply, Malformed> {
    let mut reader = FieldReader(bytes);
    let reply = match reader.u8()? {
        COMPLETE => {
            let mut nodes = Vec::new();
            for _ in 0..reader.u32()? {
                let address = decode_address(&mut reader)?;
                let leader = Rank(reader.u32()?);
                let count = reader.u32()? as usize;
                let len = count.checked_mul(4).ok_or(Malformed("a node has too many ranks"))?;
                let ranks = super::frame::decode_ranks(reader.bytes(len)?)?;
                nodes.push(NodeRanks { leader, address, ranks });
            }
            AssemblyReply::Complete(nodes)
        }
        FAILED => {
            let fault = decode_fault(reader.bytes(reader.0.len())?)?;
            AssemblyReply::Failed(fault.ok_or(Malformed("a failure has no fault"))?)
        }
        TAKEN => AssemblyReply::Taken(Rank(reader.u32()?)),
        _ => return Err(Malformed("the reply of the root has an unknown kind")),
    };
    reader.end()?;
    Ok(reply)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn replies_and_reports_are_decoded_as_encoded() {
        let nodes = vec![
            NodeRanks { leader: Rank(0), address: address("10.9.0.1:4711"), ranks: vec![Rank(0), Rank(3)] },
            NodeRanks { leader: Rank(2), address: address("[fd00::2]:65535"), ranks: vec![Rank(1), Rank(2)] },
        ];
        for reply in [
            AssemblyReply::Complete(nodes),
            AssemblyReply::Failed(GroupFault::Lost(Rank(7))),
            AssemblyReply::Taken(Rank(2)),
        ] {
            let bytes = encode_reply(&reply);
            assert_eq!(decode_reply(&bytes), Ok(reply));
            assert!(decode_reply(&bytes[..bytes.len() - 1]).is_err());
            assert!(decode_reply(&[&bytes[..], &[0]].concat()).is_err());
        }
        let update = JoinUpdate { joined: vec![Rank(1)], died: vec![Rank(2)] };
        let report = NodeReport { address: address("10.9.0.2:1"), update };
        assert_eq!(decode_report(&encode_report(&report)), Ok(report));
        assert!(decode_report(&[0; 17]).is_err());
    }
}
