//! Conditions of a graph's launch: a graph whose memory was freed by its owner must not run.

use std::fmt;
use std::sync::Arc;

use super::Stream;
use crate::Result;

/// A condition that is checked before each launch of a graph. See [`Stream::check_at_launch`].
pub trait LaunchCheck: fmt::Debug + Send + Sync {
    /// Returns the reason for which the graph must not be launched now, if there is one.
    ///
    /// # Errors
    /// For example [`Error::Freed`](crate::Error::Freed).
    fn check(&self) -> Result<()>;
}

impl Stream {
    /// Adds a check to the graph that is currently [captured](Self::capture) from this stream: each launch of the graph makes the
    /// check first, and returns its error. Does nothing if this crate is not capturing the stream: a graph of another library is
    /// launched without checks.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use wholemem_hal::{Backend, Error, HostConfig, LaunchCheck, Result};
    ///
    /// #[derive(Debug)]
    /// struct Gone;
    /// impl LaunchCheck for Gone {
    ///     fn check(&self) -> Result<()> {
    ///         Err(Error::Freed { address: 7 })
    ///     }
    /// }
    ///
    /// let stream = Backend::host(HostConfig::default())?.device(0)?.stream()?;
    /// let graph = stream.capture(|stream| {
    ///     stream.check_at_launch(Arc::new(Gone));
    ///     Ok(())
    /// })?;
    /// assert_eq!(graph.launch(&stream), Err(Error::Freed { address: 7 }));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn check_at_launch(&self, check: Arc<dyn LaunchCheck>) {
        let mut state = self.core.state();
        // If work is captured repeatedly, it adds the same check each time, which is stored only once.
        if state.capture.is_some() && !state.checks.iter().any(|known| Arc::ptr_eq(known, &check)) {
            state.checks.push(check);
        }
    }
}
