//! Selects the addresses of this node that other nodes connect to: `WHOLEMEM_INTERFACE`.

use std::net::IpAddr;

use wholemem_os::interface::InterfaceAddress;

use super::address::is_link_local;
use super::{DiscoveryError, InterfaceList};

const INTERFACE: &str = "WHOLEMEM_INTERFACE";

/// A network such as `10.1.0.0/16` or `fd00::/8`. An address is a network of one address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Network {
    address: IpAddr,
    prefix_len: u32,
}

impl Network {
    /// Parses a network or an address. Returns `None` if the text is neither, so that it can only be a name.
    fn parse(text: &str) -> Option<Self> {
        let (address, prefix_len) = text.split_once('/').map_or((text, None), |(a, len)| (a, Some(len)));
        let address: IpAddr = address.parse().ok()?;
        let max = if address.is_ipv4() { 32 } else { 128 };
        let prefix_len = prefix_len.map_or(Some(max), |len| len.parse().ok().filter(|len| *len <= max))?;
        Some(Self { address, prefix_len })
    }

    fn contains(self, address: IpAddr) -> bool {
        let shift = |bits: u32| bits - self.prefix_len;
        match (self.address, address) {
            (IpAddr::V4(a), IpAddr::V4(b)) => {
                let difference = a.to_bits() ^ b.to_bits();
                difference.checked_shr(shift(32)).unwrap_or(0) == 0
            }
            (IpAddr::V6(a), IpAddr::V6(b)) => {
                let difference = a.to_bits() ^ b.to_bits();
                difference.checked_shr(shift(128)).unwrap_or(0) == 0
            }
            _ => false,
        }
    }
}

/// Returns the addresses that `WHOLEMEM_INTERFACE` selects, or `None` if the variable is not set.
///
/// Link-local addresses are last: other nodes cannot use them without the name of one of their own interfaces.
pub(super) fn select(
    set: &impl Fn(&str) -> Option<String>,
    interfaces: &[InterfaceAddress],
) -> Result<Option<Vec<IpAddr>>, DiscoveryError> {
    let Some(value) = set(INTERFACE) else { return Ok(None) };
    let network = Network::parse(&value);
    if network.is_none() && value.contains('/') {
        let problem = "is not a network such as `10.1.0.0/16` or `fd00::/8`";
        return Err(DiscoveryError::Malformed { name: INTERFACE, value, problem });
    }
    let is_selected = |interface: &&InterfaceAddress| {
        interface.is_up
            && network.map_or_else(|| interface.name == value, |network| network.contains(interface.address))
    };
    let mut addresses: Vec<_> = interfaces.iter().filter(is_selected).map(|found| found.address).collect();
    if addresses.is_empty() {
        return Err(DiscoveryError::NoInterface { value, interfaces: InterfaceList(interfaces.to_vec()) });
    }
    addresses.sort_by_key(|address| is_link_local(*address));
    Ok(Some(addresses))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn interfaces() -> Vec<InterfaceAddress> {
        [
            ("lo", "127.0.0.1", true),
            ("eth0", "fe80::1", true),
            ("eth0", "10.1.2.3", true),
            ("eth0", "fd00::3", true),
            ("ib0", "10.2.2.3", true),
            ("ib1", "10.2.2.4", false),
        ]
        .map(|(name, address, is_up)| InterfaceAddress {
            name: name.to_owned(),
            address: address.parse().unwrap(),
            is_up,
        })
        .to_vec()
    }

    fn selected(value: &str) -> Result<Vec<String>, DiscoveryError> {
        let set = |_: &str| Some(value.to_owned());
        let addresses = select(&set, &interfaces())?.unwrap();
        Ok(addresses.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn an_interface_is_selected_by_name_network_or_address() {
        for (value, expected) in [
            ("eth0", &["10.1.2.3", "fd00::3", "fe80::1"][..]),
            ("ib0", &["10.2.2.3"]),
            ("10.0.0.0/8", &["10.1.2.3", "10.2.2.3"]),
            ("10.2.0.0/16", &["10.2.2.3"]),
            ("10.2.2.3", &["10.2.2.3"]),
            ("fd00::/8", &["fd00::3"]),
            ("0.0.0.0/0", &["127.0.0.1", "10.1.2.3", "10.2.2.3"]),
            ("::/0", &["fd00::3", "fe80::1"]),
        ] {
            assert_eq!(selected(value).unwrap(), expected, "{value}");
        }
        assert_eq!(select(&|_: &str| None, &interfaces()), Ok(None));
    }

    #[test]
    fn an_interface_that_is_missing_or_down_is_an_error_with_the_list_of_interfaces() {
        for value in ["eth1", "ib1", "192.168.0.0/16", "10.2.2.4", "fd01::/16"] {
            let interfaces = InterfaceList(interfaces());
            let error = DiscoveryError::NoInterface { value: value.to_owned(), interfaces };
            assert_eq!(selected(value), Err(error.clone()));
            let text = error.to_string();
            assert!(text.contains("lo 127.0.0.1, eth0 fe80::1, eth0 10.1.2.3"), "{text}");
            assert!(text.ends_with("ib1 10.2.2.4 (down)"), "{text}");
        }
        for value in ["10.0.0.0/33", "10.0.0.0/x", "fd00::/129", "eth0/8"] {
            assert!(matches!(selected(value), Err(DiscoveryError::Malformed { .. })), "{value}");
        }
    }

    proptest! {
        #[test]
        fn a_network_contains_the_addresses_with_its_leading_bits(a: u32, b: u32, prefix_len in 0u32..=32) {
            let network = Network { address: IpAddr::from(a.to_be_bytes()), prefix_len };
            let leading = |bits: u32| format!("{bits:032b}")[..prefix_len as usize].to_owned();
            let address = IpAddr::from(b.to_be_bytes());
            prop_assert_eq!(network.contains(address), leading(a) == leading(b));
            // An address that differs in the last bit only.
            let address = IpAddr::from((a ^ 1).to_be_bytes());
            prop_assert_eq!(network.contains(address), prefix_len < 32);
        }
    }
}
