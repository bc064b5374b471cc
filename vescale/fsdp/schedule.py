"""Schedule: a decided program whose parameters move one by one -> one whose buckets move.

Pure, and independent of the rank. Of each bucket the gathers become one, of the whole buffer,
right before the first use; one more before the backward, where the buffer was freed in between; and started
ahead of time. The reductions of its gradients become one too, as soon as the last is there:

    before                                 after
    w1' = all_gather(w1)                   shard = shard of bucket (w1, w2)
    w2' = all_gather(w2)                   whole = all_gather(shard)
    y = mm(x, w1')                         w1', w2' = views of bucket (whole)
    ...                                    y = mm(x, w1')
    g1 = mm(..)                            b0 = gradients of bucket
    g2 = mm(..)                            g1 = mm(..);  b1 = write w1 (b0, g1)
    r1 = reduce_scatter(g1)                g2 = mm(..);  b2 = write w2 (b1, g2)
    r2 = reduce_scatter(g2)                r1, r2 = views of bucket (reduce_scatter(b2))

Source: veScale-FSDP's DBuffer and FSDP2's schedule; deciding it on the traced program is ours.
"""

from __future__ import annotations

from ..spmd.program.partition import Partitioned
from .editing import Program
from .gathers import bucket_gathers
from .reductions import bucket_reductions


def schedule(partitioned: Partitioned) -> Partitioned:
    """The program with bucketed moves, as its facts say which parameters belong together.

    Moves that don't belong to a bucket as a whole stay what they were: a parameter that is used at rest, a
    gradient that another op reads before the bucket's last is there.
    """
    buckets = partitioned.facts.notes.get("buckets", ())
    if not buckets:
        return partitioned
    parameters = partitioned.facts.notes["parameters"]
    program = Program(partitioned)
    bucket_reductions(program, buckets)
    bucket_gathers(program, buckets, parameters)
    return program.finished()
