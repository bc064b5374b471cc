"""Under torchrun: two nodes, each an agent of its own on this machine; and what a rank's death does there."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import vescale as vs
from examples.train_gpt import train

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
STEPS, AXES = 3, {"dp": 2, "tp": 2}

TRAIN = f"""
import json, sys
import vescale as vs
from examples.train_gpt import train

mesh = vs.make_mesh({AXES})
assert mesh.backend == "processes", mesh
losses = train(mesh, steps={STEPS}, compare=False).curves["vescale"]
if mesh.rank == 0:
    open(sys.argv[1], "w").write(json.dumps(list(losses.values())))
mesh.close()
"""

DIE = """
import os, signal, sys
import torch
import vescale as vs

mesh = vs.make_mesh({"dp": 2})
double = vs.parallelize(lambda x: x.sum() * 2, vs.Plan(mesh, inputs={"x": vs.P(dp=vs.Shard(0))}))
x = torch.ones(4)
for step in range(10**9):
    double(x)
    if step == 50 and mesh.rank == 1:
        open(sys.argv[1], "w").write("dead")
        os.kill(os.getpid(), signal.SIGKILL)
"""


def agents(script: Path, *arguments: str, nodes: int = 1) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}",
    }
    meeting = ["--master-addr", "127.0.0.1", "--master-port", str(port), "--local-addr", "127.0.0.1"]
    return [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--node-rank", str(node)]
            + [*meeting, "--nproc-per-node", "2", str(script), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(nodes)
    ]


def test_two_nodes_train_the_example(tmp_path):
    """The losses are those of the simulated mesh, bit for bit."""
    script, found = tmp_path / "job.py", tmp_path / "losses"
    script.write_text(TRAIN)
    nodes = agents(script, str(found), nodes=2)
    said = [node.communicate(timeout=170)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    expected = train(vs.make_mesh(AXES, backend="simulated"), steps=STEPS, compare=False).curves["vescale"]
    assert json.loads(found.read_text()) == list(expected.values())


def test_the_agent_ends_the_others_when_a_rank_dies(tmp_path):
    script, dead = tmp_path / "job.py", tmp_path / "dead"
    script.write_text(DIE)
    (agent,) = agents(script, str(dead))
    said, _ = agent.communicate(timeout=120)
    assert agent.returncode != 0
    assert dead.exists()
    assert time.time() - dead.stat().st_mtime < 30
    assert f"exitcode  : -{signal.SIGKILL:d}" in said
