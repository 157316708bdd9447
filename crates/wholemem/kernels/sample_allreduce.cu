// An all-reduce as users write them: a window that every rank reads, and a call in which all ranks meet.
//
// Every rank reads every rank's input where it lies, so there are two meetings: the first says that the inputs are written,
// the second that all have read them, and whatever comes next on the stream may overwrite them.

#include "wholemem/barrier.cuh"
#include "wholemem/window.cuh"

extern "C" __global__ void __launch_bounds__(512, 1)
    sample_all_reduce(const __grid_constant__ wholemem::LaneRef lane, const __grid_constant__ wholemem::WindowRef inputs,
                      float *output, wholemem::u64 count)
{
    wholemem::Call call(lane);
    if (!call.sync())
        return;
    const wholemem::u64 stride = (wholemem::u64)gridDim.x * blockDim.x;
    for (wholemem::u64 i = (wholemem::u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
        float sum = inputs.pointer<float>(0)[i];
        for (wholemem::u32 rank = 1; rank < lane.ranks; ++rank)
            sum = __fadd_rn(sum, inputs.pointer<float>(rank)[i]);
        output[i] = sum;
    }
    if (call.sync())
        call.finish();
}
