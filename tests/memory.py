"""The memory that torch allocates while a program runs, seen by its profiler."""

from torch.profiler import ProfilerActivity, profile, record_function

import vescale as vs
from vescale import _tree


def fresh(tree):
    """The same values in memory of their own."""

    def copy(leaf):
        if isinstance(leaf, vs.DTensor):
            return vs.DTensor([local.clone() for local in leaf.locals], leaf.mesh, leaf.layout)
        return leaf.clone()

    return _tree.tree_map(copy, tree)


def measured_peak(step, *args):
    """The most bytes that are allocated while a call runs, its arguments included."""
    step(*fresh(args))  # compiled by now
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        copies = fresh(args)  # here, because frees are seen of what was allocated under the profiler
        with record_function("the call"):
            step(*copies)
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    (start,) = (event.start_ns() for event in events if event.name() == "the call")
    live = peak = 0
    for event in events:
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live) if event.start_ns() >= start else peak
    return peak
