"""Ready-made plans: transformers by the names of their parameters, on a mesh of dp and tp.

Each function returns an ordinary `Plan`, for `fn(params, batch, ...)` with parameters by qualified name and
the batch's rows over dp. A mesh that lacks one of the axes gets the plan of the other. More rules, or others
for some names, are composed with `|`. On tp, matrices are split as in Megatron-LM (Shoeybi et al. 2019): a
block communicates after attention and after its MLP.

>>> import torch
>>> from vescale.spmd.mesh import make_mesh
>>> plan = llama(make_mesh({"dp": 2, "tp": 2}, backend="simulated"))
>>> up, down = torch.ones(8, 4), torch.ones(4, 8)
>>> print(plan.resolve({"mlp.up_proj.weight": up, "mlp.down_proj.weight": down}))
parameter             shape   at rest         in use  on rank 0    rule
mlp.down_proj.weight  (4, 8)  P(tp=Shard(1))  same    (4, 4) 64 B  .*\\.(o|down)_proj\\.weight
mlp.up_proj.weight    (8, 4)  P(tp=Shard(0))  same    (4, 4) 64 B  .*\\.(q|k|v|gate|up)_proj\\.(weight|bias)
"""

from __future__ import annotations

from typing import Literal

from .._errors import PlanError, explain
from .mesh import Mesh
from .placements import InterleavedShard, P, Placement, Shard
from .plan import Plan


def llama(mesh: Mesh, *, batch: str = "batch", sequence: bool = False, vocabulary: bool = False) -> Plan:
    """Llama and what has its names: Mistral, Qwen, Gemma; `{q,k,v,o,gate,up,down}_proj`, `embed_tokens`.

    `batch` names the argument whose tensors have their rows over dp. `sequence`: between the matrices,
    where norms and residuals are, activations (batch, sequence, width) are split along the sequence over
    tp (Korthikanti et al. 2022). `vocabulary`: the embedding and the head are split by rows over tp, and
    the loss is taken of logits that stay so.

    tp divides the numbers of heads, those of keys too; where it doesn't, compose with rules that keep k and
    v whole.
    """
    params = {
        r".*\.(q|k|v|gate|up)_proj\.(weight|bias)": _on(mesh, tp=Shard(0)),
        r".*\.(o|down)_proj\.weight": _on(mesh, tp=Shard(1)),
    }
    activations = {}
    if vocabulary:
        params[r"(.*\.)?(embed_tokens|lm_head)\.weight"] = _on(mesh, tp=Shard(0))
    if sequence:
        activations[r".*norm\.(input|output)|.*embed_tokens\.output"] = _on(mesh, dp=Shard(0), tp=Shard(1))
    return Plan(mesh, params, {batch: _on(mesh, dp=Shard(0))}, activations=activations)


def mixtral(
    mesh: Mesh,
    *,
    batch: str = "batch",
    sequence: bool = False,
    vocabulary: bool = False,
    experts: Literal["inner", "whole"] = "inner",
) -> Plan:
    """Mixtral and what has its names: `llama`, with `experts.gate_up_proj` and `experts.down_proj`.

    `experts` says how tp splits them: "inner", each along its intermediate dim, or "whole", some experts
    a rank. Routers are on every rank. The other arguments are those of `llama`. Of the library's
    `experts_implementation`s these trace: "batched_mm", which looks up a matrix for each token, for "inner";
    "grouped_mm" for both, though over dp it sorts the tokens of all ranks.

    Raises PlanError for other `experts`.
    """
    choices = {
        "inner": (InterleavedShard(1, 2), Shard(2)),  # a rank: some of each gate, of each up and of each down
        "whole": (Shard(0), Shard(0)),
    }
    if experts not in choices:
        raise PlanError(
            explain(f"experts={experts!r}", where="mixtral", rule='"inner" or "whole"', remedy="choose one")
        )
    gate_up, down = choices[experts]
    split = {
        r".*\.experts\.gate_up_proj": _on(mesh, tp=gate_up),
        r".*\.experts\.down_proj": _on(mesh, tp=down),
    }
    return llama(mesh, batch=batch, sequence=sequence, vocabulary=vocabulary) | Plan(mesh, split)


def dit(mesh: Mesh, *, batch: str = "batch") -> Plan:
    """A diffusion transformer (Peebles & Xie 2023) with the names of `examples/09_dit.py`.

    Attention and MLPs are split over tp as in `llama`; `qkv` holds queries, keys and values one after the
    other. The modulations, a third of the parameters, are split by rows, and the few numbers an image that
    they give are gathered.
    """
    return Plan(
        mesh,
        {
            r".*\.qkv\.(weight|bias)": _on(mesh, tp=InterleavedShard(0, 3)),
            r".*\.(fc1|modulation)\.(weight|bias)": _on(mesh, tp=Shard(0)),
            r".*\.(proj|fc2)\.weight": _on(mesh, tp=Shard(1)),
        },
        {batch: _on(mesh, dp=Shard(0))},
        activations={r".*\.modulation\.output": _on(mesh, dp=Shard(0))},
    )


def _on(mesh: Mesh, **placements: Placement) -> P:
    """The placements on the axes that the mesh has."""
    return P(**{axis: placement for axis, placement in placements.items() if axis in mesh.axis_names})
