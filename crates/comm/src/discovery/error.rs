//! [`DiscoveryError`]: the errors of reading where the other nodes of a group are.

use std::fmt;
use std::net::IpAddr;

use thiserror::Error;
use wholemem_os::interface::InterfaceAddress;

/// A variable with the address of rank 0, an interface, ports or the secret is missing or wrong.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DiscoveryError {
    /// No variable contains the address of rank 0.
    #[error(
        "the address of rank 0 is not known: set `WHOLEMEM_ADDR` to `host:port` of rank 0, the same on all ranks{}",
        if *.is_mpirun { "; mpirun does not tell ranks on which node rank 0 is" } else { "" }
    )]
    NoAddress {
        /// True if the ranks were started by mpirun.
        is_mpirun: bool,
    },

    /// A variable with a host, a port or a list of hosts is malformed.
    #[error("`{name}` is `{value}`, which {problem}")]
    Malformed {
        /// The name of the variable.
        name: &'static str,
        /// The value of the variable.
        value: String,
        /// The problem with the value, as the rest of a sentence.
        problem: &'static str,
    },

    /// The name of rank 0's host has no address.
    #[error("cannot find the address of `{host}`: {reason}")]
    UnknownHost {
        /// The name of the host.
        host: String,
        /// The error of the resolver.
        reason: String,
    },

    /// `WHOLEMEM_INTERFACE` selects no interface of this node that is up.
    #[error(
        "`WHOLEMEM_INTERFACE` is `{value}`, but no interface that is up has this name or an address in this network; {interfaces}"
    )]
    NoInterface {
        /// The value of the variable.
        value: String,
        /// The interfaces of this node.
        interfaces: InterfaceList,
    },

    /// The interface that `WHOLEMEM_INTERFACE` selects has no address of the family of rank 0's address.
    #[error(
        "the interface of `WHOLEMEM_INTERFACE` has no {} address, and rank 0 has the address {root}",
        if root.is_ipv4() { "IPv4" } else { "IPv6" }
    )]
    OtherFamily {
        /// The address of rank 0.
        root: IpAddr,
    },

    /// Ranks on several nodes need a secret, and none is set.
    #[error(
        "ranks on several nodes need a secret: set `WHOLEMEM_SECRET_FILE` to a file that only this user can read, or \
         `WHOLEMEM_SECRET`, to the same secret on all ranks (such as the output of `openssl rand -hex 32`); \
         `wholemem launch --hosts` creates one"
    )]
    NoSecret,

    /// The secret is too short, or its file cannot be used.
    #[error("`{name}` {problem}")]
    BadSecret {
        /// The name of the variable.
        name: &'static str,
        /// The problem, as the rest of a sentence. It does not contain the secret.
        problem: String,
    },
}

/// The interfaces of a node in an error message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterfaceList(pub Vec<InterfaceAddress>);

impl fmt::Display for InterfaceList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("this node has no interface with an address");
        }
        f.write_str("this node has ")?;
        for (index, InterfaceAddress { name, address, is_up }) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            write!(f, "{separator}{name} {address}{}", if *is_up { "" } else { " (down)" })?;
        }
        Ok(())
    }
}
