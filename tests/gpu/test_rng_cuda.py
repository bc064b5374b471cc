"""Torch's own draws on cuda against virtual threads, and keyed draws on cuda against cpu.

python -m pytest tests/gpu/test_rng_cuda.py
"""

import pytest
import torch
import torch.nn.functional as F

import vescale as vs
from vescale.rng import triton_philox, virtual_threads as vt
from vescale.rng.numbers import KINDS, draw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no cuda device to compare with"),
]
SEED = 0x1234567890


def limits():
    if not torch.cuda.is_available():
        return []
    grid = vt.Processor.of("cuda").virtual_threads(2**40)
    return [1, 7, 255, 256, 257, 4096, grid - 1, grid, grid + 1, 4 * grid, 4 * grid + 8, 9 * grid + 513]


def state():
    """The seed and the offset of the default generator."""
    words = torch.cuda.get_rng_state().view(torch.int64).tolist()
    return words[0], words[1]


def check(numel, torch_draw, ours, exact=True):
    """torch's draw from some offset, and where it leaves the generator."""
    torch.cuda.manual_seed(SEED)
    torch.rand(3, device="cuda")
    seed, offset = state()
    want = torch_draw().cpu().view(-1)
    _, after = state()
    found, end = ours(seed, offset)
    assert end == after
    if exact:
        assert torch.equal(found, want)
    else:
        assert (found.double() - want.double()).abs().max() < 3e-6


@pytest.mark.parametrize("numel", limits())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_rand_and_randn(numel, dtype):
    processor = vt.Processor.of("cuda")
    check(
        numel,
        lambda: torch.rand(numel, dtype=dtype, device="cuda"),
        lambda seed, offset: vt.rand(seed, offset, numel, dtype, processor=processor),
    )
    if dtype in (torch.float32, torch.float64):
        check(
            numel,
            lambda: torch.randn(numel, dtype=dtype, device="cuda"),
            lambda seed, offset: vt.randn(seed, offset, numel, dtype, processor=processor),
            exact=False,
        )


@pytest.mark.parametrize("numel", limits())
def test_bernoulli_and_randint(numel):
    processor = vt.Processor.of("cuda")
    check(
        numel,
        lambda: torch.empty(numel, device="cuda").bernoulli_(0.3).bool(),
        lambda seed, offset: vt.bernoulli(seed, offset, numel, 0.3, processor=processor),
    )
    p = torch.linspace(0, 1, numel)
    check(
        numel,
        lambda: torch.bernoulli(p.cuda()).bool(),
        lambda seed, offset: vt.bernoulli(seed, offset, numel, p, processor=processor),
    )
    for low, high in ((-5, 995), (0, 2**28 - 1), (0, 2**28), (-(2**62), 2**62)):
        check(
            numel,
            lambda low=low, high=high: torch.randint(low, high, (numel,), device="cuda"),
            lambda seed, offset, low=low, high=high: vt.randint(
                seed, offset, numel, low, high, processor=processor
            ),
        )


@pytest.mark.parametrize("numel", limits())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dropout(numel, dtype):
    processor = vt.Processor.of("cuda")
    for p in (0.1, 0.5):
        check(
            numel,
            lambda p=p: F.dropout(torch.ones(numel, dtype=dtype, device="cuda"), p) != 0,
            lambda seed, offset, p=p: vt.dropout(seed, offset, numel, p, dtype, processor=processor),
        )


def test_more_than_two_gigabytes():
    numel, processor = 2**29 + 1024, vt.Processor.of("cuda")
    index = torch.tensor([0, 1, numel // 2 - 1, numel // 2, numel - 1])
    check(
        numel,
        lambda: torch.rand(numel, device="cuda")[index.cuda()],
        lambda seed, offset: vt.rand(seed, offset, numel, index=index, processor=processor),
    )


@pytest.mark.parametrize("numel", limits())
def test_the_triton_kernel_makes_a_ranks_elements(numel):
    pytest.importorskip("triton", reason="this build of torch comes without Triton")
    processor = vt.Processor.of("cuda")
    index = torch.arange(numel)[numel // 3 :]
    places, _ = vt.grid_stride(4, numel, index, processor, itemsize=4)
    thread, offset = places.thread.cuda(), places.offset.cuda()
    words = triton_philox.words(thread, offset, SEED)
    assert torch.equal(words.cpu(), places.read(SEED))
    torch.cuda.manual_seed(SEED)
    torch.rand(3, device="cuda")
    want = torch.rand(numel, device="cuda")[index.cuda()]
    unit = words.to(torch.float32) * 2.0**-32 + 2.0**-33
    assert torch.equal(torch.where(unit == 1, 0.0, unit), want)
    torch.cuda.manual_seed(SEED)
    torch.rand(3, device="cuda")
    want = torch.randn(numel, device="cuda")[index.cuda()]
    found = triton_philox.randn(thread, offset, SEED)
    assert (found - want).abs().max() < 1e-6
    print(f"normals equal to the bit: {float((found == want).float().mean()):.4f}")


@pytest.mark.parametrize("kind", KINDS)
def test_keyed_draws_have_the_bits_of_cpu(kind):
    key = vs.rng.key(7).data
    assert torch.equal(draw(key.cuda(), [100_003], kind).cpu(), draw(key, [100_003], kind))


def test_keyed_draws_that_are_made_of_others():
    one, other = vs.rng.key(7), vs.rng.Key(vs.rng.key(7).data.cuda())
    for function in (
        lambda key: vs.rng.truncated_normal(key, -1, 2, (10_001,)),
        lambda key: vs.rng.randint(key, (10_001,), 0, 1000),
        lambda key: vs.rng.randint(key, (10_001,), 0, 2**50),
        lambda key: vs.rng.permutation(key, 10_001),
        lambda key: vs.rng.choice(key, 10_001, (77,), replace=False),
        lambda key: vs.rng.bernoulli(key, 0.3, (10_001,)),
        lambda key: vs.rng.uniform(vs.rng.split(key)[1], (10_001,), torch.bfloat16),
    ):
        assert torch.equal(function(other).cpu(), function(one))
