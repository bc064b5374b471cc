"""shard_map the obvious way: every rank is a thread, a collective is Python over the list of all values.

Functions take the collectives as their first argument: a `Rank` here, the module `vescale` there.
"""

import threading
from itertools import product

import torch

from vescale.spmd.placements import Partial, RaggedShard, Shard


class Rank:
    """The collectives as one rank has them; `meet` returns what all members of its group gave."""

    def __init__(self, place, sizes, exchange):
        self.place, self.sizes, self.exchange = place, sizes, exchange

    def meet(self, x, axis):
        axes = (axis,) if isinstance(axis, str) else axis
        given = self.exchange(self.place, x)
        members = [
            {**self.place, **dict(zip(axes, at))} for at in product(*(range(self.sizes[a]) for a in axes))
        ]
        return [given[tuple(member.items())] for member in members], members.index(self.place)

    def psum(self, x, axis):
        return sum(self.meet(x, axis)[0])

    def pmean(self, x, axis):
        return torch.stack(self.meet(x, axis)[0]).mean(0)

    def pmax(self, x, axis):
        return torch.stack(self.meet(x, axis)[0]).amax(0)

    def pmin(self, x, axis):
        return torch.stack(self.meet(x, axis)[0]).amin(0)

    def pvary(self, x, axis):
        return x

    def all_gather(self, x, axis, *, dim=0, tiled=True, to="varying"):
        return (torch.cat if tiled else torch.stack)(self.meet(x, axis)[0], dim)

    def psum_scatter(self, x, axis, *, dim=0, tiled=True, sizes=None):
        values, me = self.meet(x, axis)
        part = parts(sum(values), len(values), dim, sizes)[me]
        return part if tiled else part.squeeze(dim)

    def all_to_all(self, x, axis, split_dim, concat_dim):
        values, me = self.meet(x, axis)
        return torch.cat([parts(value, len(values), split_dim)[me] for value in values], concat_dim)

    def ppermute(self, x, axis, perm):
        values, me = self.meet(x, axis)
        sources = [source for source, target in perm if target == me]
        return values[sources[0]] if sources else torch.zeros_like(x)

    def pshuffle(self, x, axis, perm):
        values, me = self.meet(x, axis)
        return values[perm[me]]

    def broadcast(self, x, axis, *, root=0):
        return self.meet(x, axis)[0][root]

    def axis_index(self, axis):
        return torch.tensor(self.meet(None, axis)[1])


def parts(x, count, dim, sizes=None):
    """x cut along `dim`: the sizes given, or those of Shard."""
    size, each = x.shape[dim], -(-x.shape[dim] // count)
    sizes = sizes or [max(0, min(each, size - each * index)) for index in range(count)]
    return x.split(list(sizes), dim)


def lockstep(fn, sizes, inputs):
    """[fn(rank, *inputs[rank])] for all ranks of a mesh of these axis sizes, in row-major order."""
    places = [dict(zip(sizes, place)) for place in product(*map(range, sizes.values()))]
    barrier, board, results = threading.Barrier(len(places)), {}, {}

    def exchange(place, value):
        board[tuple(place.items())] = value
        barrier.wait()
        found = dict(board)
        barrier.wait()
        return found

    def work(index):
        try:
            results[index] = fn(Rank(places[index], sizes, exchange), *inputs[index])
        except BaseException:
            barrier.abort()
            raise

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[index] for index in range(len(places))]


def split(x, spec, sizes):
    """What each rank holds of the global tensor x, splits applied in the order of the spec."""
    found = []
    for place in product(*map(range, sizes.values())):
        at, local = dict(zip(sizes, place)), x
        for axis, placement in spec.items():
            if isinstance(placement, Partial):
                local = local * (at[axis] == 0)
            elif isinstance(placement, Shard):
                local = parts(local, sizes[axis], placement.dim)[at[axis]]
            elif isinstance(placement, RaggedShard):
                units, whole = list(placement.local_units), local
                rows = whole.flatten(0, len(placement.dims) - 1)
                local = rows.split([len(rows) * unit // sum(units) for unit in units])[at[axis]]
        found.append(local)
    return found


def join(locals, spec, sizes, shape):
    """The global tensor of which `split` gives these; of replicas one, of contributions the sum."""
    index = split(torch.arange(torch.Size(shape).numel()).view(shape), P_without_partial(spec), sizes)
    flat = locals[0].new_zeros(torch.Size(shape).numel())
    for rank, place in enumerate(product(*map(range, sizes.values()))):
        at = dict(zip(sizes, place))
        if all(at[axis] == 0 or axis in spec for axis in sizes):
            flat = flat.index_add(0, index[rank].flatten(), locals[rank].flatten())
    return flat.view(shape)


def P_without_partial(spec):
    return type(spec).of((axis, one) for axis, one in spec.items() if not isinstance(one, Partial))


def shard_map(fn, sizes, in_specs, out_spec, shape):
    """The reference: fn(rank, *locals) -> one local result, of a global result of `shape`."""

    def run(*args):
        pieces = zip(*(split(arg, spec, sizes) for arg, spec in zip(args, in_specs)))
        return join(lockstep(fn, sizes, [*pieces]), out_spec, sizes, shape)

    return run
