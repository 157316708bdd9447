//! Graphs: work that is captured once and launched many times.

use std::sync::Arc;

use super::LaunchCheck;
use crate::backend::{Operand, OwnedResource, Teardown};
use crate::raw::RawGraph;
use crate::{Attempt, Backend, Device, Error, Result, Stream};

/// A graph: work that was [captured](Stream::capture) from a stream. It keeps the operands of the work alive.
///
/// ```
/// use wholemem_hal::{Backend, HostConfig, Rights};
/// use wholemem_os::Deadline;
///
/// let device = Backend::host(HostConfig::default())?.device(0)?;
/// let map = device.allocate(1 << 20)?.map(Rights::ReadWrite)?;
/// let stream = device.stream()?;
///
/// let graph = stream.capture(|stream| stream.fill(&map.span(0, 4096)?, 7))?;
/// graph.launch(&stream)?;
/// stream.synchronize(Deadline::NEVER)?;
/// # Ok::<(), wholemem_hal::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Graph {
    core: Arc<GraphCore>,
}

#[derive(Debug)]
struct GraphCore {
    owned: OwnedResource,
    raw: RawGraph,
    device: Device,
    checks: Vec<Arc<dyn LaunchCheck>>,
    _operands: Vec<Operand>,
}

impl Graph {
    pub(super) fn own(
        device: &Device,
        raw: RawGraph,
        operands: Vec<Operand>,
        checks: Vec<Arc<dyn LaunchCheck>>,
    ) -> Self {
        let owned = OwnedResource::new(device.backend(), Teardown::DestroyGraph(raw));
        let device = device.clone();
        Self { core: Arc::new(GraphCore { owned, raw, device, checks, _operands: operands }) }
    }

    /// Enqueues the captured work of the graph on `stream`.
    ///
    /// # Errors
    /// [`Error::WrongBackend`]; [`Error::Capturing`]; [`Error::Failed`]; the error of a [check](Stream::check_at_launch) of the
    /// graph.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        if stream.device().backend() != self.backend() {
            return Err(Error::WrongBackend { attempt: Attempt::LaunchGraph });
        }
        self.core.checks.iter().try_for_each(|check| check.check())?;
        let raw = self.core.raw;
        let operand: Operand = Arc::<GraphCore>::clone(&self.core);
        stream.run_now(Attempt::LaunchGraph, [operand], |queue, stream| {
            // SAFETY: `self` and then the stream keep the graph alive, and the graph keeps its operands alive.
            unsafe { queue.launch_graph(raw, stream) }
        })
    }

    /// Returns the device on which the graph was captured.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.core.device
    }

    fn backend(&self) -> &Backend {
        self.core.owned.backend()
    }
}
