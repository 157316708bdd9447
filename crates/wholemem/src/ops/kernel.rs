//! The kernels of gather and scatter on one device, and the one place where they are launched.

use wholemem_hal::{Args, Attempt, BackendKind, Device, Function, KernelImage, Module, Rights, Span, Stream};

use super::plan::{Request, Table, plan};
use super::shape::{Shape, shape, whole};
use super::{Dense, Indices, Op};
use crate::{Result, host};

/// The kernels that move bytes, and those that look at elements.
const ROWS: KernelImage =
    KernelImage { ptx: Some(include_str!("../../../../kernels/ptx/rows.ptx")), host: host::FUNCTIONS };
const ELEMENTS: KernelImage =
    KernelImage { ptx: Some(include_str!("../../../../kernels/ptx/elements.ptx")), host: host::FUNCTIONS };

/// The kernels, loaded.
#[derive(Debug)]
pub(crate) struct Kernels {
    gather: Function,
    scatter: Function,
    gather_convert: Function,
    scatter_convert: Function,
    scatter_add: Function,
}

impl Kernels {
    /// Loads the kernels.
    pub(crate) fn load(device: &Device) -> Result<Self> {
        // SAFETY: the functions of the image take a request and its tiles, and are launched with that below.
        let rows = unsafe { Module::load(device, &ROWS) }?;
        // SAFETY: as above.
        let elements = unsafe { Module::load(device, &ELEMENTS) }?;
        Ok(Self {
            gather: rows.function("gather_rows")?,
            scatter: rows.function("scatter_rows")?,
            gather_convert: elements.function("gather_convert")?,
            scatter_convert: elements.function("scatter_convert")?,
            scatter_add: elements.function("scatter_add")?,
        })
    }

    /// Enqueues `op` on the rows of a table. `table` and `held` are a memory's own: every valid index of the one is a row
    /// within the other. `note` is a word for bad indices.
    pub(crate) fn launch(
        &self,
        stream: &Stream,
        op: Op,
        (table, held): (&Table, &[Span]),
        indices: &Indices,
        dense: &Dense,
        note: Option<&Span>,
    ) -> Result<()> {
        let bad = note.map_or(0, Span::address);
        let Some(request) = plan(op, table, &indices.place(), &dense.place(), bad)? else { return Ok(()) };
        let function = match (op, &request) {
            (Op::Gather, Request::Rows(_)) => &self.gather,
            (Op::Gather, Request::Elements(_)) => &self.gather_convert,
            (Op::Scatter, Request::Rows(_)) => &self.scatter,
            (Op::Scatter, Request::Elements(_)) => &self.scatter_convert,
            (Op::ScatterAdd, _) => &self.scatter_add,
        };
        let args = match &request {
            Request::Rows(request) => Args::new().bytes(&request.to_bytes(), align_of::<u64>()),
            Request::Elements(request) => Args::new().bytes(&request.to_bytes(), align_of::<u64>()),
        };
        let device = stream.device();
        let Shape { launch, tiles } = match device.backend().kind() {
            BackendKind::Host => whole(indices.kind),
            _ => shape(op, &request, indices.kind),
        };
        let args = args.bytes(&tiles.to_bytes(), align_of::<u64>());
        let attempt = || Attempt::Launch { name: function.name() };
        indices.span.check(device, Rights::Read, attempt)?;
        let needed = if op == Op::Gather { Rights::ReadWrite } else { Rights::Read };
        dense.span.check(device, needed, attempt)?;
        let operands = held.iter().chain([&indices.span, &dense.span]).chain(note);
        // SAFETY: the request and its tiles are what the function of its operation takes, and the plan made it of spans that are all
        // among the operands: indices and rows within theirs, rights checked above; the table's rows within `held`, which
        // this rank's device may read and write, and a launch on another device is refused.
        Ok(unsafe { stream.launch(function, &launch, &args, operands) }?)
    }
}
