//! The corpora of the fuzz targets, played as they are and changed by a seeded dice.

use std::path::{Path, PathBuf};

use wholemem_store::fuzz;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/messages")
}

/// Plays every file of the corpus, and many changes of each.
fn replay(changes: usize, target: fn(&[u8])) {
    let mut files: Vec<_> = std::fs::read_dir(folder())
        .expect("the corpus")
        .map(|entry| std::fs::read(entry.expect("a file").path()).expect("bytes"))
        .collect();
    assert!(files.len() >= 8, "a corpus of {} files", files.len());
    let changes = if wholemem_testkit::exhaustive() { 50 * changes } else { changes };
    let mut dice = wholemem_testkit::seed();
    let mut roll = move |below: usize| {
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(dice >> 33).expect("31 bits") % below.max(1)
    };
    for file in &files {
        target(file);
    }
    for _ in 0..changes {
        let at = roll(files.len());
        let mut bytes = files[at].clone();
        for _ in 0..=roll(4) {
            match roll(4) {
                0 if !bytes.is_empty() => {
                    let at = roll(bytes.len());
                    bytes[at] = roll(256).to_le_bytes()[0];
                }
                1 => bytes.truncate(roll(bytes.len() + 1)),
                2 => bytes.push(roll(256).to_le_bytes()[0]),
                _ => {
                    let other = roll(files.len());
                    bytes.extend_from_slice(&files[other]);
                }
            }
        }
        target(&bytes);
        if bytes.len() < 400 && files.len() < 200 {
            files.push(bytes);
        }
    }
}

#[test]
fn messages_of_any_bytes_are_what_they_are_encoded_as() {
    replay(4000, fuzz::messages);
}

#[test]
fn requests_of_any_bytes_keep_within_the_quota_and_the_memory() {
    replay(1500, fuzz::requests);
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
