// The C ABI between Python and the native kernels: plain data, no torch, no
// Python, no exceptions. fastattn/native.py mirrors it field by field, in the order
// of the tables in fastattn/spec.py.
#pragma once
#include <stdint.h>

#if defined(__GNUC__)
#define FA_EXPORT __attribute__((visibility("default")))
#else
#define FA_EXPORT
#endif

#ifdef __cplusplus
extern "C" {
#endif

// The largest head dims, of q.k and of v, that the kernels are built for.
enum { FA_CPU_MAX_HEAD_DIM = 512, FA_CUDA_MAX_HEAD_DIM = 256 };

enum FaDtype {
  FA_F32 = 0,
  FA_F64 = 1,
  FA_BF16 = 2,
  FA_F16 = 3,
  FA_BOOL = 4,
  FA_I8 = 5,    // and the next: of k and v, with scales
  FA_E4M3 = 6,  // float8_e4m3fn
  FA_E5M2 = 7
};

// A strided 4-D view (batch, head, row, column). Strides count elements; a
// broadcast dimension has stride 0. An absent tensor has data == null.
struct FaTensor {
  void* data;
  int64_t stride[4];
  int64_t dtype;  // FaDtype
};

// Every field is 8 bytes wide, so the mirror needs no padding rules.
struct FaParams {
  struct FaTensor q, k, v;   // (B,H,M,D) (B,Hk,N,D) (B,Hk,N,Dv)
  struct FaTensor mask;      // (B,H,M,N): FA_BOOL (true = may attend) or additive float
  struct FaTensor slopes;    // (B,H,1,1), same dtype as lse: ALiBi
  struct FaTensor sinks;     // (1,H,1,1), same dtype as lse: one more logit in the denominator
  struct FaTensor k_scale;   // (B,Hk,N,1) float32, of k and v in eight bits: what each row is
  struct FaTensor v_scale;   // multiplied by, to be rounded to q's dtype; in pages as k and v lie
  struct FaTensor lse;       // (B,H,M,2) float32, or float64 for float64 inputs: the LSE, and
                             // stride[3] from it what its rounding lost

  struct FaTensor out;               // (B,H,M,Dv)
  struct FaTensor weights;           // (B,H,M,N), or (B,1,M,N) with average_heads
  struct FaTensor dq, dk, dv;        // outgoing gradients, in the inputs' dtypes
  struct FaTensor dmask, dsinks;     // null unless wanted; a dmask stride of 0 asks for the sum
                                     // over that dimension; dsinks has the dtype of sinks
  struct FaTensor dout, dlse;        // incoming gradients; dlse may be null
  struct FaTensor dweights;

  const int64_t* lengths;  // (B) valid keys per batch item, or null
  const int64_t* seed;     // one element; read by the kernel when dropout_p > 0
  const int64_t* cu_q;     // (B+1) of a packed batch, or null: sequence b has the rows from cu_q[b]
                           // to cu_q[b+1]
  const int64_t* cu_k;     // (B+1) likewise of its keys
  const int64_t* pages;    // (B,blocks) of a packed batch without cu_k, or null: where the keys and
                           // values of sequence b are, a page after the other, lengths[b] of them
  void* workspace;         // fa_cpu_workspace() or fa_cuda_workspace() bytes, 64-byte aligned,
                           // contents undefined on entry; on the CPU it may be null: the library
                           // finds them itself

  int64_t B, H, Hk, M, N, D, Dv;
  int64_t left, right;     // row i, standing at i', keeps i'-left <= j <= i'+right
  int64_t bottom_right;    // i' = i + length - M when set, else i' = i
  int64_t average_heads;   // weights: mean over heads
  int64_t constant_lse;    // weights backward: do not differentiate the normaliser
  int64_t row_invariant;   // a row has the bits that it has among any other rows: none of the ways
                           // that are for few
  // Where this call lies in a larger one: its first row, key, head and item there, and how many
  // rows and keys there are after its own. Lengths are the larger call's; draws of dropout count
  // from its beginning.
  int64_t at_row, at_key, at_head, at_item, rows_after, keys_after;
  // Of a packed batch, of B sequences with at most M rows and N keys each, the rows and keys of
  // all: what has M or N rows above has T or S, and no batch dimension. mask, slopes, lengths, and
  // dmask and dsinks, are by sequence.
  int64_t T, S;
  // Of one whose keys lie in pages: k is (P,Hk,page,D), v (P,Hk,page,Dv).
  int64_t P, page, blocks;
  int64_t threads;         // at most this many threads
  double scale;            // multiplies q.k
  double softcap;          // 0 = off
  double dropout_p;        // 0 = off

  // Of the passes that take tangents: in which directions q, k, v, mask and sinks move, each with
  // its tensor's shape and dtype, null where one does not; and what moves with them. These are
  // last, so that nothing else lies elsewhere for them.
  struct FaTensor q_t, k_t, v_t, mask_t, sinks_t;
  struct FaTensor out_t, lse_t;      // (B,H,M,Dv), and (B,H,M) in the dtype of lse
  struct FaTensor dout_t, dlse_t;    // as dout and dlse; null where they do not move

  // After how many items and heads dropout draws the same again, where this call is several of
  // those; 0 = never. Not of a packed batch. Last for the same reason.
  int64_t items_again, heads_again;
};

// FaCall field by field: by this the two sides of the ABI know that they are of one version.
#define FA_FIELDS                                                                            \
  "q k v mask slopes sinks k_scale v_scale lse out weights dq dk dv dmask dsinks dout dlse " \
  "dweights lengths seed cu_q cu_k pages workspace B H Hk M N D Dv left right bottom_right " \
  "average_heads constant_lse row_invariant at_row at_key at_head at_item rows_after "       \
  "keys_after T S P page blocks threads scale softcap dropout_p q_t k_t v_t mask_t sinks_t "  \
  "out_t lse_t dout_t dlse_t items_again heads_again "                                          \
  "out_size lse_size weights_size dq_size dk_size dv_size dmask_size dsinks_size out_t_size "  \
  "lse_t_size"

// The tensors that passes write.
enum FaWritten {
  FA_WRITES_OUT = 0,
  FA_WRITES_LSE = 1,
  FA_WRITES_WEIGHTS = 2,
  FA_WRITES_DQ = 3,
  FA_WRITES_DK = 4,
  FA_WRITES_DV = 5,
  FA_WRITES_DMASK = 6,
  FA_WRITES_DSINKS = 7,
  FA_WRITES_OUT_T = 8,
  FA_WRITES_LSE_T = 9,
  FA_WRITES_COUNT = 10
};

// FaParams, which kernels get, and the sizes of the tensors that they write. A size is that of the
// tensor in memory, in the dimensions of its strides; a dimension that the tensor lacks has size 1.
// An absent tensor has zeros. A run compares these sizes with those in FaParams before it writes.
struct FaCall {
  struct FaParams params;
  int64_t size[FA_WRITES_COUNT][4];
};

// Which kernel a workspace is for, and what running it returns: FA_BAD_LENGTH when a key
// length is outside [0, keys of the larger call] and FA_BAD_OFFSET when cu_q or cu_k does not
// rise from 0 to T or S in steps of at most M or N, FA_BAD_PAGE when a page that a length needs is
// outside [0, P) (nothing is computed), FA_NO_MEMORY when no thread got scratch. FA_BAD_EXTENT plus
// an FaWritten when that tensor has other sizes than the call (nothing is written): those in the
// comments of FaParams, where dmask may have 1 for H, M, N and, unless the batch is packed, for B.
//
// FA_JVP makes out_t and lse_t of an `out` that is given, FA_FORWARD_JVP makes out and lse, too;
// FA_SECOND from all of these, dout and dlse what dq, dk, dv, dmask and dsinks of backward move by.
// Only the CPU has the last three.
enum FaPass {
  FA_FORWARD = 0,
  FA_BACKWARD = 1,
  FA_WEIGHTS = 2,
  FA_WEIGHTS_BACKWARD = 3,
  FA_JVP = 4,
  FA_FORWARD_JVP = 5,
  FA_SECOND = 6
};
enum FaStatus {
  FA_OK = 0,
  FA_BAD_LENGTH = 1,
  FA_NO_MEMORY = 2,
  FA_BAD_OFFSET = 3,
  FA_BAD_PAGE = 4,
  FA_BAD_EXTENT = 1 << 16  // above every cudaError_t
};

FA_EXPORT const char* fa_abi_fields(void);                                   // FA_FIELDS
FA_EXPORT int64_t fa_cpu_max_head_dim(void);                                 // FA_CPU_MAX_HEAD_DIM
FA_EXPORT int64_t fa_cpu_workspace(const struct FaParams* p, int64_t pass);  // bytes
FA_EXPORT int64_t fa_cpu_run(const struct FaCall* call, int64_t pass);       // FaStatus

FA_EXPORT const char* fa_cpu_isas(void);             // what this machine can run, best first:
                                                     // "avx512_bf16,avx512,avx2,generic"; last
                                                     // amx_model, for tests, never chosen
FA_EXPORT const char* fa_cpu_isa(void);              // the one in use
FA_EXPORT const char* fa_cpu_why(void);              // and why: a sentence
FA_EXPORT const char* fa_cpu_unit(const struct FaParams* p);  // that which runs this
FA_EXPORT int64_t fa_cpu_select(const char* name);   // 0 = done, 1 = this machine cannot run it;
                                                     // not while another thread is in a call
FA_EXPORT void fa_cpu_float32_on_tiles(int64_t on);  // 0: vectors multiply it, AMX or not
// Tests: fill every scratch buffer with NaN bytes before use; "<instruction set>: <why>" of another
// chip, named as CPUID does, which has the given sets; and y = f(x) of n numbers of one dtype,
// FA_F32 or FA_F64, by the vector function that kernels use.
FA_EXPORT void fa_cpu_poison(int64_t on);
FA_EXPORT const char* fa_cpu_served(const char* vendor, int64_t family, int64_t model,
                                    const char* isas);
enum FaVectorFunction { FA_EXP = 0, FA_TANH = 1 };
FA_EXPORT void fa_cpu_vector_function(int64_t which, int64_t dtype, const void* x, void* y,
                                      int64_t n);
FA_EXPORT double fa_cpu_peak(int64_t dtype, double seconds);  // GF/s of one thread on registers

// The CUDA library. Nothing here waits for the GPU, and all may be captured in a CUDA graph, once a
// call outside has loaded its kernels; key lengths are cut to [0, N]; gradients whose data is null
// are not made. With multiprocessors, those of the device, few rows on many keys are shared out
// among them; with 0 never.
FA_EXPORT const char* fa_cuda_abi_fields(void);
FA_EXPORT int64_t fa_cuda_max_head_dim(void);  // FA_CUDA_MAX_HEAD_DIM
FA_EXPORT int64_t fa_cuda_workspace(const struct FaParams* p, int64_t pass,
                                    int64_t multiprocessors);
// Of the keys, in forward.
FA_EXPORT int64_t fa_cuda_splits(const struct FaParams* p, int64_t multiprocessors);
// 0, a cudaError_t, or FA_BAD_EXTENT plus an FaWritten.
FA_EXPORT int64_t fa_cuda_run(const struct FaCall* call, int64_t pass, int64_t device,
                              int64_t multiprocessors, void* stream);
FA_EXPORT int64_t fa_cuda_driver_error(void);          // 0 if the driver here can load its code
FA_EXPORT int64_t fa_cuda_version(int64_t of_driver);  // 13010 is CUDA 13.1: the library's, or the
                                                       // newest that the driver knows
FA_EXPORT int64_t fa_cuda_translates(void);            // 1 if the driver here translates its
                                                       // kernels from PTX
FA_EXPORT const char* fa_cuda_error(int64_t code);     // what a cudaError_t says
FA_EXPORT const char* fa_cuda_failed_kernel(void);     // whose launch failed last on this thread

#ifdef __cplusplus
}
#endif
