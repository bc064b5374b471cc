"""Save on one mesh, resume on another: other ranks, other axes, other blocks.

    python examples/06_resume.py

Claim: on every mesh, parameters, optimizer state and step are loaded bit for bit; on the mesh on which it was
saved, the next step has the bits of a run that did not stop, dropout too.
"""

import tempfile

import torch
from gpt import GPT, make_plan, read_rows, read_text, row_starts

import vescale as vs

MESHES = [{"dp": 4}, {"dp": 1}, {"dp": 2}, {"dp": 3}, {"dp": 2, "tp": 2}]
optimizer = vs.optim.adamw(1e-3)


def make_step(plan):
    model = GPT(blocks=2, width=64, dropout=0.1)

    def train_step(params, state, batch):
        loss, grads = vs.value_and_grad(lambda p, b: torch.func.functional_call(model, p, b))(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return vs.optim.apply_updates(params, updates), state, loss

    return vs.parallelize(train_step, plan), {n: p.detach().clone() for n, p in model.named_parameters()}


def plan_on(axes, tile):
    fsdp = vs.FSDP("dp", wrap=r"blocks\.\d+", block={r".*fc\d\.weight": vs.Rows(tile)})
    mesh = vs.make_mesh(axes)
    split = {k: v.run for k, v in make_plan(mesh).params.items() if isinstance(v, vs.Staged)}  # over tp
    return vs.Plan(mesh, split, {"batch": vs.P(dp=vs.Shard(0))}, fsdp=fsdp)


def same(a, b) -> bool:
    return all(torch.equal(a[name].full_tensor(), b[name].full_tensor()) for name in b)


def main() -> None:
    torch.manual_seed(0)
    text, _ = read_text()
    batches = [read_rows(text, starts)[:, :33] for starts in row_starts(text, steps=4, batch=12, seed=0)]
    step, weights = make_step(plan := plan_on(MESHES[0], tile=16))
    params = vs.distribute(weights, plan)
    state = optimizer.init(params)
    for batch in batches[:3]:
        params, state, _ = step(params, state, batch)
    with tempfile.TemporaryDirectory() as folder:
        tree = {"params": params, "state": state, "torch": torch.default_generator}
        path = vs.checkpoint.save(tree, folder, step=3)
        after, _, loss = step(params, state, batches[3])

        for axes in MESHES:
            again, fresh = make_step(plan := plan_on(axes, tile=8 if "tp" in axes else 16))
            mine = vs.distribute(fresh, plan)  # of other values, which say where everything lives
            like = {"params": mine, "state": optimizer.init(mine), "torch": torch.Generator()}
            loaded = vs.checkpoint.load(like, path)
            assert same(loaded["params"], params)
            assert same(loaded["state"]["exp_avg_sq"], state["exp_avg_sq"])
            assert loaded["state"]["step"].item() == 3
            torch.set_rng_state(loaded["torch"].get_state())
            now, _, resumed = again(loaded["params"], loaded["state"], batches[3])
            if axes == MESHES[0]:
                assert torch.equal(resumed.full_tensor(), loss.full_tensor())
                assert same(now, after)
            assert abs(resumed.item() - loss.item()) < 1e-5
            print(
                f"{axes!s:20} loaded bit for bit; next loss {resumed.item():.6f}, unstopped {loss.item():.6f}"
            )


if __name__ == "__main__":
    main()
