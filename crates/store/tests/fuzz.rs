//! The corpora of the fuzz targets, played as they are and changed by a seeded dice.

use std::path::{Path, PathBuf};

use wholemem_store::fuzz;
use wholemem_testkit::corpus;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/messages")
}

#[test]
fn messages_of_any_bytes_are_what_they_are_encoded_as() {
    corpus::replay(&folder(), 4000, fuzz::messages);
}

#[test]
fn requests_of_any_bytes_keep_within_the_quota_and_the_memory() {
    corpus::replay(&folder(), 1500, fuzz::requests);
}

#[test]
fn the_corpus_is_what_the_protocol_says_now() {
    for (name, bytes) in fuzz::corpus() {
        let path = folder().join(name);
        if std::env::var_os("WHOLEMEM_BLESS").is_some() {
            std::fs::write(&path, &bytes).expect("the corpus can be written");
        }
        let committed = std::fs::read(&path).expect("a file of the corpus");
        assert_eq!(committed, bytes, "`{name}` is of another protocol; write it with WHOLEMEM_BLESS=1");
    }
}
