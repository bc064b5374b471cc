"""Checkpoints: any tree of tensors, saved here and loaded on another mesh, in other layouts.

    save(tree, path), async_save(tree, path)     whole on disk, or not there at all
    load(tree, path) -> tree                     the values, in the layouts of the tree that is given

Each rank writes its own pieces and reads what its own pieces need; no rank sends a tensor. In reading
order: `files` is what is on disk, `storage` gives it to torch's distributed checkpoint (DCP), which decides
what is read from where, `contents` says what a leaf of a tree is, `together` makes the ranks agree,
`directories` makes a save atomic, `saving` and `loading` are the two calls. `safetensors_files` is the format
of other people's models, read by `safetensors_load` and written by `safetensors_save`.
"""

from .directories import latest
from .loading import abstract, load
from .safetensors_load import load_safetensors
from .safetensors_save import save_safetensors
from .saving import async_save, save
from .storage import Reader

__all__ = [
    "save",
    "async_save",
    "load",
    "abstract",
    "latest",
    "Reader",
    "load_safetensors",
    "save_safetensors",
]
