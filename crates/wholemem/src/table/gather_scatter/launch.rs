//! Launches the kernels of gather and scatter.

#![allow(unsafe_code, reason = "a kernel launch is unsafe")]

use wholemem_hal::{Args, Attempt, BackendKind, Rights, Span, Stream};

use super::launch_shape::{Shape, shape, whole};
use super::plan::{Request, Table, plan};
use super::{Indices, Op, RowBuffer};
use crate::Result;
use crate::kernels::RowKernels;

impl RowKernels {
    /// Enqueues `op` on the rows of a table. `table` and `held` are a memory's own: every valid index of the one is a row
    /// within the other. `flag` is the record for bad indices.
    pub(crate) fn launch(
        &self,
        stream: &Stream,
        op: Op,
        (table, held): (&Table, &[Span]),
        indices: &Indices,
        dense: &RowBuffer,
        flag: Option<&Span>,
    ) -> Result<()> {
        let bad = flag.map_or(0, Span::address);
        let Some(request) = plan(op, table, &indices.place(), &dense.place(), bad)? else { return Ok(()) };
        let function = match (op, &request) {
            (Op::Gather, Request::Rows(_)) => &self.gather,
            (Op::Gather, Request::Elements(_)) => &self.gather_convert,
            (Op::Scatter, Request::Rows(_)) => &self.scatter,
            (Op::Scatter, Request::Elements(_)) => &self.scatter_convert,
            (Op::ScatterAdd, _) => &self.scatter_add,
        };
        let args = match &request {
            Request::Rows(request) => Args::new().value(request),
            Request::Elements(request) => Args::new().value(request),
        };
        let device = stream.device();
        let Shape { launch, tiles } = match device.backend().kind() {
            BackendKind::Host => whole(indices.kind),
            _ => shape(op, &request, indices.kind),
        };
        let args = args.value(&tiles);
        let attempt = || Attempt::Launch { name: function.name() };
        indices.span.check(device, Rights::Read, attempt)?;
        let needed = if op == Op::Gather { Rights::ReadWrite } else { Rights::Read };
        dense.span.check(device, needed, attempt)?;
        let operands = held.iter().chain([&indices.span, &dense.span]).chain(flag);
        // SAFETY: the request and its tiles are what the function of its operation takes, and the plan made it of spans that are all
        // among the operands: indices and rows within theirs, rights checked above; the table's rows within `held`, which
        // this rank's device may read and write, and a launch on another device is refused.
        Ok(unsafe { stream.launch(function, &launch, &args, operands) }?)
    }
}
