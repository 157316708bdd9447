//! Selects and opens the backend of a command: CUDA or host memory.

use anyhow::Result;
use clap::ValueEnum;
use wholemem_hal::doctor::reason;
use wholemem_hal::{Backend, BackendKind};

/// The values of the command-line option `--backend`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackendChoice {
    /// GPU memory if CUDA is available, otherwise host memory
    Auto,
    /// Host memory (memfd)
    Host,
    /// GPU memory (CUDA)
    Cuda,
}

/// An open backend, and, if CUDA was wanted but is not available, the reason.
#[derive(Debug)]
pub struct SelectedBackend {
    /// The open backend.
    pub backend: Backend,
    /// The reason why CUDA is not available, if the choice was [`Auto`](BackendChoice::Auto).
    pub no_gpu: Option<String>,
}

impl SelectedBackend {
    /// Returns the name of the backend for use in a sentence: `the host backend (no GPU: ...)`.
    pub fn describe(&self) -> String {
        let kind = self.backend.kind();
        match &self.no_gpu {
            Some(reason) => format!("the {kind} backend (no GPU: {reason})"),
            None => format!("the {kind} backend"),
        }
    }
}

/// Opens the backend that `--backend` selects.
///
/// # Errors
/// [`wholemem_hal::Error::Unavailable`] if the backend is not available.
pub fn open(choice: BackendChoice) -> Result<SelectedBackend> {
    let (kind, no_gpu) = match choice {
        BackendChoice::Host => (BackendKind::Host, None),
        BackendChoice::Cuda => (BackendKind::Cuda, None),
        BackendChoice::Auto => match Backend::open(BackendKind::Cuda) {
            Ok(backend) => return Ok(SelectedBackend { backend, no_gpu: None }),
            Err(error) => (BackendKind::Host, Some(reason(&error))),
        },
    };
    Ok(SelectedBackend { backend: Backend::open(kind)?, no_gpu })
}

/// Returns the value of `--backend` with which another process opens the same backend.
pub fn choice_for(kind: BackendKind) -> BackendChoice {
    match kind {
        BackendKind::Cuda => BackendChoice::Cuda,
        _ => BackendChoice::Host,
    }
}

#[cfg(test)]
mod tests {
    use wholemem_hal::HostConfig;

    use super::*;

    #[test]
    fn the_host_backend_is_described_with_the_reason_for_the_fallback() {
        let backend = Backend::host(HostConfig::default()).unwrap();
        let chosen = SelectedBackend { backend: backend.clone(), no_gpu: None };
        assert_eq!(chosen.describe(), "the host backend");
        let fallback = SelectedBackend { backend, no_gpu: Some("no driver".to_owned()) };
        assert_eq!(fallback.describe(), "the host backend (no GPU: no driver)");
    }
}
