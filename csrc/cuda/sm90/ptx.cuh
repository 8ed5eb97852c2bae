// The PTX instructions of sm_90a that the kernels in this folder use, one wrapper each, as in
// ../ptx.cuh. Sections of the PTX ISA: mbarrier, cp.async.bulk, setmaxnreg, and wgmma with its
// "Asynchronous Warpgroup Level Matrix" layouts.
#pragma once
#include "../ptx.cuh"
#include "tensor_map.h"

// What a kernel does. Tests that run kernels as compiled PTX build the host's code without it.
#ifdef FA_WITHOUT_BODIES
#define FA_BODY(...)
#else
#define FA_BODY(...) __VA_ARGS__
#endif

namespace fa {
namespace ptx {

// -- mbarriers ------------------------------------------------------------------------------------

// A phase ends after `count` arrivals and all bytes that were announced.
FA_DEVICE void mbarrier_init(Site site, uint32_t at, int count) {
  FA_EMULATED_OR(
      emu::mbarrier_init(site, at, static_cast<uint32_t>(count));
      , asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");)
}

// The asynchronous proxy sees the mbarriers that this thread has initialised.
FA_DEVICE void mbarrier_init_fence() {
  FA_EMULATED_OR(, asm volatile("fence.mbarrier_init.release.cluster;" :: : "memory");)
}

// Arrives, and announces bytes that copies will bring in this phase.
FA_DEVICE void mbarrier_expect(Site site, uint32_t at, uint32_t bytes) {
  FA_EMULATED_OR(emu::mbarrier_expect(site, at, bytes); emu::mbarrier_arrive(site, at, 1);
                 , asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at),
                                "r"(bytes) : "memory");)
}
FA_DEVICE void mbarrier_arrive(Site site, uint32_t at) {
  FA_EMULATED_OR(emu::mbarrier_arrive(site, at, 1);
                 , asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");)
}

// Waits for the end of the phase with this parity, 0 for the first. The phase before the first
// counts as ended.
FA_DEVICE void mbarrier_wait(Site site, uint32_t at, uint32_t parity) {
  FA_EMULATED_OR(while (!emu::mbarrier_test(site, at, parity, true)){},
                 asm volatile("{ .reg .pred ended;\n"
                              "again: mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
                              "@ended bra done;\n"
                              "bra again;\n"
                              "done: }" ::"r"(at),
                              "r"(parity) : "memory");)
}

// Nanoseconds since some moment, to about a microsecond.
FA_DEVICE uint64_t nanoseconds() {
  FA_EMULATED_OR(return emu::nanoseconds();, uint64_t now;
                 asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory"); return now;)
}

// As mbarrier_wait, for about so many nanoseconds at most: false if the phase has not ended then.
FA_DEVICE bool mbarrier_wait_for(Site site, uint32_t at, uint32_t parity, uint64_t limit) {
  const auto ended = [&] {
    FA_EMULATED_OR(return emu::mbarrier_test(site, at, parity, false);, uint32_t done;
                   asm volatile("{ .reg .pred ended;\n"
                                "mbarrier.test_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
                                "selp.u32 %0, 1, 0, ended; }" : "=r"(done) : "r"(at),
                                "r"(parity) : "memory");
                   return done != 0;)
  };
  const uint64_t begin = nanoseconds();
  while (!ended())
    if (nanoseconds() - begin > limit) return false;
  return true;
}

// -- copies by the asynchronous proxy -------------------------------------------------------------

// The coordinates of a box's first element, in the order of a map's dimensions.
struct BoxAt {
  int32_t column, row, head, item;
};

// Copies a box of a tensor to shared memory. The bytes arrive at an mbarrier. Elements outside of
// the tensor become 0, and count as bytes, too.
FA_DEVICE void load_box(Site site, uint32_t to, const TensorMap* map, BoxAt at, uint32_t mbarrier) {
  FA_EMULATED_OR(
      emu::load_box(site, to, map, 4, &at.column, mbarrier);
      , asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global"
                     ".mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
                     "l"(map), "r"(mbarrier), "r"(at.column), "r"(at.row), "r"(at.head),
                     "r"(at.item) : "memory");)
}

// Copies bytes, a multiple of 16, from global to shared memory, both at multiples of 16.
FA_DEVICE void load_bytes(Site site, uint32_t to, const void* from, uint32_t bytes,
                          uint32_t mbarrier) {
  FA_EMULATED_OR(emu::load_bytes(site, to, from, bytes, mbarrier);
                 , asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                                "[%0], [%1], %2, [%3];" ::"r"(to),
                                "l"(from), "r"(bytes), "r"(mbarrier) : "memory");)
}

// Stores a box from shared memory; elements outside of the tensor are skipped. This and the next
// two belong to the group that the thread commits next.
FA_DEVICE void store_box(Site site, const TensorMap* map, BoxAt at, uint32_t from) {
  FA_EMULATED_OR(emu::bulk_box(site, map, 4, &at.column, from);
                 , asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group "
                                "[%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                                "r"(from), "r"(at.column), "r"(at.row), "r"(at.head),
                                "r"(at.item) : "memory");)
}

// Stores bytes, a multiple of 16, from shared memory to global memory, both at multiples of 16; or
// adds float32 numbers to those in global memory.
FA_DEVICE void store_bytes(Site site, void* to, uint32_t from, uint32_t bytes) {
  FA_EMULATED_OR(
      emu::bulk_bytes(site, to, from, bytes, false);
      , asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                     "r"(from), "r"(bytes) : "memory");)
}
FA_DEVICE void add_bytes(Site site, float* to, uint32_t from, uint32_t bytes) {
  FA_EMULATED_OR(emu::bulk_bytes(site, to, from, bytes, true);
                 , asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 "
                                "[%0], [%1], %2;" ::"l"(to),
                                "r"(from), "r"(bytes) : "memory");)
}

FA_DEVICE void bulk_commit(Site site) {
  FA_EMULATED_OR(emu::bulk_commit(site);
                 , asm volatile("cp.async.bulk.commit_group;" :: : "memory");)
}
// Waits until all but the newest `pending` groups have read shared memory, or have also written.
template <int pending>
FA_DEVICE void bulk_wait_read(Site site) {
  FA_EMULATED_OR(emu::bulk_wait(site, pending, true);
                 , asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");)
}
template <int pending>
FA_DEVICE void bulk_wait(Site site) {
  FA_EMULATED_OR(emu::bulk_wait(site, pending, false);
                 , asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");)
}

// What this thread has written, or waited for, comes before what the asynchronous proxy does later:
// in shared memory, and in all memory.
FA_DEVICE void async_proxy_fence(Site site) {
  FA_EMULATED_OR(emu::async_proxy_fence(site, true);
                 , asm volatile("fence.proxy.async.shared::cta;" :: : "memory");)
}
FA_DEVICE void async_proxy_fence_of_all(Site site) {
  FA_EMULATED_OR(emu::async_proxy_fence(site, false);
                 , asm volatile("fence.proxy.async;" :: : "memory");)
}

// -- registers ------------------------------------------------------------------------------------

// The limit of registers of each thread of this warpgroup. ptxas allocates by it, too.
template <int count>
FA_DEVICE void more_registers(Site site) {
  FA_EMULATED_OR(emu::set_registers(site, count, true);
                 , asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));)
}
template <int count>
FA_DEVICE void fewer_registers(Site site) {
  FA_EMULATED_OR(emu::set_registers(site, count, false);
                 , asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));)
}

// x, but the compiler does not know that. What is computed from it again needs no registers before.
FA_DEVICE int anew(int x) { FA_EMULATED_OR(return x;, asm volatile("" : "+r"(x)); return x;) }

// -- stores of matrices ---------------------------------------------------------------------------

// Stores four 8 x 8 matrices, of which the lanes hold what load_matrices gives them. Lane 8 i + r
// has the address of row r of matrix i; of column r if transposed.
FA_DEVICE void store_matrices(Site site, uint32_t at, const uint32_t (&r)[4]) {
  FA_EMULATED_OR(
      emu::store_matrices(r, 4, false, at, site);
      , asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                     "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");)
}
FA_DEVICE void store_matrices_transposed(Site site, uint32_t at, const uint32_t (&r)[4]) {
  FA_EMULATED_OR(
      emu::store_matrices(r, 4, true, at, site);
      , asm volatile(
            "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
            "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");)
}

// -- products of a warpgroup ----------------------------------------------------------------------

// Registers that this warpgroup has written are those that its next products read.
FA_DEVICE void products_fence(Site site) {
  FA_EMULATED_OR(emu::products_fence(site);
                 , asm volatile("wgmma.fence.sync.aligned;" :: : "memory");)
}
FA_DEVICE void products_commit(Site site) {
  FA_EMULATED_OR(emu::products_commit(site);
                 , asm volatile("wgmma.commit_group.sync.aligned;" :: : "memory");)
}
// Waits for all but the newest `pending` groups of products.
template <int pending>
FA_DEVICE void products_wait(Site site) {
  FA_EMULATED_OR(emu::products_wait(site, pending);
                 , asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");)
}

// The compiler moves no access to these accumulators across this place. It does not know when
// products read and write them.
template <int n>
FA_DEVICE void fence_operand(float (&d)[n][4]) {
#pragma unroll
  for (int i = 0; i < 4 * n; ++i) {
    float& x = d[i / 4][i % 4];
    FA_EMULATED_OR(static_cast<void>(x);, asm volatile("" : "+f"(x)::"memory");)
  }
}

// A matrix descriptor is two words. The upper one is the same for all tiles here: rows of 128
// bytes, swizzled by 128 bytes (1 in bits 62 and 63), eight of them 1024 bytes apart (bits 32 to
// 45, by 16). Kernels compute with the lower word, so that an address costs one addition.
constexpr uint32_t kDescriptorHigh = 1u << 30 | 1024 >> 4;
FA_DEVICE uint64_t descriptor(uint32_t low) {
  return static_cast<uint64_t>(kDescriptorHigh) << 32 | low;
}
// Bytes as a difference between lower words.
FA_DEVICE uint32_t in_descriptor(int bytes) { return static_cast<uint32_t>(bytes) >> 4; }
// The lower word for a tile at this address with rows along the products' sums. The next 16
// columns are 32 bytes further.
FA_DEVICE uint32_t k_major(uint32_t at) { return at >> 4 | 1u << 16; }
// The same where rows run across: the next 64 columns are `stride` bytes further, and the next 16
// rows 2048 bytes.
FA_DEVICE uint32_t mn_major(uint32_t at, uint32_t stride) { return at >> 4 | stride >> 4 << 16; }

// d (64 rows, N columns, float32) = a b, or += if `add`; a is 64 x 16, b 16 x N. A lane of warp w
// holds of d what ptx::multiply gives it of 8 columns, of rows 16 w on. a and b are descriptors'
// lower words, a_mn and b_mn whether they are mn_major; or a is in registers as in ptx::multiply.
// The results are there, and the registers of a free, after products_wait.
template <int N>
struct Products;

#ifdef FA_EMULATED
constexpr emu::Element element_of(BF16) { return emu::Element::kBfloat16; }
constexpr emu::Element element_of(F16) { return emu::Element::kFloat16; }

template <int N>
struct Products {
  using Sum = float[N / 8][4];
  template <bool a_mn, bool b_mn, class Type>
  static void ss(Site site, Type type, Sum& d, uint32_t a, uint32_t b, bool add) {
    uint32_t* to[N / 2];
    for (int i = 0; i < N / 2; ++i) to[i] = reinterpret_cast<uint32_t*>(&d[i / 4][i % 4]);
    emu::products_begin(site, {element_of(type), N, to, nullptr, descriptor(a), descriptor(b), add,
                               true, 1, 1, a_mn, b_mn});
  }
  template <bool b_mn, class Type>
  static void rs(Site site, Type type, Sum& d, const uint32_t (&a)[4], uint32_t b, bool add) {
    uint32_t* to[N / 2];
    for (int i = 0; i < N / 2; ++i) to[i] = reinterpret_cast<uint32_t*>(&d[i / 4][i % 4]);
    const uint32_t* from[] = {a, a + 1, a + 2, a + 3};
    emu::products_begin(
        site, {element_of(type), N, to, from, 0, descriptor(b), add, true, 1, 1, false, b_mn});
  }
};
#else
// Lists of registers, by fours.
#define FA_FOURS_4(FIRST, NEXT) \
  FIRST(0, 0, 1, 2, 3)          \
  NEXT(1, 4, 5, 6, 7) NEXT(2, 8, 9, 10, 11) NEXT(3, 12, 13, 14, 15)
#define FA_FOURS_6(FIRST, NEXT) \
  FA_FOURS_4(FIRST, NEXT) NEXT(4, 16, 17, 18, 19) NEXT(5, 20, 21, 22, 23)
#define FA_FOURS_8(FIRST, NEXT) \
  FA_FOURS_6(FIRST, NEXT) NEXT(6, 24, 25, 26, 27) NEXT(7, 28, 29, 30, 31)
#define FA_FOURS_10(FIRST, NEXT) \
  FA_FOURS_8(FIRST, NEXT) NEXT(8, 32, 33, 34, 35) NEXT(9, 36, 37, 38, 39)
#define FA_FOURS_12(FIRST, NEXT) \
  FA_FOURS_10(FIRST, NEXT) NEXT(10, 40, 41, 42, 43) NEXT(11, 44, 45, 46, 47)
#define FA_FOURS_14(FIRST, NEXT) \
  FA_FOURS_12(FIRST, NEXT) NEXT(12, 48, 49, 50, 51) NEXT(13, 52, 53, 54, 55)
#define FA_FOURS_16(FIRST, NEXT) \
  FA_FOURS_14(FIRST, NEXT) NEXT(14, 56, 57, 58, 59) NEXT(15, 60, 61, 62, 63)
#define FA_FOURS_20(FIRST, NEXT) \
  FA_FOURS_16(FIRST, NEXT)       \
  NEXT(16, 64, 65, 66, 67)       \
  NEXT(17, 68, 69, 70, 71) NEXT(18, 72, 73, 74, 75) NEXT(19, 76, 77, 78, 79)
#define FA_FOURS_22(FIRST, NEXT) \
  FA_FOURS_20(FIRST, NEXT) NEXT(20, 80, 81, 82, 83) NEXT(21, 84, 85, 86, 87)
#define FA_FOURS_24(FIRST, NEXT) \
  FA_FOURS_22(FIRST, NEXT) NEXT(22, 88, 89, 90, 91) NEXT(23, 92, 93, 94, 95)
#define FA_FOURS_32(FIRST, NEXT) \
  FA_FOURS_24(FIRST, NEXT)       \
  NEXT(24, 96, 97, 98, 99)       \
  NEXT(25, 100, 101, 102, 103)   \
  NEXT(26, 104, 105, 106, 107)   \
  NEXT(27, 108, 109, 110, 111)   \
  NEXT(28, 112, 113, 114, 115)   \
  NEXT(29, 116, 117, 118, 119)   \
  NEXT(30, 120, 121, 122, 123) NEXT(31, 124, 125, 126, 127)
#define FA_NAMES(j, a, b, c, d) "%" #a ", %" #b ", %" #c ", %" #d
#define FA_MORE_NAMES(j, a, b, c, d) ", " FA_NAMES(j, a, b, c, d)
#define FA_SUMS(j, ...) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define FA_MORE_SUMS(j, ...) , FA_SUMS(j)

// i0 to i7: the numbers of the operands after N / 2 registers.
#define FA_PRODUCTS_OF(TYPE, NAME, N, FOURS, i0, i1, i2, i3, i4, i5, i6, i7)                      \
  template <bool a_mn, bool b_mn>                                                                 \
  static FA_DEVICE void ss(Site, TYPE, Sum& d, uint32_t a, uint32_t b, bool add) {                \
    asm volatile("{ .reg .pred adds; .reg .b64 left, right; setp.ne.b32 adds, %" #i3              \
                 ", 0;\n"                                                                         \
                 "mov.b64 left, {%" #i0 ", %" #i2 "}; mov.b64 right, {%" #i1 ", %" #i2            \
                 "};\n"                                                                           \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" FOURS(      \
                     FA_NAMES, FA_MORE_NAMES) "}, left, right, adds, 1, 1, %" #i4 ", %" #i5 "; }" \
                 : FOURS(FA_SUMS, FA_MORE_SUMS)                                                   \
                 : "r"(a), "r"(b), "n"(kDescriptorHigh), "r"(static_cast<int>(add)),              \
                   "n"(static_cast<int>(a_mn)), "n"(static_cast<int>(b_mn)));                     \
  }                                                                                               \
  template <bool b_mn>                                                                            \
  static FA_DEVICE void rs(Site, TYPE, Sum& d, const uint32_t (&a)[4], uint32_t b, bool add) {    \
    asm volatile("{ .reg .pred adds; .reg .b64 right; setp.ne.b32 adds, %" #i6                    \
                 ", 0;\n"                                                                         \
                 "mov.b64 right, {%" #i4 ", %" #i5                                                \
                 "};\n"                                                                           \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME                  \
                 " {" FOURS(FA_NAMES, FA_MORE_NAMES) "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3    \
                                                     "}, right, adds, 1, 1, %" #i7 "; }"          \
                 : FOURS(FA_SUMS, FA_MORE_SUMS)                                                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kDescriptorHigh),      \
                   "r"(static_cast<int>(add)), "n"(static_cast<int>(b_mn)));                      \
  }
#define FA_PRODUCTS(N, ...)                      \
  template <>                                    \
  struct Products<N> {                           \
    using Sum = float[N / 8][4];                 \
    FA_PRODUCTS_OF(BF16, "bf16", N, __VA_ARGS__) \
    FA_PRODUCTS_OF(F16, "f16", N, __VA_ARGS__)   \
  };
FA_PRODUCTS(32, FA_FOURS_4, 16, 17, 18, 19, 20, 21, 22, 23)
FA_PRODUCTS(48, FA_FOURS_6, 24, 25, 26, 27, 28, 29, 30, 31)
FA_PRODUCTS(64, FA_FOURS_8, 32, 33, 34, 35, 36, 37, 38, 39)
FA_PRODUCTS(80, FA_FOURS_10, 40, 41, 42, 43, 44, 45, 46, 47)
FA_PRODUCTS(96, FA_FOURS_12, 48, 49, 50, 51, 52, 53, 54, 55)
FA_PRODUCTS(112, FA_FOURS_14, 56, 57, 58, 59, 60, 61, 62, 63)
FA_PRODUCTS(128, FA_FOURS_16, 64, 65, 66, 67, 68, 69, 70, 71)
FA_PRODUCTS(160, FA_FOURS_20, 80, 81, 82, 83, 84, 85, 86, 87)
FA_PRODUCTS(176, FA_FOURS_22, 88, 89, 90, 91, 92, 93, 94, 95)
FA_PRODUCTS(192, FA_FOURS_24, 96, 97, 98, 99, 100, 101, 102, 103)
FA_PRODUCTS(256, FA_FOURS_32, 128, 129, 130, 131, 132, 133, 134, 135)
#undef FA_PRODUCTS
#undef FA_PRODUCTS_OF
#endif

}  // namespace ptx
}  // namespace fa
