//! Launches the kernels of gather and scatter.

#![allow(unsafe_code, reason = "a kernel launch is unsafe")]

use wholemem_hal::{Args, Attempt, BackendKind, Rights, Span, Stream};

use super::launch_shape::{KernelLaunch, cpu_launch, gpu_launch};
use super::plan::{KernelRequest, TableOperand, plan};
use super::{Indices, RowBuffer, RowOp};
use crate::Result;
use crate::abi::{ElementsRequest, RowTiles};
use crate::kernels::RowKernels;

const _: () = assert!(
    size_of::<ElementsRequest>() + size_of::<RowTiles>() <= Args::INLINE_LEN,
    "every launch would allocate memory"
);

impl RowKernels {
    /// Enqueues `op` on the rows of a table. `table_memory` is all memory that kernels access through `table`, and `flag` is the
    /// record in which they store the first bad index.
    pub(crate) fn launch(
        &self,
        stream: &Stream,
        op: RowOp,
        (table, table_memory): (&TableOperand, &[Span]),
        indices: &Indices,
        dense: &RowBuffer,
        flag: Option<&Span>,
    ) -> Result<()> {
        let bad = flag.map_or(0, Span::address);
        let Some(request) = plan(op, table, &indices.operand(), &dense.operand(), bad)? else {
            return Ok(());
        };
        let function = match (op, &request) {
            (RowOp::Gather, KernelRequest::Rows(_)) => &self.gather,
            (RowOp::Gather, KernelRequest::Elements(_)) => &self.gather_convert,
            (RowOp::Scatter, KernelRequest::Rows(_)) => &self.scatter,
            (RowOp::Scatter, KernelRequest::Elements(_)) => &self.scatter_convert,
            (RowOp::ScatterAdd, _) => &self.scatter_add,
        };
        let args = match &request {
            KernelRequest::Rows(request) => Args::new().value(request),
            KernelRequest::Elements(request) => Args::new().value(request),
        };
        let device = stream.device();
        let KernelLaunch { launch, tiles } = match device.backend().kind() {
            BackendKind::Host => cpu_launch(indices.kind),
            _ => gpu_launch(op, &request, indices.kind),
        };
        let args = args.value(&tiles);
        let attempt = || Attempt::Launch { name: function.name() };
        indices.span.check(device, Rights::Read, attempt)?;
        let needed = if op == RowOp::Gather { Rights::ReadWrite } else { Rights::Read };
        dense.span.check(device, needed, attempt)?;
        let operands = table_memory.iter().chain([&indices.span, &dense.span]).chain(flag);
        // SAFETY: the request and its tiles are the arguments that `function` takes. `plan` has checked that all addresses of the
        // request are within spans that are among the operands: the indices and rows within theirs, with the rights checked
        // above; the table's rows within `table_memory`, which this rank's device may read and write. `Stream::launch` rejects
        // operands of other devices.
        Ok(unsafe { stream.launch(function, &launch, &args, operands) }?)
    }
}
