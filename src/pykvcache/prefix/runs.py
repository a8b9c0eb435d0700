"""A run: blocks that follow each other and were always used together. Nodes of the tree."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

from pykvcache._native.shadows import block_keys, last_key
from pykvcache.prefix.alike import TokenKeys
from pykvcache.prefix.blocks import block_names

__all__ = ["Run", "below", "new_root", "salt_of"]


class Run:
    """Consecutive blocks of one path of the tree, or a checkpoint at a block's end.

    `BlockTree` makes and changes runs; policies read them and keep what they need in ``state``.

    Attributes
    ----------
    parent : Run or None
        What comes before; None for a root, and for a run that is no longer in the tree.
    children : dict
        What follows, by the tokens of the first block.
    checkpoint : Run or None
        The checkpoint at the end of the last block.
    step : int
        Bytes of the tokens of one block.
    n_blocks : int
        How many blocks it has now; eviction takes them from the end. A checkpoint counts as one.
    block_bytes : int
        Memory of one block.
    start : int
        Blocks of the path before the first.
    tokens_saved : int
        Tokens that need no evaluation because of one block.
    uses, created, last_use : int
        How often it was used after it was made; when it was made and last used, on the tree's
        clock, which counts uses.
    held : int
        Sequences and pins that keep it.
    payloads : list
        What the cache stores for each block.
    state : Any
        What the policy notes about it.
    """

    __slots__ = (
        "_names",
        "_start_key",
        "block_bytes",
        "checkpoint",
        "children",
        "created",
        "held",
        "is_checkpoint",
        "last_use",
        "n_blocks",
        "namespace",
        "parent",
        "payloads",
        "stamp",
        "start",
        "state",
        "step",
        "tokens",
        "tokens_saved",
        "uses",
    )

    def __init__(
        self,
        parent: Run | None,
        tokens: bytes,
        step: int,
        *,
        start: int,
        start_key: int,
        block_bytes: int,
        tokens_saved: int,
        now: int,
        is_checkpoint: bool = False,
        names: list[bytes] | None = None,
    ) -> None:
        self.parent = parent
        self.children: TokenKeys[Run] = TokenKeys()
        self.checkpoint: Run | None = None
        self.is_checkpoint = is_checkpoint
        self.tokens = tokens
        self.step = step
        self.n_blocks = 1 if is_checkpoint else len(tokens) // step
        self.block_bytes = block_bytes
        self.tokens_saved = tokens_saved
        self.start = start
        self.uses = 0
        self.created = self.last_use = now
        self.held = 0
        self.payloads: list[Any] = [None] * self.n_blocks
        self.state: Any = None
        self.stamp = -1
        self.namespace: str | None = None  # of a root: whose
        self._start_key = start_key
        self._names = names

    def __repr__(self) -> str:
        what = "checkpoint at" if self.is_checkpoint else f"{self.n_blocks} blocks from"
        return f"<Run: {what} block {self.start}, {self.uses} uses>"

    @property
    def is_root(self) -> bool:
        """Whether paths begin here: a root has no blocks."""
        return self.parent is None

    @property
    def root(self) -> Run:
        """Where its path begins."""
        run = self
        while run.parent is not None:
            run = run.parent
        return run

    @property
    def end(self) -> int:
        """Blocks of the path up to the end of this run."""
        return self.start + (0 if self.is_checkpoint else self.n_blocks)

    @property
    def n_bytes(self) -> int:
        """Memory of all its blocks."""
        return self.n_blocks * self.block_bytes

    @property
    def is_evictable(self) -> bool:
        """Whether its last block may go: nothing follows it, and nobody holds it."""
        return not (
            self.children
            or self.held
            or self.checkpoint is not None
            or self.parent is None
            or not self.n_blocks
        )

    @property
    def text(self) -> bytes:
        """The tokens of its blocks."""
        size = self.n_blocks * self.step
        return self.tokens if len(self.tokens) == size else self.tokens[:size]

    def path(self) -> Iterator[Run]:
        """Yield this run and all before it, without the root; the last first."""
        run = self
        while run.parent is not None:
            yield run
            run = run.parent

    @property
    def names(self) -> list[bytes]:
        """Names of its blocks, computed when first asked for; a root has the one it gives on."""
        unnamed = []
        run = self
        while run._names is None:
            unnamed.append(run)
            assert run.parent is not None
            run = run.parent
        for run in reversed(unnamed):
            assert run.parent is not None
            run._names = block_names(run.parent.last_name, run.text, run.step)
        assert self._names is not None
        return self._names

    @property
    def last_name(self) -> bytes:
        """The name that the next block's is computed from."""
        if self.is_checkpoint:
            assert self.parent is not None
            return self.parent.last_name
        return self.names[-1]

    def key(self, block: int) -> int:
        """Return a 32-bit number for the path up to and with a block: the same whenever it returns.

        For what policies remember of blocks that are gone; two paths may have the same one.
        """
        # A checkpoint has no tokens.
        n_blocks = min(block + 1, len(self.tokens) // self.step)
        return last_key(self.tokens, self.step, n_blocks, self._start_key)

    @property
    def keys(self) -> bytes:
        """The numbers of all its blocks, as uint32; a checkpoint has none."""
        return block_keys(self.text, self.step, self._start_key)

    @property
    def path_keys(self) -> bytes:
        """The numbers of all blocks of the path up to the end of this run."""
        return b"".join(run.keys for run in reversed(list(self.path())) if not run.is_checkpoint)

    @property
    def end_key(self) -> int:
        """The number of the path up to the end of this run."""
        return self.key(self.n_blocks - 1)

    def cut(self, n_blocks: int) -> Run:
        """Return a new run of the first blocks, put before this one, which keeps the rest."""
        size = n_blocks * self.step
        head = Run(
            self.parent,
            self.tokens[:size],
            self.step,
            start=self.start,
            start_key=self._start_key,
            block_bytes=self.block_bytes,
            tokens_saved=self.tokens_saved,
            now=self.created,
            names=None if self._names is None else self._names[:n_blocks],
        )
        head.last_use, head.uses = self.last_use, self.uses
        head.payloads = self.payloads[:n_blocks]
        head.children[self.tokens[size : size + self.step]] = self
        # An interrupt from here on leaves this run where it is found, and seen to be half cut.
        self._start_key = head.end_key
        self.tokens = self.text[size:]
        self.n_blocks -= n_blocks
        self.start += n_blocks
        del self.payloads[:n_blocks]
        if self._names is not None:
            del self._names[:n_blocks]
        assert self.parent is not None
        self.parent.children[head.tokens[: self.step]] = head
        self.parent = head
        return head

    @property
    def is_linked(self) -> bool:
        """Whether what comes before it has it."""
        parent = self.parent
        if parent is None:
            return self.namespace is not None
        if self.is_checkpoint:
            return parent.checkpoint is self
        return parent.children.get(self.tokens[: self.step]) is self

    def drop(self, n_blocks: int) -> None:
        """Forget the last blocks."""
        self.n_blocks -= n_blocks
        del self.payloads[self.n_blocks :]
        if self._names is not None:
            del self._names[self.n_blocks :]
        # Cut now and then, so that taking one block at a time does not copy the rest each time.
        if not self.is_checkpoint and 2 * self.n_blocks * self.step <= len(self.tokens):
            self.tokens = self.text


def below(root: Run) -> Iterator[Run]:
    """Yield the runs after a root, each before those that follow it."""
    waiting = [root]
    while waiting:
        run = waiting.pop()
        if not run.is_root:
            yield run
        waiting.extend(run.children.values())
        if run.checkpoint is not None:
            waiting.append(run.checkpoint)


def salt_of(namespace: str) -> bytes:
    """Return the bytes of a namespace, of which its names and numbers are made."""
    return namespace.encode("utf-8", "surrogatepass")


def new_root(namespace: str, step: int, name: bytes) -> Run:
    """Return where the paths of a namespace begin."""
    root = Run(
        None,
        b"",
        step,
        start=0,
        start_key=zlib.crc32(salt_of(namespace)),
        block_bytes=0,
        tokens_saved=0,
        now=0,
        names=[name],
    )
    root.namespace = namespace
    return root
