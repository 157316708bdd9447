//! The options of symmetric memory, and the environment variables that override them.

use std::time::Duration;

use super::tuning::{Algorithm, Tuning};
use crate::{Error, Result};

/// The algorithm that is taken wherever it can be.
const ALGO: &str = "WHOLEMEM_ALGO";

/// How many bytes of addresses a group's windows get, all ranks together.
const WINDOW_SPACE: &str = "WHOLEMEM_WINDOW_SPACE";

/// What a group's symmetric memory is to be like. It is the same on all ranks.
///
/// ```
/// use std::time::Duration;
/// use wholemem::SymmetricSpec;
///
/// let spec = SymmetricSpec { lanes: 2, timeout: Duration::from_secs(5), ..SymmetricSpec::default() };
/// assert_eq!(spec.window_space, 8 << 40);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SymmetricSpec {
    /// How many calls can be under way at once: each has a lane for itself.
    pub lanes: u32,
    /// How many bytes of addresses the windows get, all ranks together.
    pub window_space: usize,
    /// How many bytes of memory that is no window go at once, of which every rank has three times as much; as much as pays,
    /// for zero.
    pub staging_len: usize,
    /// How many bytes a rank can send in packets, of which every rank has four times as much for each rank; as much as
    /// pays, for zero.
    pub packets_len: usize,
    /// How long a call waits for the others.
    pub timeout: Duration,
    /// Which algorithm is taken; what was measured, if not given.
    pub tuning: Option<Tuning>,
    /// PTX in place of the usual kernels, for devices from compute capability 9.0 on: such as heed what tests want.
    #[doc(hidden)]
    pub kernels: Option<&'static str>,
}

impl Default for SymmetricSpec {
    fn default() -> Self {
        Self {
            lanes: 1,
            window_space: 8 << 40,
            staging_len: 0,
            packets_len: 0,
            timeout: Duration::from_secs(60),
            tuning: None,
            kernels: None,
        }
    }
}

impl SymmetricSpec {
    /// The same, with what the environment says instead.
    ///
    /// | variable | what it says |
    /// |---|---|
    /// | `WHOLEMEM_ALGO` | the algorithm that is taken wherever it can be: `packets`, `one-shot` or `two-shot` |
    /// | `WHOLEMEM_WINDOW_SPACE` | how many bytes of addresses windows get |
    ///
    /// # Errors
    /// [`Error::Environment`] naming the variable that is wrong.
    pub(super) fn in_environment(
        &self,
        measured: Tuning,
        read: impl Fn(&str) -> Option<String>,
    ) -> Result<(Self, Tuning)> {
        let wrong = |name, value: &str, why| Error::Environment { name, value: value.to_owned(), why };
        let mut spec = self.clone();
        let mut tuning = self.tuning.unwrap_or(measured);
        if let Some(name) = read(ALGO) {
            let known = name.parse::<Algorithm>();
            tuning.always =
                Some(known.map_err(|_| wrong(ALGO, &name, "it is packets, one-shot or two-shot"))?);
        }
        if let Some(bytes) = read(WINDOW_SPACE) {
            let known = bytes.parse();
            spec.window_space = known.map_err(|_| wrong(WINDOW_SPACE, &bytes, "it is a number of bytes"))?;
        }
        Ok((spec, tuning))
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let Self { lanes, window_space, staging_len, packets_len, .. } = self;
        let words = [u64::from(*lanes), *window_space as u64, *staging_len as u64, *packets_len as u64];
        words.into_iter().flat_map(u64::to_le_bytes).collect()
    }
}

#[cfg(test)]
mod tests {
    use wholemem_hal::BackendKind;

    use super::*;

    #[test]
    fn the_environment_is_heard() {
        let measured = Tuning::measured(BackendKind::Host, 2);
        let spec = SymmetricSpec::default();
        assert_eq!(spec.in_environment(measured, |_| None), Ok((spec.clone(), measured)));
        let says = |name: &str| match name {
            ALGO => Some("two-shot".to_owned()),
            WINDOW_SPACE => Some("12345".to_owned()),
            _ => None,
        };
        let (heard, tuning) = spec.in_environment(measured, says).unwrap();
        assert_eq!((heard.window_space, tuning.always), (12_345, Some(Algorithm::TwoShot)));
        let wrong = |name: &str| (name == ALGO).then(|| "ring".to_owned());
        let error = spec.in_environment(measured, wrong).unwrap_err();
        let why = "it is packets, one-shot or two-shot";
        assert_eq!(error, Error::Environment { name: ALGO, value: "ring".to_owned(), why });
    }
}
