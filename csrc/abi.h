// The C ABI between Python and the native kernels: plain data, no torch, no
// Python, no exceptions. fastattn/backends/native/libraries.py mirrors it
// field by field, in the order of the tables in fastattn/call/spec.py.
#pragma once
#include <stdint.h>

#if defined(_WIN32)
#define FA_EXPORT __declspec(dllexport)
#elif defined(__GNUC__)
#define FA_EXPORT __attribute__((visibility("default")))
#else
#define FA_EXPORT
#endif

#ifdef __cplusplus
extern "C" {
#endif

// The largest head dims, of q.k and of v, that the kernels are built for.
enum { FA_CPU_MAX_HEAD_DIM = 1024, FA_CUDA_MAX_HEAD_DIM = 256 };

enum FaDtype {
  FA_F32 = 0,
  FA_F64 = 1,
  FA_BF16 = 2,
  FA_F16 = 3,
  FA_BOOL = 4,
  FA_I8 = 5,    // this and the next two: k and v only, with scales
  FA_E4M3 = 6,  // float8_e4m3fn
  FA_E5M2 = 7,
  // k and v only, in bytes: a row of D numbers is D / 32 blocks of 20 bytes, for 32 columns each.
  // Byte i < 16 has column i in its low four bits and column i + 16 in its high ones. Then come
  // scale and minimum in bfloat16: the value of a number n is n * scale + minimum.
  // Strides count bytes.
  FA_I4 = 8
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
  struct FaTensor k_scale;   // (B,Hk,N,1) float32, for k and v in eight bits: each row times its
  struct FaTensor v_scale;   // scale is rounded to q's dtype, but not where the CPU decodes on
                             // vectors, which may multiply integers; in pages like k and v
  struct FaTensor lse;       // (B,H,M,2) float32, or float64 for float64 inputs: the LSE, and
                             // at stride[3] after it, what its rounding cut off

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
  int64_t row_invariant;   // a row's result has the same bits among any other rows: the paths for
                           // few rows are not used
  int64_t deterministic;   // gradients have the same bits in every run
  // The position of this call in a larger one: its first row, key, head and item there, and how
  // many rows and keys follow its own. Lengths are the larger call's; positions of dropout count
  // from its start.
  int64_t at_row, at_key, at_head, at_item, rows_after, keys_after;
  // For a packed batch of B sequences, each with at most M rows and N keys: the total rows and
  // keys. Tensors with M or N rows above then have T or S rows and no batch dimension. mask,
  // slopes, lengths, dmask and dsinks stay per sequence.
  int64_t T, S;
  // For a packed batch with keys in pages: k is (P,Hk,page,D), v (P,Hk,page,Dv).
  int64_t P, page, blocks;
  int64_t threads;         // at most this many threads
  double scale;            // multiplies q.k
  double softcap;          // 0 = off
  double dropout_p;        // 0 = off

  // For the passes that take tangents: those of q, k, v, mask and sinks, each with its tensor's
  // shape and dtype, null if zero; then those of out, lse, dout and dlse. These fields come last,
  // so that the offsets of all others stay as they were.
  struct FaTensor q_t, k_t, v_t, mask_t, sinks_t;
  struct FaTensor out_t, lse_t;      // (B,H,M,Dv), and (B,H,M) in the dtype of lse
  struct FaTensor dout_t, dlse_t;    // as dout and dlse; null if zero

  // Dropout repeats its draws after so many items and heads, if this call consists of several such
  // groups; 0 = never. Not for a packed batch. Last for the same reason.
  int64_t items_again, heads_again;
};

// The fields of FaCall in order. Both sides of the ABI compare them to detect another version.
#define FA_FIELDS                                                                            \
  "q k v mask slopes sinks k_scale v_scale lse out weights dq dk dv dmask dsinks dout dlse " \
  "dweights lengths seed cu_q cu_k pages workspace B H Hk M N D Dv left right bottom_right " \
  "average_heads constant_lse row_invariant deterministic at_row at_key at_head at_item rows_after "       \
  "keys_after T S P page blocks threads scale softcap dropout_p q_t k_t v_t mask_t sinks_t "  \
  "out_t lse_t dout_t dlse_t items_again heads_again "                                          \
  "out_size lse_size weights_size dq_size dk_size dv_size dmask_size dsinks_size out_t_size "  \
  "lse_t_size code floats ints dfloats outside classes"

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

// A score_mod and a mask_mod, which only the CPU's kernels run: programs of fastattn/score_mods in
// the encoding of cpu/score/score_mod.h. Zeros if the call has none. Its fields are no part of
// FaParams, which GPU kernels take by value.
struct FaScoreMod {
  const int64_t* code;     // the programs
  const void* floats;      // captured numbers, contiguous, in the dtype of lse
  const int64_t* ints;     // captured whole numbers and bools, contiguous
  void* dfloats;           // the gradient of floats, or null; of a packed batch one per sequence
  int64_t* outside;        // set to 1 if an index is out of range: FA_BAD_INDEX
  struct FaTensor classes; // (B,H,ceil(M/32),ceil(N/64)) FA_I8: FaBlockClass of each block of 32
                           // rows and 64 keys; null if not known
};
enum FaBlockClass { FA_NO_PAIR = 0, FA_SOME_PAIRS = 1, FA_ALL_PAIRS = 2 };  // that mask_mod shows

// FaParams, which kernels get, and the sizes of the tensors that they write. A size is that of the
// tensor in memory, in the dimensions of its strides; a dimension that the tensor lacks has size 1.
// An absent tensor has zeros. A run compares these sizes with those in FaParams before it writes.
struct FaCall {
  struct FaParams params;
  int64_t size[FA_WRITES_COUNT][4];
  struct FaScoreMod mod;
};

// FaPass: the kernel that a workspace is for, or that a run executes. FaStatus: what a run returns.
// FA_BAD_LENGTH: a key length is outside [0, keys of the larger call]; FA_BAD_OFFSET: cu_q or cu_k
// does not rise from 0 to T or S in steps of at most M or N; FA_BAD_PAGE: a page that a length
// needs is outside [0, P). After these nothing is computed. FA_BAD_INDEX: a function indexes a
// captured tensor out of range where the program `outside` says so and only functions may hide the
// pair. FA_NO_MEMORY: no thread got scratch.
// FA_INTERRUPTED: the host interrupted the run; what it has written is to be dropped.
// FA_BAD_EXTENT plus an FaWritten: the sizes of that tensor are not those in the comments of
// FaParams (nothing is written); dmask may have 1 for H, M, N and, unless the batch is packed, for
// B.
//
// FA_JVP computes out_t and lse_t for a given `out`; FA_FORWARD_JVP computes out and lse, too.
// FA_SECOND takes all of these, dout and dlse, and writes the tangents of backward's dq, dk, dv,
// dmask and dsinks. Only the CPU has these three passes.
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
  FA_BAD_INDEX = 5,
  FA_INTERRUPTED = 6,
  FA_BAD_EXTENT = 1 << 16  // above every cudaError_t
};

// The keys with the largest scores sum_h weights[h] max(0, q[h].k) of each row: cpu/selection.
struct FaIndexer {
  struct FaTensor q, k, weights;  // (B,H,M,D) (B,1,N,D) (B,H,M,1): q and k of one dtype, not FA_F64; FA_F32
  const int64_t* lengths;         // (B), values in [0, N], or null
  int32_t* indices;               // (B,M,count): ascending, -1 after the last
  int64_t B, H, M, N, D, count;
  int64_t causal, bottom_right;   // as in FaParams, with a band of keys up to the row's own
  int64_t threads;
};

// New keys or values of the items of a cache, which are written into its pages: in the dtype of x, or
// quantised.
struct FaAppend {
  struct FaTensor x;       // (B,n,Hk,D); with offsets (1,T,Hk,D), of which item b has the rows from
                           // offsets[b] to offsets[b+1], at most n. stride[3] is not read: it is 1
  void* pages;             // (P,page,Hk,D); of FA_I4 D / 32 * 20 bytes in place of D
  int64_t dtype;           // of pages: that of x, FA_I8, FA_E4M3, FA_E5M2 or FA_I4
  int64_t stride[3];       // of P, page and Hk; that of D is 1
  float* scales;           // (P,page,Hk): of rows in eight bits; or null
  int64_t scale_stride[3];
  const int64_t* table;    // (B,blocks): the pages of each item
  const int64_t* lengths;  // (B): keys of each item, the new ones among them, which are the last
  const int64_t* offsets;  // (B+1), or null
  int64_t B, n, Hk, D, P, page, blocks;
  int64_t threads;         // at most this many threads
  const void* subtracted;  // (Hk,D) in float, or double of FA_F64: rows are quantised less it; or null
};

// Queries or keys of norm_rope. A tensor that a pass does not need is null: x in a backward pass without
// a norm, dx in a forward pass.
enum FaNorm { FA_NO_NORM = 0, FA_RMS_NORM = 1, FA_LAYER_NORM = 2 };
struct FaNormRopePart {
  struct FaTensor x;       // (B,H,M,D)
  struct FaTensor y;       // (B,H,M,D): written; in a backward pass the gradient of the result, read
  struct FaTensor dx;      // (B,H,M,D): written by a backward pass
  struct FaTensor weight;  // (1,1,1,D), of a norm; null: 1
  void* dweight;           // (D), or null: written by a backward pass; float, or double of FA_F64
  int64_t H;               // 0: there is no such part
  int64_t norm;            // FaNorm
};

// The norm of each row, with eps inside the root and the factors weight + offset, and the rotation of
// its columns [start, start + R) in pairs: (a, b) becomes (a cos - b sin, b cos + a sin). A pair is
// columns i and i + R / 2 of these, or if interleaved 2 i and 2 i + 1; with deinterleave it is
// interleaved in x alone. It is computed in float, or double of FA_F64: cpu/rotation.
struct FaNormRope {
  struct FaNormRopePart part[2];  // q and k
  struct FaTensor cos, sin;       // (B,1,M,R / 2); with cu (1,1,N,R / 2)
  const int64_t* cu;              // (sequences + 1) of a packed batch, where B is 1, or null: row i of
                                  // a sequence reads row i of the tables
  int64_t B, M, D, N, sequences;
  int64_t R, start, interleaved, deinterleave, rope_first;  // R = 0: no rotation
  int64_t backward;
  int64_t threads;                // at most this many threads
  double eps, offset;
};

// A program that calls the library, if it has a lock over its threads, as Python has, and may
// interrupt a run. It calls fa_cpu_run and fa_cpu_index with the lock. They release it by `unlock`,
// and take it again by `lock`, with what unlock returned. On one thread they also ask `interrupted`,
// with the lock, a few times a second; if it is not 0, they end. Handlers of signals may run in it,
// which may call the library.
struct FaHost {
  void* (*unlock)(void);
  void (*lock)(void* unlocked);
  int (*interrupted)(void);
  uint64_t thread;  // the one that asks: pthread_self, or on Windows GetCurrentThreadId
};
FA_EXPORT void fa_cpu_host(const struct FaHost* host);  // before the first run; by default none

FA_EXPORT const char* fa_abi_fields(void);                                   // FA_FIELDS
FA_EXPORT int64_t fa_cpu_max_head_dim(void);                                 // FA_CPU_MAX_HEAD_DIM
FA_EXPORT int64_t fa_cpu_workspace(const struct FaCall* call, int64_t pass);  // bytes
// FaStatus. brief: keep the host's lock, and do not ask it.
FA_EXPORT int64_t fa_cpu_run(const struct FaCall* call, int64_t pass, int64_t brief);

FA_EXPORT int64_t fa_cpu_index(const struct FaIndexer* p);  // FaStatus
FA_EXPORT int64_t fa_cpu_norm_rope(const struct FaNormRope* p);  // FaStatus; FA_BAD_OFFSET if cu does
                                                                 // not rise from 0 to M in steps of
                                                                 // at most N: nothing is written
FA_EXPORT int64_t fa_cpu_append(const struct FaAppend* p);  // FaStatus; FA_BAD_PAGE if the table has
                                                            // no page for a row: nothing is written

FA_EXPORT const char* fa_cpu_isas(void);             // what this machine can run, best first:
                                                     // "avx512_bf16,avx512,avx2,generic"; last
                                                     // amx_model, for tests, never chosen
FA_EXPORT const char* fa_cpu_isa(void);              // the one in use
FA_EXPORT const char* fa_cpu_why(void);              // why that one: a sentence
FA_EXPORT const char* fa_cpu_unit(const struct FaCall* call);  // the one that runs this call
FA_EXPORT const char* fa_cpu_score_mod_ops(void);  // the operators of FaScoreMod's code, in order
// Select an instruction set, and the one that decodes. 0 = done, 1 = this machine cannot run one of
// them. Not while another thread is in a call.
FA_EXPORT int64_t fa_cpu_select(const char* name, const char* decoding);
FA_EXPORT void fa_cpu_float32_on_tiles(int64_t on);  // 0: float32 on vectors even with AMX
// For tests. Fill every scratch buffer with NaN bytes before use; "<instruction set>, <the one that
// decodes>: <why>" for another chip, named as CPUID names it, with the given sets; and y = f(x) for
// n numbers of one dtype, FA_F32 or FA_F64, by the vector function that kernels use.
FA_EXPORT void fa_cpu_poison(int64_t on);
FA_EXPORT const char* fa_cpu_served(const char* vendor, int64_t family, int64_t model,
                                    const char* isas);
enum FaVectorFunction { FA_EXP = 0, FA_TANH = 1, FA_LOG = 2 };
FA_EXPORT void fa_cpu_vector_function(int64_t which, int64_t dtype, const void* x, void* y,
                                      int64_t n);
FA_EXPORT double fa_cpu_peak(int64_t dtype, double seconds);  // GF/s of one thread on registers
// For measurements: the sum of n numbers, read as 1, 2 or 4 streams of addresses on one thread,
// without those at the end that do not fill a line of each stream.
FA_EXPORT float fa_cpu_read_sum(const float* x, int64_t n, int64_t streams);

// The CUDA library. No function waits for the GPU, and all may be captured in a CUDA graph once a
// call outside it has loaded the kernels. Key lengths are clamped to [0, N]; gradients with null
// data are not computed. Few rows on many keys are split among `multiprocessors`, the number that
// the device has; 0 never splits. `architecture` is the device's, 90 for compute capability 9.0: it
// has a part in the choice of the kernels. A workspace is for a run with the same numbers.
FA_EXPORT const char* fa_cuda_abi_fields(void);
FA_EXPORT int64_t fa_cuda_max_head_dim(void);  // FA_CUDA_MAX_HEAD_DIM
FA_EXPORT int64_t fa_cuda_workspace(const struct FaParams* p, int64_t pass,
                                    int64_t multiprocessors, int64_t architecture);
// How many parts forward splits the keys into.
FA_EXPORT int64_t fa_cuda_splits(const struct FaParams* p, int64_t multiprocessors,
                                 int64_t architecture);
// 0, a cudaError_t, or FA_BAD_EXTENT plus an FaWritten.
FA_EXPORT int64_t fa_cuda_run(const struct FaCall* call, int64_t pass, int64_t device,
                              int64_t multiprocessors, int64_t architecture, void* stream);
// The class of the kernels that run this pass of a call, addresses and strides included: "sm_90";
// "sm_80"; or "sm_80: " with the reason why those of sm_90 do not, on a device that could run them.
// The text is valid until this thread's next call.
FA_EXPORT const char* fa_cuda_kernels(const struct FaParams* p, int64_t pass, int64_t architecture);
FA_EXPORT int64_t fa_cuda_driver_error(void);          // 0 if the driver here can load its code
FA_EXPORT int64_t fa_cuda_version(int64_t of_driver);  // 13010 is CUDA 13.1: the library's, or the
                                                       // newest that the driver knows
FA_EXPORT int64_t fa_cuda_translates(void);            // 1 if the driver here translates its
                                                       // kernels from PTX
FA_EXPORT const char* fa_cuda_error(int64_t code);     // the text of a cudaError_t
FA_EXPORT const char* fa_cuda_failed_kernel(void);     // of this thread's last failed launch

// One of the instructions that the kernels of sm_90 rely on, run alone by a kernel of its own.
struct FaProbe {
  int64_t what;         // numbered in csrc/cuda/sm90/probe.cu
  int64_t nanoseconds;  // that a wait may take
  const void* a;
  const void* b;
  void* out;
  void* report;            // two words of 32 bits: the step that was begun last; the step that waited
                           // until the limit, or 0
  struct FaTensor tensor;  // of a copy by a tensor map
  int64_t size[4], at[4];  // its sizes; the first item, head, row and column of the copy
};
// On the current device, without waiting for it. 0, a cudaError_t, or a CUresult for a tensor map.
FA_EXPORT int64_t fa_cuda_probe_sm90(const struct FaProbe* p, void* stream);

#ifdef __cplusplus
}
#endif
