"""Tokens and text that a sequence generates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pykvcache._native import lib
from pykvcache.errors import ClosedError, NoKvCacheSlot, OvertakenError, PositionError
from pykvcache.sampling import Sampler
from pykvcache.sequence.cells import most_tokens
from pykvcache.sequence.text import Stop, TextStream

if TYPE_CHECKING:
    from pykvcache.sequence.sequence import LlamaSequence

__all__ = ["FinishReason", "Generation", "OnFull", "TextGeneration"]

# Stubtest takes a Literal of several for no union.
OnFull = Literal["raise"] | Literal["stop"] | Literal["shift"]
FinishReason = Literal["stop"] | Literal["length"] | Literal["full"]


class Generation(Iterator[int]):
    """The tokens that `LlamaSequence.generate` yields; each stands in the sequence by then.

    The next token follows the tokens that stand there then: the sequence may be edited, parked
    or forked meanwhile. Of several generations of one sequence the newest goes on; an older one
    raises `OvertakenError`.
    """

    def __init__(
        self,
        sequence: LlamaSequence,
        max_tokens: int,
        sampler: Sampler,
        stop: Stop,
        on_full: OnFull,
        n_keep: int,
        *,
        as_text: bool = False,
    ) -> None:
        self._sequence = sequence
        self._most = max_tokens
        self._writer = lib.Writer(sequence._cells.ledger, sampler.native)
        self._stop = stop
        self._on_full = on_full
        self._n_keep = n_keep
        self._text = TextStream(stop.strings) if as_text or stop.strings else None
        self._finish: FinishReason | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """How it ended; None before.

        ``"stop"`` after an end-of-generation token or a stop, ``"length"`` after ``max_tokens``,
        ``"full"`` where the cache is full and ``on_full="stop"``.
        """
        return self._finish

    def __next__(self) -> int:
        token = self._next()[0]
        if token is None:
            raise StopIteration
        return token

    def _next(self) -> tuple[int | None, str]:
        """Return the next token, None at the end, and the text that is certain with it."""
        if self._finish is not None:
            return None, ""
        with self._sequence._held():
            if self._finish is None:  # another thread may have been faster
                self._finish = self._write()
            if self._finish is not None:
                return None, ""
            token, text = self._writer.last, ""
            if token in self._stop.tokens:
                self._finish = "stop"
            elif self._text is not None:
                text = self._text.feed(self._sequence.context.model.token_to_piece(token))
                if self._text.stopped is not None:
                    self._finish = "stop"
        return token, text

    def _write(self) -> FinishReason | None:
        """Evaluate, choose a token and append it; or return why there is none."""
        sequence, writer = self._sequence, self._writer
        if writer.n_written >= self._most:
            return "length"
        if self._text is not None and sequence.context.model.is_closed:
            raise ClosedError("the model is closed: its tokens have no text")
        while True:
            if writer.is_overtaken:
                raise OvertakenError(
                    "another generation has gone on with this sequence since this one: make a new "
                    "one to go on from the tokens as they are"
                )
            try:
                row = sequence._row()
                break
            except (NoKvCacheSlot, PositionError):
                if self._on_full == "raise" or not self._helps():
                    raise
                if self._on_full == "stop":
                    return "full"
                self._shift()
        return None if writer.write(sequence.context.native, row) else "stop"

    def _helps(self) -> bool:
        """Whether fewer tokens would fit; not where an id is missing."""
        sequence = self._sequence
        is_long = len(sequence) > most_tokens(sequence.context)
        return is_long or sequence.seq_id is not None

    def _shift(self) -> None:
        """Drop half of what comes after the first n_keep tokens."""
        n = len(self._sequence)
        gone = (n - self._n_keep) // 2
        if gone < 1:
            raise NoKvCacheSlot(
                f"the cache is full with {n} tokens, of which n_keep={self._n_keep} are kept: keep "
                "fewer, or make the context with a larger n_ctx",
                1,
                n_tokens=n + 1,
                n_cells=n,
            )
        self._sequence._discard(self._n_keep, self._n_keep + gone, reevaluate=True)


class TextGeneration(Iterator[str]):
    """The text that `LlamaSequence.stream` yields, in whole characters.

    It is that of the tokens that this generation chose, see `Generation`.
    """

    def __init__(self, tokens: Generation) -> None:
        self._tokens = tokens
        self._finished = False

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the text ended, as for `Generation`; None before."""
        return self._tokens.finish_reason

    def __next__(self) -> str:
        while not self._finished:
            token, text = self._tokens._next()
            if token is None:
                assert self._tokens._text is not None
                text = self._tokens._text.finish()
                self._finished = True
            if text:
                return text
        raise StopIteration
