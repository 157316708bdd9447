//! Parses `--hosts`: `node1:4,user@node2,[fd00::3]:2`.

use anyhow::{Result, bail, ensure};

/// A host of `--hosts`, with its number of ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HostRanks {
    /// The destination for ssh: `host` or `user@host`, without brackets.
    pub(super) destination: String,
    pub(super) ranks: u32,
}

/// The maximum number of ranks in a group.
const MAX_RANKS: u64 = 1 << 16;

impl HostRanks {
    /// Returns the name or address of the host, without the user.
    pub(super) fn host(&self) -> &str {
        self.destination.rsplit_once('@').map_or(&self.destination, |(_, host)| host)
    }
}

/// Parses a list of hosts. A host without a number of ranks has `default_ranks`.
pub(super) fn parse(list: &str, default_ranks: u32) -> Result<Vec<HostRanks>> {
    let hosts: Vec<_> = list.split(',').map(|item| parse_host(item, default_ranks)).collect::<Result<_>>()?;
    let count: u64 = hosts.iter().map(|host| u64::from(host.ranks)).sum();
    ensure!(count <= MAX_RANKS, "`--hosts` has {count} ranks: a group has at most {MAX_RANKS}");
    Ok(hosts)
}

fn parse_host(item: &str, default_ranks: u32) -> Result<HostRanks> {
    let (user, rest) = item.rsplit_once('@').map_or((None, item), |(user, rest)| (Some(user), rest));
    let (host, ranks) = match rest.strip_prefix('[') {
        Some(bracketed) => match bracketed.split_once(']') {
            Some((host, "")) => (host, None),
            Some((host, after)) if after.starts_with(':') => (host, Some(&after[1..])),
            _ => bail!(
                "`{item}` in `--hosts` has an unclosed bracket: an IPv6 host is `[address]` or `[address]:ranks`"
            ),
        },
        None => match rest.split_once(':') {
            Some((_, ranks)) if ranks.contains(':') => {
                bail!("`{item}` in `--hosts` has an IPv6 address without brackets: write `[address]:ranks`")
            }
            Some((host, ranks)) => (host, Some(ranks)),
            None => (rest, None),
        },
    };
    let is_valid =
        |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b':' | b'%');
    let is_name = |text: &str| !text.is_empty() && !text.starts_with('-') && text.bytes().all(is_valid);
    // A name that begins with a hyphen would be an option of ssh.
    ensure!(
        is_name(host) && user.is_none_or(is_name),
        "`{item}` in `--hosts` is not a host, `user@host` or `host:ranks`"
    );
    let ranks = match ranks.map(str::parse) {
        None => default_ranks,
        Some(Ok(ranks)) if ranks > 0 => ranks,
        Some(_) => bail!("`{item}` in `--hosts` has no valid number of ranks after the colon"),
    };
    let destination = user.map_or_else(|| host.to_owned(), |user| format!("{user}@{host}"));
    Ok(HostRanks { destination, ranks })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(list: &str) -> Vec<(String, String, u32)> {
        let hosts = parse(list, 7).unwrap();
        hosts.iter().map(|host| (host.destination.clone(), host.host().to_owned(), host.ranks)).collect()
    }

    #[test]
    fn hosts_have_users_and_numbers_of_ranks() {
        let expected = [("a", "a", 7), ("b", "b", 4), ("me@c.org", "c.org", 2), ("fd00::1", "fd00::1", 3)];
        let expected =
            expected.map(|(destination, host, ranks)| (destination.to_owned(), host.to_owned(), ranks));
        assert_eq!(parsed("a,b:4,me@c.org:2,[fd00::1]:3"), expected);
        assert_eq!(
            parsed("me@[fe80::1%eth0]"),
            [("me@fe80::1%eth0".to_owned(), "fe80::1%eth0".to_owned(), 7)]
        );
    }

    #[test]
    fn malformed_hosts_are_refused_by_name() {
        for (list, reason) in [
            ("", "is not a host"),
            ("a,", "is not a host"),
            ("-oProxyCommand=x", "is not a host"),
            ("x@-o", "is not a host"),
            ("-x@a", "is not a host"),
            ("a b", "is not a host"),
            ("a;b", "is not a host"),
            ("@a", "is not a host"),
            ("a:", "no valid number of ranks"),
            ("a:0", "no valid number of ranks"),
            ("a:x", "no valid number of ranks"),
            ("fd00::1", "without brackets"),
            ("[fd00::1", "unclosed bracket"),
            ("[fd00::1]4", "unclosed bracket"),
            ("a:65536,b:1", "has 65537 ranks"),
        ] {
            let error = parse(list, 1).unwrap_err().to_string();
            assert!(error.contains(reason), "{list}: {error}");
        }
    }
}
