"""The parts of a prompt whose memory cannot be rewound: they end where checkpoints are taken."""

from __future__ import annotations

from pykvcache.sequence.cells import SequenceCells

__all__ = ["end_of_part", "is_part"]


def end_of_part(cells: SequenceCells, end: int, room: int) -> int:
    """Return where a part ends that could end at ``end``, with room for so many tokens.

    A last token alone would look like one that was generated, and leave no checkpoint: it goes
    with the part before it, or with the token before it.
    """
    begin, n = cells.ledger.n_evaluated, len(cells.ledger)
    end = min(end, cells.next_stop(n))
    if end == n - 1 and cells.next_stop(n) == n:
        if end - begin > 1:
            return end - 1
        return n if room > 1 else end
    return end


def is_part(cells: SequenceCells, end: int) -> bool:
    """Whether tokens up to ``end`` are part of a prompt after which a checkpoint is taken."""
    begin, n = cells.ledger.n_evaluated, len(cells.ledger)
    return cells.needs_points and (end - begin > 1 or (n - begin > 1 and end == cells.next_stop(n)))
