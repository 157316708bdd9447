//! Checks of the JSON that the program prints.

use serde_json::Value;

use crate::run::Run;

/// Returns the JSON object of a successful run, which prints exactly one line.
pub(crate) fn object(run: &Run) -> Value {
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{run:?}");
    assert_eq!(run.stdout.matches('\n').count(), 1, "{run:?}");
    serde_json::from_str(&run.stdout).unwrap()
}

/// Asserts that a JSON object has exactly the expected keys.
pub(crate) fn assert_keys(value: &Value, expected: &[&str]) {
    let mut keys: Vec<_> = value.as_object().unwrap().keys().map(String::as_str).collect();
    let mut expected = expected.to_vec();
    keys.sort_unstable();
    expected.sort_unstable();
    assert_eq!(keys, expected, "{value}");
}

pub(crate) fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}
