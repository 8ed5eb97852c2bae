// Decode kernels for head dims up to 192.
#include "decode_launch.cuh"

#if FA_CUDA_HAS_DIM(192)
namespace fa {
namespace sm90 {

FA_DECODE(192, 128)
FA_DECODE(192, 192)

}  // namespace sm90
}  // namespace fa
#endif
