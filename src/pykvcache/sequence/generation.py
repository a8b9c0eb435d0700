"""Tokens and text that a sequence generates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from pykvcache._native import lib
from pykvcache.errors import NoKvCacheSlot, OvertakenError, PositionError
from pykvcache.sampling import Sampler
from pykvcache.sequence.edits import EditMethods
from pykvcache.sequence.length import most_tokens
from pykvcache.sequence.text import Stop, TextRules, TextState

__all__ = ["FinishReason", "Generation", "OnFull", "TextGeneration"]

# Stubtest takes a Literal of several for no union.
OnFull = Literal["raise"] | Literal["stop"] | Literal["shift"]
FinishReason = Literal["stop"] | Literal["length"] | Literal["full"]


class Given(NamedTuple):
    """What was given out of a generation: so many tokens, and the text of them."""

    n: int = 0
    text: TextState = TextState()
    finish: FinishReason | None = None


class Generation(Iterator[int]):
    """The tokens that `LlamaSequence.generate` yields; each stands in the sequence by then.

    The next token follows the tokens that stand there then: the sequence may be edited, parked
    or forked meanwhile. Of several generations of one sequence the newest goes on; an older one
    raises `OvertakenError`. After an interrupt (Ctrl-C), the next call yields what was not given
    out.
    """

    def __init__(
        self,
        sequence: EditMethods,
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
        self._reads = as_text or bool(stop.strings)
        self._rules = TextRules(stop.strings)
        self._given = Given()

    @property
    def finish_reason(self) -> FinishReason | None:
        """How it ended; None before.

        ``"stop"`` after an end-of-generation token or a stop, ``"length"`` after ``max_tokens``,
        ``"full"`` where the cache is full and ``on_full="stop"``.
        """
        return self._given.finish

    def __next__(self) -> int:
        token = self._next()[0]
        if token is None:
            raise StopIteration
        return token

    def _next(self) -> tuple[int | None, str]:
        """Return the next token, None at the end, and the text that is certain with it."""
        if self._given.finish is not None:
            return None, ""
        before = after = self._given
        try:
            with self._sequence._held():
                before = self._given
                token, text, after = self._step(before)
                self._given = after
        except BaseException:
            # An interrupt on the way out: nobody has got the token.
            if self._given is after:
                self._given = before
            raise
        return token, text

    def _step(self, given: Given) -> tuple[int | None, str, Given]:
        """Return a token, its text and what is given out with it; the lock is held."""
        writer = self._writer
        if given.finish is not None:
            return None, "", given
        if given.n == writer.n_written:
            end: FinishReason | None = "length" if given.n >= self._most else self._write()
            if end is not None:
                return None, "", given._replace(finish=end)
        token, text, state = writer.last, "", given.text
        finish: FinishReason | None = None
        if token in self._stop.tokens:
            finish = "stop"
        elif self._reads:
            piece = self._sequence.context.model.token_to_piece(token)
            text, state = self._rules.after(state, piece)
            if state.stopped is not None:
                finish = "stop"
        return token, text, Given(given.n + 1, state, finish)

    def _write(self) -> FinishReason | None:
        """Evaluate, choose a token and append it; or return why there is none."""
        sequence, writer = self._sequence, self._writer
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
        cells = sequence._cells
        cells.row = None
        try:
            if writer.write(sequence.context.native, row):
                return None
        except Exception:
            cells.row = row  # nothing was appended
            raise
        cells.row = row
        return "stop"

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
        self._sequence.discard(self._n_keep, self._n_keep + gone, reevaluate=True)


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
                given = self._tokens._given
                text = self._tokens._rules.after(given.text, b"", final=True)[0]
                self._finished = True
            if text:
                return text
        raise StopIteration
