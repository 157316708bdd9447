//! The attempted operation that an error message names.

use std::fmt;

use wholemem_os::Size;

use super::{BackendKind, DeviceId, DeviceLabel, HandleKind, Rights};

/// The operation that an error reports as failed, with its operands. `Display` continues the sentence "cannot ...".
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "`Display` describes each variant and its fields")]
pub enum Attempt {
    Open { backend: BackendKind },
    Create { len: usize, device: DeviceLabel },
    Release,
    Reserve { len: usize },
    Free,
    Map { len: usize, offset: usize },
    Unmap,
    Grant { device: DeviceId, rights: Rights },
    Populate { len: usize },
    EnlargePages { len: usize },
    SetInherited { len: usize },
    Export { kind: HandleKind, rights: Rights },
    Import { len: usize, device: DeviceLabel },
    Inspect,
    Access { len: usize },
    Pin { len: usize },
    Register { len: usize },
    CudaMalloc { len: usize, device: DeviceLabel },
    ExportCudaIpc,
    ImportCudaIpc { len: usize, device: DeviceLabel },
    Adopt { len: usize, device: DeviceLabel },
    CreateStream { device: DeviceLabel },
    CreateEvent { device: DeviceLabel },
    ShareEvent,
    ImportEvent { device: DeviceLabel },
    Copy { len: usize },
    Fill { len: usize },
    Record,
    AwaitEvent,
    Measure,
    Synchronize,
    Capture,
    LaunchGraph,
    LoadModule { device: DeviceLabel },
    Launch { name: &'static str },
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open { backend } => write!(f, "open the {backend} backend"),
            Self::Create { len, device } => write!(f, "create {} on {device}", Size(*len)),
            Self::Release => f.write_str("release the allocation"),
            Self::Reserve { len } => write!(f, "reserve {} of addresses", Size(*len)),
            Self::Free => f.write_str("free the reservation"),
            Self::Map { len, offset } => write!(f, "map {} at offset {}", Size(*len), Size(*offset)),
            Self::Unmap => f.write_str("unmap"),
            Self::Grant { device, rights } => write!(f, "grant {rights} to device {device}"),
            Self::Populate { len } => write!(f, "populate {}", Size(*len)),
            Self::EnlargePages { len } => write!(f, "collapse {} into huge pages", Size(*len)),
            Self::SetInherited { len } => write!(f, "set whether forked children inherit {}", Size(*len)),
            Self::Export { kind, rights } => write!(f, "export as {kind} with {rights}"),
            Self::Import { len, device } => write!(f, "import {} on {device}", Size(*len)),
            Self::Inspect => f.write_str("inspect the memory"),
            Self::Access { len } => write!(f, "access {}", Size(*len)),
            Self::Pin { len } => write!(f, "pin {} of host memory", Size(*len)),
            Self::Register { len } => write!(f, "register {} of host memory", Size(*len)),
            Self::CudaMalloc { len, device } => write!(f, "create a buffer of {} on {device}", Size(*len)),
            Self::ExportCudaIpc => f.write_str("export the buffer"),
            Self::ImportCudaIpc { len, device } => write!(f, "import a buffer of {} on {device}", Size(*len)),
            Self::Adopt { len, device } => write!(f, "adopt {} on {device}", Size(*len)),
            Self::CreateStream { device } => write!(f, "create a stream on {device}"),
            Self::CreateEvent { device } => write!(f, "create an event on {device}"),
            Self::ShareEvent => f.write_str("export the event"),
            Self::ImportEvent { device } => write!(f, "import an event on {device}"),
            Self::Copy { len } => write!(f, "copy {}", Size(*len)),
            Self::Fill { len } => write!(f, "fill {}", Size(*len)),
            Self::Record => f.write_str("record the event"),
            Self::AwaitEvent => f.write_str("wait for the event"),
            Self::Measure => f.write_str("measure the time between the events"),
            Self::Synchronize => f.write_str("synchronize the stream"),
            Self::Capture => f.write_str("capture the stream"),
            Self::LaunchGraph => f.write_str("launch the graph"),
            Self::LoadModule { device } => write!(f, "load a module on {device}"),
            Self::Launch { name } => write!(f, "launch `{name}`"),
        }
    }
}
