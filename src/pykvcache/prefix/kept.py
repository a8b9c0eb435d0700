"""What a cache keeps in memory: who holds it, what it counts, and what a cut call leaves of it."""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pykvcache.prefix.alike import TokenKeys
from pykvcache.prefix.changes import Changing, change
from pykvcache.prefix.events import AllBlocksCleared, BlockRemoved, EventLog
from pykvcache.prefix.pieces import Buffer, Cells, CopyCells, Joined, Pieces, arrays_of, is_whole
from pykvcache.prefix.policies import Policy
from pykvcache.prefix.repair import rebuild
from pykvcache.prefix.runs import Run
from pykvcache.prefix.tree import BlockTree

__all__ = [
    "BLOCK_BYTES",
    "PLACE_BYTES",
    "RUN_BYTES",
    "TAIL_BYTES",
    "Buffer",
    "Kept",
    "Tail",
    "parts_of",
]

#: Overhead in bytes of a run, of a block, and of an empty cache: measured with tracemalloc
#: (tests/prefix/test_budget.py).
RUN_BYTES, BLOCK_BYTES, FIXED_BYTES = 1_000, 290, 24_000
#: The same of a tail, and of all tails after one run.
TAIL_BYTES, PLACE_BYTES = 560, 600


class Hold(NamedTuple):
    """What a holder keeps."""

    holder: Callable[[], object]  # returns None once it is there no more
    run: Run | None  # releasing it counts as a use of it
    beside: tuple[Run, ...]  # and of these not

    @property
    def runs(self) -> list[Run]:
        """Return all of it."""
        return [*self.beside] if self.run is None else [self.run, *self.beside]


@dataclass(eq=False)
class Tail:
    """The tokens of a prompt after its last full block, always fewer than a block holds."""

    tokens: bytes
    buffer: Cells
    rest: Any  # the partial state (window, recurrent), where the memory has such parts
    row: npt.NDArray[np.float32] | None

    @property
    def shared(self) -> int:
        """Bytes of it that others had already when it came."""
        return self.buffer.shared if isinstance(self.buffer, Joined) else 0

    @property
    def nbytes(self) -> int:
        """Bytes of everything that it would keep if it shared nothing."""
        rest = self.rest.nbytes if self.rest is not None else 0
        row = self.row.nbytes if self.row is not None else 0
        return len(self.tokens) + self.buffer.nbytes + rest + row + TAIL_BYTES


class Kept(Changing):
    """A tree of full blocks, tails beside it, and their accounts; `RamTier` stores and finds."""

    def __init__(
        self,
        block_size: int,
        max_bytes: int,
        policy: str | Policy,
        root: Callable[[str], bytes],
        events: EventLog,
        on_restart: Callable[[], object] = lambda: None,
        other_bytes: Callable[[], int] = lambda: 0,
        release: Callable[[int], bool] = lambda _: False,
        room: Callable[[], int] = lambda: 0,
        copy: CopyCells | None = None,
        expect: Callable[[int], object] = lambda _: None,
    ) -> None:
        super().__init__()
        self.block_size = block_size
        self.max_bytes = max_bytes
        self._events, self._on_restart = events, on_restart
        self._tails: OrderedDict[tuple[Run, bytes], Tail] = OrderedDict()
        self._tails_at: dict[Run, TokenKeys[Tail]] = {}
        self._in_use: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._holds: dict[int, Hold] = {}
        self._tail_bytes = self._shared_bytes = 0
        self._twice_bytes = 0  # of states that a tail and a checkpoint have in common
        self._pieces = Pieces(copy)
        self._fixed_bytes = min(FIXED_BYTES, max_bytes // 16)
        self._more_bytes, self._release, self._room = other_bytes, release, room
        self._expect = expect
        self.stored = self.removed = self.n_checkpoints = 0
        self.tree = BlockTree(
            block_size,
            policy,
            max_bytes=max_bytes,
            root=root,
            run_bytes=RUN_BYTES + 4 * block_size,
            on_remove=self._removing,
            other_bytes=self._other_bytes,
            release=self._make_room,
            last=self._forget_oldest,
            expect=expect,
        )

    @property
    def nbytes(self) -> int:
        """Bytes that are kept, overhead included."""
        return self.tree.used_bytes - self._room()

    def _other_bytes(self) -> int:
        in_use = sum(size for _, size in self._in_use.copy().values()) if self._in_use else 0
        tails = self._tail_bytes - self._twice_bytes - self._pieces.saved
        tails += PLACE_BYTES * len(self._tails_at)
        return self._fixed_bytes + tails + in_use + self._more_bytes() + self._room()

    def block_cost(self, cell_bytes: int) -> int:
        """Return what a block takes of the budget."""
        return (cell_bytes + 4) * self.block_size + BLOCK_BYTES

    @property
    def is_busy(self) -> bool:
        """Whether it, or its policy, is in the middle of something."""
        return self._is_changing or self.tree.asked.is_busy

    @change
    def fit(self) -> None:
        """Evict until the budget is kept."""
        self.tree.fit()

    def _told(self) -> None:
        self.fit()  # events that wait take memory, too

    def _shared_at(self, run: Run) -> tuple[Any, ...]:
        """Return the state that both the checkpoint at the end of a run and a tail there keep."""
        here, point = self._tails_at.get(run), run.checkpoint
        if here is None or point is None or (tail := here.get(b"")) is None:
            return ()
        return tuple(state for state in point.payloads if state is tail.rest is not None)

    def _count_twice(self, run: Run, sign: int = 1) -> None:
        """Count what is shared at the end of a run once alone; with -1 no more."""
        self._twice_bytes += sign * sum(state.nbytes for state in self._shared_at(run))

    def _count_while_used(self, things: Iterable[Any]) -> None:
        """Count what is to be dropped for as long as something else refers to it."""
        for thing in arrays_of(things):
            key = id(thing)
            with contextlib.suppress(TypeError):  # None, or nothing that can be watched
                # No interrupt can come in the middle of this callback.
                watch = weakref.ref(thing, partial(self._in_use.pop, key))
                self._in_use[key] = watch, thing.nbytes

    def _count_as_kept(self, things: Iterable[Any]) -> None:
        """Count what is to be kept, perhaps again, no more because somebody uses it."""
        if self._in_use:
            for thing in arrays_of(things):
                self._in_use.pop(id(thing), None)

    def _leave(self, things: Iterable[Any]) -> None:
        """Let go of cells and states that were kept."""
        for thing in things:
            self._count_while_used(self._pieces.leave(thing))

    def _repair(self) -> None:
        """Keep what is whole of what a call has left that was cut short."""
        self._expect(0)
        tree, tails = self.tree, self._tails
        holds = [run for hold in list(self._holds.values()) for run in hold.runs]
        roots = {run for run, _ in tails if run.namespace is not None}
        runs = rebuild(tree, roots)
        there = {*runs, *tree.roots()}
        for run, tokens in [
            key for key, tail in tails.items() if key[0] not in there or not is_whole(tail.buffer)
        ]:
            self._count_while_used(parts_of(tails[run, tokens]))
            del tails[run, tokens]
        self._tails_at = {}
        for run, tokens in tails:
            self._tails_at.setdefault(run, TokenKeys())[tokens] = tails[run, tokens]
        self._tail_bytes = sum(tail.nbytes for tail in tails.values())
        self._shared_bytes = sum(tail.shared for tail in tails.values())
        cells = [payload for run in runs for payload in run.payloads]
        cells += [tail.buffer for tail in tails.values()]
        self._count_while_used(self._pieces.count_again(cells))
        self._twice_bytes = 0
        for run in self._tails_at:
            self._count_twice(run)
        for run in [*holds, *(run for run, _ in tails if run.namespace is not None)]:
            if run in there:
                run.held += 1
            else:
                run.parent = None
        self.n_checkpoints = sum(run.is_checkpoint for run in runs)
        self.removed = self.stored - tree.n_blocks
        self._count_as_kept(cells)
        for tail in tails.values():
            self._count_as_kept(parts_of(tail))
        tree.renew_policy(runs)
        self._untold.clear()
        self._untold += [self._on_restart, partial(self._events.add, AllBlocksCleared())]
        for run in runs:
            self._say_stored(run)

    def _say_stored(self, run: Run) -> None:
        if run.is_checkpoint:
            return
        parent = run.parent
        assert parent is not None
        root = parent.last_name
        before = None if parent.is_root else root
        told = root, before, run.text, self.block_size, run.root.namespace
        self._untold.append(partial(self._events.add_stored, *told))

    # Holding -------------------------------------------------------------------------------------

    @change
    def hold(self, holder: object, run: Run | None, *beside: Run) -> None:
        """Keep runs until their holder releases them, holds others, or is there no more.

        Releasing is a use of ``run``, and none of those beside it.
        """
        old = self._holds.get(id(holder))
        new = self._holds[id(holder)] = Hold(weakref.ref(holder), run, beside)
        for each in new.runs:
            self.tree.hold(each)
        if old is not None:
            self._let_go(old)

    def release(self, holder: object) -> None:
        """Release what a holder has, now or with the next call; nothing where that is none."""
        if (held := self._holds.get(id(holder))) is not None:
            self._holds[id(holder)] = held._replace(holder=_nobody)
            if not self.is_busy:
                self._reap_one(id(holder))

    def reap(self) -> None:
        """Release what holders had that are there no more."""
        if self._holds and not self.is_busy:
            for key in [key for key, held in list(self._holds.items()) if held.holder() is None]:
                self._reap_one(key)

    @change
    def _reap_one(self, key: int) -> None:
        if (held := self._holds.pop(key, None)) is not None:
            self._let_go(held)

    def _let_go(self, held: Hold) -> None:
        for run in held.beside:
            self.tree.release(run, is_use=False)
        if held.run is not None:
            self.tree.release(held.run)

    # Leaving -------------------------------------------------------------------------------------

    def _forget(self, key: tuple[Run, bytes]) -> None:
        run, tokens = key
        tail = self._tails[key]
        self._leave(parts_of(tail))
        if not tokens:
            self._count_twice(run, -1)
            self._count_as_kept(self._shared_at(run))
        here = self._tails_at[run]
        del here[tokens], self._tails[key]
        if not here:
            del self._tails_at[run]
        self._tail_bytes -= tail.nbytes
        self._shared_bytes -= tail.shared
        if run.namespace is not None:
            self.tree.release(run)

    @property
    def _most_tails(self) -> int:
        """Bytes of tails that stay while there is a block that may leave."""
        return self.max_bytes // 4

    def _make_room(self, excess: int) -> bool:
        """Give back what serves speed alone, then tails that keep blocks from their part."""
        if self._release(excess):
            return True
        own = self._tail_bytes - self._shared_bytes
        return excess > 0 and own > self._most_tails and self._forget_oldest()

    def _forget_oldest(self) -> bool:
        """Drop the tail that was not used for longest; whether there was one."""
        key = next(iter(self._tails), None)
        if key is not None:
            self._forget(key)
        return key is not None

    def _removing(self, run: Run, first: int) -> None:
        if run.is_checkpoint:
            # A checkpoint without a state was never counted: the budget had no room for it.
            self.n_checkpoints -= run.payloads[0] is not None
            self._count_while_used(run.payloads)
            assert run.parent is not None
            self._count_twice(run.parent, -1)
            self._count_as_kept(self._shared_at(run.parent))
            return
        for tokens in list(self._tails_at.get(run, ())):
            self._forget((run, tokens))
        self._leave(run.payloads[first:])
        # Blocks without bytes were never stored: the budget had no room for them.
        names = [
            name
            for name, payload in zip(run.names[first:], run.payloads[first:], strict=True)
            if payload is not None
        ]
        self.removed += len(names)
        if names:
            self._untold.append(partial(self._events.add, BlockRemoved(tuple(names))))

    def clear_without_policy(self) -> None:
        """Drop everything after a failure of the policy, which is asked no more."""
        self.tree.give_up_policy()
        self._is_whole = False  # so that another one is made
        self.clear(None)

    @change
    def clear(self, namespace: str | None) -> None:
        """Drop a namespace, or all of them."""
        for key in list(self._tails):
            if namespace is None or key[0].namespace == namespace:
                self._forget(key)  # tails after blocks are dropped with these
        self.tree.clear(namespace)


def parts_of(tail: Tail) -> tuple[Any, ...]:
    """Return what takes memory of a tail: None for what it has not."""
    return tail.buffer, tail.rest, tail.row


def _nobody() -> None:
    """Stand for a holder that is there no more."""
