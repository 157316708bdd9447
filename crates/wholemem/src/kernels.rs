//! The kernels of gather and scatter, loaded on one device.
//!
//! Every communicator loads them once, when it is created. `table` launches them; the host functions are in `cpu`.

#![allow(unsafe_code, reason = "loading a kernel image is unsafe")]

use wholemem_hal::{Device, Function, KernelImage, Module};

use crate::cpu;
use crate::error::Result;

/// The image of the gather and scatter kernels that copy rows as bytes.
const ROWS: KernelImage =
    KernelImage { ptx: Some(include_str!("../kernels/ptx/rows.ptx")), host: cpu::FUNCTIONS };

/// The image of the gather and scatter kernels that convert or add elements.
const ELEMENTS: KernelImage =
    KernelImage { ptx: Some(include_str!("../kernels/ptx/elements.ptx")), host: cpu::FUNCTIONS };

/// The loaded kernels of gather and scatter. Their arguments are a request and its tiles.
#[derive(Debug)]
pub(crate) struct RowKernels {
    pub(crate) gather: Function,
    pub(crate) scatter: Function,
    pub(crate) gather_convert: Function,
    pub(crate) scatter_convert: Function,
    pub(crate) scatter_add: Function,
}

impl RowKernels {
    /// Loads the kernels of gather and scatter on a device.
    pub(crate) fn load(device: &Device) -> Result<Self> {
        // SAFETY: every function of this image takes a `RowsRequest` and a `RowTiles`, and `RowKernels::launch`, the only caller
        // of the functions, passes these.
        let rows = unsafe { Module::load(device, &ROWS) }?;
        // SAFETY: every function of this image takes an `ElementsRequest` and a `RowTiles`, and `RowKernels::launch`, the only
        // caller of the functions, passes these.
        let elements = unsafe { Module::load(device, &ELEMENTS) }?;
        Ok(Self {
            gather: rows.function("gather_rows")?,
            scatter: rows.function("scatter_rows")?,
            gather_convert: elements.function("gather_convert")?,
            scatter_convert: elements.function("scatter_convert")?,
            scatter_add: elements.function("scatter_add")?,
        })
    }
}
