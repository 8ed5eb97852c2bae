"""nvcc's PTX of kernels for sm_90a: a kernel's name chooses its headers and its architecture, and a
map of the host passes through a parameter.
"""

import numpy as np
import pytest

from tests.gpu_emulation import tensor_maps
from tests.gpu_emulation.emulator import SCHEDULES, needs_emulator
from tests.gpu_emulation.ptx import cpp, library, ours, text
from tests.gpu_emulation.tests.test_ptx_hopper import Tensor

pytestmark = [needs_emulator, ours.needs_nvcc]

# The first thread of a block copies its box of 64 x 8 to the other tensor's, by shared memory.
COPY = r"""
#include <cuda.h>
#include <stdint.h>

#ifndef __CUDA_ARCH_FEAT_SM90_ALL
#ifdef __CUDA_ARCH__
#error "expected sm_90a"
#endif
#endif

namespace fa::sm90 {

struct Parameters {
  int64_t columns;
  CUtensorMap from;
};

template <int Rows>
__global__ void __launch_bounds__(128, 1)
    copy_kernel(const __grid_constant__ Parameters given, const __grid_constant__ CUtensorMap to) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const auto at = static_cast<unsigned>(__cvta_generic_to_shared(memory));
  const unsigned mbarrier = at + Rows * 128;
  asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
  if (threadIdx.x) return;
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(mbarrier) : "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mbarrier),
               "n"(Rows * 128) : "memory");
  const int column = blockIdx.x * 64 % static_cast<int>(given.columns), row = blockIdx.y * Rows;
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4}], [%2];" ::"r"(at), "l"(&given.from), "r"(mbarrier), "r"(column), "r"(row)
      : "memory");
  asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;"
               "@!p bra again; }" ::"r"(mbarrier) : "memory");
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
                   &to), "r"(at), "r"(column), "r"(row) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

}  // namespace fa::sm90
"""
NAME = "_ZN2fa4sm9011copy_kernelILi{}EEEvNS0_10ParametersE14CUtensorMap_st"
NAMES = [NAME.format(rows) for rows in (8, 16)]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """A folder of kernels as csrc/cuda has them; those of sm80 do not compile."""
    folder = tmp_path_factory.mktemp("kernels")
    for name, code in (("sm80", "#error"), ("sm90", COPY)):
        (folder / name).mkdir()
        (folder / name / "copy.cuh").write_text(code)
    return folder


@pytest.mark.slow
def test_the_namespace_chooses_headers_and_architecture(kernels):
    found = text.kernels(ours.ptx(*NAMES, kernels=kernels))
    assert [*found] == NAMES
    assert all(x.target == 90 and cpp.registers(x) == 256 for x in found.values())
    assert {x: (ours.namespace(x), ours.instance(x)) for x in SIGNATURES} == SIGNATURES


SIGNATURES = {
    "void fa::sm80::a_kernel<fa::sm90::A>(int)": ("sm80", "fa::sm80::a_kernel<fa::sm90::A>"),
    "void fa::sm90::a_kernel<(fa::sm80::A)1>(B)": ("sm90", "fa::sm90::a_kernel<(fa::sm80::A)1>"),
    "void fa::a_kernel<64, 64>(void (*)(int), C)": ("sm80", "fa::a_kernel<64, 64>"),
}


def test_kernels_of_two_architectures_are_refused(kernels):
    with pytest.raises(ValueError, match="too many values"):
        ours.ptx(NAMES[0], NAMES[1].replace("sm90", "sm80"), kernels=kernels)


def test_a_map_passes_through_nvcc(kernels):
    """Alone and in a structure, both __grid_constant__."""
    executor = library.Executor(tensor_maps.with_driver(), ours.ptx(*NAMES, kernels=kernels))
    for rows, name in zip((8, 16), NAMES):
        for schedule in SCHEDULES:
            source, target = (
                Tensor((100, 21), (64, rows), 2, swizzle, np.random.default_rng(seed))
                for seed, swizzle in ((0, 3), (1, 3))
            )
            maps = [tensor_maps.of_tensor(executor.emulator, x) for x in (source, target)]
            parameters = (100).to_bytes(8, "little") + bytes(120) + maps[0]
            grid, shared = (2, -(-21 // rows)), rows * 128 + 8
            found = executor.launch(
                name, grid, (128,), shared, [parameters, maps[1]], schedule=schedule
            )
            found.none()
            assert np.array_equal(of(target), of(source))


def of(tensor):
    shape, strides = (*tensor.dims[::-1], tensor.size), (*tensor.strides, tensor.size, 1)
    return np.lib.stride_tricks.as_strided(tensor.memory, shape, strides)
