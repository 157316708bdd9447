//! The kernels of gather and scatter on one device, and the one place where they are launched.

use wholemem_hal::{Args, Attempt, Device, Function, KernelImage, Module, Rights, Span, Stream};

use super::plan::{Request, Table, plan};
use super::shape::shape;
use super::{Dense, IndexType, Indices, Op};
use crate::{Result, host};

const IMAGE: KernelImage = KernelImage { ptx: None, host: host::FUNCTIONS };

/// The kernels, loaded: for each [`Op`] and type of index, one that moves bytes and one that moves elements.
#[derive(Debug)]
pub(crate) struct Kernels {
    gather: Pair,
    scatter: Pair,
    gather_convert: Pair,
    scatter_convert: Pair,
    scatter_add: Pair,
}

/// A kernel for either type of index.
#[derive(Debug)]
struct Pair {
    i32: Function,
    i64: Function,
}

impl Kernels {
    /// Loads the kernels.
    pub(crate) fn load(device: &Device) -> Result<Self> {
        // SAFETY: the functions of the image take one request each, and are launched with that below.
        let module = unsafe { Module::load(device, &IMAGE) }?;
        let pair = |i32, i64| -> Result<Pair> {
            Ok(Pair { i32: module.function(i32)?, i64: module.function(i64)? })
        };
        Ok(Self {
            gather: pair("gather_rows_i32", "gather_rows_i64")?,
            scatter: pair("scatter_rows_i32", "scatter_rows_i64")?,
            gather_convert: pair("gather_convert_i32", "gather_convert_i64")?,
            scatter_convert: pair("scatter_convert_i32", "scatter_convert_i64")?,
            scatter_add: pair("scatter_add_i32", "scatter_add_i64")?,
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
        let pair = match (op, &request) {
            (Op::Gather, Request::Rows(_)) => &self.gather,
            (Op::Gather, Request::Elements(_)) => &self.gather_convert,
            (Op::Scatter, Request::Rows(_)) => &self.scatter,
            (Op::Scatter, Request::Elements(_)) => &self.scatter_convert,
            (Op::ScatterAdd, _) => &self.scatter_add,
        };
        let function = match indices.kind {
            IndexType::I32 => &pair.i32,
            IndexType::I64 => &pair.i64,
        };
        let args = match &request {
            Request::Rows(request) => Args::new().bytes(&request.to_bytes(), align_of::<u64>()),
            Request::Elements(request) => Args::new().bytes(&request.to_bytes(), align_of::<u64>()),
        };
        let attempt = || Attempt::Launch { name: function.name() };
        let device = stream.device();
        indices.span.check(device, Rights::Read, attempt)?;
        let needed = if op == Op::Gather { Rights::ReadWrite } else { Rights::Read };
        dense.span.check(device, needed, attempt)?;
        let mut operands = Vec::with_capacity(held.len() + 3);
        operands.extend_from_slice(held);
        operands.extend([&indices.span, &dense.span].into_iter().chain(note).cloned());
        // SAFETY: the request is what the function of its operation takes, and the plan made it of spans that are all
        // among the operands: indices and rows within theirs, rights checked above; the table's rows within `held`, which
        // this rank's device may read and write, and a launch on another device is refused.
        Ok(unsafe { stream.launch(function, &shape(&request), &args, &operands) }?)
    }
}
