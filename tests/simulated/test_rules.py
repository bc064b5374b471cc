"""Every op that has a rule, in float64, with each operand placed in every way: the values of plain torch.

Operands hold whole numbers, so that sums and products are exact in whatever order they are made: then
equality is bitwise, also where a reduction is reordered. `bound` says where it can't be.
"""

from importlib import import_module
from pathlib import Path

import pytest
import torch

import vescale as vs
from vescale import _tree
from vescale.spmd.placements import InterleavedShard, P, Partial, RaggedShard, Shard
from vescale.spmd.rules import notation

aten = torch.ops.aten
words = str.split
MESH = vs.make_mesh({"dp": 4}, backend="simulated")


def whole(*shape, low=-4, high=5, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(low, high, shape, generator=generator).double()


# Lengths 8 and 6 over four ranks: an even dim, and one of which the last rank has nothing.
X, Y, COLUMN, ROW = whole(8, 6), whole(8, 6, seed=1), whole(8, 1), whole(6)
TWO, SEVEN = torch.tensor(2.0).double(), torch.tensor(7.0).double()
UNIT = whole(8, 6, low=1, high=8) / 8  # between 0 and 1
LARGE = whole(8, 6, low=1, high=9)
INTS, BOOLS, SHIFTS = X.long(), X > 0, LARGE.long()
CUBE, CLASSES, ROWS = (
    whole(4, 8, 6),
    torch.tensor([1, 0, 5, 2, -100, 3, 3, 1]),
    torch.tensor([[0, 7], [3, 3]]),
)
HEADS, KEYS = whole(4, 8, 6, 2), whole(4, 2, 6, 2, seed=1)  # grouped queries: 4 heads a key
LOG_PROBS = torch.log_softmax(X, 1)
STATS = torch.native_layer_norm(X, [6], ROW, None, 1e-5)[1:]
ATTENDED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(HEADS, HEADS, HEADS, 0.0, True)

# (op, arguments), and keyword arguments if there are any.
PLAIN = """
    abs alias atan ceil clone contiguous cos cosh detach elu erf exp expm1 floor frac gelu hardtanh
    isfinite isinf isnan leaky_relu lift_fresh lift_fresh_copy logical_not mish nan_to_num neg reciprocal
    relu round sgn sigmoid sign silu sin sinh softplus square tan tanh trunc
    asinh erfc exp2 hardsigmoid hardswish log_sigmoid_forward real signbit
"""
UNARY = [
    *((getattr(aten, name), (X,)) for name in words(PLAIN)),
    *(
        (getattr(aten, name), (LARGE,))
        for name in words("acosh digamma lgamma log log10 log1p log2 rsqrt sqrt")
    ),
    *((getattr(aten, name), (UNIT,)) for name in words("acos asin atanh erfinv logit")),
]
BINARY = [
    *((getattr(aten, name), args) for name in words("add sub mul") for args in [(X, Y), (X, COLUMN)]),
    *(
        (getattr(aten, name), (X, ROW))
        for name in words("add mul rsub atan2 copysign fmax fmin hypot maximum minimum eq ne lt le gt ge")
    ),
    *(
        (getattr(aten, name), args)
        for name in words("div fmod remainder floor_divide pow")
        for args in [(X, LARGE), (X, 3.0)]
    ),
    *((getattr(aten, name), (X, 2)) for name in words("add sub mul rsub eq lt clamp_min clamp_max")),
    *((getattr(aten, f"logical_{name}"), (BOOLS, Y > 1)) for name in words("and or xor")),
    *(
        (getattr(aten, f"bitwise_{name}"), (INTS, SHIFTS))
        for name in words("and or xor left_shift right_shift")
    ),
]
OTHER = [
    (aten.add, (X, Y), {"alpha": 2}),
    (aten.xlogy, (X, LARGE)),
    (aten.imag, (torch.complex(X, Y),)),
    (aten.div, (X, LARGE), {"rounding_mode": "floor"}),
    (aten.pow, (2.0, X)),
    (aten.bitwise_not, (INTS,)),
    (aten.clamp, (X, -1, 2)),
    (aten.clamp, (X, ROW, None)),
    (aten.lerp, (X, Y, 0.25)),
    (aten.lerp, (X, Y, UNIT)),
    (aten.addcmul, (X, Y, ROW), {"value": 2}),
    (aten.addcdiv, (X, Y, LARGE)),
    (aten.where, (BOOLS, X, Y)),
    (aten.where, (BOOLS, X, ROW)),
    (aten.where, (BOOLS, X, 1.0)),
    (aten.masked_fill, (X, BOOLS, 2.0)),
    (aten.fill, (X, 2.0)),
    (aten.fill, (X, TWO)),
    (aten._to_copy, (X,), {"dtype": torch.float32}),
    (aten._to_copy, (X.float(),), {"dtype": torch.float64}),
    (aten.gelu_backward, (X, Y)),
    (aten.silu_backward, (X, Y)),
    (aten.tanh_backward, (X, UNIT)),
    (aten.sigmoid_backward, (X, UNIT)),
    (aten.threshold_backward, (X, Y, 0)),
    (aten.elu_backward, (X, 1.0, 1, 1, False, Y)),
    (aten.leaky_relu_backward, (X, Y, 0.5, False)),
    (aten.softplus_backward, (X, Y, 1, 20)),
]
MATMUL = [
    (aten.mm, (X, whole(6, 8))),
    (aten.mm, (whole(6, 8), X)),
    (aten.bmm, (CUBE, whole(4, 6, 8))),
    (aten.mv, (X, ROW)),
    (aten.dot, (ROW, whole(6, seed=1))),
    (aten.addmm, (ROW, whole(8, 8), X)),
    (aten.addmm, (X, whole(8, 8), Y), {"beta": 2, "alpha": 3}),
    (aten.addmm, (COLUMN, whole(8, 8), Y)),
]
REDUCTIONS = [
    (aten.sum, (X,)),
    (aten.sum, (CUBE, [0, 2], True)),
    (aten.sum, (CUBE, [-2])),
    (aten.sum, (X, []), {"dtype": torch.float32}),
    (aten.mean, (X,)),
    (aten.mean, (CUBE, [1], True)),
    (aten.amax, (X, [1], True)),
    (aten.amax, (X,)),
    (aten.amin, (CUBE, [0, -1])),
    (aten.max, (X,)),
    (aten.min, (X,)),
    (aten.max, (CUBE, 1)),
    (aten.min, (X, 0, True)),
    (aten.var, (X, [1]), {"correction": 1}),
    (aten.var, (X,), {"correction": 0}),
    (aten.std, (CUBE, [0, 2]), {"correction": 1, "keepdim": True}),
    (aten.var_mean, (CUBE, [0]), {"correction": 1}),
    (aten.std_mean, (X,), {"correction": 2}),
    *((aten.linalg_vector_norm, (X, order)) for order in (2, 1, 0, 3, torch.inf, -torch.inf)),
    *((aten.linalg_vector_norm, (CUBE, order, [1], True)) for order in (2, 0.5, torch.inf)),
    (aten.linalg_vector_norm, (CUBE, 2, [0, 1])),
    (aten.linalg__powsum, (CUBE, 2, [0, 1])),
    (aten.norm, (X, 3.0)),
    (aten.norm, (CUBE, 2.0, [0, -1], True)),
    (aten.argmax, (X, 1)),
    (aten.argmin, (X, 0, True)),
    (aten.prod, (X,)),
    (aten.prod, (X, 1)),
    (aten.any, (BOOLS, 1)),
    (aten.any, (BOOLS,)),
    (aten.all, (BOOLS, 0, True)),
    (aten.all, (BOOLS,)),
    (aten.logsumexp, (X, [1])),
    (aten.cumsum, (X, 1)),
]
VIEWS = [
    (aten.view, (X, [48])),
    (aten.view, (CUBE, [2, 2, 8, 2, 3])),
    (aten.view, (CUBE, [4, 1, 48])),
    (aten._unsafe_view, (X, [4, 12])),
    (aten.reshape, (X.t(), [48])),
    (aten.t, (X,)),
    (aten.t, (ROW,)),
    (aten.transpose, (CUBE, 0, -1)),
    (aten.permute, (CUBE, [2, 0, 1])),
    (aten.unsqueeze, (X, -1)),
    (aten.unsqueeze, (X, 0)),
    (aten.squeeze, (COLUMN,)),
    (aten.squeeze, (COLUMN, 1)),
    (aten.squeeze, (COLUMN, [0, 1])),
    (aten.expand, (COLUMN, [8, 6])),
    (aten.expand, (X, [4, -1, 6])),
    (aten.slice, (X, 0, 2, 7)),
    (aten.slice, (X, 1, 0, 6)),
    (aten.slice, (X, 0, 0, 8, 3)),
    (aten.select, (CUBE, 1, -1)),
    (aten.unbind, (X, 1)),
    (aten.split, (X, 3, 1)),
    (aten.split, (X, 5)),
    (aten.split_with_sizes, (X, [1, 3, 2], 1)),
    (aten.cat, ([X, Y],)),
    (aten.cat, ([X, Y], 1)),
    (aten.cat, ([X, COLUMN], 1)),
    (aten.stack, ([X, Y], 1)),
]
NETWORKS = [
    (aten.embedding, (X, ROWS)),
    (aten.embedding, (whole(6, 8), ROWS.clamp(max=5))),
    (aten.embedding_dense_backward, (whole(4, 6), ROWS.flatten(), 8, -1, False)),
    (aten.embedding_dense_backward, (whole(4, 6), ROWS.flatten(), 8, 3, False)),
    (aten.native_layer_norm, (X, [6], ROW, whole(6, seed=1), 1e-5)),
    (aten.native_layer_norm, (CUBE, [8, 6], None, None, 1e-5)),
    (aten.native_layer_norm_backward, (Y, X, [6], *STATS, ROW, ROW, [True, True, True])),
    (aten.native_layer_norm_backward, (Y, X, [6], *STATS, ROW, None, [True, True, False])),
    (aten._softmax, (X, 1, False)),
    (aten._softmax, (X, 0, False)),
    (aten._log_softmax, (X, -1, False)),
    (aten._log_softmax, (CUBE, 1, False)),
    (aten._softmax_backward_data, (X, UNIT, 1, torch.float64)),
    (aten._log_softmax_backward_data, (X, LOG_PROBS, 1, torch.float64)),
    (aten.nll_loss_forward, (X, CLASSES, None, 1, -100)),
    (aten.nll_loss_forward, (X, CLASSES, None, 2, -100)),
    (aten.nll_loss_forward, (X, CLASSES, None, 0, -100)),
    (aten.nll_loss_forward, (X, CLASSES, ROW, 1, -100)),
    (aten.nll_loss_backward, (TWO, X, CLASSES, None, 1, -100, SEVEN)),
    (aten.nll_loss_backward, (whole(8), X, CLASSES, None, 0, -100, SEVEN)),
    (torch.ops.vescale.cross_entropy_backward, (TWO, LOG_PROBS, CLASSES, 1, -100, SEVEN)),
    (torch.ops.vescale.cross_entropy_backward, (TWO, LOG_PROBS, CLASSES, 2, -100, SEVEN)),
    (aten._scaled_dot_product_flash_attention_for_cpu, (HEADS, HEADS, HEADS, 0.0, True)),
    (aten._scaled_dot_product_flash_attention_for_cpu, (HEADS, KEYS, KEYS), {"attn_mask": whole(6, 6)}),
    (aten._scaled_dot_product_flash_attention_for_cpu_backward,
     (HEADS, HEADS, HEADS, HEADS, *ATTENDED, 0.0, True)),
]  # fmt: skip
LIKE = [
    (aten.zeros_like, (X,)),
    (aten.ones_like, (X,)),
    (aten.full_like, (X, 3)),
    (aten.new_zeros, (X, [6, 8])),
    (aten.new_ones, (X, [6, 8])),
    (aten.new_full, (X, [6, 8], 3)),
]
ENDS = torch.tensor([2, 2, 5, 8], dtype=torch.int32)  # of the rows of four matrices, one without rows
GROUPED = [
    (aten._grouped_mm, (whole(8, 16).float(), whole(4, 16, 32).float(), ENDS)),
    (aten._grouped_mm, (whole(8, 16).float(), whole(4, 32, 16).float().mT, ENDS)),
    (aten._grouped_mm, (whole(8, 16).float().t(), whole(8, 32).float(), ENDS)),
    (aten.histc, (X, 4, -4, 4)),
    (aten.histc, (ROW, 3)),
]
PADS = [
    (aten.constant_pad_nd, (X, [0, 1])),
    (aten.constant_pad_nd, (CUBE, [1, -2, 0, 0], 3.0)),
    (aten.slice_backward, (X, [8, 12], 1, 0, 6, 1)),
    (aten.slice_backward, (CUBE, [4, 8, 12], -1, 1, 12, 2)),
    (aten.select_backward, (X, [8, 4, 6], 1, 2)),
]
CALLS = [*UNARY, *BINARY, *OTHER, *MATMUL, *REDUCTIONS, *VIEWS, *NETWORKS, *LIKE, *GROUPED, *PADS]

FACTORIES = {
    aten.zeros: lambda: torch.zeros(8, 6),
    aten.ones: lambda: torch.ones(8, 6),
    aten.full: lambda: torch.full((8, 6), 2.5),
    aten.scalar_tensor: lambda: torch.scalar_tensor(2.5),
    aten.arange: lambda: torch.arange(6),
    aten.eye: lambda: torch.eye(8, 6),
    aten.linspace: lambda: torch.linspace(0, 5, 6),
}

# Tested elsewhere: keyed draws with programs, and uninitialised memory has no value to compare.
ELSEWHERE = {"draw", "derive_keys", "normal_from_bits", "scale_bits", "cotangent", "diagonal_copy"}
ELSEWHERE |= set(words("empty empty_like empty_permuted empty_strided new_empty new_empty_strided"))
# test_muon, test_shampoo, test_adamw_8bit
ELSEWHERE |= {"orthogonalize", "precondition", "quantize_blocks", "dequantize_blocks", "zero_blocks"}

# Ops of torch's op database, or of the gradients of its ops: see test_op_coverage. Whole families, and
WITH_THE_DATABASE = {"linalg", "losses", "rearrange"}
ELSEWHERE |= set(
    words(
        """
        alias_copy detach_copy expand_copy permute_copy select_copy slice_copy split_copy
        split_with_sizes_copy
        squeeze_copy t_copy transpose_copy unbind_copy unsafe_split unsafe_split_with_sizes unsqueeze_copy
        view_copy _efficientzerotensor logspace complex polar fill copy _prelu_kernel _prelu_kernel_backward
        hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward
        infinitely_differentiable_gelu_backward log_sigmoid_backward mish_backward softshrink_backward
        nansum count_nonzero aminmax renorm vdot trace addmv baddbmm addbmm addr _trilinear dist _safe_softmax
        nll_loss2d_forward nll_loss2d_backward
        """
    )
)


def test_no_rule_is_untested():
    tested = {op.__name__ for op, *_ in CALLS} | {op.__name__ for op in FACTORIES} | ELSEWHERE
    for path in Path(__file__).parent.glob("test_rules_*.py"):
        tested |= {case.op.__name__ for case in import_module(f"tests.simulated.{path.stem}").CASES}
    here = {
        op.overloadpacket.__name__
        for op, made in notation._rules.items()
        if made.__module__.rsplit(".", 1)[-1] not in WITH_THE_DATABASE
    }
    assert not here - tested


def placements(tensor, few=False):
    """Every kind of placement that a tensor of this shape and dtype can have, or one of each family."""
    for dim, length in enumerate(tensor.shape):
        yield P(dp=Shard(dim))
        if length % 2 == 0 and not few:
            yield P(dp=InterleavedShard(dim, 2))
    if tensor.dim() and not few:
        rows = tensor.shape[0]
        yield P(dp=RaggedShard((0,), (rows - rows // 2, 0, rows // 2, 0)))
    if tensor.dim() > 1:
        count = tensor.shape[0] * tensor.shape[1]
        yield P(dp=RaggedShard((0, 1), (1, count - 3, 0, 2)))
    if tensor.is_floating_point() and torch.equal(tensor, tensor.round()):
        yield P(dp=Partial())


def placed(tensor, spec):
    """The tensor in a layout; a pending sum is one of contributions that are all different."""
    if spec != P(dp=Partial()):
        return vs.distribute_tensor(tensor, MESH, spec)
    parts = [whole(*tensor.shape, seed=seed).to(tensor.dtype) for seed in range(3)]
    return vs.from_local([*parts, tensor - sum(parts)], MESH, spec)


def assignments(tensors, few):
    """Each tensor in turn placed in each way, the others whole; then all that can be placed alike."""
    for at, tensor in enumerate(tensors):
        for spec in placements(tensor, few):
            yield [spec if other == at else P() for other in range(len(tensors))]
    if len(tensors) > 1:
        for spec in placements(tensors[0], few):
            yield [spec if spec in list(placements(tensor)) else P() for tensor in tensors]


# Where a value need not have the bits of plain torch, and by how many ulps of the largest value.
BOUNDS = {
    # kernels that work in vectors, and do what is left of a slice in another way
    **dict.fromkeys(
        words("acos asin atan atan2 cosh elu erf erfinv expm1 gelu log log10 log1p log2 logit"), 2
    ),
    **dict.fromkeys(words("mish pow rsqrt sigmoid silu sinh softplus tan"), 2),
    **dict.fromkeys(words("acosh asinh atanh digamma erfc exp2 hypot lgamma log_sigmoid_forward xlogy"), 4),
    **dict.fromkeys(words("elu_backward gelu_backward silu_backward softplus_backward"), 4),
    # contributions that are divided before they are summed; a sum divided where a mean multiplies
    **dict.fromkeys(words("div mean nll_loss_forward"), 2),
    # squares and powers, summed in another order than in torch's own kernels
    **dict.fromkeys(words("var std var_mean std_mean norm linalg_vector_norm linalg__powsum"), 4),
    # sums of numbers that are not whole, taken apart over ranks
    **dict.fromkeys(words("_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data"), 4),
    **dict.fromkeys(words("cross_entropy_backward native_layer_norm_backward"), 4),
}


def bound(op):
    return BOUNDS.get(op.__name__, 0)


@pytest.mark.parametrize("number", range(len(CALLS)), ids=lambda n: f"{CALLS[n][0].__name__}-{n}")
def test_values(number):
    op, args, *rest = CALLS[number]
    kwargs = rest[0] if rest else {}
    leaves, spec = _tree.flatten(list(args))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def fn(*tensors):
        taken = iter(tensors)
        return op(
            *_tree.unflatten(spec, [next(taken) if isinstance(x, torch.Tensor) else x for x in leaves]),
            **kwargs,
        )

    expected = [x for x in _tree.leaves(fn(*tensors)) if x is not None]
    few = number < len(UNARY) + len(BINARY)
    for specs in assignments(tensors, few):
        run = vs.parallelize(fn, vs.Plan(MESH))
        found = _tree.leaves(run(*map(placed, tensors, specs)))
        for ours, theirs in zip(found, expected, strict=True):
            ours = ours.full_tensor()
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            same = torch.equal(torch.nan_to_num(ours), torch.nan_to_num(theirs))
            if not same:
                ulps = (
                    (ours - theirs).abs().max() / torch.finfo(theirs.dtype).eps / theirs.abs().max()
                ).item()
                assert ulps <= bound(op), f"{ulps} ulps for {specs}"


@pytest.mark.parametrize("op", FACTORIES, ids=lambda op: op.__name__)
def test_factories(op):
    make = FACTORIES[op]
    for spec in placements(X):
        run = vs.parallelize(lambda x: (x * make(), make()), vs.Plan(MESH, outputs={"1": P()}))
        product, made = run(placed(X, spec))
        assert torch.equal(product.full_tensor(), X * make())
        assert torch.equal(made.full_tensor(), make())
