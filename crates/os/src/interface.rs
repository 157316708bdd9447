//! The network interfaces of this machine and their addresses.
//!
//! ```
//! let addresses = wholemem_os::interface::addresses()?;
//! assert!(addresses.iter().all(|address| !address.name.is_empty()));
//! # Ok::<(), wholemem_os::Error>(())
//! ```

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr;

use crate::Result;
use crate::call::call_libc;

/// An address of a network interface. An interface has one entry for each of its addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterfaceAddress {
    /// The name of the interface, such as `eth0`.
    pub name: String,
    /// The address.
    pub address: IpAddr,
    /// True if the interface is up.
    pub is_up: bool,
}

/// Returns the IPv4 and IPv6 addresses of all network interfaces in the network namespace of this process, in the
/// kernel's order.
///
/// # Errors
/// If the kernel does not list them.
#[doc(alias = "getifaddrs")]
pub fn addresses() -> Result<Vec<InterfaceAddress>> {
    let mut first: *mut libc::ifaddrs = ptr::null_mut();
    call_libc("getifaddrs", || {
        // SAFETY: `first` is a valid place for the head of the list.
        unsafe { libc::getifaddrs(&raw mut first) }.into()
    })?;
    let mut addresses = Vec::new();
    let mut next = first.cast_const();
    // SAFETY: `next` is null or an entry of the list, which is freed after the loop.
    while let Some(entry) = unsafe { next.as_ref() } {
        if let Some(address) = ip_address(entry.ifa_addr) {
            // SAFETY: the name of an entry is a string with a terminating zero, which lives as long as the list.
            let name = unsafe { CStr::from_ptr(entry.ifa_name) };
            let is_up = entry.ifa_flags & libc::IFF_UP.cast_unsigned() != 0;
            addresses.push(InterfaceAddress { name: name.to_string_lossy().into_owned(), address, is_up });
        }
        next = entry.ifa_next.cast_const();
    }
    // SAFETY: `first` is the list that `getifaddrs` allocated, and no reference to it is used after this call.
    unsafe { libc::freeifaddrs(first) };
    Ok(addresses)
}

/// Returns the IP address in a socket address of an entry, or `None` if it is of another family.
fn ip_address(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: the address of an entry is null, or points to a structure that begins with the address family.
    let family = unsafe { address.as_ref() }?.sa_family;
    match i32::from(family) {
        libc::AF_INET => {
            // SAFETY: the kernel's structure of this family is `sockaddr_in`; glibc aligns it for any family.
            let v4 = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: the kernel's structure of this family is `sockaddr_in6`; glibc aligns it for any family.
            let v6 = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(v6.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_is_listed_if_it_has_an_address() {
        // `/proc/net/if_inet6` lists the IPv6 addresses independently: address, index, prefix, scope, flags, name.
        let addresses = addresses().unwrap();
        let listed = std::fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
        for line in listed.lines() {
            let fields: Vec<_> = line.split_whitespace().collect();
            let address = IpAddr::from(u128::from_str_radix(fields[0], 16).unwrap().to_be_bytes());
            assert!(
                addresses.iter().any(|found| found.name == fields[5] && found.address == address),
                "{line}: {addresses:?}"
            );
        }
        let can_bind = std::net::TcpListener::bind(("127.0.0.1", 0)).is_ok();
        let loopback = IpAddr::from(Ipv4Addr::LOCALHOST);
        assert_eq!(addresses.iter().any(|found| found.address == loopback && found.is_up), can_bind);
    }
}
