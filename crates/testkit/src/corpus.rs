//! Corpora of fuzz targets, played as they are and changed by a seeded dice.

use std::path::Path;

/// A changed input that is longer than this is played and then forgotten.
const LONGEST: usize = 400;

/// How many inputs are kept to be changed further.
const MOST: usize = 200;

/// Plays every file of a folder to `target`, and then `changes` changes of them; fifty times as many in whole runs.
///
/// # Panics
/// When there are fewer than eight files, or the target panics: a promise about hostile bytes is broken.
pub fn replay(folder: &Path, changes: usize, target: fn(&[u8])) {
    let mut inputs: Vec<_> = std::fs::read_dir(folder)
        .expect("the corpus")
        .map(|entry| std::fs::read(entry.expect("a file").path()).expect("bytes"))
        .collect();
    assert!(inputs.len() >= 8, "a corpus of {} files", inputs.len());
    inputs.iter().for_each(|input| target(input));
    let changes = if crate::exhaustive() { 50 * changes } else { changes };
    let mut dice = crate::seed();
    let mut roll = move |below: usize| {
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(dice >> 33).expect("31 bits") % below.max(1)
    };
    for _ in 0..changes {
        let mut bytes = inputs[roll(inputs.len())].clone();
        for _ in 0..=roll(4) {
            match roll(4) {
                0 if !bytes.is_empty() => {
                    let at = roll(bytes.len());
                    bytes[at] = roll(256).to_le_bytes()[0];
                }
                1 => bytes.truncate(roll(bytes.len() + 1)),
                2 => bytes.push(roll(256).to_le_bytes()[0]),
                _ => bytes.extend_from_slice(&inputs[roll(inputs.len())]),
            }
        }
        target(&bytes);
        if bytes.len() < LONGEST && inputs.len() < MOST {
            inputs.push(bytes);
        }
    }
}
