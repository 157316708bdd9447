//! The corpora of the fuzz targets, played as they are and changed by a seeded dice.

use std::path::Path;

use wholemem_comm::fuzz;
use wholemem_testkit::corpus;

fn replay(name: &str, target: fn(&[u8])) {
    corpus::replay(&Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name), 4000, target);
}

#[test]
fn frames_of_any_bytes_keep_within_their_bounds() {
    replay("frame", fuzz::frame);
}

#[test]
fn no_stranger_is_believed_whatever_it_says() {
    replay("handshake", fuzz::handshake);
}
