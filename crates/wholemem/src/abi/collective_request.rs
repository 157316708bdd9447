//! The request of a collective call, which is the argument of the call's kernels.

use zerocopy::{Immutable, IntoBytes, KnownLayout, TryFromBytes};

use super::{CallTerms, LaneRef, WindowRef};
use crate::dtype::{Dtype, ReduceOp};

/// The number of threads in one block of a collective kernel.
pub const COLLECTIVE_THREADS: u32 = 512;

/// One rank's part of a collective call. All ranks launch kernels with equal grids.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, IntoBytes, TryFromBytes, Immutable, KnownLayout)]
pub struct CollectiveRequest {
    /// The lane (the sequence of collective calls) to which the call belongs.
    pub lane: LaneRef,
    /// The address of this rank's input of the call, aligned to its element type.
    pub input: u64,
    /// The address of this rank's output of the call, aligned to its element type. The input may be the output, or, in an
    /// all-gather, this rank's part of the output.
    pub output: u64,
    /// The number of elements in each rank's input.
    pub count: u64,
    /// The addresses of every rank's input, if ranks read the inputs of other ranks directly; otherwise zero.
    pub inputs: WindowRef,
    /// The addresses of every rank's output, if ranks write the outputs of other ranks directly; otherwise zero.
    pub outputs: WindowRef,
    /// The type of the elements that the call reduces or copies.
    pub dtype: Dtype,
    /// The operation by which an all-reduce combines elements, for example a sum.
    pub op: ReduceOp,
    /// The number of the rank whose input a broadcast copies.
    pub root: u32,
    /// Nonzero for a programmatic launch: the kernel starts while the previous kernel of the stream runs, and permits the next
    /// kernel to start early.
    pub programmatic: u32,
    /// The arguments of the call that must be equal on all ranks.
    pub terms: CallTerms,
    /// The digest of the terms, which has at most 16 bits.
    pub digest: u32,
    /// Padding, which must be zero.
    pub reserved: u32,
}

layout!(CollectiveRequest: 248 {
    lane: 0, input: 112, output: 120, count: 128, inputs: 136, outputs: 160, dtype: 184, op: 188, root: 192,
    programmatic: 196, terms: 200, digest: 240, reserved: 244,
});

impl CollectiveRequest {
    /// Creates the request of a call without input and output, such as a barrier.
    pub(crate) fn without_data(lane: LaneRef) -> Self {
        let [inputs, outputs] = [WindowRef::default(); 2];
        let (dtype, op) = (Dtype::U8, ReduceOp::Sum);
        let terms = CallTerms::default();
        Self {
            lane,
            input: 0,
            output: 0,
            count: 0,
            inputs,
            outputs,
            dtype,
            op,
            root: 0,
            programmatic: 0,
            terms,
            digest: 0,
            reserved: 0,
        }
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
        assert!(CollectiveRequest::try_read_from_bytes(&bytes[..247]).is_err());
        bytes[188] = 8;
        assert!(CollectiveRequest::try_read_from_bytes(&bytes).is_err());
    }
}
