"""What a sequence begins with, and a pin keeps, stays: a block used in part, a checkpoint, too."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from pykvcache.prefix.ram import RamTier
from pykvcache.prefix.runs import Run

from prefix.accounts import check_accounts
from pykvcache import LlamaContext, PrefixCache
from pykvcache.prefix.block_hash import token_bytes
from pykvcache.prefix.events import EventLog
from pykvcache.prefix.policies import LRU

Make = Callable[..., LlamaContext]
SIZE = 8


def words(seed: int, n: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(5, 56, n).tolist()
    return found


TRUNK = words(1, 45)


def filled(ctx: LlamaContext, **options: object) -> PrefixCache:
    cache = PrefixCache(ctx, block_size=SIZE, policy="lru", **options)  # type: ignore[arg-type]
    for prompt in (TRUNK, TRUNK[:32] + words(2, 20)):  # they part after four blocks
        with cache.sequence(prompt) as sequence:
            sequence.evaluate()
    return cache


def known(cache: PrefixCache, tokens: list[int]) -> int:
    data = token_bytes(np.array(tokens, np.uint32))
    needs_rest = cache._needs_rest
    return cache._ram.find(data, "", needs_rest=needs_rest, is_use=False).n


def evict(cache: PrefixCache) -> None:
    """Let all go that may."""
    with cache._pool.hold():
        cache._ram.tree.shrink(0)


# In the first block; in the middle of a run; in a run after the one that is used whole.
@pytest.mark.parametrize("n", [1, 5, 20, 36])
@pytest.mark.parametrize("how", ["sequence", "fork", "pin"])
def test_a_block_that_is_used_in_part_stays(n: int, how: str, make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=512, n_seq_max=3)
    cache = filled(ctx)
    prompt = [*TRUNK[:n], 60, 60, 60]
    if how == "pin":
        pin = cache.pin(prompt)
        assert pin.n_tokens == n
        let_go: Callable[[], None] = pin.release
    else:
        sequence = cache.sequence(prompt)
        assert sequence.reuse.ram == n
        child = sequence.fork() if how == "fork" else None
        let_go = sequence.close
        cache._ram.check()
    evict(cache)
    check_accounts(cache)
    assert known(cache, prompt) == n
    # What follows in the same run has left.
    assert cache.stats().ram_blocks == n // SIZE + 1
    let_go()
    if how == "fork" and child is not None:
        child.close()
    evict(cache)
    check_accounts(cache)
    assert not cache.stats().ram_blocks
    cache.close()


def test_a_part_of_a_block_is_no_use_of_it(make_context: Make) -> None:
    """A sequence leaves a block of its own that begins so: counting both would keep both."""
    cache = filled(make_context("llama", n_ctx=512, n_seq_max=3))
    told: list[Run] = []
    used = cache._ram.tree.policy.used
    cache._ram.tree.policy.used = lambda run: (told.append(run), used(run))[1]  # type: ignore
    with cache.sequence([*TRUNK[:20], 60, 60]) as sequence:
        begun = next(run for run in cache._ram.tree.runs() if run.start == 2)
        before = begun.uses, begun.last_use
        assert begun.held
        sequence.evaluate()
    assert [run.start for run in told] == [0]
    assert (begun.uses, begun.last_use) == before
    assert begun.parent is not None
    assert begun.parent.last_use > begun.last_use
    cache.close()


@pytest.mark.parametrize("name", ["mamba", "jamba", "gemma3"])
@pytest.mark.parametrize("n", [20, 40])  # an exact repeat begins at the checkpoint before
def test_the_checkpoint_that_a_sequence_begins_at_stays(
    name: str, n: int, make_context: Make
) -> None:
    cache = filled(make_context(name, n_ctx=512, n_seq_max=3))
    prompt = TRUNK[:n]
    sequence = cache.sequence(prompt)
    n_used = sequence.reuse.ram
    evict(cache)
    check_accounts(cache)
    data = token_bytes(np.array(prompt, np.uint32))
    found = cache._ram.find(data, "", needs_rest=True, is_use=False)
    begin = found.n if found.below is None else found.below[0]
    assert n_used in (begin, found.n - 1)  # of a window the last token may be evaluated again
    assert n_used > 0
    cache.clear()
    sequence.close()
    check_accounts(cache)
    cache.close()


class Notes(LRU):
    """Takes more of the budget with every prompt that it hears of."""

    n_bytes = 0

    def asked(self, tokens: bytes, step: int, start_key: int) -> None:
        self.n_bytes += 3000


@pytest.mark.parametrize("more", [0, 4])
def test_room_for_what_a_policy_notes_is_not_made_of_what_was_found(more: int) -> None:
    """The prompt was evaluated whole, and the report said that it was known."""
    for max_bytes in range(70_000, 90_000, 400):
        ram = RamTier(SIZE, max_bytes, Notes(), lambda _: b"root", EventLog(0))

        def read(_: int, n: int, n_tail: int, __: int) -> list[np.typing.NDArray[np.uint8]]:
            return [np.zeros(4 * SIZE, np.uint8) for _ in range(n + bool(n_tail))]

        tokens = token_bytes(np.arange(SIZE * 200, dtype=np.uint32))
        ram.add(tokens, "", 4, read)
        asked = tokens[: len(tokens) - 4 * more]
        expected = min(ram.tree.n_blocks * SIZE, len(asked) // 4)
        found = ram.find(asked, "", needs_rest=False)
        assert found.n == sum(n for _, _, n in found.blocks) == expected
        # It leaves once somebody else needs the room, if nobody holds it.
        ram.fit()
        assert ram.nbytes <= max_bytes


def test_who_holds_something_else_holds_it_before_the_first_is_released() -> None:
    ram = RamTier(SIZE, 90_000, "lru", lambda _: b"root", EventLog(0))
    tokens = token_bytes(np.arange(SIZE * 4, dtype=np.uint32))
    ram.add(tokens, "", 4, lambda _, n, __, ___: [np.zeros(4 * SIZE, np.uint8) for _ in range(n)])
    found = ram.find(tokens, "", needs_rest=False)
    assert found.run is not None

    class Holder: ...

    holder = Holder()
    ram.hold(holder, found.run)
    ram.tree.max_bytes = ram.max_bytes = 0
    ram.hold(holder, found.run)
    assert found.run.held == 1
    assert found.run.n_blocks == 4
    ram.release(holder)
    assert not ram.tree.n_blocks
