"""Mirrors: which values are state of a parameter, and which results take the place of an argument."""

from __future__ import annotations

from typing import Any

from .. import _tree
from .layout import Layout


def owner_of(path: str, parameters: dict[str, Any]) -> Any:
    """The parameter whose path ends this path, at a dot."""
    while path:
        if path in parameters:
            return parameters[path]
        _, _, path = path.partition(".")
    return None


def mirrors(
    spec: _tree.TreeSpec,
    shapes: list[Any],
    in_spec: _tree.TreeSpec,
    in_shapes: list[Any],
    layouts: list[Layout | None],
) -> list[tuple[int, list[Layout | None]]]:
    """(start, layouts) of each subtree of the result that has the structure and shapes of an argument's."""
    subtrees: dict[_tree.TreeSpec, list[tuple[list[Any], list[Layout | None]]]] = {}

    def collect(node: _tree.TreeSpec, start: int) -> None:
        if node.is_leaf() or node.num_leaves == 0:
            return
        stop = start + node.num_leaves
        subtrees.setdefault(node, []).append((in_shapes[start:stop], layouts[start:stop]))
        for child in node.children():
            collect(child, start)
            start += child.num_leaves

    start = 0
    for child in in_spec.children():
        collect(child, start)
        start += child.num_leaves
    found: list[tuple[int, list[Layout | None]]] = []

    def look(node: _tree.TreeSpec, start: int) -> None:
        if node.is_leaf() or node.num_leaves == 0:
            return
        for there, their_layouts in subtrees.get(node, ()):
            if there == shapes[start : start + node.num_leaves]:
                found.append((start, their_layouts))
                return
        for child in node.children():
            look(child, start)
            start += child.num_leaves

    look(spec, 0)
    return found


__all__ = ["mirrors", "owner_of"]
