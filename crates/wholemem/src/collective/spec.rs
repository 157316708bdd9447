//! The options of symmetric memory, and the environment variables that override them.

use std::time::Duration;

use super::tuning::{Algorithm, Tuning};
use crate::{Error, Result};

/// The name of the environment variable with the algorithm for all collective calls that support it.
const ALGO: &str = "WHOLEMEM_ALGO";

/// The name of the environment variable with the number of bytes of addresses to reserve for a group's windows, for all ranks
/// together.
const WINDOW_SPACE: &str = "WHOLEMEM_WINDOW_SPACE";

/// The options of symmetric memory (windows and lanes of a group). They must be equal on all ranks.
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
    /// The number of lanes, which is the number of collective calls that can be in flight at once.
    pub lanes: u32,
    /// The number of bytes of addresses to reserve for windows, for all ranks together.
    pub window_space: usize,
    /// The length of a staging buffer, through which collective calls copy memory that is not in a window. Every rank has three
    /// of them. Zero selects the default.
    pub staging_len: usize,
    /// The maximum number of bytes that a rank can send in packets in one collective call. Every rank allocates four times as
    /// much for each rank. Zero selects the default.
    pub packets_len: usize,
    /// The time that a collective call waits for other ranks before it fails.
    pub timeout: Duration,
    /// The thresholds by which a collective call chooses its algorithm; `None` for [`Tuning::measured`].
    pub tuning: Option<Tuning>,
    /// The PTX of collective kernels with fault injection for tests, for devices of compute capability 9.0 and later.
    #[cfg(feature = "test-hooks")]
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
            #[cfg(feature = "test-hooks")]
            kernels: None,
        }
    }
}

impl SymmetricSpec {
    /// Returns these options and the tuning, with the overrides of environment variables.
    ///
    /// | variable | meaning |
    /// |---|---|
    /// | `WHOLEMEM_ALGO` | the algorithm to use if the call supports it: `packets`, `one-shot` or `two-shot` |
    /// | `WHOLEMEM_WINDOW_SPACE` | the bytes of addresses for windows |
    ///
    /// # Errors
    /// [`Error::Environment`] for a variable with an invalid value.
    pub(super) fn with_environment(
        &self,
        measured: Tuning,
        read: impl Fn(&str) -> Option<String>,
    ) -> Result<(Self, Tuning)> {
        let wrong = |name, value: &str, reason| Error::Environment { name, value: value.to_owned(), reason };
        let mut spec = self.clone();
        let mut tuning = self.tuning.unwrap_or(measured);
        if let Some(name) = read(ALGO) {
            let known = name.parse::<Algorithm>();
            tuning.always = Some(known.map_err(|_| wrong(ALGO, &name, "use packets, one-shot or two-shot"))?);
        }
        if let Some(bytes) = read(WINDOW_SPACE) {
            let known = bytes.parse();
            spec.window_space =
                known.map_err(|_| wrong(WINDOW_SPACE, &bytes, "it must be a number of bytes"))?;
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
    fn environment_variables_override_the_options() {
        let measured = Tuning::measured(BackendKind::Host, 2);
        let spec = SymmetricSpec::default();
        assert_eq!(spec.with_environment(measured, |_| None), Ok((spec.clone(), measured)));
        let variable = |name: &str| match name {
            ALGO => Some("two-shot".to_owned()),
            WINDOW_SPACE => Some("12345".to_owned()),
            _ => None,
        };
        let (overridden, tuning) = spec.with_environment(measured, variable).unwrap();
        assert_eq!((overridden.window_space, tuning.always), (12_345, Some(Algorithm::TwoShot)));
        let wrong = |name: &str| (name == ALGO).then(|| "ring".to_owned());
        let error = spec.with_environment(measured, wrong).unwrap_err();
        let reason = "use packets, one-shot or two-shot";
        assert_eq!(error, Error::Environment { name: ALGO, value: "ring".to_owned(), reason });
    }
}
