// A plugin of qemu-user for bench/instructions/arm.py: counts the aarch64 instructions
// that a program executes, and those that multiply and add vectors.
//
// A block is what qemu translates at once: instructions up to a branch. The inner loops of matrix
// products are the blocks in which at least half of the instructions are products; their
// instructions are counted apart. At exit one line is printed: all instructions, those of such
// blocks, and the products in such blocks.
//
// The declarations are those of qemu-plugin.h, which Debian does not package.
#include <inttypes.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum { QEMU_PLUGIN_INLINE_ADD_U64 };
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb*);
struct qemu_plugin_insn* qemu_plugin_tb_get_insn(const struct qemu_plugin_tb*, size_t);
const void* qemu_plugin_insn_data(const struct qemu_plugin_insn*);
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t, void (*)(uint64_t, struct qemu_plugin_tb*));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb*, int, void*, uint64_t);
void qemu_plugin_register_atexit_cb(uint64_t, void (*)(uint64_t, void*), void*);

#define EXPORTED __attribute__((visibility("default")))
EXPORTED int qemu_plugin_version = 1;

static uint64_t all, in_loops, products;

// Encodings: Arm Architecture Reference Manual, DDI 0487, C4.1.
static const struct {
  uint32_t mask, value;
} kProducts[] = {
    {0xBFA0FC00, 0x0E20CC00},  // FMLA (vector)
    {0xBF80F400, 0x0F801000},  // FMLA (by element)
    {0xFFE0FC00, 0x6E40EC00},  // BFMMLA
    {0xBFE0FC00, 0x2E40FC00},  // BFDOT (vector)
    {0xBFC0F400, 0x0F40F000},  // BFDOT (by element)
    {0xFF20E000, 0x65200000},  // FMLA (SVE, vectors)
    {0xFF20E000, 0x65208000},  // FMAD (SVE)
    {0xFFA0FC00, 0x64A00000},  // FMLA (SVE, by element)
    {0xFFE0FC00, 0x6460E400},  // BFMMLA (SVE)
    {0xFFE0FC00, 0x64608000},  // BFDOT (SVE, vectors)
};

static int is_product(uint32_t instruction) {
  for (size_t i = 0; i < sizeof kProducts / sizeof *kProducts; ++i)
    if ((instruction & kProducts[i].mask) == kProducts[i].value) return 1;
  return 0;
}

static void translated(uint64_t id, struct qemu_plugin_tb* block) {
  (void)id;
  const size_t n = qemu_plugin_tb_n_insns(block);
  size_t found = 0;
  for (size_t i = 0; i < n; ++i) {
    uint32_t instruction;
    memcpy(&instruction, qemu_plugin_insn_data(qemu_plugin_tb_get_insn(block, i)), 4);
    found += is_product(instruction);
  }
  qemu_plugin_register_vcpu_tb_exec_inline(block, QEMU_PLUGIN_INLINE_ADD_U64, &all, n);
  if (2 * found < n) return;
  qemu_plugin_register_vcpu_tb_exec_inline(block, QEMU_PLUGIN_INLINE_ADD_U64, &in_loops, n);
  qemu_plugin_register_vcpu_tb_exec_inline(block, QEMU_PLUGIN_INLINE_ADD_U64, &products, found);
}

static void print(uint64_t id, void* unused) {
  (void)id, (void)unused;
  fprintf(stderr, "instructions %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", all, in_loops, products);
}

EXPORTED int qemu_plugin_install(uint64_t id, const void* info, int argc, char** argv) {
  (void)info, (void)argc, (void)argv;
  qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
  qemu_plugin_register_atexit_cb(id, print, NULL);
  return 0;
}
