"""What a lookup in the tree of blocks finds."""

from __future__ import annotations

from dataclasses import dataclass

from pykvcache.prefix.runs import Run

__all__ = ["Match", "common_blocks"]


@dataclass(slots=True)
class Match:
    """The longest known beginning of some tokens.

    Attributes
    ----------
    run : Run
        The run that it ends in; the root if nothing is known.
    offset : int
        How many blocks of that run belong to it.
    n_blocks : int
        All its blocks.
    checkpoint : Run or None
        The deepest checkpoint on the way.
    """

    run: Run
    offset: int
    n_blocks: int
    checkpoint: Run | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it ends where its run does."""
        return self.offset == self.run.n_blocks

    def parts(self) -> list[tuple[Run, int]]:
        """Return the runs on the way, the first first, and how many blocks of each belong to it."""
        path = [(run, run.n_blocks) for run in self.run.path()]
        if path:
            path[0] = (self.run, self.offset)
        return path[::-1]


def common_blocks(text: bytes, tokens: bytes, at: int, step: int) -> int:
    """Return how many blocks of the text stand in the tokens from there on; at least the first."""
    low, high = 1, min(len(text), len(tokens) - at) // step
    while low < high:
        middle = (low + high + 1) // 2
        if tokens.startswith(text[low * step : middle * step], at + low * step):
            low = middle
        else:
            high = middle - 1
    return low
