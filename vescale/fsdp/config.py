"""`vs.FSDP`: which parameters are sharded, gathered and reduced together, and how. A frozen value.

What follows from it for given parameters, buckets and layouts at rest, is decided in `staging`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import torch

from .._errors import PlanError, explain
from ..spmd.dtensor import DTensor
from ..spmd.layout import AbstractMesh, Layout
from ..spmd.plan import Parameter, Staging
from .blocks import Block
from .bucket import Bucket
from .dbuffer import DBuffer
from .staging import stage


class FSDP:
    """Fully sharded data parallelism: parameters rest as shards and are gathered a bucket at a time.

        FSDP(axis, wrap, block={regex: block}, param_dtype, reduce_dtype, reshard_after_forward, prefetch)

    `axis` is the mesh axis over which parameters, gradients and optimizer state are sharded, or
    `(replica, shard)`: sharded over the second, replicated over the first (HSDP). `wrap` is a regex, or
    several, that fullmatches module paths ("blocks.0"): the parameters below such a path are one bucket;
    those below none are one more. `block` says, by regex on parameter paths, what may never be
    cut: `vs.Rows(n)`, `vs.Tile(r, c)`, `vs.Elements(n)` or `vs.Whole()`; the first match wins, and a tensor
    of two dims or more is `Rows(1)` unless told otherwise.

    Parameters are gathered in `param_dtype` and gradients reduced in `reduce_dtype`, by default the
    parameter's own. With `reshard_after_forward` a bucket is freed after its last use in the forward
    and gathered again for the backward. `prefetch` is how many buckets are under way ahead of the one
    in use. `max_padding` bounds the part of a buffer that no parameter fills.

    What the plan's `params` rules say is the layout in use: tensor- and expert-parallel placements
    compose, and a parameter with a `vs.Staged` of its own is left alone.

    Raises PlanError for an axis, a regex or a dtype that can't be meant.

    >>> FSDP("dp", wrap=r"blocks\\..*", param_dtype=torch.bfloat16)
    FSDP('dp', wrap=('blocks\\\\..*',), param_dtype=torch.bfloat16)
    """

    def __init__(
        self,
        axis: str | tuple[str, str],
        wrap: str | Sequence[str] = (),
        block: Mapping[str, Block] | None = None,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
        prefetch: int = 1,
        max_padding: float = 0.25,
    ) -> None:
        self.axes = _strings(axis, "axis")
        self.wrap = _strings(wrap, "wrap")
        if not isinstance(block, Mapping | None):
            raise PlanError(
                explain(
                    f"block={block!r}",
                    where="vs.FSDP",
                    rule="blocks are given by regex on parameter paths",
                    remedy=f"block={{'.*': {block!r}}} for all parameters",
                )
            )
        self.block = dict(block or {})
        self.param_dtype, self.reduce_dtype = param_dtype, reduce_dtype
        self.reshard_after_forward, self.prefetch = reshard_after_forward, prefetch
        self.max_padding = max_padding
        self._check()

    @property
    def shard_axis(self) -> str:
        """The axis over which shards differ."""
        return self.axes[-1]

    def stage(self, mesh: AbstractMesh, parameters: Sequence[Parameter]) -> Staging:
        """Where each parameter rests, and the buckets: see `staging.stage`."""
        return stage(self, mesh, tuple(parameters))

    def store(self, buckets: Sequence[Bucket], tensors: Mapping[str, DTensor]) -> dict[str, DTensor]:
        """The DTensors at rest of each bucket, copied into a `DBuffer`."""
        return {name: x for bucket in buckets for name, x in DBuffer.placed(bucket, tensors).items()}

    def grouped(
        self, buckets: Sequence[Bucket], mesh: AbstractMesh, outside: Callable[[Layout], Layout]
    ) -> tuple[Bucket, ...]:
        """The same buffers, in the shards of ranks that host several lanes each."""
        return tuple(bucket.grouped(mesh.axis_size(bucket.axis), outside) for bucket in buckets)

    def _check(self) -> None:
        if not 1 <= len(self.axes) <= 2 or len(set(self.axes)) != len(self.axes):
            raise PlanError(
                explain(
                    f"axis={self.axes}",
                    where="FSDP",
                    rule="the axis is a name, or (replica, shard): two names",
                    remedy='FSDP("dp"), or FSDP(("replica", "shard"))',
                )
            )
        for regex in (*self.wrap, *self.block):
            try:
                re.compile(regex)
            except re.error as error:
                raise PlanError(
                    explain(
                        f"{regex!r}: {error}",
                        where="FSDP",
                        rule="wraps and the keys of block are regular expressions",
                        remedy="escape dots and brackets, as in r'blocks\\.\\d+'",
                    )
                ) from None
        for regex, block in self.block.items():
            if not isinstance(block, Block):
                raise PlanError(
                    explain(
                        repr(block),
                        where=f"FSDP block[{regex!r}]",
                        rule="a block is vs.Rows(n), vs.Tile(r, c), vs.Elements(n) or vs.Whole()",
                        remedy="for example vs.Rows(128)",
                    )
                )
        for name in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not getattr(dtype, "is_floating_point", False):
                raise PlanError(
                    explain(
                        f"{name}={dtype}",
                        where="FSDP",
                        rule="parameters are gathered and gradients reduced as floating-point numbers",
                        remedy="torch.bfloat16, or torch.float32",
                    )
                )
        for name, kinds in (("prefetch", int), ("max_padding", (int, float))):
            value = getattr(self, name)
            if not isinstance(value, kinds) or isinstance(value, bool) or value < 0:
                raise PlanError(
                    explain(
                        f"{name}={value!r}",
                        where="FSDP",
                        rule="a number of buckets, 0 or more" if name == "prefetch" else "a part, 0 or more",
                        remedy="prefetch=1" if name == "prefetch" else "max_padding=0.25",
                    )
                )

    def __repr__(self) -> str:
        usual = {"wrap": (), "block": {}, "param_dtype": None, "reduce_dtype": None}
        usual |= {"reshard_after_forward": True, "prefetch": 1, "max_padding": 0.25}
        told = [
            f"{name}={getattr(self, name)!r}" for name, value in usual.items() if getattr(self, name) != value
        ]
        axis = self.axes[0] if len(self.axes) == 1 else self.axes
        return f"FSDP({', '.join([repr(axis), *told])})"


def _strings(value: str | Sequence[str], name: str) -> tuple[str, ...]:
    """One string or several."""
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, (tuple, list)) or not all(isinstance(one, str) for one in found):
        raise PlanError(
            explain(
                f"{name}={value!r}",
                where="FSDP",
                rule="a string, or several",
                remedy='"dp", or ("replica", "shard")' if name == "axis" else "for example r'blocks\\.\\d+'",
            )
        )
    return tuple(found)
