//! Servers with little memory: what they cannot make is refused, and a request that kills servers is not tried for ever.

use wholemem_store::{Error, Refusal};

use crate::served::Served;

const MIB: usize = 1 << 20;

#[test]
fn a_request_during_which_two_servers_died_is_refused_by_the_third() {
    const LONGEST: usize = 32 * MIB;
    let served = Served::start_mortal(LONGEST as u64);
    let (client, other) = (served.client(), served.client());
    other.put("before", &[1; 3000]).unwrap();
    let error = client.create("deadly", LONGEST + MIB).unwrap_err();
    assert!(matches!(error, Error::Refused(Refusal::ServersDied { servers: 2 })), "{error:?}");
    assert_eq!(
        error.to_string(),
        "2 servers died while this request was in progress, and it is not tried again; ask for less memory, or give \
         the server more, before the next request"
    );
    // The third serves all others, and this client too.
    assert_eq!(other.status().unwrap().epoch, 3);
    assert_eq!(other.get("before").unwrap().to_vec().unwrap(), [1; 3000]);
    client.put("after", &vec![2; LONGEST - MIB]).unwrap();
    assert_eq!(other.get("after").unwrap().len(), LONGEST - MIB);
    assert_eq!(other.status().unwrap().epoch, 3);
}
