// An example of a user's kernel: an all-reduce over a window (memory that every rank has mapped).
//
// Every rank reads every rank's input in the window, so there are two barriers. After the first barrier, all inputs are
// written. After the second, all ranks have read them, and the next work on the stream may overwrite them.

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
