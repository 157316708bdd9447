//! Tests of servers with little memory: allocations that do not fit are refused, and a request that kills servers is not retried
//! without end.

use wholemem_store::{Error, Refusal};
use wholemem_testkit::{MemoryGroup, skipped};

use crate::test_store::TestStore;

const MIB: usize = 1 << 20;

/// The memory limit of the cgroup in bytes, below the quota of the store, which is 256 MiB.
const LIMIT: usize = 200 * MIB;

/// Returns true if an error reports that the cgroup has no memory for `wanted` bytes.
fn is_cgroup_limit(error: &Error, wanted: usize) -> bool {
    let Error::Refused(Refusal::NoMemory { len, reason }) = error else { return false };
    *len == wanted as u64 && reason.contains("of the 200 MiB that control group `")
}

#[test]
fn a_put_beyond_the_limit_of_the_control_group_is_refused_and_kills_no_server() {
    let group = match MemoryGroup::create("store", LIMIT) {
        Ok(group) => group,
        Err(reason) => return skipped(&reason),
    };
    let store = TestStore::start_in_group(&group);
    let client = store.client();
    let content = vec![7; 4 * MIB];
    let put = |number: usize| client.put(&format!("object {number}"), &content);
    let refused =
        (0..LIMIT / content.len()).find_map(|number| put(number).err().map(|error| (number, error)));
    let (count, error) = refused.expect("the limit of the cgroup was not reached");
    assert!(is_cgroup_limit(&error, content.len()), "{error:?}");
    assert!(count >= LIMIT / 2 / content.len(), "only {count} objects");
    // Small objects succeed while an arena (memory for small objects) has space, or are refused because of the same limit.
    for number in 0..100 {
        let small = client.put(&format!("small {number}"), &[7; 100]);
        assert!(small.is_ok() || is_cgroup_limit(&small.unwrap_err(), 16 * MIB));
    }
    // After objects are deleted, their memory must be available for another object.
    for number in 0..4 {
        client.delete(client.stat(&format!("object {number}")).unwrap().id).unwrap();
    }
    client.put("another", &content).unwrap();
    assert_eq!(client.status().unwrap().epoch, 1, "the first server is still alive");
    drop(client);
    drop(store);
}

#[test]
fn a_request_during_which_two_servers_died_is_refused_by_the_third() {
    const MAX_LEN: usize = 32 * MIB;
    let store = TestStore::start_with_file_limit(MAX_LEN as u64);
    let (client, other) = (store.client(), store.client());
    other.put("before", &[1; 3000]).unwrap();
    let error = client.create("deadly", MAX_LEN + MIB).unwrap_err();
    assert!(matches!(error, Error::Refused(Refusal::ServersDied { servers: 2 })), "{error:?}");
    assert_eq!(
        error.to_string(),
        "2 servers died while this request was in progress, so it is not retried; request less memory, or give the \
         server more, and try again"
    );
    // The third server serves all clients, including the client whose request killed the other two servers.
    assert_eq!(other.status().unwrap().epoch, 3);
    assert_eq!(other.get("before").unwrap().to_vec().unwrap(), [1; 3000]);
    client.put("after", &vec![2; MAX_LEN - MIB]).unwrap();
    assert_eq!(other.get("after").unwrap().len(), MAX_LEN - MIB);
    assert_eq!(other.status().unwrap().epoch, 3);
}
