"""torch's own DTensor on the same samples: one of each op, forward and backward, on 4 threads as ranks.

A process runs a batch; what an op does to the process, to the other threads or to the clock is part of the
answer, so the caller restarts it after the op that it did not survive.
"""

import warnings
from collections.abc import Callable
from threading import Event, Thread
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from tests.op_coverage import MOVEMENT, ORDINARY, Sample, compare, expected, plain_samples

RANKS = 4
RIGHT, WRONG, RAISES, CRASH, APART = "right", "wrong", "raises", "crash", "apart"


def run_op(op: Any) -> tuple[str, str]:
    """What DTensor makes of the op's first sample with a tensor to shard, and a note."""
    for sample in plain_samples(op):
        case = Sample(op, sample)
        if not any(tensor.dim() for tensor in case.tensors):
            continue
        try:
            reference = expected(case)
        except Exception:
            continue
        return (APART, reference[2]) if reference[2] != ORDINARY else judge(case, reference)
    return APART, "no sample has a tensor to shard"


def judge(case: Sample, reference: tuple[list[Any], list[torch.Tensor], str]) -> tuple[str, str]:
    results, gradients, _ = reference
    exact = case.op.name in MOVEMENT

    def check(mesh: DeviceMesh) -> tuple[str, str]:
        values = [
            distribute_tensor(tensor, mesh, [Shard(0) if tensor.dim() else Replicate()])
            for tensor in case.tensors
        ]
        for index in case.learned:
            values[index].requires_grad_()
        try:
            found = case.call(*values)
            learned = []
            if case.learned:
                chosen = [values[index] for index in case.learned]
                loss = case.loss(found, lambda tensor: distribute_tensor(tensor, mesh, [Replicate()]))
                made = torch.autograd.grad(loss, chosen, allow_unused=True)
                learned = [
                    torch.zeros_like(tensor) if gradient is None else gradient
                    for tensor, gradient in zip(gradients, made, strict=True)
                ]
            fault = compare(found, results, exact, True, whole=_whole)
            fault = fault or compare(learned, gradients, False, True, whole=_whole)
        except Exception as error:
            return RAISES, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return (WRONG, fault) if fault else (RIGHT, "")

    answers = on_threads(check)
    return max(answers, key=lambda answer: (RIGHT, RAISES, WRONG).index(answer[0]))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def on_threads(fn: Callable[[DeviceMesh], tuple[str, str]]) -> list[tuple[str, str]]:
    """The answers of `fn` on 4 threads as ranks, without those of ranks that others left waiting."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    ProcessLocalGroup.reset()
    store = dist.HashStore()
    answers: dict[int, tuple[str, str]] = {}
    stopped = Event()

    def work(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=RANKS, store=store)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answer = fn(init_device_mesh("cpu", (RANKS,)))
            if not stopped.is_set():
                answers[rank] = answer
        except SystemExit:  # what a collective raises when another rank has left
            pass
        finally:
            dist.destroy_process_group()

    threads = [Thread(target=work, args=(rank,), daemon=True) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for patience in (20.0, 5.0):
        deadline = monotonic() + patience
        while any(thread.is_alive() for thread in threads) and monotonic() < deadline:
            threads[0].join(0.01)
            left = [answer for answer in list(answers.values()) if answer[0] == RAISES]
            deadline = min(deadline, monotonic() + 2) if left else deadline
        if any(thread.is_alive() for thread in threads):
            stopped.set()
            ProcessLocalGroup.exception_handle(RuntimeError("another rank raised"))
    _uninstall_threaded_pg()
    if any(thread.is_alive() for thread in threads) or not answers:
        raise SystemExit("a rank waits for ever")
    return list(answers.values())
