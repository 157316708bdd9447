//! Runs the fuzz targets on their corpora, unchanged and with seeded mutations.

use std::path::Path;

use wholemem_comm::fuzz;
use wholemem_testkit::corpus;

fn replay(name: &str, target: fn(&[u8])) {
    corpus::replay(&Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name), 4000, target);
}

#[test]
fn decoding_arbitrary_frames_stays_within_bounds() {
    replay("frame", fuzz::frame);
}

#[test]
fn no_peer_without_the_secret_is_authenticated() {
    replay("handshake", fuzz::handshake);
}
