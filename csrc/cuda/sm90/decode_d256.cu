// Decode kernels for head dims up to 256.
#include "decode_launch.cuh"

#if FA_CUDA_HAS_DIM(256)
namespace fa {
namespace sm90 {

FA_DECODE(256, 256)

}  // namespace sm90
}  // namespace fa
#endif
