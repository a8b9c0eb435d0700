"""Tests of the contract of `BlockStore`, for stores of your own, too.

::

    from pykvcache.prefix.stores.conformance import StoreConformance

    class TestMyStore(StoreConformance):
        def make_store(self):
            return MyStore(...)

pytest collects the methods. The first `make_store` of a test returns an empty store; if `shared` is
True, later calls return other handles on the same blocks.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
from collections.abc import Iterator, Sequence

from pykvcache.prefix.stores.base import BlockStore

__all__ = ["StoreConformance", "chain"]


def chain(n: int, seed: object = 0, size: int = 1000) -> list[tuple[bytes, bytes]]:
    """Return ``n`` blocks with keys of 32 bytes, equal for equal seeds."""
    keys = [hashlib.sha256(f"{seed}/{i}".encode()).digest() for i in range(n)]
    return [(key, random.Random(key).randbytes(size + i)) for i, key in enumerate(keys)]


def _check(condition: bool, message: str) -> None:
    if not condition:  # not `assert`, which python -O removes
        raise AssertionError(message)


def _keys(blocks: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
    return [key for key, _ in blocks]


class StoreConformance:
    """Tests of a `BlockStore`. Subclass it, implement `make_store`, and run pytest.

    Attributes
    ----------
    shared : bool
        Whether `make_store` returns handles on the same blocks within one test.
    ordered : bool
        Whether `trim` removes exactly the least recently used first.
    keeps_paths : bool
        Whether `trim` never removes a block before one that needs it.
    can_discard : bool
        Whether the store has `discard` and `entries`.
    """

    shared = True
    ordered = True
    keeps_paths = True
    can_discard = True

    def make_store(self) -> BlockStore:
        """Return a store, which is empty at the first call of a test."""
        raise NotImplementedError

    @contextlib.contextmanager
    def opened(self) -> Iterator[BlockStore]:
        """Yield a store, and close it."""
        with self.make_store() as store:
            yield store

    def expect(self, store: BlockStore, blocks: Sequence[tuple[bytes, bytes]], n: int) -> None:
        """Check that exactly the first ``n`` of the blocks are stored, and intact."""
        _check(store.contains(_keys(blocks)) == n, f"contains does not return {n}")
        buffers = [bytearray(len(data)) for _, data in blocks]
        _check(store.get_into(_keys(blocks), buffers) == n, f"get_into does not read {n}")
        for buffer, (_, data) in list(zip(buffers, blocks, strict=True))[:n]:
            _check(buffer == data, "get_into reads something else")

    def test_an_empty_store_misses(self) -> None:
        with self.opened() as store:
            self.expect(store, chain(3), 0)
            _check(store.trim(0) == [], "an empty store removes something")
            store.touch(_keys(chain(3)))

    def test_no_keys_are_no_blocks(self) -> None:
        with self.opened() as store:
            _check(store.contains([]) == 0, "contains of nothing")
            _check(store.get_into([], []) == 0, "get_into of nothing")
            _check(store.put([]) == 0, "put of nothing")
            store.touch([])

    def test_what_is_put_is_read(self) -> None:
        blocks = chain(20)
        with self.opened() as store:
            _check(store.put(blocks) == 20, "put does not store all")
            self.expect(store, blocks, 20)

    def test_any_buffer_is_stored(self) -> None:
        ((a, data), (b, _), (c, _)) = blocks = chain(3)
        with self.opened() as store:
            _check(store.put([(a, bytearray(data)), (b, memoryview(data)[:7])]) == 2, "put")
            _check(store.put([(c, b"")]) == 1, "an empty block is not stored")
            buffers = [bytearray(len(data)), bytearray(7), bytearray(0)]
            _check(store.get_into(_keys(blocks), buffers) == 3, "get_into does not read all")
            _check(buffers == [data, data[:7], b""], "get_into reads something else")

    def test_present_answers_for_each_key(self) -> None:
        blocks = chain(6)
        with self.opened() as store:
            store.put([blocks[1], blocks[4]])
            there = store.present(_keys(blocks))
            _check(there == [False, True, False, False, True, False], f"present returns {there}")
            _check(store.present([]) == [], "present of nothing")

    def test_a_missing_block_ends_the_run(self) -> None:
        blocks = chain(9)
        with self.opened() as store:
            store.put(blocks[:4] + blocks[5:])
            self.expect(store, blocks, 4)
            self.expect(store, blocks[5:], 4)

    def test_what_is_there_is_not_replaced(self) -> None:
        blocks = chain(3)
        with self.opened() as store:
            store.put(blocks)
            others = [(key, bytes(len(data))) for key, data in blocks]
            _check(store.put(others) == 0, "put replaces")
            self.expect(store, blocks, 3)

    def test_a_key_that_comes_twice_is_stored_once(self) -> None:
        blocks = chain(1)
        with self.opened() as store:
            _check(store.put(blocks * 2) == 1, "put stores twice")
            self.expect(store, blocks, 1)

    def test_a_buffer_may_be_longer(self) -> None:
        ((key, data),) = chain(1)
        with self.opened() as store:
            store.put([(key, data)])
            buffer = bytearray(b"x" * (len(data) + 50))
            _check(store.get_into([key], [buffer]) == 1, "get_into reads nothing")
            _check(buffer == data + b"x" * 50, "get_into writes past the block")

    def test_a_buffer_that_is_too_short_ends_the_run(self) -> None:
        blocks = chain(3)
        with self.opened() as store:
            store.put(blocks)
            buffers = [bytearray(len(data)) for _, data in blocks]
            buffers[1] = bytearray(10)
            _check(
                store.get_into(_keys(blocks), buffers) == 1, "a short buffer does not end the run"
            )

    def test_large_blocks_come_back_whole(self) -> None:
        blocks = chain(2, size=1_500_000)
        with self.opened() as store:
            store.put(blocks)
            self.expect(store, blocks, 2)

    def test_trimming_to_nothing_removes_all(self) -> None:
        blocks = chain(5)
        with self.opened() as store:
            store.put(blocks)
            _check(sorted(store.trim(0)) == sorted(_keys(blocks)), "trim(0) does not remove all")
            self.expect(store, blocks, 0)
            _check(store.put(blocks) == 5, "removed blocks cannot be stored again")

    def test_trimming_to_a_lot_removes_nothing(self) -> None:
        blocks = chain(5)
        with self.opened() as store:
            store.put(blocks)
            _check(store.trim(1 << 50) == [], "trim removes blocks that fit")
            self.expect(store, blocks, 5)

    def test_the_least_recently_used_goes_first(self) -> None:
        if not self.ordered:
            return
        first, second = chain(4, "a", 200_000), chain(4, "b", 200_000)
        with self.opened() as store:
            store.put(first)
            store.put(second)
            store.touch(_keys(first))
            removed: list[bytes] = []
            for mebibytes in range(40, 0, -1):
                removed += store.trim(mebibytes << 18)
            _check(bool(removed), "trim removes nothing")
            order = _keys(second)[::-1] + _keys(first)[::-1]
            _check(removed == order[: len(removed)], "another block is removed first")

    def test_no_block_is_removed_before_one_that_needs_it(self) -> None:
        """Paths of a tree are used in random order, and the store is trimmed in between."""
        if not self.keeps_paths:
            return
        dice, size = random.Random(1), 60_000
        blocks = chain(40, "tree", size)
        paths: list[list[tuple[bytes, bytes]]] = [[blocks[0]]]
        for i in range(1, len(blocks)):
            paths.append([*paths[dice.randrange(max(0, i - 6), i)], blocks[i]])
        order: list[bytes] = []  # the least recently used first
        with self.opened() as store:
            for step in range(1, 61):
                path = dice.choice(paths)
                keys = _keys(path)
                store.touch(keys)
                store.put(path)
                store.touch(keys)
                order = [key for key in order if key not in keys] + keys[::-1]
                if step % 12:
                    continue
                there = dict(zip(order, store.present(order), strict=True))
                order = [key for key in order if there[key]]
                removed = store.trim(int(len(order) * size * dice.choice((0.4, 0.6, 0.8))))
                _check(bool(removed), "trim removes nothing")
                if self.ordered:
                    _check(removed == order[: len(removed)], "another block is removed first")
                order = [key for key in order if key not in removed]
                for path in paths:
                    n = store.contains(_keys(path))
                    _check(
                        not any(store.present(_keys(path[n:]))),
                        "a block remains that needs a removed one",
                    )

    def test_another_handle_sees_the_blocks(self) -> None:
        if not self.shared:
            return
        blocks = chain(4)
        with self.opened() as one, self.opened() as other:
            one.put(blocks[:2])
            self.expect(other, blocks, 2)
            other.put(blocks)
            self.expect(one, blocks, 4)

    def test_blocks_survive_the_store(self) -> None:
        if not self.shared:
            return
        blocks = chain(4)
        with self.opened() as store:
            store.put(blocks)
        with self.opened() as store:
            self.expect(store, blocks, 4)

    def test_a_closed_store_misses(self) -> None:
        blocks = chain(2)
        with self.opened() as store:
            store.put(blocks)
        store.close()
        self.expect(store, blocks, 0)
        _check(store.put(chain(2, "new")) == 0, "a closed store stores")
        store.touch(_keys(blocks))
        _check(store.trim(0) == [], "a closed store removes")

    def test_discarded_blocks_can_be_written_again(self) -> None:
        if not self.can_discard:
            return
        blocks = chain(3)
        with self.opened() as store:
            store.put(blocks)
            _check(store.discard(_keys(blocks)[1:2]) == 1, "discard does not remove one")
            _check(store.discard(_keys(blocks)[1:2]) == 0, "discard counts a missing block")
            self.expect(store, blocks, 1)
            _check(store.put(blocks) == 1, "put does not store one")
            self.expect(store, blocks, 3)
            found = {entry.key: entry.size for entry in store.entries()}
            _check(found.keys() == {key for key, _ in blocks}, "entries lists other blocks")
            _check(all(found[key] >= len(data) for key, data in blocks), "entries have no size")

    def test_wrong_arguments_raise_and_change_nothing(self) -> None:
        ((key, data), _) = blocks = chain(2)
        with self.opened() as store:
            store.put(blocks)
            for call in (
                lambda: store.contains([key[:31]]),
                lambda: store.put([(key + b"x", data)]),
                lambda: store.get_into([key], []),
                lambda: store.get_into([key], [bytes(len(data))]),
                lambda: store.touch(["text"]),  # type: ignore[list-item]
                lambda: store.trim(-1),
            ):
                with contextlib.suppress(TypeError, ValueError):
                    call()
                    _check(False, "wrong arguments do not raise")
            self.expect(store, blocks, 2)

    def test_threads_share_a_store(self) -> None:
        blocks = chain(48, "threads", 3000)
        failures: list[BaseException] = []
        with self.opened() as store:

            def work(part: int) -> None:
                try:
                    mine = blocks[part * 8 : part * 8 + 16]
                    for _ in range(2):
                        store.put(mine)
                        self.expect(store, mine, 16)
                        store.touch(_keys(mine))
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=work, args=(part,)) for part in range(5)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            _check(not failures, f"a thread failed: {failures[:1]}")
            self.expect(store, blocks, 48)
