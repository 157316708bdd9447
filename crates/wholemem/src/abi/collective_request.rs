//! The request of a collective call: the argument of its kernels.

use zerocopy::{Immutable, IntoBytes, KnownLayout, TryFromBytes};

use super::{LaneRef, WindowRef};
use crate::dtype::{Dtype, ReduceOp};

/// Threads of a block.
pub const COLLECTIVE_THREADS: u32 = 512;

/// One rank's part of one collective call. All ranks run it with equal grids.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, IntoBytes, TryFromBytes, Immutable, KnownLayout)]
pub struct CollectiveRequest {
    /// The lane.
    pub lane: LaneRef,
    /// The address of this rank's input, aligned to its elements.
    pub input: u64,
    /// The address of this rank's output, aligned to its elements. It may be the input; of an all-gather, this rank's part of
    /// the output may be the input.
    pub output: u64,
    /// The number of elements of the input.
    pub count: u64,
    /// Every rank's input, if the other ranks read it directly.
    pub inputs: WindowRef,
    /// Every rank's output, if the other ranks write it directly.
    pub outputs: WindowRef,
    /// The type of the elements.
    pub dtype: Dtype,
    /// The reduction.
    pub op: ReduceOp,
    /// The root of a broadcast.
    pub root: u32,
    /// Nonzero for a programmatic launch: the kernel starts while the previous one runs, and permits the next one to start.
    pub programmatic: u32,
}

layout!(CollectiveRequest: 192 {
    lane: 0, input: 104, output: 112, count: 120, inputs: 128, outputs: 152, dtype: 176, op: 180, root: 184,
    programmatic: 188,
});

impl CollectiveRequest {
    /// A request without input and output: that of a barrier.
    pub(crate) fn without_data(lane: LaneRef) -> Self {
        let [inputs, outputs] = [WindowRef::default(); 2];
        let (dtype, op) = (Dtype::U8, ReduceOp::Sum);
        Self { lane, input: 0, output: 0, count: 0, inputs, outputs, dtype, op, root: 0, programmatic: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_with_an_operation_that_does_not_exist_is_not_read() {
        let request = CollectiveRequest {
            dtype: Dtype::F64,
            op: ReduceOp::Xor,
            root: 3,
            ..CollectiveRequest::without_data(LaneRef { base: 4096, ranks: 5, ..LaneRef::default() })
        };
        let mut bytes = request.as_bytes().to_vec();
        assert_eq!(CollectiveRequest::try_read_from_bytes(&bytes).ok(), Some(request));
        assert!(CollectiveRequest::try_read_from_bytes(&bytes[..191]).is_err());
        bytes[180] = 8;
        assert!(CollectiveRequest::try_read_from_bytes(&bytes).is_err());
    }
}
