//! The statuses of the header have the numbers of the Rust errors, which the sources of the errors contain.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::fs;

use wholemem_capi::status::*;

use super::support::repository;

/// The sources of errors, and the function that returns their numbers.
const SOURCES: &[(&str, &str)] = &[
    ("crates/hal/src/values/error.rs", "fn code(&self) -> u32"),
    ("crates/wholemem/src/error/mod.rs", "fn code(&self) -> u32"),
    ("crates/comm/src/error.rs", "fn number(&self) -> u32"),
    ("crates/store/src/error.rs", "fn number(&self) -> u32"),
    ("crates/store/src/protocol/refusal.rs", "fn number(&self) -> u32"),
];

/// The first number of errors that only the C interface has.
const FIRST_OWN: u32 = 3000;

fn name(status: wm_status_t) -> &'static str {
    // SAFETY: the text is valid as long as the library is loaded.
    unsafe { CStr::from_ptr(wm_status_name(status)) }.to_str().unwrap()
}

/// Returns the numbers in the matches of the functions with a signature.
fn numbers(source: &str, signature: &str) -> Vec<u32> {
    let functions = source.split(signature).skip(1).map(|rest| rest.split("\n    }\n").next().unwrap());
    let arms = functions.flat_map(|body| body.split("=> ").skip(1));
    let digits = arms.map(|arm| arm.chars().take_while(char::is_ascii_digit).collect::<String>());
    digits.filter_map(|digits| digits.parse().ok()).collect()
}

#[test]
fn every_number_of_an_error_has_a_name_and_every_name_a_number() {
    let mut of_errors = BTreeMap::new();
    for (file, signature) in SOURCES {
        let found = numbers(&fs::read_to_string(repository().join(file)).unwrap(), signature);
        assert!(found.len() > 15, "{file} has only {} numbers", found.len());
        of_errors.extend(found.into_iter().map(|number| (number, *file)));
    }
    for (number, file) in &of_errors {
        assert_ne!(name(*number), "WM_ERROR_UNKNOWN", "the number {number} of {file} has no constant");
    }
    for number in (1..FIRST_OWN).filter(|number| name(*number) != "WM_ERROR_UNKNOWN") {
        assert!(of_errors.contains_key(&number), "no error has the number of {}", name(number));
    }
}

#[test]
fn statuses_have_the_codes_of_rust_errors() {
    use wholemem::Rank;
    assert_eq!(wholemem::Error::NoRanks.code(), WM_ERROR_NO_RANKS);
    let lost = wholemem_comm::Error::PeerLost { rank: Rank(1) };
    assert_eq!((lost.number(), wholemem::Error::from(lost).code()), (WM_ERROR_PEER_LOST, WM_ERROR_PEER_LOST));
    assert_eq!(wholemem_comm::Error::Forked.number(), WM_ERROR_FORKED);
    assert_eq!(wholemem_store::Error::Disconnected.number(), WM_ERROR_STORE_DISCONNECTED);
    let refusal = wholemem_store::Error::Refused(wholemem_store::Refusal::NothingToSeal);
    assert_eq!(refusal.number(), WM_ERROR_STORE_NOTHING_TO_SEAL);
}

#[test]
fn names_are_those_of_the_constants() {
    assert_eq!(name(WM_OK), "WM_OK");
    assert_eq!(name(WM_ERROR_TIMEOUT), "WM_ERROR_TIMEOUT");
    assert_eq!(name(WM_ERROR_TOO_MANY_HANDLES), "WM_ERROR_TOO_MANY_HANDLES");
    assert_eq!(name(u32::MAX), "WM_ERROR_UNKNOWN");
}
