"""`ram_bytes` bounds what a cache keeps, measured against what the process allocates."""

from __future__ import annotations

import gc
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pykvcache.prefix.kept import PLACE_BYTES, RUN_BYTES
from pykvcache.prefix.roots import name_bytes

from prefix.accounts import check_accounts, told
from pykvcache import LlamaContext, PrefixCache
from pykvcache.prefix.events import AllBlocksCleared, BlockRemoved, BlockStored, EventLog
from pykvcache.prefix.stores import MemoryStore
from support.forks import run_forked
from support.models import make_model
from support.sanitizer import SANITIZED

Make = Callable[..., LlamaContext]

# Small blocks: what the cache notes of them is much beside their bytes. In a process of its own,
# because tracemalloc counts whatever is allocated meanwhile.
CHILD = """
import gc, json, sys, tracemalloc
import numpy as np
from pykvcache import LlamaContext, LlamaModel, PrefixCache

path, sizes, policies, limit, n = sys.argv[1], *map(json.loads, sys.argv[2:])
ctx = LlamaContext(LlamaModel(path), n_ctx=256, n_seq_max=2, n_threads=1)

def work(cache, n):
    rng = np.random.default_rng(1)
    known = [rng.integers(5, 56, 100) for _ in range(20)]
    for step in range(n):
        begin = known[rng.integers(20)][: rng.integers(100)]
        prompt = np.concatenate([begin, rng.integers(5, 56, rng.integers(1, 60))])
        with cache.sequence(prompt, namespace=str(step % 3)) as sequence:
            sequence.evaluate()
        if step % 3 == 0:
            known[rng.integers(20)] = prompt

found = []
with PrefixCache(ctx, block_size=4) as cache:
    work(cache, 20)  # whatever is made once
tracemalloc.start()
for size in sizes:
    for policy in policies:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        cache = PrefixCache(ctx, block_size=size, ram_bytes=limit, policy=policy)
        work(cache, n)
        gc.collect()
        bytes = tracemalloc.get_traced_memory()[0] - before
        stats = cache.stats()
        found.append([size, policy, bytes, stats.ram_bytes, stats.ram_blocks, stats.removed])
        cache.close()
        del cache
print(json.dumps(found))
"""


#: Prompts that share nothing: little beside the blocks is counted too high.
CHAINS = CHILD.replace("known[rng.integers(20)][: rng.integers(100)]", "rng.integers(5, 56, 190)")


def measured(
    model: Path, sizes: list[int], policies: list[str], limit: int, n: int, child: str = CHILD
) -> Any:
    arguments = [str(model), *map(json.dumps, (sizes, policies, limit, n))]
    # 33 caches of 600 prompts each, on a busy machine.
    done = run_forked(["-c", child, *arguments], timeout=1500)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["llama", "jamba"])
def test_the_process_allocates_no_more_than_the_budget(name: str, tmp_path: Path) -> None:
    limit = 1 << 20
    policies = ["adaptive", "slru"] if name == "llama" else ["adaptive"]
    for size, policy, taken, counted, n_blocks, removed in measured(
        make_model(name, tmp_path), [1, 8], policies, limit, 150
    ):
        what = f"{policy}, blocks of {size}"
        assert removed > 50, what
        assert n_blocks > 20, what
        assert counted <= limit, what
        # Objects that are made once count for all, whoever makes them first.
        assert taken <= 1.01 * counted, what
        assert taken > 0.6 * counted, what


def test_long_chains_of_tiny_blocks_fit_the_budget(tmp_path: Path) -> None:
    limit = 4 << 20
    model = make_model("llama", tmp_path)
    for size, policy, taken, counted, n_blocks, removed in measured(
        model, [1, 4], ["lru", "adaptive"], limit, 80, CHAINS
    ):
        assert removed > 50
        assert n_blocks > 1000
        assert counted <= limit
        assert taken <= 1.01 * counted, (size, policy)


#: The most that is taken at any time, where the first run that has to leave is where shadows begin.
PEAK = CHILD.replace("before = tracemalloc", "tracemalloc.reset_peak(); before = tracemalloc")
PEAK = PEAK.replace(
    "bytes = tracemalloc.get_traced_memory()[0]", "bytes = tracemalloc.get_traced_memory()[1]"
)
PEAK = PEAK.replace("prompt = np.concatenate([begin, ", "prompt = np.concatenate([")


def test_shadows_take_no_more_than_they_may_while_they_are_made(tmp_path: Path) -> None:
    limit = 4 << 20
    model = make_model("llama", tmp_path)
    for size, policy, taken, counted, _, removed in measured(
        model, [4, 16], ["lru", "adaptive"], limit, 450, PEAK
    ):
        assert removed > 50
        assert counted <= limit
        assert taken <= 1.05 * limit, (size, policy)


@pytest.mark.slow
def test_thousands_of_blocks_of_every_policy_fit_the_budget(tmp_path: Path) -> None:
    from pykvcache.prefix.policies import POLICIES

    limit = 4 << 20
    model = make_model("llama", tmp_path)
    for size, policy, taken, counted, *_ in measured(model, [1, 4, 16], [*POLICIES], limit, 600):
        assert counted <= limit, (size, policy)
        assert taken <= 1.01 * counted, (size, policy)


#: What the system gives the process, with all that its allocator keeps.
RESIDENT = """
import gc, sys
import numpy as np
from pykvcache import LlamaContext, LlamaModel, PrefixCache

ctx = LlamaContext(LlamaModel(sys.argv[1]), n_ctx=4096, n_seq_max=2, n_threads=1)
rng = np.random.default_rng(1)

def resident():
    gc.collect()
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))

def work(cache, n):
    for _ in range(n):
        with cache.sequence(rng.integers(5, 56, rng.integers(75, 125))) as sequence:
            sequence.logits()

with PrefixCache(ctx, ram_bytes=1 << 20, block_size=16) as cache:
    work(cache, 10)
before = resident()
cache = PrefixCache(ctx, ram_bytes=4 << 20, block_size=16)
work(cache, 700)
print(resident() - before, cache.stats().removed)
"""


@pytest.mark.skipif(
    SANITIZED or not Path("/proc/self/smaps_rollup").exists(),
    reason="Linux says how much it is, and AddressSanitizer keeps what was freed",
)
def test_what_is_evicted_goes_back_to_the_system(tmp_path: Path) -> None:
    """Holes between small blocks: the process had a quarter more than the budget."""
    command = [sys.executable, "-c", RESIDENT, str(make_model("mamba", tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    taken, removed = map(int, done.stdout.split())
    assert removed > 100
    assert taken <= 1.1 * (4 << 20)


def words(seed: int, n: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(5, 56, n).tolist()
    return found


def test_what_left_counts_while_a_parked_sequence_is_made_of_it(make_context: Make) -> None:
    ctx = make_context("llama", n_seq_max=2)
    cache = PrefixCache(ctx, block_size=8, policy="lru")
    with cache.sequence(words(1, 47)) as first:
        first.evaluate()
    empty = PrefixCache(make_context("llama"), policy="lru", block_size=8).stats().ram_bytes
    parked = cache.sequence(words(1, 47))
    assert parked.reuse.ram
    cache.clear()
    assert not list(cache.events)[5:]
    cell = ctx.native.block_bytes()
    left = cache.stats().ram_bytes - empty
    assert left >= 46 * cell
    parked.logits()  # its tokens are in the cells now
    assert cache.stats().ram_bytes == empty


def test_a_tail_that_goes_makes_room(make_context: Make) -> None:
    """What the tails leave of the budget is for blocks again when they are gone."""
    ctx = make_context("llama", n_ctx=512, n_seq_max=2)
    cell = ctx.native.block_bytes()
    cache = PrefixCache(ctx, block_size=64, ram_bytes=12 * 64 * cell, policy="lru")
    for i in range(8):  # a block, and a tail of nearly another
        with cache.sequence(words(i, 127)) as sequence:
            sequence.evaluate()
    assert cache._ram._tail_bytes > 2 * 63 * cell
    for i in range(20, 40):  # blocks alone: those that tails hang on leave
        with cache.sequence(words(i, 64)) as sequence:
            sequence.evaluate()
    assert cache._ram._tail_bytes == 0
    stats = cache.stats()
    assert stats.max_ram_bytes - stats.ram_bytes < 65 * cell + 2_000, "all but a block is used"


def test_a_state_that_is_kept_again_counts_once(make_context: Make) -> None:
    """It left while a sequence used it, and comes back from that sequence."""
    ctx = make_context("gemma3", n_ctx=512)
    cache = PrefixCache(ctx, block_size=8)
    sequence = cache.sequence(np.random.default_rng(1).integers(5, 56, 100).tolist())
    sequence.evaluate()
    sequence.fork().close()
    check_accounts(cache)
    kept = cache.stats()
    assert kept.ram_checkpoints
    cache._ram.clear(None)
    list(cache.events)
    assert cache._ram._in_use
    sequence.fork().close()
    check_accounts(cache)
    assert abs(cache.stats().ram_bytes - kept.ram_bytes) < 2_000
    sequence.close()


@pytest.mark.parametrize("is_repaired", [False, True])
@pytest.mark.parametrize("first", ["checkpoint", "tail"])
@pytest.mark.parametrize("name", ["gemma3", "jamba", "mamba"])
def test_a_state_of_a_checkpoint_and_a_tail_counts_once(
    name: str, first: str, is_repaired: bool, make_context: Make
) -> None:
    """A prompt ends with a block, and its logits are kept; whichever of the two leaves first."""
    ctx = make_context(name, n_ctx=512, n_seq_max=2)
    cache = PrefixCache(ctx, block_size=8, keep_logits=True)
    ram, prompt = cache._ram, words(1, 40)
    with cache.sequence(prompt) as sequence:
        sequence.logits()
    (key,) = ram._tails
    run, tail = key[0], ram._tails[key]

    def lose_checkpoint() -> None:
        assert run.checkpoint is not None
        ram.tree.remove(run.checkpoint)

    def lose_tail() -> None:
        ram._forget(key)

    def counted() -> int:
        gc.collect()
        check_accounts(cache)
        return cache.stats().ram_bytes

    lose_checkpoint()
    with cache.sequence(prompt + words(2, 8)) as sequence:
        assert sequence.reuse.ram == 40
        sequence.logits()
    del sequence
    assert run.checkpoint is not None
    assert run.checkpoint.payloads[0] is tail.rest
    if is_repaired:
        ram._is_whole = False
    before = counted()
    overhead = ram.tree.run_bytes + RUN_BYTES
    size, others = tail.rest.nbytes, tail.nbytes - tail.rest.nbytes + PLACE_BYTES
    if first == "checkpoint":
        lose_checkpoint()
        assert before - counted() == overhead
        lose_tail()
    else:
        lose_tail()
        del tail
        assert before - counted() == others
        lose_checkpoint()
    tail = None
    assert before - counted() == overhead + others + size
    cache.close()


def test_waiting_events_are_bounded_in_bytes() -> None:
    log = EventLog(100_000)
    names = tuple(bytes([i]) * 32 for i in range(10))
    for i in range(1_000):
        log.add(BlockStored(names, None, tuple(range(i, i + 640)), 64))
        log.add(BlockRemoved(names))
        assert log.nbytes <= 100_000
    assert 20 < len(log) < 200
    first, *_, stored, removed = log
    assert isinstance(first, AllBlocksCleared), "what was forgotten is said to be"
    assert stored == BlockStored(names, None, tuple(range(999, 1639)), 64, time=stored.time)
    assert isinstance(removed, BlockRemoved)
    assert (len(log), log.nbytes) == (0, 0)
    log.add(BlockStored(names, None, tuple(range(100_000)), 64))
    assert [type(one) for one in log] == [AllBlocksCleared], "it is too large for the log alone"
    log.add(BlockRemoved(names[:1]))
    log.add(BlockStored(names, None, tuple(range(100_000)), 64))
    log.add(BlockRemoved(names))
    assert [type(one) for one in log] == [AllBlocksCleared, BlockRemoved]
    assert not list(log)


def test_who_reads_events_late_believes_in_no_block_that_is_gone(make_context: Make) -> None:
    """What left while nobody read was forgotten, and readers kept it for ever."""
    cache = PrefixCache(make_context("llama"), block_size=2, ram_bytes=60_000)
    believed: set[bytes] = set()
    for i in range(40):
        with cache.sequence(np.random.default_rng(i).integers(5, 50, 30)) as sequence:
            sequence.evaluate()
        if i % 7 == 0:
            events = list(cache.events)
            believed = told([BlockStored(tuple(believed), None, (), 2), *events])
            with cache._pool.hold():
                assert believed <= {n for run in cache._ram.tree.runs() for n in run.names}
    assert cache.stats().removed


def test_tenants_that_left_are_forgotten(make_context: Make) -> None:
    ctx = make_context("llama")
    cache = PrefixCache(ctx, block_size=8, ram_bytes=40_000)
    for i in range(60):
        with cache.sequence(words(i, 20), namespace=f"tenant {i}") as sequence:
            sequence.evaluate()
    gc.collect()
    tree = cache._ram.tree
    alive = {run.namespace for run in tree._roots.values()}
    assert 0 < len(alive) < 20
    assert all(root.children or root.held for root in tree._roots.values())


@pytest.mark.parametrize("letter", ["x", "\u00e9", "\u4e16"])
def test_names_of_namespaces_count(letter: str, make_context: Make) -> None:
    """By a figure that stays: Python may keep a text in UTF-8 beside itself, from any time on."""
    ctx = make_context("llama")
    cache = PrefixCache(ctx, block_size=8, ram_bytes=1_000_000)
    for i in range(80):
        name = f"{i}" + letter * 20_000
        with cache.sequence(words(i, 20), namespace=name) as sequence:
            sequence.evaluate()
        pickle.dumps(name)
        tree = cache._ram.tree
        assert 20_000 * len(tree._roots) < cache.stats().ram_bytes <= 1_000_000
        assert tree._roots.name_bytes == sum(map(name_bytes, tree._roots))
    assert len(tree._roots) > 3
    cache.clear(name)
    cache.clear()
    assert tree._roots.name_bytes == 0


def test_pins_say_what_they_keep(make_context: Make) -> None:
    ctx = make_context("llama")
    cache = PrefixCache(ctx, block_size=8)
    with cache.sequence(words(1, 40)) as sequence:
        sequence.evaluate()
    pin, short = cache.pin(words(1, 40)), cache.pin(words(1, 40), ttl=0)
    assert (pin.n_tokens, short.n_tokens) == (40, 0)
    cache.clear()
    assert pin.n_tokens == 0
    pin.release()
    for ttl in (float("nan"), -1):
        with pytest.raises(ValueError, match="ttl is "):
            cache.pin(words(1, 40), ttl=ttl)


def test_what_tiers_tell_while_nothing_can_leave_is_in_the_budget(make_context: Make) -> None:
    ctx, limit, told = make_context("llama"), 400_000, 0
    with PrefixCache(ctx, block_size=1, ram_bytes=limit, tiers=[MemoryStore()]) as cache:
        for i in range(60):
            with cache.sequence(words(i, 20)) as sequence:
                sequence.evaluate()
            assert cache.flush(60)
            assert cache.stats().ram_bytes <= limit, "an event of a tier is over the budget"
            told += len(list(cache.events))
        assert cache.stats().removed
        assert told > 60
