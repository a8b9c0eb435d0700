"""The tree of blocks against a plain set of paths, and what it promises whatever the policy."""

from __future__ import annotations

import random

import pytest

from pykvcache.prefix.blocks import block_names, root_name, token_bytes
from pykvcache.prefix.policies import POLICIES
from pykvcache.prefix.runs import Run
from pykvcache.prefix.tree import BlockTree

Path = tuple[int, ...]


def known(tree: BlockTree, namespace: str = "") -> set[Path]:
    """Every block of the tree, by the tokens up to its end."""
    paths: set[Path] = set()
    for run in tree.runs(namespace):
        if run.is_checkpoint:
            continue
        before = b"".join(x.text for x in list(run.path())[:0:-1])
        assert len(before) == run.start * tree.step
        for i in range(1, run.n_blocks + 1):
            whole = memoryview(before + run.text[: i * tree.step]).cast("I")
            paths.add(tuple(whole))
    return paths


def check(tree: BlockTree) -> None:
    """Fail unless the numbers are right and every run hangs together."""
    runs = list(tree.runs())
    blocks = [run for run in runs if not run.is_checkpoint]
    assert tree.n_runs == len(runs)
    assert tree.n_blocks == sum(run.n_blocks for run in blocks)
    assert tree.n_bytes == sum(run.n_bytes + tree.run_bytes for run in runs)
    for run in runs:
        assert run.n_blocks >= 1
        assert len(run.payloads) == run.n_blocks
        assert run.parent is not None
        if run.is_checkpoint:
            assert run.parent.checkpoint is run
        else:
            assert len(run.text) == run.n_blocks * run.step
            assert run.parent.children[run.text[: run.step]] is run
        if not run.parent.is_root:
            assert run.parent.end == run.start
            assert run.parent.last_use >= run.last_use


class LeastRecentlyUsed:
    """The reference: every block by itself, in time that grows with their number."""

    def __init__(self, block_size: int, n_blocks: int) -> None:
        self.block_size, self.limit = block_size, n_blocks
        self.blocks: dict[Path, int] = {}
        self.held: list[Path] = []
        self.clock = 0

    def prefixes(self, tokens: Path) -> list[Path]:
        size = self.block_size
        return [tokens[:n] for n in range(size, len(tokens) + 1, size)]

    def match(self, tokens: Path) -> int:
        return sum(path in self.blocks for path in self.prefixes(tokens))

    def touch(self, tokens: Path) -> None:
        self.clock += 1
        for path in self.prefixes(tokens):
            if path in self.blocks:
                self.blocks[path] = self.clock

    def insert(self, tokens: Path) -> None:
        new = [path for path in self.prefixes(tokens) if path not in self.blocks]
        self.blocks.update(dict.fromkeys(new, self.clock))
        while len(self.blocks) > self.limit:
            followed = {path[: -self.block_size] for path in self.blocks}
            leaves = [x for x in self.blocks if x not in followed and x not in self.held]
            others = [path for path in leaves if path not in new]
            if not (others or leaves):
                break
            # What is new goes only when nothing else is left; of one prompt the last block first.
            gone = min(others or leaves, key=lambda path: (self.blocks[path], -len(path)))
            del self.blocks[gone]


def some_tokens(rng: random.Random, seen: list[Path]) -> Path:
    """A prompt: one that was there, its beginning, what it goes on with, or another end."""
    base: Path = rng.choice(seen) if seen and rng.random() < 0.8 else ()
    cut = base[: rng.randint(0, len(base))] if rng.random() < 0.6 else base
    tokens = cut + tuple(rng.randrange(3) for _ in range(rng.choice([0, 0, 1, 5, 12, 30])))
    seen.append(tokens)
    return tokens


@pytest.mark.parametrize("block_size", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_it_is_an_lru_cache_of_blocks(seed: int, block_size: int) -> None:
    rng = random.Random(f"{seed} {block_size}")
    limit = rng.choice([1, 5, 40, 200])
    tree = BlockTree(block_size, "lru", max_bytes=limit * 10)
    reference = LeastRecentlyUsed(block_size, limit)
    seen: list[Path] = []
    holds: list[tuple[Run, Path]] = []
    for _ in range(300):
        tokens = some_tokens(rng, seen)
        text = token_bytes(tokens)
        match = tree.match(text)
        assert match.n_blocks == reference.match(tokens)
        assert match.n_blocks == sum(n for _, n in match.parts())
        run = tree.use(match)
        reference.touch(tokens)
        if rng.random() < 0.2 and match.n_blocks:
            tree.hold(run)
            holds.append((run, tokens[: match.n_blocks * block_size]))
            reference.held.append(holds[-1][1])
        if rng.random() < 0.8:
            new = tree.insert(text, 10)
            reference.insert(tokens)
            if new is not None:
                assert all(x is None for x in new.payloads)
        while holds and rng.random() < 0.3:
            run, tokens = holds.pop(rng.randrange(len(holds)))
            reference.held.remove(tokens)
            tree.release(run)
            reference.touch(tokens)
        assert known(tree) == set(reference.blocks)
        assert tree.n_bytes <= tree.max_bytes
        check(tree)


def held_paths(holds: list[Run]) -> set[Run]:
    return {each for run in holds for each in run.path()}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_every_policy_keeps_the_promises(policy: str, seed: int) -> None:
    """Ends of the tree first, never what is held, never above the budget; with checkpoints."""
    rng = random.Random(f"{seed} {policy}")
    removed: list[Run] = []

    def on_remove(run: Run, first: int) -> None:
        assert run.is_evictable
        assert 0 <= first < run.n_blocks
        assert run not in held_paths(holds)
        removed.append(run)

    tree = BlockTree(2, policy, max_bytes=3000, run_bytes=7, on_remove=on_remove)
    seen: list[Path] = []
    holds: list[Run] = []
    for _ in range(400):
        tokens = token_bytes(some_tokens(rng, seen))
        namespace = rng.choice(["", "", "tenant"])
        match = tree.match(tokens, namespace)
        run = tree.use(match)
        what = rng.random()
        if what < 0.7:
            tree.insert(tokens, rng.choice([10, 10, 30]), namespace)
        elif what < 0.8 and len(holds) < 3 and match.n_blocks:
            tree.hold(run)
            holds.append(run)
        elif what < 0.9 and match.n_blocks:
            tree.add_checkpoint(run, rng.randint(0, 200), 2)
        while holds and rng.random() < 0.2:
            tree.release(holds.pop())
        if tree.n_bytes > tree.max_bytes:
            assert not [run for run in tree.runs() if run.is_evictable]
        assert held_paths(holds) <= set(tree.runs())
        check(tree)
    assert removed
    while holds:
        tree.release(holds.pop())
    assert tree.n_bytes <= tree.max_bytes
    tree.max_bytes = 0
    assert (tree.n_bytes, tree.n_blocks, tree.n_runs) == (0, 0, 0)
    assert not list(tree.runs())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_larger_than_the_budget_keeps_its_beginning(policy: str) -> None:
    tree = BlockTree(1, policy, max_bytes=50)
    tree.insert(token_bytes(range(100, 105)), 10)
    run = tree.insert(token_bytes(range(9)), 10)
    if tree.policy.whole:
        assert run is None
    else:
        assert run is not None
        assert run.n_blocks == 5
        assert tree.match(token_bytes(range(9))).n_blocks == 5
    assert tree.n_bytes <= 50


def test_what_is_held_stays_and_nothing_new_is_kept_beside_it() -> None:
    tree = BlockTree(1, max_bytes=50)
    run = tree.insert(token_bytes(range(5)), 10)
    assert run is not None
    tree.hold(run)
    assert tree.insert(token_bytes([7, 8]), 10) is None
    assert tree.match(token_bytes(range(5))).n_blocks == 5
    with pytest.raises(ValueError, match="held"):
        tree.remove(run)
    tree.release(run)
    assert tree.insert(token_bytes([7, 8]), 10) is not None
    assert tree.match(token_bytes(range(5))).n_blocks == 3
    with pytest.raises(ValueError, match="not held"):
        tree.release(run)


def test_a_hold_outlives_a_cut_of_its_run() -> None:
    tree = BlockTree(1, max_bytes=1000)
    run = tree.insert(token_bytes(range(6)), 10)
    assert run is not None
    tree.hold(run)
    tree.insert(token_bytes([0, 1, 9]), 10)
    tree.max_bytes = 0
    assert known(tree) == {tuple(range(n)) for n in range(1, 7)}


def test_namespaces_share_nothing() -> None:
    tree = BlockTree(2, max_bytes=1000)
    tokens = token_bytes(range(10))
    tree.insert(tokens, 10, "a")
    assert tree.match(tokens, "b").n_blocks == 0
    tree.insert(tokens, 10, "b")
    assert tree.n_blocks == 10
    held = tree.use(tree.match(tokens, "a"))
    tree.hold(held)
    tree.clear("a")
    assert known(tree, "a") == set()
    assert tree.match(tokens, "a").n_blocks == 0
    assert tree.match(tokens, "b").n_blocks == 5
    assert (tree.n_blocks, tree.n_bytes) == (5, 50)
    tree.clear()
    assert (tree.n_blocks, tree.n_bytes, tree.n_runs) == (0, 0, 0)
    assert held.n_blocks == 0
    tree.release(held)
    with pytest.raises(ValueError, match="not held"):
        tree.release(held)
    assert (tree.n_blocks, tree.n_bytes, tree.n_runs) == (0, 0, 0)


def test_names_are_those_of_the_chain_however_the_tree_was_cut() -> None:
    rng = random.Random(5)
    digest = b"d" * 32

    def root(namespace: str) -> bytes:
        return root_name(
            model=digest, rope=digest, layout=digest, block_size=2, namespace=namespace
        )

    tree = BlockTree(2, max_bytes=400, root=root)
    seen: list[Path] = []
    for _ in range(200):
        tokens = token_bytes(some_tokens(rng, seen))
        tree.insert(tokens, 10)
        match = tree.match(tokens)
        if rng.random() < 0.5:
            names = [name for run, n in match.parts() for name in run.names[:n]]
            assert names == block_names(root(""), tokens, 8)[: match.n_blocks]


def test_numbers_of_paths_come_back_when_the_path_does() -> None:
    tree = BlockTree(1, max_bytes=1000)
    run = tree.insert(token_bytes([1, 2, 3, 4]), 10)
    assert run is not None
    keys = [run.key(i) for i in range(4)]
    assert len({*keys}) == 4
    tree.insert(token_bytes([1, 2, 9]), 10)
    other = BlockTree(1, max_bytes=1000)
    other.insert(token_bytes([1]), 10)
    other.insert(token_bytes([1, 2, 3]), 10)
    other.insert(token_bytes([1, 2, 3, 4]), 10)
    for each in (tree, other):
        parts = each.match(token_bytes([1, 2, 3, 4])).parts()
        assert [run.key(i) for run, n in parts for i in range(n)] == keys


def test_checkpoints_are_found_and_leave_before_their_block() -> None:
    tree = BlockTree(1, max_bytes=1000)
    tokens = token_bytes(range(6))
    tree.insert(tokens, 10)
    run = tree.use(tree.match(token_bytes(range(3))))
    assert tree.match(tokens).checkpoint is None
    checkpoint = tree.add_checkpoint(run, 25, 3)
    assert checkpoint is not None
    assert tree.add_checkpoint(run, 25, 3) is None
    assert tree.add_checkpoint(checkpoint, 25, 3) is None
    assert tree.match(tokens).checkpoint is checkpoint
    assert tree.match(tokens[:8]).checkpoint is None
    assert tree.n_bytes == 85
    with pytest.raises(ValueError, match="followed"):
        tree.remove(run)
    tree.remove(checkpoint)
    assert tree.match(tokens).checkpoint is None
    assert tree.n_bytes == 60


class Counted(bytes):
    """Tokens that count how they are looked at."""

    calls = 0

    def startswith(self, *args: object) -> bool:  # type: ignore[override]
        Counted.calls += 1
        return super().startswith(*args)  # type: ignore[arg-type]


def test_a_lookup_compares_runs_and_not_blocks() -> None:
    """Work per prompt grows with the runs on its way, not with its blocks or the tree's."""
    tree = BlockTree(64, max_bytes=10**9)
    tokens = token_bytes([i % 251 for i in range(4096)])
    tree.insert(tokens, 10)
    for i in range(2000):
        tree.insert(token_bytes([1000 + i] * 64), 10)
    changed = token_bytes([i % 251 if i != 3000 else 999 for i in range(4096)])
    for text, n in ((tokens, 64), (changed, 3000 // 64)):
        Counted.calls = 0
        assert tree.match(Counted(text)).n_blocks == n
        assert Counted.calls <= 1 + 7


@pytest.mark.parametrize("policy", POLICIES)
def test_evicting_asks_the_policy_for_runs_and_not_blocks(policy: str) -> None:
    tree = BlockTree(1, policy, max_bytes=10**6)
    asked = 0
    victim = tree.policy.victim

    def counted() -> Run | None:
        nonlocal asked
        asked += 1
        return victim()

    tree.policy.victim = counted  # type: ignore[method-assign]
    for i in range(100):
        tree.insert(token_bytes([i] * 1000), 1000)
    assert asked <= 2 * 100


def test_bad_arguments_raise() -> None:
    with pytest.raises(ValueError, match="block_size is 0"):
        BlockTree(0, max_bytes=1)
    with pytest.raises(ValueError, match="max_bytes is -1"):
        BlockTree(1, max_bytes=-1)
    with pytest.raises(ValueError, match="no policy 'best': known are lru, "):
        BlockTree(1, "best", max_bytes=1)
    tree = BlockTree(1, max_bytes=100)
    run = tree.insert(token_bytes([1, 2]), 1)
    assert run is not None
    with pytest.raises(ValueError, match="3 blocks"):
        tree.remove(run, 3)
    assert tree.extend(run, b"", 1) is None
    tree.extend(run, token_bytes([3]), 1)
    with pytest.raises(ValueError, match="known"):
        tree.extend(run, token_bytes([3, 4]), 1)
