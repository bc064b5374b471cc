"""Labels of parameters: by a tree, by a function, or by regular expressions over their paths."""

import re
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from .. import _tree
from .._errors import ArgumentError, explain
from ..spmd.plan import with_near_misses

Labels = Callable[[str, torch.Tensor], Hashable] | Mapping[str, Any] | Any
Mask = Callable[[str, torch.Tensor], bool] | str | Any


def labels_of(labels: Labels, params: Any, where: str) -> list[Any]:
    """The label of each parameter, in the order of the leaves.

    `labels` is a function of path and parameter; or a mapping of regexes, of which the first that
    fullmatches a dotted path counts; or a tree like the parameters, or a prefix of it. A mapping whose
    keys are those of the parameters is a tree.

    Raises ArgumentError for a regex that matches nothing and for parameters that none matches.

    >>> params = {"fc.weight": torch.ones(2, 2), "fc.bias": torch.ones(2)}
    >>> labels_of({r".*\\.bias": "vector", ".*": "matrix"}, params, "here")
    ['vector', 'matrix']
    >>> labels_of(lambda path, p: p.dim(), params, "here")
    [1, 2]
    """
    paths, leaves, _ = _tree.flatten_with_path(params)
    if callable(labels):
        return [labels(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
    if isinstance(labels, Mapping) and not (isinstance(params, Mapping) and set(labels) == set(params)):
        return _by_regex(labels, paths, where)
    return _tree.broadcast_prefix(labels, params, where=where)


def mask_of(mask: Mask, params: Any, where: str) -> list[bool]:
    """Whether each parameter is meant: all for None, those that a regex fullmatches, or as `labels_of`."""
    if mask is None:
        return [True] * len(_tree.leaves(params))
    if isinstance(mask, str):
        paths = _tree.paths(params)
        matches = _matches([mask], paths, where)[mask]
        return [path in matches for path in paths]
    return list(map(bool, labels_of(mask, params, where)))


def _by_regex(rules: Mapping[str, Any], paths: list[str], where: str) -> list[Any]:
    matches = _matches(list(rules), paths, where)
    missing = [path for path in paths if not any(path in matches[rule] for rule in rules)]
    if missing:
        raise ArgumentError(
            explain(
                f"parameters that no regex matches: {', '.join(missing)}",
                where=where,
                rule="each parameter has a label: that of the first regex that fullmatches its path",
                remedy='end with a regex that matches the rest, ".*"',
            )
        )
    return [next(rules[rule] for rule in rules if path in matches[rule]) for path in paths]


def _matches(rules: list[str], paths: list[str], where: str) -> dict[str, set[str]]:
    """The paths that each regex fullmatches."""
    found = {}
    for rule in rules:
        try:
            found[rule] = {path for path in paths if re.fullmatch(rule, path)}
        except (re.error, TypeError) as error:
            raise ArgumentError(
                explain(f"{rule!r}: {error}", where=where, rule="a regular expression")
            ) from None
    unused = [rule for rule in rules if not found[rule]]
    if unused and paths:
        raise ArgumentError(
            explain(
                f"regexes that match no parameter: {with_near_misses(unused, paths)}",
                where=where,
                rule="a regex fullmatches the dotted path of at least one parameter",
                remedy="mend the regex, or drop it",
            )
        )
    return found
