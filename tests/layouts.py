"""The strategies of `vs.testing.strategies`, with meshes that have no ranks."""

from functools import partial

from vescale.testing.strategies import AXES, LENGTHS, layouts, meshes as any_meshes, shapes

meshes = partial(any_meshes, abstract=True)

__all__ = ["AXES", "LENGTHS", "layouts", "meshes", "shapes"]
