// The operators of the code of score_mods, as X(name, text). The encoder in Python numbers them by
// their texts (fa_cpu_score_mod_ops), so that the two sides cannot differ. A text is the name of the
// operator in fastattn/score_mods/operators.py and the kind of its last operand: f, i or b.
#pragma once

#include "../../abi.h"

// clang-format off
#define FA_SCORE_MOD_OPS(X) \
  X(b, "b") X(h, "h") X(i, "i") X(j, "j") X(constant_f, "constant:f") \
  X(constant_i, "constant:i") X(constant_b, "constant:b") X(load_f, "load:f") \
  X(load_i, "load:i") X(add_f, "add:f") X(sub_f, "sub:f") X(mul_f, "mul:f") X(neg_f, "neg:f") \
  X(abs_f, "abs:f") X(minimum_f, "minimum:f") X(maximum_f, "maximum:f") X(where_f, "where:f") \
  X(floor_div_f, "floor_div:f") X(remainder_f, "remainder:f") X(sign_f, "sign:f") \
  X(div_f, "div:f") X(pow_f, "pow:f") X(exp_f, "exp:f") X(exp2_f, "exp2:f") X(log_f, "log:f") \
  X(log2_f, "log2:f") X(log1p_f, "log1p:f") X(sqrt_f, "sqrt:f") X(rsqrt_f, "rsqrt:f") \
  X(sin_f, "sin:f") X(cos_f, "cos:f") X(tanh_f, "tanh:f") X(sigmoid_f, "sigmoid:f") \
  X(floor_f, "floor:f") X(ceil_f, "ceil:f") X(trunc_f, "trunc:f") X(round_f, "round:f") \
  X(erf_f, "erf:f") \
  X(add_i, "add:i") X(sub_i, "sub:i") X(mul_i, "mul:i") X(neg_i, "neg:i") X(abs_i, "abs:i") \
  X(minimum_i, "minimum:i") X(maximum_i, "maximum:i") X(where_i, "where:i") \
  X(floor_div_i, "floor_div:i") X(remainder_i, "remainder:i") X(sign_i, "sign:i") \
  X(shift_left_i, "shift_left:i") X(shift_right_i, "shift_right:i") X(bit_and_i, "bit_and:i") \
  X(bit_or_i, "bit_or:i") X(bit_xor_i, "bit_xor:i") X(bit_not_i, "bit_not:i") X(and_b, "and:b") \
  X(or_b, "or:b") X(xor_b, "xor:b") X(not_b, "not:b") X(ge_f, "ge:f") X(gt_f, "gt:f") \
  X(le_f, "le:f") X(lt_f, "lt:f") X(eq_f, "eq:f") X(ne_f, "ne:f") X(ge_i, "ge:i") \
  X(gt_i, "gt:i") X(le_i, "le:i") X(lt_i, "lt:i") X(eq_i, "eq:i") X(ne_i, "ne:i") \
  X(to_float_i, "to_float:i") X(to_float_b, "to_float:b") X(to_int_f, "to_int:f") \
  X(to_int_b, "to_int:b") X(to_bool_f, "to_bool:f") X(to_bool_i, "to_bool:i") X(copy, "copy") \
  X(hide, "hide") X(check, "check") X(scatter, "scatter")
// clang-format on

namespace fa {

enum class ScoreModOp : int64_t {
#define FA_NAME(name, text) name,
  FA_SCORE_MOD_OPS(FA_NAME)
#undef FA_NAME
};

inline constexpr char kScoreModOps[] =
#define FA_TEXT(name, text) text " "
    FA_SCORE_MOD_OPS(FA_TEXT);
#undef FA_TEXT

// The code is a ScoreModCode, then the instructions, all of int64.
enum class ModClass : int64_t { uniform = 0, row = 1, key = 2, tile = 3 };
struct ModOperand {
  int64_t slot, of;  // `of`: a ModClass
};
struct ModInstruction {
  int64_t op;
  ModOperand out, in[3];
  int64_t number;  // of a constant: an int, or the bits of a double
};
// Instructions [begin, varying) have results for all keys, [varying, end) for some keys at a time.
struct ModList {
  int64_t begin, varying, end;
};
struct ScoreModCode {
  int64_t constant_slots, slots;  // the slots after the three tiles; of all slots
  int64_t floats, ints;           // how many captured numbers there are of each kind
  int64_t derivative;             // 1: the derivative of the score by the product is not 1
  int64_t reads_products;         // 1: `gradients` reads the products
  ModList score, with_derivative, with_second, mask, outside, gradients;
};

inline const ScoreModCode& code_of(const FaScoreMod& mod) {
  return *reinterpret_cast<const ScoreModCode*>(mod.code);
}
inline int64_t captured_floats(const FaScoreMod& mod) { return mod.code ? code_of(mod).floats : 0; }
inline bool empty(const ModList& list) { return list.begin == list.end; }

}  // namespace fa
