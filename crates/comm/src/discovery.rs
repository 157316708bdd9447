//! How ranks on several nodes find each other: the address of rank 0, the local interface, the ports and the secret.
//!
//! [`Discovery::read`] reads environment variables, but opens no connection and resolves no name:
//!
//! | variable | meaning |
//! |---|---|
//! | `WHOLEMEM_ADDR` | `host:port` of rank 0; an IPv6 address is in brackets: `[fd00::1]:29600` |
//! | `MASTER_ADDR` | the host of rank 0, if `WHOLEMEM_ADDR` is not set. `MASTER_PORT` is not used: torchrun's agent listens there |
//! | `SLURM_STEP_NODELIST`, `SLURM_JOB_NODELIST` | the first host of the step, or else of the job, if the other two are not set; under mpirun they are not read |
//! | `WHOLEMEM_PORT` | the port of rank 0, if `WHOLEMEM_ADDR` is not set; the default is [derived](default_port) from the variables that identify the run |
//! | `WHOLEMEM_INTERFACE` | the interface of this node that the other nodes connect to: its name, a network such as `10.1.0.0/16` or `fd00::/8`, or an address |
//! | `WHOLEMEM_PORT_RANGE` | the ports at which this rank may listen: `20000-20100`; the default is any port |
//! | `WHOLEMEM_SECRET`, `WHOLEMEM_SECRET_FILE` | the secret of the group, of at least [`MIN_SECRET_LEN`] bytes, or the path of a file with it that no other user can access |
//!
//! No value of a secret is in an error or in the output of `Debug`.
//!
//! ```
//! use wholemem_comm::discovery::Discovery;
//!
//! let get = |name: &str| match name {
//!     "WHOLEMEM_ADDR" => Some("node7:29600".to_owned()),
//!     "WHOLEMEM_SECRET" => Some("0123456789abcdef0123456789abcdef".to_owned()),
//!     _ => None,
//! };
//! let discovery = Discovery::read(get, &[], "job 77")?;
//! assert_eq!((discovery.root.host.as_str(), discovery.root.port), ("node7", 29600));
//! assert_eq!(discovery.local_addresses, None);
//! discovery.require_secret()?;
//! # Ok::<(), wholemem_comm::discovery::DiscoveryError>(())
//! ```

use std::net::{IpAddr, SocketAddr};

mod address;
mod error;
mod interface;
mod secret;
mod slurm;

use wholemem_os::interface::InterfaceAddress;

pub use self::address::{HostPort, PortRange, default_port};
pub use self::error::{DiscoveryError, InterfaceList};
pub use self::secret::{MIN_SECRET_LEN, Secret};
pub use self::slurm::{expand_hosts, expand_task_counts, first_host};

/// What the environment of a rank tells about the other nodes of its group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Discovery {
    /// The address at which rank 0 accepts connections of other nodes.
    pub root: HostPort,
    /// The addresses of this node that other nodes may connect to, the best one first, if `WHOLEMEM_INTERFACE` is set.
    /// The list is not empty. Otherwise it is the local address of a connection to rank 0.
    pub local_addresses: Option<Vec<IpAddr>>,
    /// The ports at which this rank may listen.
    pub ports: PortRange,
    /// The secret, if one is set.
    pub secret: Option<Secret>,
}

impl Discovery {
    /// Reads the variables with `get`. `interfaces` are the addresses of this node
    /// ([`wholemem_os::interface::addresses`]), and `run` is a text that is equal on all ranks of a run, from which the
    /// default port is derived. An empty variable counts as one that is not set.
    ///
    /// # Errors
    /// [`DiscoveryError`] with the variable that is missing or wrong. A missing secret is not an error here, because the
    /// unique id of a launcher may contain one: see [`require_secret`](Self::require_secret).
    pub fn read(
        get: impl Fn(&str) -> Option<String>,
        interfaces: &[InterfaceAddress],
        run: &str,
    ) -> Result<Self, DiscoveryError> {
        let set = |name: &str| get(name).filter(|text| !text.is_empty());
        Ok(Self {
            root: address::root(&set, run)?,
            local_addresses: interface::select(&set, interfaces)?,
            ports: address::port_range(&set)?,
            secret: Secret::read(&set)?,
        })
    }

    /// Returns the address of rank 0 to use, of those that [`HostPort::resolve`] returns, and the local address that other
    /// nodes connect to, if `WHOLEMEM_INTERFACE` is set. If rank 0 has addresses of both families, IPv4 is used, unless the
    /// interface has no IPv4 address: all ranks then choose the same family.
    ///
    /// # Errors
    /// [`DiscoveryError::OtherFamily`] if the interface has no address of a family of rank 0.
    ///
    /// # Panics
    /// If there are no addresses.
    pub fn select_root(
        &self,
        resolved: &[SocketAddr],
    ) -> Result<(SocketAddr, Option<IpAddr>), DiscoveryError> {
        let mut roots = resolved.to_vec();
        roots.sort_by_key(SocketAddr::is_ipv6);
        let with_local = |root: &SocketAddr| Ok((*root, self.local_address_for(root.ip())?));
        let mut outcomes = roots.iter().map(with_local);
        let first = outcomes.next().expect("`resolve` returns at least one address");
        first.or_else(|error| outcomes.find_map(Result::ok).ok_or(error))
    }

    /// Returns the local address that other nodes connect to, if `WHOLEMEM_INTERFACE` is set: the best one of the same
    /// family as an address of rank 0, which [`HostPort::resolve`] returns.
    ///
    /// # Errors
    /// [`DiscoveryError::OtherFamily`] if the interface has no address of this family.
    pub fn local_address_for(&self, root: IpAddr) -> Result<Option<IpAddr>, DiscoveryError> {
        let Some(addresses) = &self.local_addresses else { return Ok(None) };
        let found = addresses.iter().find(|address| address.is_ipv4() == root.is_ipv4());
        found.map(|address| Some(*address)).ok_or(DiscoveryError::OtherFamily { root })
    }

    /// Returns the secret, which ranks on several nodes need.
    ///
    /// # Errors
    /// [`DiscoveryError::NoSecret`] with the ways to set a secret.
    pub fn require_secret(&self) -> Result<&Secret, DiscoveryError> {
        self.secret.as_ref().ok_or(DiscoveryError::NoSecret)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads the discovery from the given variables and no interfaces.
    fn read(variables: &[(&str, &str)]) -> Result<Discovery, DiscoveryError> {
        let get =
            |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
        Discovery::read(get, &[], "a run")
    }

    #[test]
    fn empty_variables_count_as_missing() {
        let discovery = read(&[
            ("WHOLEMEM_ADDR", ""),
            ("MASTER_ADDR", "n1"),
            ("WHOLEMEM_PORT", ""),
            ("WHOLEMEM_INTERFACE", ""),
            ("WHOLEMEM_PORT_RANGE", ""),
            ("WHOLEMEM_SECRET", ""),
        ])
        .unwrap();
        let root = HostPort { host: "n1".to_owned(), port: default_port("a run") };
        let ports = PortRange::ANY;
        assert_eq!(discovery, Discovery { root, local_addresses: None, ports, secret: None });
        assert_eq!(discovery.require_secret(), Err(DiscoveryError::NoSecret));
    }

    #[test]
    fn the_local_address_has_the_family_of_rank_0() {
        let interface = |address: &str| InterfaceAddress {
            name: "eth0".to_owned(),
            address: address.parse().unwrap(),
            is_up: true,
        };
        let get = |name: &str| match name {
            "WHOLEMEM_ADDR" => Some("n0:1".to_owned()),
            "WHOLEMEM_INTERFACE" => Some("eth0".to_owned()),
            _ => None,
        };
        let [v4, v6]: [IpAddr; 2] = ["10.0.0.1", "fd00::1"].map(|address| address.parse().unwrap());
        let both = ["fe80::2", "10.0.0.2", "fd00::2"].map(interface);
        let discovery = Discovery::read(get, &both, "run").unwrap();
        assert_eq!(discovery.local_address_for(v4), Ok(Some(both[1].address)));
        assert_eq!(discovery.local_address_for(v6), Ok(Some(both[2].address)));
        let roots = [v6, v4].map(|address| SocketAddr::new(address, 1));
        assert_eq!(discovery.select_root(&roots), Ok((roots[1], Some(both[1].address))), "IPv4 comes first");
        assert_eq!(discovery.select_root(&roots[..1]), Ok((roots[0], Some(both[2].address))));
        let only_v6 = Discovery::read(get, &both[2..], "run").unwrap();
        assert_eq!(only_v6.select_root(&roots), Ok((roots[0], Some(both[2].address))));
        let discovery = Discovery::read(get, &both[1..2], "run").unwrap();
        let other = Err(DiscoveryError::OtherFamily { root: v6 });
        assert_eq!(discovery.select_root(&roots[..1]), other);
        assert_eq!(discovery.local_address_for(v6), Err(DiscoveryError::OtherFamily { root: v6 }));
        let discovery = read(&[("WHOLEMEM_ADDR", "n0:1")]).unwrap();
        assert_eq!(discovery.local_address_for(v6), Ok(None));
    }

    #[test]
    fn debug_and_errors_hide_the_secret() {
        let secret = "correct horse battery staple";
        let discovery = read(&[("WHOLEMEM_ADDR", "n1:1"), ("WHOLEMEM_SECRET", secret)]).unwrap();
        assert_eq!(discovery.require_secret().unwrap().expose(), secret);
        assert!(!format!("{discovery:?}").contains("horse"), "{discovery:?}");
        let error = read(&[("WHOLEMEM_ADDR", "n1:1"), ("WHOLEMEM_SECRET", "short horse")]).unwrap_err();
        assert!(!format!("{error:?} {error}").contains("horse"), "{error:?}");
    }
}
