//! The connection to a rank of another node, with the monitor that decides whether that rank runs.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::PollFd;

use crate::Rank;
use crate::handshake::{AttemptOutcome, NodeAttempt};
use crate::id::GroupKey;
use crate::links::{Closing, FramePacket, RankLink};
use crate::machine::link_monitor::{Input, LinkFailure, LinkMonitor, Output, ProbeResult};
use crate::operation::Operation;
use crate::wire::frame::{FrameHeader, FrameKind};
use crate::wire::session::Purpose;

/// What every connection to another node needs of the rank at this end.
#[derive(Debug, Clone)]
pub(crate) struct NodeContext {
    pub(crate) rank: Rank,
    pub(crate) size: u32,
    pub(crate) key: GroupKey,
    pub(crate) silence: Duration,
}

/// The connection to a rank of another node.
#[derive(Debug)]
pub(crate) struct NodeLink {
    pub(crate) rank: Rank,
    /// The address at which the rank listens, if it is known.
    pub(crate) address: Option<SocketAddr>,
    pub(crate) link: Arc<RankLink>,
    began: Instant,
    monitor: LinkMonitor,
    probe: Option<NodeAttempt>,
    is_closed: bool,
}

impl NodeLink {
    pub(crate) fn new(
        context: &NodeContext,
        rank: Rank,
        address: Option<SocketAddr>,
        link: Arc<RankLink>,
    ) -> Self {
        let monitor = LinkMonitor::new(context.silence, Duration::ZERO);
        Self { rank, address, link, began: Instant::now(), monitor, probe: None, is_closed: false }
    }

    pub(crate) fn poll_probe(&self) -> Option<PollFd<'_>> {
        self.probe.as_ref().map(NodeAttempt::poll)
    }

    pub(crate) fn tick_within(&self) -> Duration {
        self.monitor.tick_within()
    }

    /// Records that a frame of the rank has arrived.
    pub(crate) fn heard(&mut self) {
        self.monitor.step(self.began.elapsed(), Input::Heard);
    }

    /// Returns true if the connection has ended.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Records that the connection has ended, unless this is known.
    pub(crate) fn closed(&mut self, context: &NodeContext) -> Option<LinkFailure> {
        if std::mem::replace(&mut self.is_closed, true) {
            return None;
        }
        let closing = self.link.socket.stream().and_then(crate::links::StreamSocket::closing);
        if let Some(Closing::Forged(violation)) = closing {
            tracing::warn!(rank = %self.rank, violation, "a connection between nodes was tampered with");
        }
        let by_peer = closing == Some(Closing::Eof);
        self.step_monitor(context, Input::Closed { by_peer })
    }

    /// Sends a heartbeat if it is time, and advances a probe. Returns the failure on the rank when there is one.
    pub(crate) fn step(&mut self, context: &NodeContext) -> Option<LinkFailure> {
        if let Some(probe) = &mut self.probe {
            let result = match probe.step(&context.key, context.silence) {
                AttemptOutcome::Pending => None,
                AttemptOutcome::Refused => Some(ProbeResult::Refused),
                AttemptOutcome::Failed => Some(ProbeResult::Unknown),
                AttemptOutcome::OtherSize(..) | AttemptOutcome::Authenticated(_) => {
                    Some(ProbeResult::Answered)
                }
            };
            if let Some(result) = result {
                self.probe = None;
                let failure = self.step_monitor(context, Input::Probed(result));
                if failure.is_some() {
                    return failure;
                }
            }
        }
        self.step_monitor(context, Input::Tick)
    }

    fn step_monitor(&mut self, context: &NodeContext, input: Input) -> Option<LinkFailure> {
        let mut inputs = vec![input];
        while let Some(input) = inputs.pop() {
            for output in self.monitor.step(self.began.elapsed(), input) {
                match output {
                    Output::Heartbeat => {
                        let header = FrameHeader::new(
                            FrameKind::Heartbeat,
                            Operation::None,
                            context.rank,
                            self.rank,
                            0,
                        );
                        self.link.post_urgent(FramePacket::from(header.encode(&[])));
                    }
                    Output::Probe => match self.begin_probe(context) {
                        Ok(attempt) => self.probe = Some(attempt),
                        Err(result) => inputs.push(Input::Probed(result)),
                    },
                    Output::LinkFailure(failure) => return Some(failure),
                }
            }
        }
        None
    }

    fn begin_probe(&self, context: &NodeContext) -> Result<NodeAttempt, ProbeResult> {
        let address = self.address.ok_or(ProbeResult::Unknown)?;
        let hello = (Purpose::Probe, context.rank, context.size);
        match NodeAttempt::begin(address, hello, context.silence) {
            Ok(Ok(attempt)) => Ok(attempt),
            Ok(Err(AttemptOutcome::Refused)) => Err(ProbeResult::Refused),
            Ok(Err(_)) | Err(_) => Err(ProbeResult::Unknown),
        }
    }
}
