"""Keyed draws of discrete things: coins, integers, categories, orders, samples, and dropout.

Each is a draw of bits or numbers (`draws.py`) and ops of torch after it, so what is true of those is
true of these: element i depends on the key and on i only. `permutation` and `choice` without
replacement are the exception that there must be: each of their elements depends on all, every rank
computes the whole order, O(n log n), and keeps what it needs of it.
"""

import math
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from .._errors import ArgumentError, explain
from .draws import FLOATS, INTEGERS, check_dtype, check_shape
from .keys import Key, consumed
from .numbers import draw
from .philox import MORE, derive_keys
from .ranges import scale_bits


def bernoulli(key: Key, p: float | Tensor = 0.5, shape: int | Sequence[int] | None = None) -> Tensor:
    """key -> booleans of `shape`, true with probability p.

        uniform(key, shape) < p     in float32, or in float64 where p is a float64 tensor

    So p is rounded to that format, and up to a multiple of 2^-24 (2^-53). A tensor p broadcasts to
    `shape`, which is its shape unless given; its values are not checked. No gradient.

    Raises ArgumentError for a key that isn't one, a negative size, a number p outside [0, 1], a
    tensor p that isn't of floats or doesn't broadcast to `shape`.

    >>> from vescale.rng import key
    >>> bernoulli(key(7), 0.8, (4,))
    tensor([False,  True,  True,  True])
    """
    where = "vs.rng.bernoulli"
    found = repr(p)
    if isinstance(p, Tensor):
        sizes = tuple(p.shape) if shape is None else check_shape(shape, where)
        found = f"a tensor of {p.dtype}, shape {tuple(p.shape)}, for shape {sizes}"
        valid = p.is_floating_point() and _broadcasts(p.shape, sizes)
    else:
        sizes = () if shape is None else check_shape(shape, where)
        valid = _is_probability(p)
    if not valid:
        raise ArgumentError(
            explain(
                found,
                where=f"{where}(p=)",
                rule="a probability in [0, 1], or a tensor of floats that broadcasts to shape",
                remedy="pass logits through torch.sigmoid first",
            )
        )
    wide = isinstance(p, Tensor) and p.dtype == torch.float64
    u = draw(consumed(key, where), sizes, "uniform64" if wide else "uniform32")
    return u < (p.detach().to(u.dtype) if isinstance(p, Tensor) else float(p))


def _is_probability(p: object) -> bool:
    return isinstance(p, Real) and not isinstance(p, bool) and 0 <= float(p) <= 1


def _broadcasts(shape: Sequence[int], sizes: Sequence[int]) -> bool:
    if len(shape) > len(sizes):
        return False
    return all(a in (1, b) for a, b in zip(reversed(shape), reversed(sizes)))


def randint(
    key: Key,
    shape: int | Sequence[int],
    minval: int,
    maxval: int,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """key -> integers of `shape`, uniform over [minval, maxval).

    By multiplication and shift of 64 bits an element, or of 128 where there are more than 2^32
    integers: each one's probability is right to 2^-64, or to 2^-64 of itself (`ranges.py`). 64 of the
    128 bits are those of `bits`, the rest are drawn from a key derived from this one.

    Raises ArgumentError for a key that isn't one, a negative size, a dtype that isn't integer, and for
    bounds that aren't ints, hold no integer, or hold one that `dtype` doesn't have.

    >>> from vescale.rng import key
    >>> randint(key(7), (6,), 0, 10)
    tensor([7, 0, 7, 9, 0, 8])
    """
    where = "vs.rng.randint"
    sizes = check_shape(shape, where)
    check_dtype(dtype, tuple(INTEGERS), where, "draw integers and convert")
    info = torch.iinfo(dtype)
    found = [bound for bound in (minval, maxval) if isinstance(bound, int) and not isinstance(bound, bool)]
    if len(found) < 2 or not info.min <= minval < maxval <= info.max + 1:
        raise ArgumentError(
            explain(
                f"minval={minval!r}, maxval={maxval!r}",
                where=f"{where}(minval=, maxval=)",
                rule=f"ints, and [minval, maxval) holds integers of {dtype} only, at least one",
                remedy="pass int bounds, or a wider dtype; for bounds that are tensors scale a uniform",
            )
        )
    data = consumed(key, where)
    more = None
    if maxval - minval > 2**32:
        child = derive_keys(data, torch.zeros((), dtype=torch.int64, device=data.device), MORE)
        more = draw(child, sizes, "bits64")
    drawn = scale_bits(draw(data, sizes, "bits64"), more, minval, maxval - minval - 1)
    return drawn if dtype == torch.int64 else drawn.to(dtype)


def categorical(key: Key, logits: Tensor, dim: int = -1, shape: int | Sequence[int] | None = None) -> Tensor:
    """key, unnormalised log probabilities -> int64 indices along `dim`, each with its probability.

        argmax(logits + gumbel(key, ...), dim)      ties to the first index

    `shape` is the result's: that of logits without `dim` unless given, then with more dims in front
    for more samples of each. The Gumbel numbers have the shape (more dims, *logits.shape), in float32,
    or float64 for float64 logits; so a rank draws those of its own logits. No gradient.

    Raises ArgumentError for a key that isn't one, logits that aren't floats or have no dim `dim`, of
    one entry at least, and for a shape that doesn't end in that of logits without `dim`.

    >>> from vescale.rng import key
    >>> categorical(key(7), torch.tensor([0.1, 0.2, 0.7]).log(), shape=(8,))
    tensor([0, 2, 1, 2, 2, 2, 2, 2])
    """
    where = "vs.rng.categorical"
    valid = isinstance(logits, Tensor) and logits.is_floating_point() and -logits.ndim <= dim < logits.ndim
    if not valid or not logits.shape[dim]:
        found = f"{logits.dtype} {tuple(logits.shape)}" if isinstance(logits, Tensor) else repr(logits)
        raise ArgumentError(
            explain(
                f"logits {found}, dim={dim!r}",
                where=f"{where}(logits, dim=)",
                rule="a tensor of floats, one log probability an entry of `dim`",
                remedy="pass logits (..., categories); for probabilities pass p.log()",
            )
        )
    at = dim % logits.ndim
    batch = (*logits.shape[:at], *logits.shape[at + 1 :])
    sizes = batch if shape is None else check_shape(shape, where)
    extra = sizes[: len(sizes) - len(batch)]
    if (*extra, *batch) != sizes:
        raise ArgumentError(
            explain(
                f"shape {sizes} for logits {tuple(logits.shape)}, dim={dim}",
                where=f"{where}(shape=)",
                rule=f"the shape ends in that of logits without dim, {batch}",
                remedy="put the dims for more samples in front",
            )
        )
    kind = "gumbel64" if logits.dtype == torch.float64 else "gumbel32"
    noise = draw(consumed(key, where), (*extra, *logits.shape), kind)
    return (noise + logits.detach()).argmax(len(extra) + at)


def _items(a: int | Tensor, dim: int, where: str, name: str) -> int:
    """How many things there are to order or choose from."""
    if isinstance(a, Tensor):
        if -a.ndim <= dim < a.ndim:
            return a.shape[dim]
    elif isinstance(a, int) and not isinstance(a, bool) and a >= 0 and dim in (0, -1):
        return a
    found = f"a tensor of shape {tuple(a.shape)}" if isinstance(a, Tensor) else repr(a)
    raise ArgumentError(
        explain(
            f"{found}, dim={dim!r}",
            where=f"{where}({name}, dim=)",
            rule="an int of zero or more, for the numbers below it, or a tensor with that dim",
            remedy="pass a number of things, or the things",
        )
    )


def _order(data: Tensor, n: int) -> Tensor:
    """A random order of range(n): that of n 64-bit numbers; equal ones keep their order."""
    return draw(data, (n,), "bits64").argsort(stable=True)


def permutation(key: Key, x: int | Tensor, dim: int = 0) -> Tensor:
    """key, x -> the slices of x along `dim` in a random order; an int x means range(x).

    The order is that of 64 random bits a slice, sorted (signed, stable: equal bits, which have a
    probability of n^2 / 2^65, keep their order). O(n log n) on every rank, whatever the sharding. The
    gradient is that of index_select.

    Raises ArgumentError for a key that isn't one, and for an x without that dim.

    >>> from vescale.rng import key
    >>> permutation(key(7), 6)
    tensor([0, 2, 5, 3, 4, 1])
    """
    where = "vs.rng.permutation"
    n = _items(x, dim, where, "x")
    order = _order(consumed(key, where), n)
    return x.index_select(dim, order) if isinstance(x, Tensor) else order


def choice(
    key: Key,
    a: int | Tensor,
    shape: int | Sequence[int] = (),
    replace: bool = True,
    p: Tensor | None = None,
    dim: int = 0,
) -> Tensor:
    """key, a -> a sample of the slices of `a` along `dim`; an int a means range(a).

        replace, no p       randint
        replace, p          searchsorted(cumsum(p), uniform * sum(p)), in float64
        no replace, no p    the first of a permutation
        no replace, p       the smallest of exponential / p, in order (float64; Efraimidis and
                            Spirakis 2006): the first has the probabilities p, the second those that
                            are left, and so on

    `p` are weights, not necessarily of sum 1; their values are not checked, and without replacement as
    many as are chosen must be positive. The result has `shape` in the place of `dim`. Without
    replacement, and for p, the work is O(n) or O(n log n) on every rank. The gradient is that of
    index_select.

    Raises ArgumentError for a key that isn't one, a negative size, an `a` without that dim or with
    nothing in it, a p that isn't n floats, and for more than n things without replacement.

    >>> from vescale.rng import key
    >>> choice(key(7), torch.tensor([10, 20, 30]), (4,))
    tensor([30, 10, 30, 30])
    >>> choice(key(7), 5, (3,), replace=False, p=torch.tensor([0.1, 0.1, 0.0, 0.4, 0.4]))
    tensor([3, 0, 4])
    """
    where = "vs.rng.choice"
    n = _items(a, dim, where, "a")
    sizes = check_shape(shape, where)
    count = math.prod(sizes)
    if p is not None and not (isinstance(p, Tensor) and p.is_floating_point() and p.shape == (n,)):
        raise ArgumentError(
            explain(
                f"p of {p.dtype}, shape {tuple(p.shape)}" if isinstance(p, Tensor) else f"p={p!r}",
                where=f"{where}(p=)",
                rule=f"one float for each of the {n} things",
                remedy="pass a tensor of weights",
            )
        )
    if count > (n if not replace else count * min(n, 1)):
        raise ArgumentError(
            explain(
                f"{count} of {n} things, replace={replace}",
                where=f"{where}(shape=, replace=)",
                rule="there is something to choose, and without replacement each thing once at most",
                remedy="choose fewer, or replace=True",
            )
        )
    data = consumed(key, where)
    if replace and p is None:
        index = scale_bits(draw(data, sizes, "bits64"), None, 0, n - 1) if count else _none(data, sizes)
    elif p is not None and replace:
        sums = p.detach().double().cumsum(0)
        index = torch.searchsorted(sums, draw(data, sizes, "uniform64") * sums[-1], right=True)
    elif p is not None:
        race = draw(data, (n,), "exponential64") / p.detach()
        index = race.argsort(stable=True)[:count].view(sizes)
    else:
        index = _order(data, n)[:count].view(sizes)
    if not isinstance(a, Tensor):
        return index
    at = dim % a.ndim
    chosen = a.index_select(at, index.reshape(-1))
    return chosen.view(*a.shape[:at], *sizes, *a.shape[at + 1 :])


def _none(data: Tensor, sizes: tuple[int, ...]) -> Tensor:
    return torch.empty(sizes, dtype=torch.int64, device=data.device)


def dropout(key: Key, x: Tensor, p: float = 0.5) -> Tensor:
    """key, x -> x with each element zero with probability p, and 1/(1 - p) times itself otherwise.

        keep = uniform(key, x.shape) >= p       float32
        where(keep, x * (1 / (1 - p)), 0)       1 / (1 - p) in float64, the product in x's dtype

    The gradient of x is where(keep, 1 / (1 - p), 0) times that of the result. An element of x that is
    dropped doesn't matter: infinities and NaNs become zeros as well.

    Raises ArgumentError for a key that isn't one, an x that isn't a tensor of floats, and for a p
    outside [0, 1].

    >>> from vescale.rng import key
    >>> dropout(key(7), torch.ones(4), 0.2)
    tensor([1.2500, 1.2500, 0.0000, 0.0000])
    """
    where = "vs.rng.dropout"
    if not (isinstance(x, Tensor) and x.dtype in FLOATS):
        found = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else repr(x)
        raise ArgumentError(explain(found, where=f"{where}(x)", rule="a tensor of floats"))
    if not _is_probability(p):
        raise ArgumentError(
            explain(
                repr(p),
                where=f"{where}(p=)",
                rule="the probability of a zero, in [0, 1]",
                remedy="pass a number",
            )
        )
    keep = draw(consumed(key, where), tuple(x.shape), "uniform32") >= float(p)
    if p == 1:  # 1 / (1 - p) is infinite, and no element is kept (a uniform number is less than 1)
        return torch.where(keep, x, 0.0)
    return torch.where(keep, x * (1 / (1 - float(p))), 0.0)
