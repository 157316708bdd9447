//! The address of rank 0, and the ports at which ranks listen.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::ops::RangeInclusive;
use std::str::FromStr;

use super::{DiscoveryError, slurm};

const ADDR: &str = "WHOLEMEM_ADDR";
const PORT: &str = "WHOLEMEM_PORT";
const PORT_RANGE: &str = "WHOLEMEM_PORT_RANGE";
const MASTER_ADDR: &str = "MASTER_ADDR";
const MPI_RANK: &str = "OMPI_COMM_WORLD_RANK";
/// The lists of nodes of Slurm: of the step first, because rank 0 is on the first node of the step.
const NODE_LISTS: [&str; 2] = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"];

/// The context of the hash that derives the default port.
const PORT_CONTEXT: &str = "wholemem 2026-11 default port of rank 0";

/// The default ports: below the ports that Linux assigns to outgoing connections, whose lowest is 32768.
const DEFAULT_PORTS: RangeInclusive<u16> = 20000..=28999;

/// A host, by name or address, and a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPort {
    /// The name of the host, or its IPv4 or IPv6 address without brackets.
    pub host: String,
    /// The port.
    pub port: u16,
}

impl HostPort {
    /// Returns the addresses of the host, in the order of the resolver. An address in numbers is not looked up.
    ///
    /// # Errors
    /// [`DiscoveryError::UnknownHost`] if the name has no address.
    pub fn resolve(&self) -> Result<Vec<SocketAddr>, DiscoveryError> {
        let unknown = |reason: String| DiscoveryError::UnknownHost { host: self.host.clone(), reason };
        let found = (self.host.as_str(), self.port).to_socket_addrs();
        let found: Vec<_> = found.map_err(|error| unknown(error.to_string()))?.collect();
        if found.is_empty() { Err(unknown("it has no address".to_owned())) } else { Ok(found) }
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl FromStr for HostPort {
    type Err = DiscoveryError;

    fn from_str(text: &str) -> Result<Self, DiscoveryError> {
        host_port(text).map_err(|problem| malformed(ADDR, text, problem))
    }
}

fn host_port(text: &str) -> Result<HostPort, &'static str> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => rest.split_once("]:").ok_or("is not `[IPv6 address]:port`")?,
        None => text.rsplit_once(':').ok_or("has no port: it must be `host:port`")?,
    };
    if host.contains(':') && !text.starts_with('[') {
        return Err("has an IPv6 address without brackets: it must be `[address]:port`");
    }
    if text.starts_with('[') && !is_ipv6(host) {
        return Err("has no IPv6 address in the brackets");
    }
    Ok(HostPort { host: self::host(host)?, port: self::port(port)? })
}

/// Returns a host name or an address without brackets, if it is well-formed.
fn host(text: &str) -> Result<String, &'static str> {
    let text = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let is_name = |text: &str| {
        text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_'))
    };
    if text.is_empty() || !(is_name(text) || is_ipv6(text)) {
        return Err("has no valid host name or address");
    }
    Ok(text.to_owned())
}

/// Returns true for an IPv6 address, also with a scope: `fe80::1%eth0`.
fn is_ipv6(text: &str) -> bool {
    let (address, scope) = text.split_once('%').unwrap_or((text, "0"));
    address.parse::<Ipv6Addr>().is_ok() && !scope.is_empty()
}

fn port(text: &str) -> Result<u16, &'static str> {
    match text.parse() {
        Ok(0) | Err(_) => Err("has no valid port: a port is a number from 1 to 65535"),
        Ok(port) => Ok(port),
    }
}

fn malformed(name: &'static str, value: &str, problem: &'static str) -> DiscoveryError {
    DiscoveryError::Malformed { name, value: value.to_owned(), problem }
}

/// Returns the port of rank 0 if neither `WHOLEMEM_ADDR` nor `WHOLEMEM_PORT` is set: a port from 20000 to 28999, derived
/// from the text that identifies the run.
#[must_use]
pub fn default_port(run: &str) -> u16 {
    let hash = blake3::derive_key(PORT_CONTEXT, run.as_bytes());
    let count = u32::from(DEFAULT_PORTS.end() - DEFAULT_PORTS.start()) + 1;
    let offset = u32::from_le_bytes([hash[0], hash[1], hash[2], hash[3]]) % count;
    // The offset is less than 9000, so the port is in the range.
    DEFAULT_PORTS.start() + u16::try_from(offset).expect("less than the number of default ports")
}

/// Returns the address of rank 0.
pub(super) fn root(set: &impl Fn(&str) -> Option<String>, run: &str) -> Result<HostPort, DiscoveryError> {
    if let Some(text) = set(ADDR) {
        return text.parse();
    }
    let host = if let Some(text) = set(MASTER_ADDR) {
        host(&text).map_err(|problem| malformed(MASTER_ADDR, &text, problem))?
    } else if set(MPI_RANK).is_some() {
        // mpirun in a job of Slurm may place rank 0 on any node of the job.
        return Err(DiscoveryError::NoAddress { is_mpirun: true });
    } else if let Some((name, text)) = NODE_LISTS.iter().find_map(|name| Some((*name, set(name)?))) {
        slurm::first_host(&text).map_err(|problem| malformed(name, &text, problem))?
    } else {
        return Err(DiscoveryError::NoAddress { is_mpirun: false });
    };
    let port = match set(PORT) {
        Some(text) => port(&text).map_err(|problem| malformed(PORT, &text, problem))?,
        None => default_port(run),
    };
    Ok(HostPort { host, port })
}

/// The ports at which a rank may listen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortRange {
    first: u16,
    last: u16,
}

impl PortRange {
    /// Any port: the kernel chooses one.
    pub const ANY: Self = Self { first: 0, last: 0 };

    /// Returns the ports to try, in this order. The range [`ANY`](Self::ANY) is the port 0, for which the kernel chooses
    /// a port.
    #[must_use]
    pub fn ports(self) -> RangeInclusive<u16> {
        self.first..=self.last
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::ANY => f.write_str("any port"),
            Self { first, last } => write!(f, "{first}-{last}"),
        }
    }
}

pub(super) fn port_range(set: &impl Fn(&str) -> Option<String>) -> Result<PortRange, DiscoveryError> {
    let Some(text) = set(PORT_RANGE) else { return Ok(PortRange::ANY) };
    let bounds = text.split_once('-').and_then(|(first, last)| {
        let (first, last) = (port(first.trim()).ok()?, port(last.trim()).ok()?);
        (first <= last).then_some(PortRange { first, last })
    });
    bounds.ok_or_else(|| malformed(PORT_RANGE, &text, "is not `first-last` with ports from 1 to 65535"))
}

/// Returns true if an address cannot be reached from another node without naming an interface there.
pub(super) fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root_of(variables: &[(&str, &str)]) -> Result<HostPort, DiscoveryError> {
        let set =
            |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
        root(&set, "run")
    }

    fn at(host: &str, port: u16) -> Result<HostPort, DiscoveryError> {
        Ok(HostPort { host: host.to_owned(), port })
    }

    #[test]
    fn addresses_of_all_forms_are_parsed_and_displayed() {
        for (text, host, port) in [
            ("node-7.cluster_a:1", "node-7.cluster_a", 1),
            ("10.0.0.1:65535", "10.0.0.1", 65535),
            ("[fd00::1]:29600", "fd00::1", 29600),
            ("[fe80::1%eth0]:5", "fe80::1%eth0", 5),
        ] {
            let parsed: HostPort = text.parse().unwrap();
            assert_eq!(Ok(parsed.clone()), at(host, port));
            assert_eq!(parsed.to_string(), text);
        }
    }

    #[test]
    fn malformed_addresses_are_refused_with_the_reason() {
        for (text, reason) in [
            ("node", "has no port"),
            ("node:", "has no valid port"),
            ("node:0", "has no valid port"),
            ("node:65536", "has no valid port"),
            (":1", "has no valid host"),
            ("no de:1", "has no valid host"),
            ("fd00::1:29600", "without brackets"),
            ("[fd00::1]29600", "is not `[IPv6"),
            ("[fd00::1%]:1", "no IPv6 address in the brackets"),
            ("[10.0.0.1]:1", "no IPv6 address in the brackets"),
        ] {
            let error = text.parse::<HostPort>().unwrap_err();
            let DiscoveryError::Malformed { name, value, problem } = &error else { panic!("{error:?}") };
            assert_eq!((*name, value.as_str()), (ADDR, text));
            assert!(problem.contains(reason), "{text}: {problem}");
        }
    }

    #[test]
    fn the_address_of_rank_0_is_taken_from_the_first_variable_that_is_set() {
        let slurm = [("SLURM_JOB_NODELIST", "n[07-09]"), ("WHOLEMEM_PORT", "77")];
        assert_eq!(root_of(&slurm), at("n07", 77));
        let step = [&slurm[..], &[("SLURM_STEP_NODELIST", "n[08-09]")]].concat();
        assert_eq!(root_of(&step), at("n08", 77));
        // `MASTER_PORT` is never the port.
        let torchrun = [&step[..], &[("MASTER_ADDR", "head"), ("MASTER_PORT", "29500")]].concat();
        assert_eq!(root_of(&torchrun), at("head", 77));
        assert_eq!(root_of(&[&torchrun[..], &[("WHOLEMEM_ADDR", "[::1]:5")]].concat()), at("::1", 5));
        assert_eq!(root_of(&[("MASTER_ADDR", "fd00::1"), ("WHOLEMEM_PORT", "9")]), at("fd00::1", 9));
    }

    #[test]
    fn without_a_port_it_is_derived_from_the_run() {
        let only_host = [("MASTER_ADDR", "head"), ("MASTER_PORT", "29500")];
        assert_eq!(root_of(&only_host), at("head", default_port("run")));
        assert_ne!(default_port("run"), default_port("run 2"));
        for run in 0..1000 {
            assert!(DEFAULT_PORTS.contains(&default_port(&run.to_string())));
        }
    }

    #[test]
    fn mpirun_needs_an_address_even_in_a_job_of_slurm() {
        let mpirun = [("OMPI_COMM_WORLD_RANK", "0"), ("SLURM_JOB_NODELIST", "n[1-2]")];
        let error = root_of(&mpirun).unwrap_err();
        assert_eq!(error, DiscoveryError::NoAddress { is_mpirun: true });
        assert!(
            error.to_string().contains("`WHOLEMEM_ADDR`") && error.to_string().contains("mpirun"),
            "{error}"
        );
        assert_eq!(root_of(&[&mpirun[..], &[("WHOLEMEM_ADDR", "n1:5")]].concat()), at("n1", 5));
        assert_eq!(root_of(&[]), Err(DiscoveryError::NoAddress { is_mpirun: false }));
    }

    #[test]
    fn a_malformed_variable_is_named() {
        for (variables, expected) in [
            (&[("MASTER_ADDR", "a b")][..], "MASTER_ADDR"),
            (&[("MASTER_ADDR", "a"), ("WHOLEMEM_PORT", "x")], "WHOLEMEM_PORT"),
            (&[("SLURM_JOB_NODELIST", "n[1-")], "SLURM_JOB_NODELIST"),
        ] {
            match root_of(variables) {
                Err(DiscoveryError::Malformed { name, .. }) => assert_eq!(name, expected),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn port_ranges_are_parsed() {
        let range = |text: &str| port_range(&|_: &str| Some(text.to_owned()));
        assert_eq!(range("20000-20002").unwrap().ports().collect::<Vec<_>>(), [20000, 20001, 20002]);
        assert_eq!(range("7 - 7").unwrap().to_string(), "7-7");
        for text in ["7", "8-7", "0-7", "7-65536", "-", "a-b"] {
            let problem = "is not `first-last` with ports from 1 to 65535";
            assert_eq!(range(text), Err(malformed(PORT_RANGE, text, problem)));
        }
        assert_eq!(port_range(&|_: &str| None).unwrap().ports(), 0..=0);
    }

    #[test]
    fn numeric_addresses_resolve_without_a_resolver() {
        let v6 = HostPort { host: "fd00::1".to_owned(), port: 5 };
        assert_eq!(v6.resolve().unwrap(), ["[fd00::1]:5".parse().unwrap()]);
        let v4 = HostPort { host: "10.0.0.1".to_owned(), port: 5 };
        assert_eq!(v4.resolve().unwrap(), ["10.0.0.1:5".parse().unwrap()]);
    }
}
