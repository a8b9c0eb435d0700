"""What goes wrong around a tier: frozen servers, full disks, and random programs through them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from memory.kit import Case, Fresh, Make, apart
from pykvcache import BatchGenerator, PrefixCache
from pykvcache.prefix.stores import FolderStore, MemoryStore
from stores.servers import freeze, redis_server
from tiers.kit import clear_memory
from tiers.test_tiers import SERVED, SIZE, WAIT, total, words


@pytest.mark.hazard("N79")
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_a_server_that_freezes_is_a_miss_and_soon_left_alone(
    make_context: Make, fresh_logits: Fresh, tmp_path: Path
) -> None:
    prompt = words(1, 45)
    with redis_server(tmp_path) as server:
        ctx = make_context("llama")
        cache = PrefixCache(ctx, block_size=SIZE, ram_bytes=0, tiers=[server.url])
        with cache.sequence(prompt) as sequence:
            sequence.logits()
        assert cache.flush(30)
        freeze(server.process)
        try:
            for i in range(4):
                with cache.sequence(prompt if i % 2 else words(i, 45)) as sequence:
                    wanted = sequence.tokens
                    assert apart(sequence.logits(), fresh_logits("llama", wanted)) < 1e-3
                    assert sequence.reuse.remote == 0
            assert cache.flush(30)
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        stats = cache.stats().tiers[0]
        assert stats.timed_out + stats.skipped > 0
        cache.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux, and to mount a tmpfs")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


def test_a_full_disk_is_a_counter(
    make_context: Make, fresh_logits: Fresh, small_disk: Path
) -> None:
    (small_disk / "rest").write_bytes(bytes(4 << 20))
    store = FolderStore(small_disk / "tier", max_bytes=1 << 30)
    cache = PrefixCache(make_context("llama"), block_size=SIZE, tiers=[store], **WAIT)
    for seed in range(12):
        prompt = words(seed, 150)
        with cache.sequence(prompt) as sequence:
            assert apart(sequence.logits(), fresh_logits("llama", prompt)) < 1e-3
    assert cache.flush(30)
    assert store.counters.full > 0
    clear_memory(cache)
    with cache.sequence(words(0, 150)) as sequence:
        assert apart(sequence.logits(), fresh_logits("llama", words(0, 150))) < 1e-3
    cache.close()


@pytest.mark.hazard("N80")
@pytest.mark.parametrize("case", SERVED[::2], ids=str)
def test_random_programs_through_a_tier_equal_fresh_runs(
    case: Case, make_context: Make, fresh_logits: Fresh
) -> None:
    """Memory has room for a few blocks: what comes back comes from the tier, edits and all."""
    store = MemoryStore()
    rng = np.random.default_rng(11)
    ctx = make_context(case.name, **(case.options | {"n_seq_max": 3}))
    cache = PrefixCache(ctx, block_size=SIZE, ram_bytes=30_000, tiers=[store], **WAIT)
    known: list[list[int]] = [words(0, 40)]
    alive = [cache.sequence(known[0])]
    for step in range(40):
        what = rng.choice(["new", "grow", "cut", "fork", "close", "park", "forget", "again"])
        one = alive[int(rng.integers(len(alive)))]
        if what == "new" or len(alive) < 2:
            begin = known[int(rng.integers(len(known)))]
            prompt = begin[: int(rng.integers(len(begin) + 1))]
            one = cache.sequence((prompt + words(step, int(rng.integers(1, 20))))[:90])
            assert total(one.reuse) == len(one)
            alive.append(one)
        elif what == "grow" and len(one) < 80:
            one.append(words(step, int(rng.integers(1, 12))))
        elif what == "cut":
            one.truncate(int(rng.integers(1, len(one) + 1)))
        elif what == "fork" and len(alive) < 5:
            alive.append(one := one.fork(int(rng.integers(1, len(one) + 1))))
        elif what == "park":
            one.park()
        elif what == "forget":
            clear_memory(cache)
        elif what == "again":
            assert cache.flush(30)
            cache.close()
            for other in alive:
                other.close()
            cache = PrefixCache(ctx, block_size=SIZE, ram_bytes=30_000, tiers=[store], **WAIT)
            alive = [one := cache.sequence(known[int(rng.integers(len(known)))])]
        if rng.random() < 0.7:
            tokens = one.tokens.tolist()
            assert apart(one.logits(), fresh_logits(case.name, tokens)) < case.tolerance, step
            known.append(tokens)
        if what == "close" and len(alive) > 1:
            one.close()
            alive.remove(one)
    assert cache.stats().tiers[0].read or cache.stats().tiers[0].written
    cache.close()


def test_a_batch_over_a_tier_gives_what_each_request_has_alone(
    make_context: Make, fresh_logits: Fresh
) -> None:
    store = MemoryStore()
    shared = words(1, 40)
    prompts = [shared + words(i, 9) for i in range(2, 8)]
    for _ in range(2):
        cache = PrefixCache(make_context("llama"), block_size=SIZE, tiers=[store], **WAIT)
        generator = BatchGenerator(cache)
        handles = [generator.submit(prompt, 2) for prompt in prompts]
        generator.run()
        for prompt, handle in zip(prompts, handles, strict=True):
            assert handle.tokens[0] == int(fresh_logits("llama", prompt).argmax())
        cache.close()
    stats = cache.stats()
    assert stats.evaluated == 6
    assert stats.remote >= 40


def test_caches_that_nobody_closes_leave_no_thread(make_context: Make) -> None:
    import gc
    import threading

    def threads() -> int:
        return sum(one.name.startswith("pykvcache-write") for one in threading.enumerate())

    before = threads()
    for i in range(3):
        store = MemoryStore()
        cache = PrefixCache(make_context("llama"), block_size=SIZE, tiers=[store], **WAIT)
        with cache.sequence(words(i, 40)) as sequence:
            sequence.evaluate()
        del cache, sequence
    gc.collect()
    until = time.monotonic() + 20
    while threads() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threads() <= before
