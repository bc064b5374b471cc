"""What FSDP refuses: each error says what was found, where, the rule and the remedy."""

import re

import pytest
import torch

import vescale as vs
from vescale._errors import PlanError


def resolve(shapes, fsdp, rules=None, axes=None):
    axes = axes or {"dp": 4}
    mesh = vs.AbstractMesh(tuple(axes), tuple(axes.values()))
    params = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return vs.Plan(mesh, rules, fsdp=fsdp).resolve(params)


BLOCKS = {"blocks.0.w": (64, 64), "blocks.1.w": (64, 64), "head": (8, 8)}
TALL = {"blocks.0.w": (520, 4096)}  # five blocks of 128 rows, the last short, on four shards

REFUSED = {
    "an axis that isn't there": (lambda: resolve(BLOCKS, vs.FSDP("data")), "'data'"),
    "a replica axis that isn't there": (lambda: resolve(BLOCKS, vs.FSDP(("r", "dp"))), "'r'"),
    "an axis twice": (lambda: vs.FSDP(("dp", "dp")), "axis="),
    "three axes": (lambda: vs.FSDP(("a", "b", "c")), "axis="),
    "an axis that is no name": (lambda: vs.FSDP(3), "axis=3"),
    "a wrap that is no string": (lambda: vs.FSDP("dp", wrap=[3]), "wrap="),
    "a wrap that is no regex": (lambda: vs.FSDP("dp", wrap="("), "regular expressions"),
    "a wrap that matches nothing": (lambda: resolve(BLOCKS, vs.FSDP("dp", r"block\.\d+")), "near: blocks"),
    "wraps that overlap": (lambda: resolve(BLOCKS, vs.FSDP("dp", ["blocks", r"blocks\.0"])), "blocks.0.w"),
    "a block that matches nothing": (
        lambda: resolve(BLOCKS, vs.FSDP("dp", block={"tail": vs.Rows(2)})),
        "'tail'",
    ),
    "a block for no name": (lambda: vs.FSDP("dp", block=vs.Elements(4)), "block=Elements(n=4)"),  # type: ignore[arg-type]
    "a block that is none": (lambda: vs.FSDP("dp", block={".*": 128}), "vs.Rows"),
    "a dtype of integers": (lambda: vs.FSDP("dp", param_dtype=torch.int8), "param_dtype=torch.int8"),
    "a dtype that is none": (lambda: vs.FSDP("dp", reduce_dtype="bfloat16"), "reduce_dtype=bfloat16"),
    "a prefetch below 0": (lambda: vs.FSDP("dp", prefetch=-1), "prefetch=-1"),
    "half a prefetch": (lambda: vs.FSDP("dp", prefetch=0.5), "prefetch=0.5"),
    "a negative padding": (lambda: vs.FSDP("dp", max_padding=-0.1), "max_padding=-0.1"),
    "an axis that a rule uses": (
        lambda: resolve(BLOCKS, vs.FSDP("dp"), {r"blocks\.0\.w": vs.P(dp=vs.Shard(0))}),
        "blocks.0.w of shape (64, 64), P(dp=Shard(0)) in use: placed over dp already",
    ),
    "a replica axis that a rule uses": (
        lambda: resolve(BLOCKS, vs.FSDP(("r", "dp")), {"head": vs.P(r=vs.Shard(0))}, {"r": 2, "dp": 2}),
        "placed over r already",
    ),
    "an uneven split": (
        lambda: resolve({"w": (7, 4)}, vs.FSDP("dp"), {"w": vs.P(tp=vs.Shard(0))}, {"dp": 2, "tp": 2}),
        "cut unevenly",
    ),
    "a ragged parameter in use": (
        lambda: resolve(
            {"w": (8, 4)}, vs.FSDP("dp"), {"w": vs.P(tp=vs.RaggedShard((0,), (1, 3)))}, {"dp": 2, "tp": 2}
        ),
        "w of shape (8, 4)",
    ),
    "padding": (lambda: resolve(TALL, vs.FSDP("dp", block={".*": vs.Rows(128)})), "blocks.0.w"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    run, told = REFUSED[case]
    with pytest.raises(PlanError) as caught:
        run()
    text = str(caught.value)
    assert told in text
    for part in ("found: ", "where: ", "rule: ", "remedy: "):
        assert part in text, text


def test_padding_names_the_tensor_a_number_of_shards_nearby_and_hsdp():
    with pytest.raises(PlanError) as caught:
        resolve({**TALL, "blocks.0.b": (4096,)}, vs.FSDP("dp", r"blocks\.\d", {r".*w": vs.Rows(128)}))
    text = str(caught.value)
    assert "where: blocks.0.w" in text
    shards = int(re.search(r"shard over (\d+) ranks", text)[1])
    assert "HSDP, axis=(replica, shard)" in text
    resolve(TALL, vs.FSDP("dp", block={".*": vs.Rows(128)}), axes={"dp": shards})  # as it says
    resolve(TALL, vs.FSDP("dp", block={".*": vs.Rows(128)}, max_padding=1.0))


def test_a_little_padding_is_never_refused():
    """Three numbers take a unit of 16 bytes on one rank, and as much on the others."""
    (bucket,) = resolve({"b": (3,)}, vs.FSDP("dp", max_padding=0.0)).buckets
    assert bucket.plan.overhead > 1


def test_a_bucket_is_split_only_where_that_saves_memory_worth_a_collective():
    """Blocks of GPT-like widths stay one buffer; rows of clashing widths that are large do not."""
    small = {f"blocks.0.{n}": (64 * k, 64 * j) for n, k, j in (("qkv", 3, 1), ("up", 4, 1), ("down", 1, 4))}
    (bucket,) = resolve(small, vs.FSDP("dp", r"blocks\.0")).buckets
    assert set(bucket.names) == set(small)
    # 20,480 elements a shard less, of 43,008.
    large = resolve({"wide": (64, 7168), "narrow": (640, 1536)}, vs.FSDP("dp"), axes={"dp": 64}).buckets
    assert sorted(bucket.plan.shard_size for bucket in large) == [7168, 15360]


def test_the_order_of_the_parameters_counts_for_nothing():
    forward, backward = (
        resolve(dict(items), vs.FSDP("dp")) for items in (BLOCKS.items(), reversed(BLOCKS.items()))
    )
    assert {entry.path: entry.rest for entry in forward} == {entry.path: entry.rest for entry in backward}
