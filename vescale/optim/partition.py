"""`partition`: each parameter its optimizer, by label; `freeze` for those that have none."""

from collections.abc import Hashable, Mapping
from typing import Any

from .. import _tree
from .._errors import ArgumentError, explain
from .gradients import entries
from .labels import Labels, labels_of
from .optimizer import Optimizer, Updates, check_optimizer


def freeze() -> Optimizer:
    """The optimizer of parameters that stay as they are: it has no state and leaves their bits alone.

    >>> import torch
    >>> freeze().update({"w": torch.ones(2)}, {}, {"w": torch.ones(2)})
    (Updates(keep=1.0, delta={'w': None}, rate=1.0), {})
    """

    def update(grads: Any, state: dict[str, Any], params: Any) -> tuple[Updates, dict[str, Any]]:
        return Updates(1.0, _tree.tree_map(lambda _: None, params)), state

    return Optimizer(lambda params: {}, update)


def partition(labels: Labels, optimizers: Mapping[Any, Optimizer | None]) -> Optimizer:
    """Optimizers by label: each parameter is updated by the one of its label.

        partition({r".*bias": "vectors", ".*": "matrices"}, {"vectors": adamw(1e-3), "matrices": sgd(0.1)})

    `labels` is a function of path and parameter, a mapping of regexes over paths, or a tree: see
    `vs.optim.labels`. None in the place of an optimizer is `freeze()`. Transforms may be given too, to
    change gradients or updates by label.

    An optimizer sees its parameters as one flat dict by dotted path, and so does its state:
    {label: state}, of the labels in use.

    Raises ArgumentError for a label without optimizer, a regex that matches nothing, a parameter without
    label: at `init`, with their paths.

    >>> import torch
    >>> from vescale.optim import apply_updates, sgd
    >>> opt = partition(lambda path, p: path == "head", {True: sgd(0.1), False: None})
    >>> params = {"body": torch.ones(1), "head": torch.ones(1)}
    >>> updates, _ = opt.update(params, opt.init(params), params)
    >>> apply_updates(params, updates)
    {'body': tensor([1.]), 'head': tensor([0.9000])}
    """
    where = "vs.optim.partition"
    if not isinstance(optimizers, Mapping):
        rule = "a mapping, from label to optimizer or None"
        raise ArgumentError(explain(f"optimizers={optimizers!r}", where=where, rule=rule))
    chosen = {label: freeze() if opt is None else opt for label, opt in optimizers.items()}
    for label, opt in chosen.items():
        check_optimizer(opt, f"{where}, label {label!r}")

    def groups(params: Any) -> dict[Hashable, list[int]]:
        """The numbers of the parameters of each label, in the order of the optimizers."""
        found = labels_of(labels, params, where)
        lost = [
            (p, label)
            for p, label in zip(_tree.paths(params), found)
            if not isinstance(label, Hashable) or label not in chosen
        ]
        if lost:
            raise ArgumentError(
                explain(
                    "; ".join(f"{path!r} has the label {label!r}" for path, label in lost),
                    where=where,
                    rule=f"there are optimizers for {', '.join(map(repr, chosen))}",
                    remedy="add an optimizer of that label, None to freeze",
                )
            )
        numbers = {label: [n for n, own in enumerate(found) if own == label] for label in chosen}
        return {label: members for label, members in numbers.items() if members}

    def init(params: Any) -> dict[Hashable, Any]:
        paths, leaves, _ = _tree.flatten_with_path(params)
        if len(set(paths)) < len(paths):
            twice = sorted({path for path in paths if paths.count(path) > 1})
            raise ArgumentError(
                explain(
                    f"two parameters at {', '.join(twice)}",
                    where=where,
                    rule="a path is that of one parameter",
                    remedy="give one of them another key: a key 'a.b' reads like b in a",
                )
            )
        return {
            label: chosen[label].init({paths[n]: leaves[n] for n in members})
            for label, members in groups(params).items()
        }

    def update(grads: Any, state: dict[Hashable, Any], params: Any) -> tuple[Any, dict[Hashable, Any]]:
        paths, leaves, spec = _tree.flatten_with_path(params)
        behind = isinstance(grads, Updates)
        given = grads.by_leaf(params) if behind else _tree.leaves_like(spec, grads, where="grads")
        members_of = groups(params)
        states = dict(zip(members_of, entries(state, tuple(members_of), where), strict=True))
        results: list[Any] = [None] * len(leaves)  # (keep, delta, rate), or gradients
        new, made = {}, behind
        for label, members in members_of.items():
            own = {paths[n]: leaves[n] for n in members}
            part = {paths[n]: given[n] for n in members}
            taken = _as_updates(part) if behind else part
            found, new[label] = chosen[label].update(taken, states[label], own)
            made = made or isinstance(found, Updates)
            order = sorted(members, key=lambda n: paths[n])  # the leaves of a dict
            if isinstance(found, Updates):
                each: list[Any] = found.by_leaf(own)
            else:
                each = [(1.0, found[paths[n]], 1.0) for n in order]
            for number, result in zip(order, each, strict=True):
                results[number] = result
        keeps, deltas, rates = ([row[column] for row in results] for column in range(3))
        tree = lambda values: _tree.unflatten(spec, values)  # noqa: E731
        return Updates(tree(keeps), tree(deltas), tree(rates)) if made else tree(deltas), new

    return Optimizer(init, update)


def _as_updates(rows: Mapping[str, Any]) -> Updates:
    """(keep, delta, rate) by path, as an `Updates`."""
    return Updates(*({path: row[column] for path, row in rows.items()} for column in range(3)))
