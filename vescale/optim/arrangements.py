"""Arrangements: which matrices the parameters of an optimizer are, by their dims or as `matrix_dims` says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .. import _tree
from .._errors import ArgumentError, explain, nearest
from ..spmd.matrices import Matrices


def arrangements(texts: Mapping[str, str], params: Any, optimizer: str) -> tuple[list[str], list[Matrices]]:
    """The paths of parameters, and how each is a batch of matrices; `optimizer` names it in errors.

    Raises ArgumentError for parameters that are no matrices, and for texts that fit none of them.
    """
    paths, leaves, _ = _tree.flatten_with_path(params)
    unused, found = dict(texts), []
    for path, leaf in zip(paths, leaves, strict=True):
        matching = [regex for regex in texts if re.fullmatch(regex, path)]
        for regex in matching:
            unused.pop(regex, None)
        how = Matrices.of(texts[matching[0]], path) if matching else Matrices.default(leaf.dim())
        if how is None:
            few = leaf.dim() < 2
            raise ArgumentError(
                explain(
                    f"{path} of shape {tuple(leaf.shape)}",
                    where=optimizer,
                    rule="its parameters are matrices, or batches of them",
                    remedy="give this one to another optimizer, by its label: vs.optim.partition"
                    if few
                    else f"say which dims are rows and columns: matrix_dims={{{re.escape(path)!r}: "
                    f"'o i y x -> o (i y x)'}}",
                )
            )
        if not leaf.is_floating_point():
            rule, remedy = "its parameters are real floating-point tensors", "leave it to another optimizer"
            raise ArgumentError(explain(f"{path} of {leaf.dtype}", where=optimizer, rule=rule, remedy=remedy))
        how.sizes(leaf.shape, path)
        found.append(how)
    if unused:
        regex = next(iter(unused))
        plain = re.sub(r"\\d\+|\.\*|[\\^$()?+*\[\]]", "", regex)
        raise ArgumentError(
            explain(
                f"matrix_dims[{regex!r}] matches no parameter",
                where=optimizer,
                rule="a key is a regex that fullmatches the dotted path of at least one parameter",
                remedy=nearest(plain, paths),
            )
        )
    return paths, found


def checked_texts(matrix_dims: Any, optimizer: str) -> dict[str, str]:
    """`matrix_dims` as a dict. Raises ArgumentError for what is no mapping of regexes to texts."""
    if not isinstance(matrix_dims, Mapping | None):
        rule, remedy = "a mapping of regexes to texts", "matrix_dims={r'.*conv': 'o i y x -> o (i y x)'}"
        raise ArgumentError(
            explain(f"matrix_dims={matrix_dims!r}", where=optimizer, rule=rule, remedy=remedy)
        )
    for regex in matrix_dims or {}:
        try:
            re.compile(regex)
        except (re.error, TypeError) as error:
            where = f"{optimizer}, matrix_dims"
            raise ArgumentError(
                explain(f"{regex!r}: {error}", where=where, rule="a key is a regular expression")
            ) from None
    return dict(matrix_dims or {})
