"""Factor notation: what an op does to dims, written like einops.

    rule(aten.mm.default, "i k, k j -> i j", sum="k")

Operands and results are lists of dims; a dim is a factor (`i`), several with the outermost first (`(b t)`),
or `1`. From the factors the engine derives what a placement of one operand means for the others and for
the results: see `partition`. A factor may be

* sharded, when it is in no list below: every result that has it is sharded, operands without it are whole;
* `sum`: missing from a result, and summed over there: sharding it makes that result Partial;
* `whole`: never sharded, unless `expand` names a decomposition to use when it is.

A rule for ops of one shape is text; one whose dims depend on the arguments is a function of the node
that returns a `Pattern`. The tensors of a node are numbered in the order of its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..._compat import OpOverload
from ..layout import Layout
from ..program.ir import Node, Ref, TensorMeta

Dim = tuple[str, ...]  # factors of a dim, outermost first; empty for a dim of size 1
Dims = tuple[Dim, ...]

ALL_DIMS = 64  # as Pattern.ragged: torch has no tensor of more


@dataclass(frozen=True, slots=True)
class LocalCall:
    """A node about to run on one rank: change `args` or `fn` where sizes or offsets are local."""

    node: Node
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    meta: TensorMeta  # of the first result, at its global shape
    rank: int

    def with_arg(self, position: int, value: Any) -> LocalCall:
        args = list(self.args)
        args[position] = value
        return replace(self, args=tuple(args))


Localise = Callable[[LocalCall], LocalCall]
Follow = Callable[[Layout], tuple[Sequence[Layout], Sequence[Layout]]]


@dataclass(frozen=True)
class Pattern:
    """What one node does to the dims of its tensors, and what may be done to it.

    `linear`: sets of operands that may be Partial together, the others then being whole values.
    `extremes`: "max" or "min" -> operands that may be pending so together: they are moved, or it takes that.
    `pointwise`: the op works element by element. `ragged`: a ragged cut of so many leading dims or fewer
    commutes with it: as `local` adapts it, it runs on pieces (rows, *rest). One dim keeps the number of dims.
    `view`: the result shares memory with operand 0 and costs nothing. `reduction`: what sharding a `sum`
    factor leaves pending.
    `alike`: factor -> results that don't depend on it: each rank has them whole when the factor is sharded.
    `expand`: factor -> a function of the node's arguments to run in its place when the factor is sharded.
    `contiguous`: factors of which a rank may only hold one run. `local`: adapts the call to one rank.
    `between`: whether the ragged cut of a layout passes although it is one of `whole` factors: it goes
    between what must stay together. Pieces then have these merged into their rows.
    `follow`: the op runs where its first operand is, and no factor says what that means for the rest: layout
    of the operand -> those of all operands and of all results. It may raise.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[str, int]
    sum: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    extremes: Mapping[str, frozenset[int]] = field(default_factory=dict)
    ragged: int = 0
    pointwise: bool = False
    view: bool = False
    reduction: str = "sum"
    alike: Mapping[str, frozenset[int]] = field(default_factory=dict)
    expand: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    contiguous: frozenset[str] = frozenset()
    local: Localise | None = None
    between: Callable[[Layout], bool] | None = None
    follow: Follow | None = None

    def split(self, factor: str, outer: int) -> Pattern:
        """The same pattern with `factor` written as two, the first of `outer` values."""
        first, second = factor + "<", factor + ">"

        def dims(old: Dims) -> Dims:
            return tuple(
                tuple(part for name in dim for part in ((first, second) if name == factor else (name,)))
                for dim in old
            )

        def names(old: frozenset[str]) -> frozenset[str]:
            return old - {factor} | {first, second} if factor in old else old

        sizes = {name: size for name, size in self.sizes.items() if name != factor} | {
            first: outer,
            second: self.sizes[factor] // outer,
        }
        alike, expand = dict(self.alike), dict(self.expand)
        for of_factor in (alike, expand):
            if factor in of_factor:
                of_factor[first] = of_factor[second] = of_factor.pop(factor)  # type: ignore[index]
        return replace(
            self,
            operands=tuple(map(dims, self.operands)),
            results=tuple(map(dims, self.results)),
            sizes=sizes,
            sum=names(self.sum),
            whole=names(self.whole) | ({second} if factor in self.contiguous else set()),
            contiguous=names(self.contiguous),
            alike=alike,
            expand=expand,
        )


Rule = Callable[[Node, Sequence[TensorMeta]], Pattern]
_rules: dict[OpOverload, Rule] = {}
_rules_for_tags: dict[torch.Tag, Rule] = {}
_sources: set[OpOverload] = set()


def find_rule(op: OpOverload) -> Rule | None:
    """The rule of an op, else that of a tag which torch gives it; None when there is none."""
    found = _rules.get(op)
    if found is None and torch.Tag.nondeterministic_seeded not in op.tags:
        return next((made for tag, made in _rules_for_tags.items() if tag in op.tags), None)
    return found


def rule_for_tag(tag: torch.Tag, made: Rule) -> None:
    """Registers the rule of all ops with a tag that have none of their own."""
    _rules_for_tags[tag] = made


def is_source(op: OpOverload) -> bool:
    """Whether the op reads no tensor value: a draw or a factory, made in whatever layout is asked for."""
    return op in _sources


def source(ops: Iterable[OpOverload], local: Localise) -> None:
    """Registers ops that make values from nothing; `local` makes a rank's part for the asked layout."""
    for op in ops:
        _sources.add(op)
        rule(op, lambda node, metas: _source_pattern(node, metas, local))


def _source_pattern(node: Node, metas: Sequence[TensorMeta], local: Localise) -> Pattern:
    (shape,) = result_shapes(node, metas)
    sizes = {f"r{dim}": size for dim, size in enumerate(shape)}
    operands = []
    for index, meta in enumerate(operand_metas(node, metas)):
        operands.append(tuple((f"o{index}.{dim}",) for dim in range(len(meta.shape))))
        sizes |= {name: size for (name,), size in zip(operands[-1], meta.shape, strict=True)}
    return Pattern(
        tuple(operands),
        (tuple((f"r{dim}",) for dim in range(len(shape))),),
        sizes,
        whole=frozenset(sizes),
        local=local,
    )


def rule(
    ops: OpOverload | Iterable[OpOverload],
    pattern: str | Rule | None = None,
    *,
    sum: str = "",
    whole: str = "",
    linear: Iterable[Iterable[int]] = (),
    expand: Mapping[str, Callable[..., Any]] | None = None,
    local: Localise | None = None,
    contiguous: str = "",
) -> Any:
    """Registers the rule of one op or several: text, or a function (also as a decorator)."""
    ops = (ops,) if isinstance(ops, OpOverload) else tuple(ops)
    if pattern is None:
        return lambda function: rule(ops, function) or function
    if isinstance(pattern, str):
        options: dict[str, Any] = {
            "sum": sum.split(),
            "whole": whole.split(),
            "linear": tuple(map(frozenset, linear)),
            "expand": expand or {},
            "local": local,
            "contiguous": frozenset(contiguous.split()),
        }
        text = pattern

        def made(node: Node, metas: Sequence[TensorMeta]) -> Pattern:
            return bind(
                text,
                [meta.shape for meta in operand_metas(node, metas)],
                result_shapes(node, metas),
                **options,
            )

        pattern = made
    for op in ops:
        assert op not in _rules, op
        _rules[op] = pattern
    return None


def named_dims(shape: Sequence[int]) -> tuple[list[Dim], dict[str, int]]:
    """A factor for each dim, and their sizes.

    >>> named_dims((3, 2))
    ([('d0',), ('d1',)], {'d0': 3, 'd1': 2})
    """
    sizes = {f"d{dim}": size for dim, size in enumerate(shape)}
    return [(name,) for name in sizes], sizes


def broadcast_dims(shapes: Sequence[Sequence[int]], full: Sequence[int]) -> tuple[Dims, ...]:
    """Right-aligned factors of tensors that are broadcast to `full`; size 1 against a longer dim has none.

    >>> broadcast_dims([(3, 1), (2,)], (3, 2))
    ((('d0',), ()), (('d1',),))
    """
    return tuple(
        tuple(
            () if size == 1 != full[dim] else (f"d{dim}",)
            for dim, size in enumerate(shape, len(full) - len(shape))
        )
        for shape in shapes
    )


def overloads(*packets: Any) -> list[OpOverload]:
    """All functional overloads of op packets: those that neither mutate nor write to `out`."""
    from ..._compat import is_mutable

    found = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    return [op for op in found if not is_mutable(op)]


def operand_metas(node: Node, metas: Sequence[TensorMeta]) -> list[TensorMeta]:
    """What the tensors of a node look like, in the order of its arguments."""
    return [metas[value] for value in node.refs()]


def result_shapes(node: Node, metas: Sequence[TensorMeta]) -> list[tuple[int, ...]]:
    """Global shapes of the results that are tensors."""
    return [metas[out].shape for out in node.outs if out is not None]


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a node, by position or by name."""
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, default)


def tensor_position(node: Node, position: int, name: str = "") -> int | None:
    """The number among the node's tensors of the one given as this argument; None when it isn't one."""
    value = argument(node, position, name)
    if not isinstance(value, Ref):
        return None
    seen = 0
    for index, arg in enumerate(node.args):
        if index == position:
            return seen
        seen += _count(arg)
    for key, arg in node.kwargs.items():
        if key == name:
            return seen
        seen += _count(arg)
    return None


def _count(value: Any) -> int:
    if isinstance(value, Ref):
        return 1
    return sum(map(_count, value)) if isinstance(value, (tuple, list)) else 0


_TOKEN = re.compile(r"\.\.\.|\(|\)|\w+")


def parse(text: str) -> tuple[list[list[list[str] | str]], list[list[list[str] | str]]]:
    """`"i k, (k g) 1 -> i ..."` to lists of dims, for operands and for results."""
    sides = text.split("->")
    assert len(sides) == 2, text
    operands, results = ([_parse_dims(part) for part in side.split(",")] for side in sides)
    return operands, results


def _parse_dims(text: str) -> list[list[str] | str]:
    dims: list[list[str] | str] = []
    group: list[str] | None = None
    for token in _TOKEN.findall(text):
        if token == "(":
            group = []
        elif token == ")":
            assert group is not None, text
            dims.append(group)
            group = None
        elif group is not None:
            group.append(token)
        else:
            dims.append("..." if token == "..." else [] if token == "1" else [token])
    return dims


def bind(
    text: str,
    operand_shapes: Sequence[tuple[int, ...]],
    result_shapes: Sequence[tuple[int, ...]],
    **options: Any,
) -> Pattern:
    """The pattern of a text for tensors of these shapes.

    `...` stands for the same dims everywhere. A factor that is missing from a result and is not a `sum`
    is made whole: forgetting to say so must not give a wrong value.
    """
    operand_dims, result_dims = parse(text)
    sizes: dict[str, int] = {}
    operands = tuple(
        _bind_dims(dims, shape, sizes, text) for dims, shape in zip(operand_dims, operand_shapes, strict=True)
    )
    results = tuple(
        _bind_dims(dims, shape, sizes, text) for dims, shape in zip(result_dims, result_shapes, strict=True)
    )
    for key in ("sum", "whole"):
        options[key] = frozenset(
            name
            for want in options[key]
            for name in sizes
            if name == want or (want == "..." and name.startswith("."))
        )
    everywhere = set(sizes)
    for dims in results:
        everywhere &= {name for dim in dims for name in dim}
    options["whole"] |= frozenset(sizes) - everywhere - options["sum"] - frozenset(options.get("expand", ()))
    return Pattern(operands, results, sizes, **options)


def _bind_dims(dims: list[list[str] | str], shape: tuple[int, ...], sizes: dict[str, int], text: str) -> Dims:
    if "..." in dims:
        at = dims.index("...")
        count = len(shape) - (len(dims) - 1)
        dims = [*dims[:at], *([f".{index}"] for index in range(count)), *dims[at + 1 :]]
    assert len(dims) == len(shape), (text, shape)
    for dim, size in zip(dims, shape, strict=True):
        assert isinstance(dim, list)
        if len(dim) == 1:
            assert sizes.setdefault(dim[0], size) == size, (text, dim, size, sizes)
    return tuple(tuple(dim) for dim in dims)


def result_shape_arg(position: int) -> Localise:
    """The argument at `position` is the global shape of the result: on a rank it is the local one."""

    def localise(call: LocalCall) -> LocalCall:
        return call.with_arg(position, call.results[0].local_shape(call.rank))

    return localise
