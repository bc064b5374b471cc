"""Listings of small functions: what one rank of a mesh of one runs, before any pass."""

from dataclasses import replace

import torch

from tests.graphs import traced
from vescale.spmd.layout import AbstractMesh, replicated
from vescale.spmd.program.cleanup import cleanup
from vescale.spmd.program.codegen import generate
from vescale.spmd.program.emit import Call
from vescale.spmd.program.partition import Facts, partition
from vescale.spmd.program.program import listing

ONE = AbstractMesh(("dp",), (1,))


def listed(fn, *tensors, donated=()):
    """The listing of fn for tensors that look like these; `donated` numbers arguments."""
    graph = cleanup(traced(fn, *tensors))
    assert not graph.hidden
    layouts = [replicated(ONE, tuple(tensor.shape)) for tensor in tensors]
    partitioned = partition(graph, ONE, layouts, [None] * len(graph.outputs))
    inputs = frozenset(partitioned.inputs[place] for place in donated)
    return listing(replace(partitioned, facts=Facts(donated=inputs)), 0)


def run(listing, *tensors):
    """The results of a listing, as compiled."""
    return run_on(listing, [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors])


def run_on(listing, tensors):
    """The same on these very tensors; the list is emptied."""
    return generate(listing.instructions, listing.inputs, listing.outputs, listing.looks).run(tensors)


def calls(listing):
    """The ops of a listing, without their namespace."""
    return [
        str(step.fn).removeprefix("aten.").removesuffix(".default") if isinstance(step, Call) else "exchange"
        for step in listing.instructions
    ]
