"""Graphs of small functions, and the plainest way to run one."""

from vescale import _tree
from vescale.spmd.program.ir import Ref, TensorMeta, map_args
from vescale.spmd.program.trace import trace


def traced(fn, *tensors, **options):
    """The graph of fn, with inputs that look like these tensors and are called a, b, c ..."""
    metas = [TensorMeta.of(tensor) for tensor in tensors]
    return trace(
        lambda values: _tree.leaves(fn(*values)),
        metas,
        [*"abcdefgh", *map(str, range(8, len(metas)))][: len(metas)],
        **options,
    )


def ops(graph):
    """The names of the graph's ops, in order."""
    return [node.op.name().removeprefix("aten::") for node in graph.nodes]


def evaluate(graph, *tensors):
    """The results of a graph on real tensors, node by node."""
    values = dict(zip(graph.inputs, tensors, strict=True)) | dict(graph.hidden)
    for node in graph.nodes:
        read = lambda ref: values[ref.id]  # noqa: E731
        kwargs = {name: map_args(value, read) for name, value in node.kwargs.items()}
        found = node.op(*map_args(node.args, read), **kwargs)
        values.update(zip(node.outs, found if node.returns_list else [found], strict=True))
    return [values[output.id] if isinstance(output, Ref) else output for output in graph.outputs]
