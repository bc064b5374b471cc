"""Block-wise quantization and 8-bit AdamW on one device, from their formulas: one block after the other."""

import functools
import itertools
import math

import torch


@functools.cache
def dynamic_map(signed):
    """Read bit by bit: leading zeros are powers of ten, a one ends them, the rest is a fraction. The eighth
    bit is the sign, or one more of the fraction. Seven zeros are 0, and with the eighth bit 1."""
    numbers = [0.0, 1.0]
    for tree, eighth in itertools.product(range(1, 1 << 7), "01"):
        text = f"{tree:07b}"
        zeros = text.index("1")
        fraction = text[zeros + 1 :] + ("" if signed else eighth)
        middle = 10.0**-zeros * (0.1 + 0.9 * (int(fraction or "0", 2) + 0.5) / 2 ** len(fraction))
        numbers.append(-middle if signed and eighth == "1" else middle)
    return torch.tensor(sorted(numbers), dtype=torch.float64).to(torch.float32)


def blocks(shape, block):
    """(indices of the flattened tensor, where its scale is) of each block."""
    index = torch.arange(math.prod(shape)).view(shape)
    if len(shape) == 1 or isinstance(block, int):
        size = block if isinstance(block, int) else math.prod(block)
        return list(torch.arange(math.prod(shape)).split(size))
    found = []
    for lead in itertools.product(*map(range, shape[:-2])):
        for band in index[lead].split(block[0]):
            found += [tile.reshape(-1) for tile in band.split(block[1], dim=1)]
    return found


def quantize(x, signed, block, noise=None):
    """(codes, scales), the scales one after the other."""
    numbers, flat = dynamic_map(signed), x.reshape(-1)
    codes, scales = torch.empty(flat.shape, dtype=torch.uint8), []
    zero = numbers.tolist().index(0.0)
    for where in blocks(x.shape, block):
        values = flat[where]
        scale = values.abs().max() if bool(values.isfinite().all()) else torch.tensor(torch.nan)
        scales.append(scale)
        if not scale > 0:
            codes[where] = zero
            continue
        v = values / scale
        if noise is None:
            codes[where] = (v.double().unsqueeze(1) - numbers.double()).abs().min(1).indices.to(torch.uint8)
        else:
            lower = (v.unsqueeze(1) >= numbers).sum(1).sub(1).clamp(0, 254)
            part = (v - numbers[lower]) / (numbers[lower + 1] - numbers[lower])
            codes[where] = (lower + (noise.reshape(-1)[where] < part)).to(torch.uint8)
    return codes.view(x.shape), torch.stack(scales)


def dequantize(codes, scales, signed, block):
    numbers, x = dynamic_map(signed), torch.empty(codes.numel())
    for where, scale in zip(blocks(codes.shape, block), scales, strict=True):
        x[where] = numbers[codes.reshape(-1)[where].long()] * scale
    return x.view(codes.shape)


class AdamW8bit:
    """Parameters and moments by name; `step` updates them. `draws(t, number, shape)` round at random."""

    def __init__(
        self, params, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, block=(32, 32), draws=None
    ):
        self.params = {name: p.clone() for name, p in params.items()}
        self.lr, self.betas, self.eps, self.decay = lr, betas, eps, weight_decay
        self.block, self.draws, self.t = block, draws, 0
        self.kept = {name: p.dim() > 0 and p.numel() >= 4096 for name, p in params.items()}
        zeros = {name: torch.zeros(p.shape) for name, p in params.items()}
        self.moments = {name: [self.keep(name, zeros[name], s) for s in (True, False)] for name in params}

    def keep(self, name, x, signed, noise=None):
        return quantize(x, signed, self.block, noise) if self.kept[name] else x

    def moment(self, name, signed):
        kept = self.moments[name][0 if signed else 1]
        return dequantize(*kept, signed, self.block) if isinstance(kept, tuple) else kept

    def step(self, grads):
        self.t += 1
        step_size = torch.tensor(-self.lr / (1 - self.betas[0] ** self.t), dtype=torch.float64).float()
        root = torch.tensor((1 - self.betas[1] ** self.t) ** 0.5, dtype=torch.float64).float()
        number = 0
        for name in sorted(self.params):
            m, v = (self.moment(name, signed) for signed in (True, False))
            g, p = grads[name].float(), self.params[name]
            m = torch.lerp(m, g, 1 - self.betas[0])
            v = torch.addcmul(v * self.betas[1], g, g, value=1 - self.betas[1])
            delta = m * step_size / (v.sqrt() / root + self.eps)
            self.params[name] = p * (1 - self.lr * self.decay) + delta.to(p.dtype)
            noises = [None, None]
            if self.draws is not None and self.kept[name]:
                noises = [self.draws(self.t, number + moment, p.shape) for moment in (0, 1)]
                number += 2
            self.moments[name] = [self.keep(name, m, True, noises[0]), self.keep(name, v, False, noises[1])]
