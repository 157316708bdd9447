//! Slurm's lists of hosts and of task counts: `node[01-04,7],gpu-a[1-2]b` and `4(x2),3`.

/// The maximum number of hosts in a list. A longer list is malformed, and must not exhaust the memory.
const MAX_HOSTS: usize = 1 << 16;

const MALFORMED_HOSTS: &str = "is not a list of hosts such as `node[01-04,7],gpu2`";
const TOO_MANY_HOSTS: &str = "has more than 65536 hosts";
const MALFORMED_COUNTS: &str = "is not a list of task counts such as `4(x2),3`";

/// Returns the hosts of a list in Slurm's format, in order. A host may have several groups in brackets, of which the
/// last one varies fastest. Numbers keep their leading zeros.
///
/// ```
/// let hosts = wholemem_comm::discovery::expand_hosts("node[01-02,7],gpu-a[9-10]b")?;
/// assert_eq!(hosts, ["node01", "node02", "node7", "gpu-a9b", "gpu-a10b"]);
/// # Ok::<(), &str>(())
/// ```
///
/// # Errors
/// The problem with the list, as the rest of a sentence.
pub fn expand_hosts(list: &str) -> Result<Vec<String>, &'static str> {
    let mut hosts = Vec::new();
    for host in split_outside_brackets(list)? {
        hosts.extend(expand_host(host)?);
        if hosts.len() > MAX_HOSTS {
            return Err(TOO_MANY_HOSTS);
        }
    }
    Ok(hosts)
}

/// Returns the first host of a list in Slurm's format.
///
/// # Errors
/// As [`expand_hosts`].
pub fn first_host(list: &str) -> Result<String, &'static str> {
    let mut hosts = expand_hosts(list)?;
    // The list has at least one host: an empty text is malformed.
    Ok(hosts.swap_remove(0))
}

/// Returns the task counts of all nodes in a list in Slurm's format, such as `SLURM_STEP_TASKS_PER_NODE`.
///
/// ```
/// assert_eq!(wholemem_comm::discovery::expand_task_counts("4(x2),3"), Ok(vec![4, 4, 3]));
/// ```
///
/// # Errors
/// The problem with the list, as the rest of a sentence.
pub fn expand_task_counts(list: &str) -> Result<Vec<u32>, &'static str> {
    let mut counts = Vec::new();
    for part in list.split(',') {
        let (count, nodes) = match part.split_once("(x") {
            Some((count, nodes)) => (count, nodes.strip_suffix(')').and_then(|nodes| nodes.parse().ok())),
            None => (part, Some(1)),
        };
        let count: u32 = count.parse().map_err(|_| MALFORMED_COUNTS)?;
        let nodes = nodes.filter(|nodes| (1..=MAX_HOSTS).contains(nodes)).ok_or(MALFORMED_COUNTS)?;
        counts.extend(std::iter::repeat_n(count, nodes));
        if counts.len() > MAX_HOSTS {
            return Err(MALFORMED_COUNTS);
        }
    }
    Ok(counts)
}

/// Splits a list at the commas that are not in brackets.
fn split_outside_brackets(list: &str) -> Result<Vec<&str>, &'static str> {
    let (mut parts, mut begin, mut is_inside) = (Vec::new(), 0, false);
    for (index, byte) in list.bytes().enumerate() {
        match byte {
            b'[' if !is_inside => is_inside = true,
            b']' if is_inside => is_inside = false,
            b'[' | b']' => return Err(MALFORMED_HOSTS),
            b',' if !is_inside => {
                parts.push(&list[begin..index]);
                begin = index + 1;
            }
            _ => {}
        }
    }
    parts.push(&list[begin..]);
    if is_inside || parts.iter().any(|part| part.is_empty()) { Err(MALFORMED_HOSTS) } else { Ok(parts) }
}

/// Expands one host with any number of groups in brackets.
fn expand_host(host: &str) -> Result<Vec<String>, &'static str> {
    let mut hosts = vec![String::new()];
    let mut rest = host;
    while let Some((text, group)) = rest.split_once('[') {
        // The brackets are balanced, because `split_outside_brackets` has checked them.
        let (group, after) = group.split_once(']').ok_or(MALFORMED_HOSTS)?;
        let mut numbers = Vec::new();
        for range in group.split(',') {
            expand_range(range, &mut numbers)?;
        }
        if hosts.len().saturating_mul(numbers.len()) > MAX_HOSTS {
            return Err(TOO_MANY_HOSTS);
        }
        let add =
            |host: &String| numbers.iter().map(|number| format!("{host}{text}{number}")).collect::<Vec<_>>();
        hosts = hosts.iter().flat_map(add).collect();
        rest = after;
    }
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
    hosts.iter_mut().for_each(|host| host.push_str(rest));
    if hosts.iter().all(|host| !host.is_empty() && host.bytes().all(is_valid)) {
        Ok(hosts)
    } else {
        Err(MALFORMED_HOSTS)
    }
}

/// Appends the numbers of `7` or `01-04`, with the leading zeros of the first one.
fn expand_range(range: &str, numbers: &mut Vec<String>) -> Result<(), &'static str> {
    let (first, last) = range.split_once('-').unwrap_or((range, range));
    let number = |text: &str| {
        let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then(|| text.parse::<u64>().ok()).flatten()
    };
    let (low, high) = number(first).zip(number(last)).ok_or(MALFORMED_HOSTS)?;
    if low > high {
        return Err(MALFORMED_HOSTS);
    }
    if high - low >= MAX_HOSTS as u64 || numbers.len() > MAX_HOSTS {
        return Err(TOO_MANY_HOSTS);
    }
    let width = first.len();
    numbers.extend((low..=high).map(|number| format!("{number:0width$}")));
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lists_of_hosts_are_expanded_in_order() {
        for (list, expected) in [
            ("head", &["head"][..]),
            (
                "node[01-04,7],gpu-a[1-2]b",
                &["node01", "node02", "node03", "node04", "node7", "gpu-a1b", "gpu-a2b"],
            ),
            ("a,b.example.org,c_1", &["a", "b.example.org", "c_1"]),
            ("n[8-11]", &["n8", "n9", "n10", "n11"]),
            ("n[098-101]", &["n098", "n099", "n100", "n101"]),
            ("rack[1-2]n[0-1]", &["rack1n0", "rack1n1", "rack2n0", "rack2n1"]),
            ("n[5]", &["n5"]),
            ("[1-2]", &["1", "2"]),
        ] {
            assert_eq!(expand_hosts(list).unwrap(), expected, "{list}");
            assert_eq!(first_host(list).unwrap(), expected[0], "{list}");
        }
    }

    #[test]
    fn malformed_lists_of_hosts_are_refused() {
        for list in [
            "",
            ",",
            "a,",
            ",a",
            "n[",
            "n]",
            "n[1",
            "n[]",
            "n[1-]",
            "n[-2]",
            "n[2-1]",
            "n[a-b]",
            "n[1,]",
            "n[1[2]]",
            "n[1-2-3]",
            "a b",
            "n[+1]",
            "n[99999999999999999999]",
            "a;b",
            "é",
        ] {
            assert_eq!(expand_hosts(list), Err(MALFORMED_HOSTS), "{list}");
        }
        for list in ["n[0-65536]", "n[0-18446744073709551615]", "n[0-300]m[0-300]"] {
            assert_eq!(expand_hosts(list), Err(TOO_MANY_HOSTS), "{list}");
        }
    }

    #[test]
    fn task_counts_are_expanded() {
        assert_eq!(expand_task_counts("4"), Ok(vec![4]));
        assert_eq!(expand_task_counts("2(x3),1"), Ok(vec![2, 2, 2, 1]));
        for list in ["", "x", "2(x", "2(x)", "2(x0)", "2(x3", "2,", "2(x99999)"] {
            assert_eq!(expand_task_counts(list), Err(MALFORMED_COUNTS), "{list}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_expanded_or_refused(list in "[a0-9\\[\\],-]{0,24}") {
            if let Ok(hosts) = expand_hosts(&list) {
                prop_assert!(!hosts.is_empty() && hosts.iter().all(|host| !host.is_empty()));
            }
        }

        #[test]
        fn a_range_is_the_numbers_between_its_ends(low in 0u64..2000, count in 1u64..50, width in 0usize..6) {
            let list = format!("n[{low:0width$}-{:0width$}]", low + count - 1);
            let expected: Vec<_> = (low..low + count).map(|number| format!("n{number:0width$}")).collect();
            prop_assert_eq!(expand_hosts(&list).unwrap(), expected);
        }
    }
}
