"""What the passes need to know about JAX's primitives, by name."""

from __future__ import annotations

# One result, of the shape of its array operands, in which axes of size 1 may stand for any size;
# rank-0 operands apply to every element.
ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type
    copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag
    integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or
    population_count pow real reduce_precision rem round rsqrt select_n sharding_constraint
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient
    sub tan tanh xor
    """.split()
)

# Reductions over the axes in the parameter `axes`, with the primitive that combines two results.
REDUCTIONS = {
    'reduce_sum': 'add',
    'reduce_max': 'max',
    'reduce_min': 'min',
    'reduce_prod': 'mul',
    'reduce_and': 'and',
    'reduce_or': 'or',
}

# Move or view elements, or make constants; XLA fuses them into their users.
CHEAP_LAYOUT = frozenset(
    'broadcast_in_dim copy expand_dims iota reshape rev slice squeeze transpose pad'.split()
)

# f(zeros) = zeros.
ZERO_PRESERVING = frozenset(
    'convert_element_type copy neg reduce_precision sharding_constraint'.split()
)

# Too dear to compute twice in order to save a transfer or a buffer.
HEAVY = frozenset(
    """
    approx_top_k cholesky conv_general_dilated cond custom_root dot_general eigh fft lu qr
    ragged_dot random_bits random_fold_in random_gamma random_split reduce_window remat remat2
    checkpoint scan scatter scatter-add sort svd threefry2x32 top_k triangular_solve while
    """.split()
)
