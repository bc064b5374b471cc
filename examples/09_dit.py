"""Train a diffusion transformer (Peebles & Xie, "Scalable Diffusion Models with Transformers", 2023).

    python examples/09_dit.py

Claim: on a mesh of dp and tp the losses are those of one device, noise included, to rounding; the plan is
`vs.plans.dit`, and nothing in the model knows of meshes.
"""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale as vs


def waves(positions: Tensor, width: int) -> Tensor:
    """positions (n,) -> (n, width): cosines and sines of falling frequencies."""
    half = torch.arange(width // 2, device=positions.device, dtype=positions.dtype)
    angles = positions[:, None] * torch.exp(-math.log(10_000) / (width // 2) * half)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """adaLN-Zero: the condition shifts, scales and gates; at first every gate is zero."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=1e-6, elementwise_affine=False) for _ in range(2))
        self.attn, self.modulation = Attention(width, heads), nn.Linear(width, 6 * width)
        fc1, fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(OrderedDict(fc1=fc1, gelu=nn.GELU("tanh"), fc2=fc2))
        for p in self.modulation.parameters():
            nn.init.zeros_(p)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        parts = self.modulation(F.silu(condition))[:, None].chunk(6, dim=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        x = x + gate1 * self.attn(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """(images (b, channels, size, size), times (b,), labels (b,)) -> the noise in the images."""

    def __init__(self, size=8, patch=2, channels=3, width=32, depth=2, heads=4, classes=10):
        super().__init__()
        self.size, self.patch, self.width = size, patch, width
        self.embed = nn.Linear(channels * patch**2, width)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(classes, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.adapt, self.head = nn.Linear(width, 2 * width), nn.Linear(width, channels * patch**2)
        for p in (*self.adapt.parameters(), *self.head.parameters()):
            nn.init.zeros_(p)

    def forward(self, images: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        (b, c), n, p = images.shape[:2], self.size // self.patch, self.patch
        patches = images.view(b, c, n, p, n, p).permute(0, 2, 4, 1, 3, 5).reshape(b, n * n, c * p * p)
        place = waves(torch.arange(n, dtype=images.dtype, device=images.device), self.width // 2)
        places = torch.cat([place.repeat_interleave(n, 0), place.repeat(n, 1)], dim=-1)
        x = self.embed(patches) + places
        condition = self.time(waves(times, self.width)) + self.label(labels)
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.adapt(F.silu(condition))[:, None].chunk(2, dim=-1)
        patches = self.head(self.norm(x) * (1 + scale) + shift)
        return patches.view(b, n, n, c, p, p).permute(0, 3, 1, 4, 2, 5).reshape(images.shape)


def make_step(model: nn.Module, optimizer):
    def loss_fn(params, batch, key):
        """The squared error of the predicted noise, at a random time for each image."""
        images, (for_times, for_noise) = batch["images"], vs.rng.split(key)
        times = vs.rng.uniform(for_times, images.shape[:1], dtype=images.dtype)
        noise = vs.rng.normal(for_noise, images.shape, dtype=images.dtype)
        keep = (times * math.pi / 2).cos().view(-1, 1, 1, 1)  # of the image, and what remains is noise
        noisy = keep * images + (1 - keep * keep).sqrt() * noise
        predicted = torch.func.functional_call(model, params, (noisy, 1000 * times, batch["labels"]))
        return (predicted - noise).square().mean()

    def step(params, state, batch, key):
        loss, gradients = vs.value_and_grad(loss_fn)(params, batch, key)
        updates, state = optimizer.update(gradients, state, params)
        return vs.optim.apply_updates(params, updates), state, loss

    return step


def train(mesh: vs.Mesh | None, steps: int = 6) -> list[float]:
    """The losses of some steps on images of stripes, whose direction is their label."""
    torch.manual_seed(0)
    model, optimizer = DiT().double(), vs.optim.adamw(3e-3)
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    labels = torch.arange(8) % 2
    stripes = torch.arange(8.0).double().mul(math.pi / 2).sin().expand(8, 3, 8, 8)
    batch = {"images": torch.where(labels.view(-1, 1, 1, 1) == 1, stripes, stripes.mT), "labels": labels}
    step = make_step(model, optimizer)
    if mesh is not None:
        plan = vs.plans.dit(mesh)
        step, params = vs.parallelize(step, plan), vs.distribute(params, plan)
    state, losses = optimizer.init(params), []
    for key in vs.rng.split(vs.rng.key(0), steps):
        params, state, loss = step(params, state, batch, key)
        losses.append(loss.item())
    return losses


def main() -> None:
    alone, together = train(None), train(vs.make_mesh({"dp": 2, "tp": 2}, backend="simulated"))
    gap = max(abs(a - b) / abs(a) for a, b in zip(alone, together, strict=True))
    assert gap < 1e-10, gap
    assert alone[-1] < alone[0], alone
    print(f"DiT, dp=2 x tp=2: loss {together[0]:.3f} to {together[-1]:.3f}, within {gap:.0e} of one device")


if __name__ == "__main__":
    main()
