//! Passes the corpus of a fuzz target to the target, unchanged and with seeded random mutations.

use std::path::Path;

/// A mutated input of at least this length is not mutated further.
const MAX_MUTABLE_LEN: usize = 400;

/// While there are fewer inputs than this, a mutated input is added to the inputs that can be mutated.
const MAX_INPUTS: usize = 200;

/// Passes every file of a folder to `target`, followed by `mutations` mutated inputs. Exhaustive runs use fifty times
/// as many mutated inputs.
///
/// # Panics
/// If there are fewer than eight files, or the target panics on an input.
pub fn replay(folder: &Path, mutations: usize, target: fn(&[u8])) {
    let mut inputs: Vec<_> = std::fs::read_dir(folder)
        .expect("the corpus")
        .map(|entry| std::fs::read(entry.expect("a file").path()).expect("bytes"))
        .collect();
    assert!(inputs.len() >= 8, "a corpus of {} files", inputs.len());
    inputs.iter().for_each(|input| target(input));
    let mutations = if crate::exhaustive() { 50 * mutations } else { mutations };
    let mut state = crate::seed();
    let mut random = move |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(state >> 33).expect("31 bits") % below.max(1)
    };
    for _ in 0..mutations {
        let mut bytes = inputs[random(inputs.len())].clone();
        for _ in 0..=random(4) {
            match random(4) {
                0 if !bytes.is_empty() => {
                    let at = random(bytes.len());
                    bytes[at] = random(256).to_le_bytes()[0];
                }
                1 => bytes.truncate(random(bytes.len() + 1)),
                2 => bytes.push(random(256).to_le_bytes()[0]),
                _ => bytes.extend_from_slice(&inputs[random(inputs.len())]),
            }
        }
        target(&bytes);
        if bytes.len() < MAX_MUTABLE_LEN && inputs.len() < MAX_INPUTS {
            inputs.push(bytes);
        }
    }
}
