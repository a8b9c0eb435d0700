"""Tokens and text that a sequence generates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pykvcache.errors import NoKvCacheSlot
from pykvcache.sampling import Sampler
from pykvcache.sequence.edits import EditMethods
from pykvcache.sequence.text import Stop, TextStream

__all__ = ["FinishReason", "Generation", "OnFull", "TextGeneration"]

# Stubtest takes a Literal of several for no union.
OnFull = Literal["raise"] | Literal["stop"] | Literal["shift"]
FinishReason = Literal["stop"] | Literal["length"] | Literal["full"]


class Generation(Iterator[int]):
    """The tokens that `LlamaSequence.generate` yields; each stands in the sequence by then.

    Attributes
    ----------
    finish_reason
        ``"stop"`` after an end-of-generation token or a stop, ``"length"`` after ``max_tokens``,
        ``"full"`` where the cache is full and ``on_full="stop"``; None before.
    """

    def __init__(
        self,
        sequence: EditMethods,
        max_tokens: int,
        sampler: Sampler,
        stop: Stop,
        on_full: OnFull,
        n_keep: int,
    ) -> None:
        self._sequence = sequence
        self._left = max_tokens
        self._sampler = sampler
        self._stop = stop
        self._on_full = on_full
        self._n_keep = n_keep
        self._text = TextStream(stop.strings)
        self.finish_reason: FinishReason | None = None

    def __next__(self) -> int:
        return self._next()[0]

    def _next(self) -> tuple[int, str]:
        """Return the next token, and the text that is certain with it."""
        if self.finish_reason is None and self._left <= 0:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            raise StopIteration
        token = self._sample()
        if token is None:
            raise StopIteration
        self._left -= 1
        text = ""
        if token in self._stop.tokens:
            self.finish_reason = "stop"
        else:
            text = self._text.feed(self._sequence.context.model.token_to_piece(token))
            if self._text.stopped is not None:
                self.finish_reason = "stop"
        return token, text

    def _sample(self) -> int | None:
        """Evaluate, choose a token and append it, in one hold of the lock."""
        sequence = self._sequence
        with sequence._held():
            while True:
                try:
                    row = sequence._row()
                    break
                except NoKvCacheSlot:
                    if self._on_full == "raise":
                        raise
                    if self._on_full == "stop":
                        self.finish_reason = "full"
                        return None
                    self._shift()
            native = sequence.context.native
            token = self._sampler.native.sample(native, row)
            if native.is_eog(token):
                self.finish_reason = "stop"
                return None
            sequence._append_one(token)
            return token

    def _shift(self) -> None:
        """Drop half of what comes after the first n_keep tokens."""
        n = len(self._sequence)
        gone = (n - self._n_keep) // 2
        if gone < 1:
            raise NoKvCacheSlot(
                f"the cache is full with {n} tokens, of which n_keep={self._n_keep} are kept", 1
            )
        self._sequence.discard(self._n_keep, self._n_keep + gone, reevaluate=True)


class TextGeneration(Iterator[str]):
    """The text that `LlamaSequence.stream` yields, in whole characters.

    Attributes
    ----------
    finish_reason
        As for `Generation`.
    """

    def __init__(self, tokens: Generation) -> None:
        self._tokens = tokens
        self._finished = False

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the text ended; None before."""
        return self._tokens.finish_reason

    def __next__(self) -> str:
        while not self._finished:
            try:
                text = self._tokens._next()[1]
            except StopIteration:
                self._finished = True
                text = self._tokens._text.finish()
            if text:
                return text
        raise StopIteration
