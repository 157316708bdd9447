//! Opening the backend that was asked for, and saying which one that is.

use anyhow::Result;
use clap::ValueEnum;
use wholemem_hal::doctor::reason;
use wholemem_hal::{Backend, BackendKind};

/// Which backend a command is asked to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackendChoice {
    /// CUDA where it works, otherwise the host
    Auto,
    /// Linux shared memory
    Host,
    /// GPU memory
    Cuda,
}

/// A backend, and why it is this one.
#[derive(Debug)]
pub struct Opened {
    /// The backend.
    pub backend: Backend,
    /// Why no GPU is used, where one was looked for.
    pub no_gpu: Option<String>,
}

impl Opened {
    /// `the host backend (no GPU: ...)`
    pub fn describe(&self) -> String {
        let kind = self.backend.kind();
        match &self.no_gpu {
            Some(reason) => format!("the {kind} backend (no GPU: {reason})"),
            None => format!("the {kind} backend"),
        }
    }
}

/// Opens the backend that was asked for.
///
/// # Errors
/// That it is not available.
pub fn open(choice: BackendChoice) -> Result<Opened> {
    let (kind, no_gpu) = match choice {
        BackendChoice::Host => (BackendKind::Host, None),
        BackendChoice::Cuda => (BackendKind::Cuda, None),
        BackendChoice::Auto => match Backend::open(BackendKind::Cuda) {
            Ok(backend) => return Ok(Opened { backend, no_gpu: None }),
            Err(error) => (BackendKind::Host, Some(reason(&error))),
        },
    };
    Ok(Opened { backend: Backend::open(kind)?, no_gpu })
}

/// The words for another process, so that it opens the same.
pub fn choice_of(kind: BackendKind) -> BackendChoice {
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
    fn the_host_is_described_with_the_reason_for_it() {
        let backend = Backend::host(HostConfig::default()).unwrap();
        let asked = Opened { backend: backend.clone(), no_gpu: None };
        assert_eq!(asked.describe(), "the host backend");
        let fallen_back = Opened { backend, no_gpu: Some("no driver".to_owned()) };
        assert_eq!(fallen_back.describe(), "the host backend (no GPU: no driver)");
    }
}
