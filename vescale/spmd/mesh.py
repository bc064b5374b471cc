"""Meshes: named axes over ranks, real (one process each) or simulated (all in this process).

Everything that is decided speaks of an `AbstractMesh`; a `Mesh` adds who and where: the ranks that this
process hosts, their device, and how they talk.
"""

from __future__ import annotations

import atexit
import math
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import lru_cache
from itertools import combinations
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import _compat
from .._errors import ArgumentError, explain
from . import watch, world
from .layout import AbstractMesh


def make_mesh(
    shape: Mapping[str, int],
    *,
    backend: str | None = None,
    device: torch.device | str | None = None,
) -> Mesh:
    """A mesh of named axes, outermost first: `{"dp": 2, "tp": 4}` has 8 ranks, numbered row-major.

        make_mesh : {axis: size} -> Mesh

    `backend=None` means "processes" when torch.distributed is initialised or torchrun's environment
    is present (then the process group is initialised here: nccl on cuda, gloo on cpu, and LOCAL_RANK picks
    the device), else "simulated": every rank lives in this process. The first ranks of the world
    make up the mesh; the others get a mesh with no local ranks. Process groups are made here, once, by
    every process of the world: those outside the mesh make this call too, and take part in nothing else.

    Raises ArgumentError for a shape that isn't one, and for a mesh larger than the world.

    >>> mesh = make_mesh({"dp": 2, "tp": 2}, backend="simulated")
    >>> mesh
    Mesh(dp=2 x tp=2, simulated on cpu)
    >>> mesh.local_ranks
    (0, 1, 2, 3)
    """
    abstract = _abstract(shape)
    if backend is None:
        backend = "processes" if world.size() else "simulated"
    if backend == "simulated":
        return Mesh(abstract, torch.device(device or "cpu"), range(abstract.size), simulated=True)
    if backend != "processes":
        raise ArgumentError(
            explain(
                f"backend={backend!r}",
                where="make_mesh",
                rule='the backend is "processes" or "simulated"',
                remedy="leave it out to follow the environment",
            )
        )
    available = world.size()
    if not available:
        raise ArgumentError(
            explain(
                'backend="processes", no process group, and not under torchrun',
                where="make_mesh",
                rule="real ranks need a process each",
                remedy="start the script with torchrun --nproc-per-node N, or leave backend out",
            )
        )
    if abstract.size > available:
        raise ArgumentError(
            explain(
                f"a mesh of {abstract.size} ranks ({abstract}) in a world of {available}",
                where="make_mesh",
                rule="a mesh is no larger than the world",
                remedy=f"start {abstract.size} processes, or make the mesh smaller",
            )
        )
    where = world.device(device) if dist.is_initialized() else world.start(device)
    return Mesh(abstract, where, range(abstract.size))


class Mesh:
    """Ranks with named axes, and how this process takes part in them.

    `local_ranks` are the ranks that live here: all of them when simulated, one in a process, none in
    a process outside the mesh. Ranks are indices into the mesh, row-major; `world_ranks` says which
    ranks of torch.distributed they are.
    """

    abstract: AbstractMesh
    device: torch.device
    backend: str
    local_ranks: tuple[int, ...]
    world_ranks: tuple[int, ...]

    def __init__(
        self,
        abstract: AbstractMesh,
        device: torch.device,
        world_ranks: range | tuple[int, ...],
        *,
        simulated: bool = False,
        parent: Mesh | None = None,
        groups: Mapping[tuple[str, ...], dist.ProcessGroup] | None = None,
    ) -> None:
        self.abstract, self.device = abstract, device
        self.backend = "simulated" if simulated else "processes"
        self.world_ranks = tuple(world_ranks)
        self._parent = parent
        self._groups = dict(groups or {})
        self._created: list[dist.ProcessGroup] = []
        self._device_mesh: DeviceMesh | None = None
        self._parts: dict[tuple[str, ...], Mesh] = {}
        if simulated:
            self.local_ranks = tuple(range(abstract.size))
        else:
            me = dist.get_rank()
            self.local_ranks = (self.world_ranks.index(me),) if me in self.world_ranks else ()
            if parent is None:
                _open.add(self)
                self._make_groups()
                if self.local_ranks:
                    watch.start(self.world_ranks)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The axes, outermost first."""
        return self.abstract.axis_names

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis."""
        return self.abstract.shape

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.abstract.size

    @property
    def is_simulated(self) -> bool:
        """Whether all ranks live in this process."""
        return self.backend == "simulated"

    @property
    def reduction(self) -> str:
        """How reductions add up unless told otherwise: "ordered" (one fixed tree) or "native"."""
        return "native" if self.device.type == "cuda" and not self.is_simulated else "ordered"

    @property
    def rank(self) -> int:
        """This process's index in the mesh."""
        if self.is_simulated:
            raise ArgumentError(
                explain(
                    "rank of a simulated mesh",
                    rule=f"this process hosts all {self.size} ranks",
                    remedy="use mesh.local_ranks",
                )
            )
        if not self.local_ranks:
            raise ArgumentError(
                explain(
                    f"process {dist.get_rank()} has no rank in {self}",
                    rule=f"the mesh is made of the processes {_brief(self.world_ranks)}",
                    remedy="ask mesh.local_ranks first",
                )
            )
        return self.local_ranks[0]

    def coordinate(self, axis: str) -> int:
        """This process's index on `axis`."""
        self.abstract.check_axis(axis, where="mesh.coordinate")
        return self.abstract.coordinate(self.rank)[axis]

    def __getitem__(self, axes: str | tuple[str, ...]) -> Mesh:
        """The sub-mesh of these axes that this process is in (rank 0's, when simulated); one object each."""
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        for axis in axes:
            self.abstract.check_axis(axis, where=f"mesh[{axes}]")
        kept = tuple(axis for axis in self.axis_names if axis in axes)
        sub = AbstractMesh(kept, tuple(self.abstract.axis_size(axis) for axis in kept))
        here = self.local_ranks[0] if self.local_ranks else 0
        if kept not in self._parts:
            members = group_ranks(self.abstract, kept, here)
            self._parts[kept] = Mesh(
                sub,
                self.device,
                tuple(self.world_ranks[rank] for rank in members),
                simulated=self.is_simulated,
                parent=self,
            )
        return self._parts[kept]

    def group(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """The process group of this rank over `axes`, flattened row-major in the order of the mesh."""
        if self._parent is not None:
            return self._parent.group(axes)
        axes = tuple(a for a in self.axis_names if a in axes and self.abstract.axis_size(a) > 1)
        group = self._groups.get(axes)
        if group is None:
            assert not axes, (axes, self)
            # One rank alone: only `device_mesh` asks for it, and no other rank takes part.
            alone: Any = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            group = self._groups[axes] = alone
            self._created.append(group)
        return group

    def late_group(self, axes: tuple[str, ...]) -> Callable[[], dist.ProcessGroup]:
        """A function that gives `group(axes)`: what a program keeps, which may outlive the mesh.

        A gloo group that is still referenced when the interpreter ends aborts the process
        (torch 2.13: "terminate called without an active exception").
        """
        if self._parent is not None:
            return self._parent.late_group(axes)
        self.group(axes)
        groups = self._groups
        key = tuple(a for a in self.axis_names if a in axes and self.abstract.axis_size(a) > 1)

        def lookup() -> dist.ProcessGroup:
            try:
                return groups[key]
            except KeyError:
                raise ArgumentError(
                    explain(
                        f"a collective over {', '.join(key)} on a closed mesh",
                        rule="a mesh stays open while programs run on it",
                        remedy="call mesh.close() last",
                    )
                ) from None

        return lookup

    @property
    def store(self) -> Any:
        """The key-value store of the process group, None when simulated."""
        return None if self.is_simulated else _compat.default_store()

    @property
    def device_mesh(self) -> DeviceMesh:
        """The same mesh as torch's DeviceMesh, over the same process groups."""
        if self.is_simulated:
            raise ArgumentError(
                explain(
                    "device_mesh of a simulated mesh",
                    rule="torch's DeviceMesh is made of real processes",
                    remedy="start under torchrun",
                )
            )
        if self._device_mesh is None:
            groups = [self.group((axis,)) for axis in self.axis_names]
            self._device_mesh = DeviceMesh.from_group(
                groups if len(groups) > 1 else groups[0],
                self.device.type,
                torch.tensor(self.world_ranks, dtype=torch.int).view(self.shape),
                mesh_dim_names=self.axis_names,
            )
        return self._device_mesh

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh) -> Mesh:
        """The mesh of a DeviceMesh whose dims are named and whose ranks ascend.

        Groups over one axis are the DeviceMesh's own. Those over several are made here, so every
        process of the world makes this call.
        """
        names = device_mesh.mesh_dim_names
        if not names:
            raise ArgumentError(
                explain(
                    f"{device_mesh} without names",
                    where="Mesh.from_device_mesh",
                    rule="the axes of a mesh are named",
                    remedy="pass mesh_dim_names to init_device_mesh",
                )
            )
        ranks = tuple(device_mesh.mesh.flatten().tolist())
        if list(ranks) != sorted(ranks):
            raise ArgumentError(
                explain(
                    f"ranks {_brief(ranks)} of {device_mesh}",
                    where="Mesh.from_device_mesh",
                    rule="ranks ascend, row-major",
                    remedy="order the axes so that they do",
                )
            )
        if len(names) > 1 and len(ranks) < dist.get_world_size():
            raise ArgumentError(
                explain(
                    f"{device_mesh} in a world of {dist.get_world_size()}",
                    where="Mesh.from_device_mesh",
                    rule="groups over several axes are made by the whole world",
                    remedy="convert the mesh that it is a part of, and take mesh[axes] of that",
                )
            )
        abstract = AbstractMesh(tuple(names), tuple(device_mesh.mesh.shape))
        groups = {(name,): device_mesh.get_group(name) for name in names}
        return cls(abstract, world.device(device_mesh.device_type), ranks, groups=groups)

    def close(self) -> None:
        """End what was started here: the mesh's process groups, and with the last mesh the world.

        A world that somebody else has initialised is left alone.
        """
        created, self._created, self._device_mesh = self._created, [], None
        self._groups.clear()
        _open.discard(self)
        if not _open:
            watch.stop("it closed its mesh")
        if dist.is_initialized():
            for group in created:
                dist.destroy_process_group(group)
            if not _open:
                world.end()

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        """Itself: a copy of what lives on a mesh lives on the same one (torch's async_save makes such)."""
        return self

    def __repr__(self) -> str:
        axes = " x ".join(f"{a}={n}" for a, n in zip(self.axis_names, self.shape, strict=True))
        return f"Mesh({axes}, {self.backend} on {self.device})"

    def _make_groups(self) -> None:
        """One group for every set of axes, now: later a rank might need one that its peers don't.

        All groups along each set are made by all processes, in one order. Letting the members make
        theirs alone (use_local_synchronization) hangs in torch 2.13 when they have made different numbers of
        groups before, because that number is part of the name under which they meet.
        """
        wide = [axis for axis in self.axis_names if self.abstract.axis_size(axis) > 1]
        everyone = list(range(dist.get_world_size()))
        patience = timedelta(seconds=world.timeout())  # torch's default is another one than the world's
        for count in range(1, len(wide) + 1):
            for axes in combinations(wide, count):
                if axes in self._groups:
                    continue
                for rank in range(self.size):
                    members = group_ranks(self.abstract, axes, rank)
                    if members[0] != rank:
                        continue
                    ranks = [self.world_ranks[member] for member in members]
                    whole = ranks == everyone
                    group: Any = dist.group.WORLD if whole else dist.new_group(ranks, timeout=patience)
                    if set(members) & set(self.local_ranks):
                        self._groups[axes] = group
                        self._created += [] if whole else [group]


_open: WeakSet[Mesh] = WeakSet()  # meshes of processes


@atexit.register
def _close_all() -> None:
    """Whoever forgets `close` gets a clean exit all the same; see `Mesh.late_group`."""
    watch.stop()
    for mesh in list(_open):
        mesh.close()
    world.end()


@lru_cache(maxsize=65536)
def group_ranks(mesh: AbstractMesh, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
    """The ranks that differ from `rank` at most along `axes`, row-major in the order of the mesh.

    >>> group_ranks(AbstractMesh(("dp", "tp"), (2, 4)), ("dp",), 5)
    (1, 5)
    """
    strides = dict(zip(mesh.axis_names, _strides(mesh.shape), strict=True))
    coordinate = mesh.coordinate(rank)
    ranks = [rank - sum(coordinate[axis] * strides[axis] for axis in axes)]
    for axis in mesh.axis_names:
        if axis in axes:
            ranks = [r + i * strides[axis] for r in ranks for i in range(mesh.axis_size(axis))]
    return tuple(ranks)


def group_index(mesh: AbstractMesh, axes: tuple[str, ...], rank: int) -> int:
    """The place of `rank` in `group_ranks(mesh, axes, rank)`, without listing them.

    >>> group_index(AbstractMesh(("dp", "tp"), (2, 4)), ("dp",), 5)
    1
    """
    coordinate, place = mesh.coordinate(rank), 0
    for axis in mesh.axis_names:
        if axis in axes:
            place = place * mesh.axis_size(axis) + coordinate[axis]
    return place


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[index + 1 :]) for index in range(len(shape)))


def _abstract(shape: Mapping[str, int]) -> AbstractMesh:
    if not isinstance(shape, Mapping):
        raise ArgumentError(
            explain(
                repr(shape),
                where="make_mesh",
                rule="the shape is a dict of axis names and sizes: placements speak of axes by name",
                remedy='for example make_mesh({"dp": 2, "tp": 4})',
            )
        )
    for axis, size in shape.items():
        # Axis names are keywords of P(...), and so Python identifiers.
        if not isinstance(axis, str) or not axis.isidentifier() or type(size) is not int or size < 1:
            raise ArgumentError(
                explain(
                    f"{axis!r}: {size!r}",
                    where="make_mesh",
                    rule="an axis is an identifier with a positive size",
                    remedy='for example make_mesh({"dp": 2, "tp": 4})',
                )
            )
    if not shape:
        raise ArgumentError(
            explain(
                "no axes",
                where="make_mesh",
                rule="a mesh has at least one axis",
                remedy='for one rank, make_mesh({"dp": 1})',
            )
        )
    return AbstractMesh(tuple(shape), tuple(shape.values()))


def _brief(ranks: tuple[int, ...]) -> str:
    return str(ranks) if len(ranks) <= 8 else f"({ranks[0]}, {ranks[1]}, .., {ranks[-1]})"
