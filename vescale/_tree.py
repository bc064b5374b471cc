"""All pytree code: flatten, paths, maps and prefixes, on optree.

A tree is a leaf or a dict, list, tuple, namedtuple or registered dataclass (`register`) of trees.
None is a tree without leaves. Order of insertion into a dict does not matter: keys are sorted.

>>> paths, leaves, spec = flatten_with_path({"b": [10, None, 20], "a": {"fc.weight": 30}})
>>> list(zip(paths, leaves))
[('a.fc.weight', 30), ('b.0', 10), ('b.2', 20)]
>>> unflatten(spec, leaves)
{'b': [10, None, 20], 'a': {'fc.weight': 30}}
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import optree

from ._errors import ArgumentError, explain

# Our registrations are invisible to other users of optree, and theirs to us.
NAMESPACE = "vescale"

TreeSpec = optree.PyTreeSpec
IsLeaf = Callable[[Any], bool] | None
C = TypeVar("C", bound=type)


def register(cls: C) -> C:
    """Class decorator: a dataclass becomes a tree node whose children are its fields, by name.

    >>> @register
    ... @dataclasses.dataclass(frozen=True)
    ... class Pair:
    ...     left: object
    ...     right: object
    >>> flatten_with_path({"p": Pair(1, [2])})[0]
    ['p.left', 'p.right.0']
    """
    names = tuple(field.name for field in dataclasses.fields(cls))

    def children(node: Any) -> tuple[tuple, None, tuple[str, ...]]:
        return tuple(getattr(node, name) for name in names), None, names

    optree.register_pytree_node(
        cls,
        children,
        lambda _, values: cls(*values),
        path_entry_type=optree.GetAttrEntry,
        namespace=NAMESPACE,
    )
    return cls


def flatten(tree: Any, is_leaf: IsLeaf = None) -> tuple[list, TreeSpec]:
    """The leaves in order, and the structure that is left without them (hashable)."""
    return optree.tree_flatten(tree, is_leaf, namespace=NAMESPACE)


def unflatten(spec: TreeSpec, leaves: Iterable) -> Any:
    """The inverse of `flatten`."""
    return optree.tree_unflatten(spec, leaves)


def leaves(tree: Any, is_leaf: IsLeaf = None) -> list:
    """The leaves in order."""
    return optree.tree_leaves(tree, is_leaf, namespace=NAMESPACE)


def flatten_with_path(tree: Any, is_leaf: IsLeaf = None) -> tuple[list[str], list, TreeSpec]:
    """Dotted paths, leaves and structure; the path of a tree that is a leaf is the empty string.

    Keys keep their own dots, so a module's qualified names and nested dicts read the same; fields
    of namedtuples and dataclasses go by name, items of sequences by number.
    """
    accessors, values, spec = optree.tree_flatten_with_accessor(tree, is_leaf, namespace=NAMESPACE)
    return [".".join(_word(entry) for entry in path) for path in accessors], values, spec


def _word(entry: optree.PyTreeEntry) -> str:
    if isinstance(entry, optree.NamedTupleEntry | optree.StructSequenceEntry):
        return entry.field
    return str(entry.entry)


def paths(tree: Any, is_leaf: IsLeaf = None) -> list[str]:
    """The dotted path of each leaf, in the order of `leaves`."""
    return flatten_with_path(tree, is_leaf)[0]


def tree_map(fn: Callable, tree: Any, *rest: Any, is_leaf: IsLeaf = None) -> Any:
    """fn of each leaf, and of the subtrees of `rest` at the same place.

    >>> tree_map(lambda x, y: x + y, {"a": 1, "b": (2, None)}, {"b": (20, None), "a": 10})
    {'a': 11, 'b': (22, None)}
    """
    return optree.tree_map(fn, tree, *rest, is_leaf=is_leaf, namespace=NAMESPACE)


def broadcast_prefix(prefix: Any, tree: Any, is_leaf: IsLeaf = None, where: str = "the tree") -> list:
    """One value a leaf of `tree`, from a tree that may stop earlier: its leaves stand for subtrees.

    `is_leaf` is asked about the prefix too, so that a tuple can be a value. A prefix that doesn't
    fit raises an ArgumentError that lists every place.

    >>> broadcast_prefix({"a": "x", "b": ["y", "z"]}, {"a": (1, 2), "b": [3, {"k": 4}]})
    ['x', 'x', 'y', 'z']
    """
    problems = optree.prefix_errors(prefix, tree, is_leaf, namespace=NAMESPACE)
    if problems:
        raise ArgumentError(
            explain(
                "; ".join(" ".join(str(problem("prefix")).split()) for problem in problems),
                where=where,
                rule="a prefix has the tree's structure, or stops at a leaf that stands for a subtree",
                remedy="give one value for the whole subtree, or one for each of its leaves",
            )
        )
    return optree.broadcast_prefix(prefix, tree, is_leaf, namespace=NAMESPACE)


def leaves_like(spec: TreeSpec, tree: Any, where: str = "the tree") -> list:
    """The subtrees of `tree` at the leaves of `spec`, in order; another structure is an error."""
    try:
        return spec.flatten_up_to(tree)
    except ValueError:
        pass
    try:  # again, for a message without the values of tensors
        spec.flatten_up_to(tree_map(lambda leaf: type(leaf).__name__, tree))
    except ValueError as error:
        raise ArgumentError(
            explain(
                " ".join(str(error).split()),
                where=where,
                rule="the structure of the tree it goes with",
            )
        ) from None
    raise AssertionError("a structure that fits only without its values")
