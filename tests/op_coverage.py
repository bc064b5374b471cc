"""Every op of torch's own op database through the sharding engine, against plain torch on global tensors.

A *case* is a sample of an op with its tensors laid out in one of the ways of `WAYS`, forward and, where torch
differentiates it, backward. Its verdict is the best that can be said of it; that of an op is its worst case.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

import vescale as vs
from vescale._errors import LayoutError, VescaleError
from vescale.spmd.layout import Layout
from vescale.spmd.program.program import collectives

# Verdicts, best first.
FREE, MOVED, REPLICATED, REFUSED, WRONG = VERDICTS = (
    "right without communication",
    "right with communication",
    "right by replication",
    "refused",
    "wrong",
)
# What is listed apart: nothing, draws, shapes that depend on data, values that torch leaves open, and ops of
# which plain torch runs no sample of dense tensors here.
ORDINARY, RANDOM, DATA, OPEN, ABSENT = CATEGORIES = (
    *("ordinary", "random", "data dependent", "uninitialised"),
    "not run",
)
WAYS = ("Shard(0)", "Shard(last)", "mixed", "uneven", "ragged")

# Reductions may be reordered: an element may differ by this much of itself, and of the largest one or 1.
RELATIVE, OF_LARGEST = 2e-4, 2e-5

UNINITIALISED = {
    *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
    *("resize_", "resize_as_"),
}
# Ops that only move elements, or make the same ones anywhere: their results are equal bit for bit.
words = str.split
MOVEMENT = {
    *words("""
    H T mH mT adjoint atleast_1d atleast_2d atleast_3d block_diag broadcast_shapes broadcast_tensors
    broadcast_to cat chunk clone column_stack concat contiguous conj diag diag_embed diagonal
    diagonal_copy diagonal_scatter dsplit dstack expand expand_as expand_copy fill flatten flip fliplr
    flipud full_like gather hsplit hstack index_select masked_fill meshgrid movedim moveaxis narrow
    narrow_copy ones_like permute permute_copy ravel repeat reshape reshape_as resolve_conj resolve_neg
    roll rot90 select select_scatter slice slice_scatter split split_list_args split_with_sizes
    split_with_sizes_copy squeeze squeeze_copy stack swapaxes swapdims t t_copy take_along_dim tile
    transpose transpose_copy tril triu unbind unbind_copy unflatten unfold unfold_copy unsafe_chunk
    unsafe_split unsqueeze unsqueeze_copy view view_as view_copy vsplit vstack where zero_ zeros_like eq
    ne lt le gt ge isnan isinf isfinite sign signbit abs neg
    """)
}


@dataclass
class Result:
    """What came out of an op."""

    name: str
    category: str
    cases: Counter[str] = field(default_factory=Counter)  # by verdict
    notes: list[tuple[str, str]] = field(default_factory=list)  # (verdict, what happened) of what isn't right
    apart: Counter[str] = field(default_factory=Counter)  # cases of another category, by verdict

    @property
    def verdict(self) -> str:
        return max(self.cases, key=VERDICTS.index, default=FREE)

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "cases": dict(self.cases), "apart": dict(self.apart)}


def name_of(op: Any) -> str:
    return op.name.removeprefix("torch.ops.") + (f" ({op.variant_test_name})" if op.variant_test_name else "")


def every_op() -> list[Any]:
    """The ops that torch can run on a CPU here, in the order of the database."""
    return [op for op in op_db if op.dtypes]


def dtype_of(op: Any) -> torch.dtype:
    """float32, or the first that the op takes."""
    return torch.float32 if torch.float32 in op.dtypes else sorted(op.dtypes, key=str)[0]


def samples(op: Any, count: int) -> list[Any]:
    """So many samples, spread over all that torch has: the first are all alike."""
    dtype = dtype_of(op)
    grad = op.supports_autograd and dtype.is_floating_point
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = list(islice(op.sample_inputs("cpu", dtype, requires_grad=grad), 100))
    step = max(len(found) / count, 1)
    return [found[int(index * step)] for index in range(min(count, len(found)))]


def plain_samples(op: Any, count: int = 6) -> list[Any]:
    """Those whose tensors are dense."""

    def is_plain(sample: Any) -> bool:
        leaves = tree_flatten((sample.input, sample.args, sample.kwargs))[0]
        return all(leaf.layout is torch.strided for leaf in leaves if isinstance(leaf, torch.Tensor))

    return [sample for sample in samples(op, count) if is_plain(sample)]


# Layouts.


@cache
def mesh(way: str) -> vs.Mesh:
    axes = {"mixed": {"dp": 2, "tp": 2}, "uneven": {"dp": 3}}.get(way, {"dp": 4})
    return vs.make_mesh(axes, backend="simulated")


def wanted(way: str, shape: Sequence[int], number: int) -> list[Callable[[], vs.P]]:
    """Placements to try, in order, for tensor `number` of a sample. Some can't be made for some shapes."""
    last = len(shape) - 1
    if not shape:
        return []
    if way == "Shard(0)":
        return [lambda: vs.P(dp=vs.Shard(0))]
    if way == "Shard(last)":
        return [lambda: vs.P(dp=vs.Shard(last))]
    if way == "uneven":
        odd = [dim for dim, size in enumerate(shape) if size % 3]
        return [lambda dim=dim: vs.P(dp=vs.Shard(dim)) for dim in odd]
    if way == "mixed":
        kinds = [
            lambda: vs.P(dp=vs.Shard(0), tp=vs.Shard(last)),
            lambda: vs.P(dp=vs.InterleavedShard(0, 2)),
            lambda: vs.P(tp=vs.Shard(0)),
            lambda: vs.P(tp=vs.Shard(last), dp=vs.Shard(last)),
        ]
        return [*kinds[number % len(kinds) :], lambda: vs.P(tp=vs.Shard(0))]
    dims = tuple(range(len(shape))) if number % 2 else (0,)
    return [lambda: vs.P(dp=vs.RaggedShard(dims, _ragged(shape, dims)))]


def _ragged(shape: Sequence[int], dims: Sequence[int]) -> tuple[int, ...]:
    """Units of four ranks, all different: none on the first, most on the last."""
    units = math.prod(shape[dim] for dim in dims)
    few = units // 4
    return 0, units // 2 - few, few, units - units // 2


def place(tensor: torch.Tensor, way: str, number: int) -> vs.DTensor:
    """The tensor in the first layout that there is; whole tensors where there is none."""
    for make in wanted(way, tensor.shape, number):
        try:
            spec = make()
            Layout(mesh(way).abstract, spec, tuple(tensor.shape))
        except LayoutError:
            continue
        return vs.distribute_tensor(tensor, mesh(way), spec)
    return vs.distribute_tensor(tensor, mesh(way), vs.P())


# A sample as a function of tensors.


class Seen(TorchDispatchMode):
    """Collects the tags of the ATen ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[torch.Tag] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.tags.update(func.tags)
        return func(*args, **(kwargs or {}))


class Sample:
    """One sample: its tensors, and the op as a function of them that returns flat results."""

    def __init__(self, op: Any, sample: Any, inplace: bool = False) -> None:
        self.op, self.inplace = op, inplace
        leaves, self.spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        self.leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.where = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[index] for index in self.where]
        self.tensors = [tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in tensors]
        self.learned = [] if inplace else [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
        self.process: Callable[[Any], Any] = sample.output_process_fn_grad
        self.cotangents: list[torch.Tensor | None] = []

    def call(self, *tensors: torch.Tensor) -> list[Any]:
        leaves = list(self.leaves)
        for index, tensor in zip(self.where, tensors, strict=True):
            leaves[index] = tensor
        value, args, kwargs = tree_unflatten(leaves, self.spec)
        if self.inplace:
            value = value.clone() if isinstance(value, torch.Tensor) else [part.clone() for part in value]
            made = self.op.inplace_variant(value, *args, **kwargs)
            return tree_flatten((value, made if made is not None else ()))[0]
        return tree_flatten(self.op(value, *args, **kwargs))[0]

    def loss(self, results: Sequence[Any], place: Callable[[Any], Any] = lambda cotangent: cotangent) -> Any:
        """A fixed scalar of all results that can be differentiated."""
        total: Any = 0
        for result, cotangent in zip(results, self.cotangents):
            if cotangent is not None:
                product = result * place(cotangent)
                total = total + (product.real if product.is_complex() else product).sum().float()
        return total

    def both(self, *tensors: torch.Tensor) -> tuple[list[Any], Any]:
        """The results, and the gradients of `loss`."""
        if not self.learned:
            return self.call(*tensors), ()

        def of(*values: torch.Tensor) -> Any:
            results = self.call(*values)
            return self.loss(results), results

        (_, results), gradients = vs.value_and_grad(of, tuple(self.learned), has_aux=True)(*tensors)
        return results, gradients


def expected(sample: Sample) -> tuple[list[Any], list[torch.Tensor], str]:
    """Results, gradients and category, by plain torch on the global tensors."""
    values = [tensor.clone() for tensor in sample.tensors]
    for index in sample.learned:
        values[index].requires_grad_()
    with Seen() as seen:
        results = sample.call(*values)
    generator = torch.Generator().manual_seed(0)
    sample.cotangents = [
        torch.randn(result.shape, generator=generator).to(result.dtype)
        if isinstance(result, torch.Tensor) and (result.requires_grad and result.layout is torch.strided)
        else None
        for result in results
    ]
    if not any(cotangent is not None for cotangent in sample.cotangents):
        sample.learned = []
    gradients: list[torch.Tensor] = []
    if sample.learned:
        chosen = [values[index] for index in sample.learned]
        with seen:
            found = torch.autograd.grad(sample.loss(results), chosen, allow_unused=True)
        gradients = [
            torch.zeros_like(value) if gradient is None else gradient.detach()
            for value, gradient in zip(chosen, found, strict=True)
        ]
    category = ORDINARY
    if sample.op.name in UNINITIALISED:
        category = OPEN
    elif torch.Tag.nondeterministic_seeded in seen.tags:
        category = RANDOM
    elif seen.tags & {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}:
        category = DATA
    return [r.detach() if isinstance(r, torch.Tensor) else r for r in results], gradients, category


# One case.


def judge(sample: Sample, reference: tuple[list[Any], list[torch.Tensor], str], way: str) -> tuple[str, str]:
    """The verdict of a case, and what to say of it when it isn't right."""
    results, gradients, category = reference
    try:
        tensors = [place(tensor, way, number) for number, tensor in enumerate(sample.tensors)]
        program = vs.parallelize(sample.both, vs.Plan(mesh(way)))
        found, learned = program(*tensors)
        fault = compare(found, results, exact=sample.op.name in MOVEMENT, values=category is ORDINARY)
        fault = fault or compare(learned, gradients, exact=False, values=category is ORDINARY)
    except VescaleError as error:
        return REFUSED, str(error)
    except Exception as error:
        return WRONG, f"{type(error).__name__}: {error}"
    if fault:
        return WRONG, fault
    moves = collectives(program._cache.last().decision.partitioned)
    if any("no rule" in move.cause for move in moves):
        return REPLICATED, next(move.cause for move in moves if "no rule" in move.cause)
    return (MOVED if moves else FREE), ""


def compare(
    found: Any,
    wanted: Any,
    exact: bool,
    values: bool,
    whole: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor.full_tensor(),  # type: ignore
) -> str:
    """What differs, empty when nothing does."""
    found = list(found)
    if len(found) != len(wanted):
        return f"{len(found)} results, not {len(wanted)}"
    for number, (one, other) in enumerate(zip(found, wanted)):
        if not isinstance(other, torch.Tensor):
            if one != other:
                return f"result {number} is {one!r}, not {other!r}"
            continue
        if not isinstance(one, torch.Tensor):
            return f"result {number} is a {type(one).__name__}, not a tensor"
        if one.shape != other.shape or one.dtype != other.dtype:
            found_, wanted_ = f"{one.dtype}{list(one.shape)}", f"{other.dtype}{list(other.shape)}"
            return f"result {number} is {found_}, not {wanted_}"
        if values and (text := _differ(whole(one), other, exact)):
            return f"result {number}: {text}"
    return ""


def _differ(one: torch.Tensor, other: torch.Tensor, exact: bool) -> str:
    other = other.detach().resolve_conj().resolve_neg()
    if other.is_floating_point() or other.is_complex():
        if other.is_complex():
            one, other = torch.view_as_real(one), torch.view_as_real(other.contiguous())
        one, other = one.double(), other.double()
        if exact:
            same = (one == other) | (one.isnan() & other.isnan())
        else:
            largest = max(other[other.isfinite()].abs().max().item() if other.isfinite().any() else 0.0, 1.0)
            same = torch.isclose(one, other, RELATIVE, OF_LARGEST * largest, equal_nan=True)
    else:
        same = one == other
    if same.all():
        return ""
    bad = ~same
    return f"{int(bad.sum())} of {bad.numel()} values differ: {one[bad][0]}, not {other[bad][0]}"


# One op.


def run_op(op: Any, count: int = 6, ways: Sequence[str] = WAYS) -> Result:
    """All cases of an op."""
    outcomes: list[tuple[str, str, str]] = []  # category, verdict, note
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [(Sample(op, sample), ways) for sample in plain_samples(op, count)]
        if op.inplace_variant is not None:
            found += [
                (Sample(op, sample, inplace=True), ways[:1])
                for sample in plain_samples(op, count)
                if not sample.broadcasts_input
            ][:1]
        for number, (sample, ways_) in enumerate(found):
            try:
                reference = expected(sample)
            except Exception:  # torch itself can't: nothing to compare with
                continue
            for way in ways_:
                with torch.random.fork_rng():
                    verdict, note = judge(sample, reference, way)
                form = "in place" if sample.inplace else f"sample {number}"
                shapes = [list(tensor.shape) for tensor in sample.tensors]
                outcomes.append((reference[2], verdict, f"{form} {shapes} {way}: {note}"))
    categories = {category for category, _, _ in outcomes}
    category = min(categories, key=CATEGORIES.index, default=ABSENT)
    result = Result(name_of(op), category)
    for its, verdict, note in outcomes:
        (result.cases if its == category else result.apart)[verdict] += 1
        if verdict == WRONG or (verdict in (REFUSED, REPLICATED) and its == category):
            result.notes.append((verdict, note))
    if any(verdict == WRONG for its, verdict, _ in outcomes if its != category):
        result.cases[WRONG] += result.apart[WRONG]
    return result
