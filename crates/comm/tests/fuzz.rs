//! The corpora of the fuzz targets, played as they are and changed by a seeded dice.

use std::path::Path;

use wholemem_comm::fuzz;

/// Plays every file of a corpus, and many changes of each.
fn replay(name: &str, target: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name);
    let mut files: Vec<_> = std::fs::read_dir(&folder)
        .expect("the corpus")
        .map(|entry| std::fs::read(entry.expect("a file").path()).expect("bytes"))
        .collect();
    assert!(files.len() >= 8, "a corpus of {} files", files.len());
    let changes = if wholemem_testkit::exhaustive() { 100_000 } else { 4_000 };
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
        if bytes.len() < 200 && files.len() < 200 {
            files.push(bytes);
        }
    }
}

#[test]
fn frames_of_any_bytes_keep_within_their_bounds() {
    replay("frame", fuzz::frame);
}

#[test]
fn no_stranger_is_believed_whatever_it_says() {
    replay("handshake", fuzz::handshake);
}
