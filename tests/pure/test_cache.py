"""The program cache: bounded, explained, and safe to share."""

from concurrent.futures import ThreadPoolExecutor

import torch

import vescale as vs
from vescale.spmd.program.cache import ProgramCache


def test_hits_and_misses():
    cache = ProgramCache[str](("structure",))
    assert cache.get(("a",)) is None
    cache.put(("a",), "program")
    assert cache.get(("a",)) == cache.get(("a",)) == "program"
    info = cache.info()
    assert (info.hits, info.misses, info.size) == (2, 1, 1)


def test_the_least_recently_used_goes():
    cache = ProgramCache[int](("number",), bound=2)
    cache.put((1,), 1)
    cache.put((2,), 2)
    assert cache.get((1,)) == 1
    cache.put((3,), 3)
    assert [cache.get((number,)) for number in (1, 2, 3)] == [1, None, 3]
    assert cache.info().size == 2


def test_a_miss_says_what_was_new():
    cache = ProgramCache[int](("structure", "leaf", "mode"), bound=2)
    for key in [
        ("s", (1, 2, 3), "m"),
        ("s", (1, 5, 3), "m"),
        ("s", (0, 5, 4), "m"),
        ("s", (0, 5), "n"),
    ]:
        cache.put(key, 0)
    assert cache.info().misses == 4
    assert cache.info().reasons == (  # of the last two: the reasons are bounded too
        "leaf 0: 1 -> 0 and 1 more",
        "leaf: (0, 5, 4) -> (0, 5), mode: m -> n",
    )


def test_what_was_dropped_before_says_so():
    cache = ProgramCache[int](("number",), bound=1)
    cache.put((1,), 1)
    assert cache.info().reasons == ("first call",)
    cache.put((1,), 1)
    assert cache.info().reasons == ("dropped from the cache before",)


def test_it_prints():
    cache = ProgramCache[int](("number",))
    assert str(cache.info()) == "not called yet"
    cache.put((1,), 1)
    assert str(cache.info()) == "0 hits, 1 misses, 1 programs kept (first call)"


def test_threads_count_together():
    cache = ProgramCache[int](("thread", "turn"), bound=8)
    cache.put((0, 0), 0)

    def work(number):
        for turn in range(200):
            cache.put((number, turn), turn)
            cache.get((number, turn))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    info = cache.info()
    assert info.misses == 1 + 4 * 200  # every put is one
    assert info.size <= 8


def test_a_number_that_changes_is_reported_with_advice():
    mesh = vs.make_mesh({"dp": 2}, backend="simulated")
    run = vs.parallelize(lambda x, n: x * n, vs.Plan(mesh))
    for number in (1.0, 2.0, 3):
        run(torch.ones(2), number)
    assert "2.0" in run.cache_info().reasons[1]
    assert "pass a 0-d tensor" in run.cache_info().reasons[1]
    run(torch.ones(3), 3)
    assert "0-d tensor" not in run.cache_info().reasons[3]
