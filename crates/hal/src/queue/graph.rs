//! Work recorded once and launched many times.

use std::sync::Arc;

use crate::backend::{Operand, Owned, Teardown};
use crate::raw::RawGraph;
use crate::{Attempt, Backend, Device, Error, Result, Stream};

/// Work [captured](Stream::capture) from a stream. It holds what it touches for as long as it lives.
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
    owned: Owned,
    raw: RawGraph,
    device: Device,
    _operands: Vec<Operand>,
}

impl Graph {
    pub(super) fn own(device: &Device, raw: RawGraph, operands: Vec<Operand>) -> Self {
        let owned = Owned::new(device.backend(), Teardown::DestroyGraph(raw));
        Self { core: Arc::new(GraphCore { owned, raw, device: device.clone(), _operands: operands }) }
    }

    /// Runs the recorded work once more, in the order of `stream`.
    ///
    /// # Errors
    /// [`Error::WrongBackend`]; [`Error::Capturing`]; [`Error::Failed`].
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        if stream.device().backend() != self.backend() {
            return Err(Error::WrongBackend { attempt: Attempt::LaunchGraph });
        }
        let raw = self.core.raw;
        let operand: Operand = Arc::<GraphCore>::clone(&self.core);
        stream.run_now(Attempt::LaunchGraph, [operand], |queue, stream| {
            // SAFETY: the graph is live because `self` and then the stream hold it, and it holds what it touches.
            unsafe { queue.launch_graph(raw, stream) }
        })
    }

    /// The device it was captured on.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.core.device
    }

    fn backend(&self) -> &Backend {
        self.core.owned.backend()
    }
}
