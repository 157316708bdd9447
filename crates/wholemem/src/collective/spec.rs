//! The options of symmetric memory, and the environment variables that override them.

use std::time::Duration;

use super::tuning::{Algorithm, Tuning};
use crate::{Error, Result};

/// The name of the environment variable with the algorithm for all collective calls that support it.
const ALGO: &str = "WHOLEMEM_ALGO";

/// The name of the environment variable with the number of bytes of addresses to reserve for a group's windows, for all ranks
/// together.
const WINDOW_SPACE: &str = "WHOLEMEM_WINDOW_SPACE";

/// The name of the environment variable that selects the memory of new windows on GPUs, and that of NCCL, which is read if ours is
/// not set.
const VMM: &str = "WHOLEMEM_VMM";
const NCCL_VMM: &str = "NCCL_CUMEM_ENABLE";

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
    /// The time that a collective call waits for other ranks before it fails. [`Duration::MAX`], the default, selects the timeout of
    /// the group's other operations ([`Bootstrap::timeout`](crate::Bootstrap::timeout)), which `WHOLEMEM_TIMEOUT` sets.
    pub timeout: Duration,
    /// True if new windows on GPUs have memory of `cuMemCreate` (virtual memory management), false for memory of `cudaMalloc`, which
    /// ranks share by CUDA IPC handles.
    #[doc(alias = "NCCL_CUMEM_ENABLE")]
    pub vmm: bool,
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
            timeout: Duration::MAX,
            vmm: true,
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
    /// | `WHOLEMEM_VMM` | `1` or `0`: the memory of new windows on GPUs. If it is not set, `0` in `NCCL_CUMEM_ENABLE` counts |
    ///
    /// # Errors
    /// [`Error::Environment`] for a variable with an invalid value.
    pub(super) fn with_environment(
        &self,
        measured: Tuning,
        read: impl Fn(&str) -> Option<String>,
    ) -> Result<(Self, Tuning)> {
        let wrong = |name, value: &str, reason| Error::Environment { name, value: value.to_owned(), reason };
        let read = |name: &str| read(name).filter(|value| !value.is_empty());
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
        spec.vmm = match (read(VMM).as_deref(), read(NCCL_VMM).as_deref()) {
            (Some("1"), _) => true,
            (Some("0"), _) | (None, Some("0")) => false,
            (Some(value), _) => return Err(wrong(VMM, value, "use 1 or 0")),
            (None, _) => self.vmm,
        };
        Ok((spec, tuning))
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let Self { lanes, window_space, staging_len, packets_len, vmm, .. } = self;
        let lens = [window_space, staging_len, packets_len].map(|len| *len as u64);
        let words = [u64::from(*lanes), u64::from(*vmm)].into_iter().chain(lens);
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

    #[test]
    fn a_variable_of_nccl_counts_only_if_ours_is_not_set() {
        let measured = Tuning::measured(BackendKind::Cuda, 2);
        let vmm = |ours: &str, nccl: &str| {
            let read = |name: &str| match name {
                VMM => Some(ours.to_owned()),
                NCCL_VMM => Some(nccl.to_owned()),
                _ => None,
            };
            SymmetricSpec::default().with_environment(measured, read).map(|(spec, _)| spec.vmm)
        };
        assert_eq!(
            [vmm("", ""), vmm("", "1"), vmm("", "-2"), vmm("", "0")],
            [Ok(true), Ok(true), Ok(true), Ok(false)]
        );
        assert_eq!([vmm("1", "0"), vmm("0", "1")], [Ok(true), Ok(false)]);
        let error = Error::Environment { name: VMM, value: "yes".to_owned(), reason: "use 1 or 0" };
        assert_eq!(vmm("yes", "0"), Err(error));
    }

    #[test]
    fn encodings_of_different_options_differ() {
        let spec = SymmetricSpec::default();
        let others = [
            SymmetricSpec { lanes: 2, ..spec.clone() },
            SymmetricSpec { window_space: 1, ..spec.clone() },
            SymmetricSpec { staging_len: 1, ..spec.clone() },
            SymmetricSpec { packets_len: 1, ..spec.clone() },
            SymmetricSpec { vmm: false, ..spec.clone() },
        ];
        assert!(others.iter().all(|other| other.to_bytes() != spec.to_bytes()));
    }
}
