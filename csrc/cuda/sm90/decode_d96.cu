// Decode kernels for head dims up to 96.
#include "decode_launch.cuh"

#if FA_CUDA_HAS_DIM(96)
namespace fa {
namespace sm90 {

FA_DECODE(96, 96)

}  // namespace sm90
}  // namespace fa
#endif
