//! Replays the fuzz corpora of the store, unchanged and with seeded mutations.

use std::path::{Path, PathBuf};

use wholemem_store::fuzz;
use wholemem_testkit::corpus;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/messages")
}

#[test]
fn decoded_messages_survive_encoding_and_decoding() {
    corpus::replay(&folder(), 4000, fuzz::messages);
}

#[test]
fn arbitrary_requests_stay_within_the_quota_and_the_memory() {
    corpus::replay(&folder(), 1500, fuzz::requests);
}

#[test]
fn the_corpus_matches_the_current_protocol() {
    for (name, bytes) in fuzz::corpus() {
        let path = folder().join(name);
        if std::env::var_os("WHOLEMEM_BLESS").is_some() {
            std::fs::write(&path, &bytes).expect("cannot write the corpus");
        }
        let committed = std::fs::read(&path).expect("cannot read a file of the corpus");
        assert_eq!(
            committed, bytes,
            "`{name}` differs from the current protocol; regenerate it with WHOLEMEM_BLESS=1"
        );
    }
}
