"""One request of a BatchGenerator: its tokens, its text, and how it ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from pykvcache._arguments import IntArray
from pykvcache._native import lib
from pykvcache.errors import ClosedError
from pykvcache.sampling import Sampler
from pykvcache.sequence.logprobs import likeliest
from pykvcache.sequence.sequence import LlamaSequence
from pykvcache.sequence.text import Stop, TextState, TextStream

if TYPE_CHECKING:
    from pykvcache.generate.handle import GenerationHandle

__all__ = ["FinishReason", "GenerationRequest", "RequestTimes"]

# Stubtest takes a Literal of several for no union.
FinishReason = (
    Literal["stop"] | Literal["length"] | Literal["full"] | Literal["aborted"] | Literal["error"]
)


@dataclass
class RequestTimes:
    """When things happened, by ``time.perf_counter()``, in seconds.

    Attributes
    ----------
    queued
        When it was submitted.
    tokens
        When each token was chosen; the first is the time to the first token.
    finished
        When it ended; None before.
    """

    queued: float = field(default_factory=time.perf_counter)
    tokens: list[float] = field(default_factory=list)
    finished: float | None = None

    @property
    def first_token(self) -> float | None:
        """When the first token was chosen; None before."""
        return self.tokens[0] if self.tokens else None


class Driver(Protocol):
    """What a request needs of the `BatchGenerator` that makes its tokens."""

    def _wait_for(self, request: GenerationRequest, i: int) -> int | None:
        """Return token i of a request, making steps if need be; None where it ended before."""

    def _end_aborted(self) -> None:
        """End what was aborted: now, or in the step that is under way."""


class GenerationRequest:
    """A generation as its generator sees it; users hold a `GenerationHandle`, which can be dropped.

    Parameters
    ----------
    driver
        Makes its tokens.
    sequence
        The sequence it continues.
    max_tokens
        Tokens to generate at most.
    sampler, stop, n_logprobs, priority
        As for `BatchGenerator.submit`.
    order
        Requests that came earlier have a smaller one.
    owns
        Whether the sequence is closed at the end.
    """

    def __init__(
        self,
        driver: Driver,
        sequence: LlamaSequence,
        max_tokens: int,
        sampler: Sampler,
        stop: Stop,
        n_logprobs: int,
        priority: int,
        order: int,
        *,
        owns: bool,
    ) -> None:
        self._driver = driver
        self._sequence = sequence
        self._cells = sequence._cells
        self._stop = stop
        self._stream = TextStream(stop.strings)
        self._seen = 0  # tokens that `_look` has looked at
        self._text: str | None = None
        # How many tokens `text` has read, their text, and where it stands: replaced as one.
        self._shown = 0, "", TextState()
        self._lane = lib.Lane(
            sequence._cells.ledger,
            sampler.native,
            max_tokens,
            stop.tokens,
            bool(stop.strings or n_logprobs),
            n_logprobs > 0,
        )
        self._n_logprobs = n_logprobs
        self._priority = priority
        self._order = order
        self._owns = owns
        self._siblings: list[GenerationRequest] = []
        #: The object that the user holds; None where it was dropped.
        self.handle: Callable[[], GenerationHandle | None] = lambda: None
        self._tokens = self._lane.tokens
        self._logprobs: list[dict[int, float]] = []
        self._finish: FinishReason | None = None
        self._error: Exception | None = None
        self._abort = False
        self._watchers: tuple[Callable[[], object], ...] = ()
        self.times = RequestTimes(tokens=self._lane.times)

    # What has come of it ----------------------------------------------------------------------

    @property
    def tokens(self) -> IntArray:
        """The new tokens, so far; int32, shape (n,), a copy."""
        return np.array(self._tokens, np.int32)

    @property
    def text(self) -> str:
        """The text of the new tokens, so far; it ends before a stop string.

        Characters whose bytes are not all there are left out until the end. Read it once before
        the model is closed: the whole text is kept then.
        """
        if self._text is None:
            is_whole = self._finish is not None
            text = self._read_text(is_whole)
            if not is_whole:
                return text
            self._text = text
        return self._text

    def _read_text(self, is_whole: bool) -> str:
        """Return the text so far; only tokens that are new since the last time are read."""
        n, text, state = self._shown
        tokens, rules, parts = self._tokens[n:], self._stream.rules, [text]
        for token in tokens:
            if token not in self._stop.tokens:
                piece = self._sequence.context.model.token_to_piece(token)
                new, state = rules.after(state, piece)
                parts.append(new)
        text = "".join(parts)
        self._shown = n + len(tokens), text, state
        return text + rules.after(state, b"", final=True)[0] if is_whole else text

    @property
    def logprobs(self) -> list[dict[int, float]]:
        """For each token the log-probabilities that the model gave, by token id; a copy.

        The ``logprobs`` likeliest, and the one that was chosen; empty if none were asked for.
        """
        return [dict(one) for one in self._logprobs]

    @property
    def finish_reason(self) -> FinishReason | None:
        """How it ended; None while it runs.

        ``"stop"`` (an end-of-generation token, or a stop), ``"length"`` (``max_tokens``),
        ``"full"`` (it has all the room that there is), ``"aborted"``, ``"error"`` (see `error`).
        """
        return "aborted" if self._finish is None and self._abort else self._finish

    @property
    def error(self) -> Exception | None:
        """What ended it with ``"error"``; iterating raises it."""
        return self._error

    @property
    def sequence(self) -> LlamaSequence:
        """The sequence it continues; closed at the end unless it was the submitted one."""
        return self._sequence

    @property
    def priority(self) -> int:
        """Larger ones go first."""
        return self._priority

    def abort(self) -> None:
        """End it before its next token; its tokens stay. Does nothing where it has ended."""
        if self._finish is None and not self._abort:
            self._abort = True
            self._driver._end_aborted()

    @property
    def is_owned(self) -> bool:
        """Whether the request made its sequence itself, so that only its handle refers to it."""
        return self._owns

    @property
    def n_tokens(self) -> int:
        """How many new tokens there are so far."""
        return len(self._tokens)

    @property
    def n_logprobs(self) -> int:
        """How many of the likeliest tokens are noted for each."""
        return self._n_logprobs

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it; None where it ended otherwise."""
        return self._stream.stopped

    def watch(self, call: Callable[[], object]) -> None:
        """Call something after each step that made tokens of this request, and at its end.

        It is called in the thread that makes the step, and must not call this context: let it
        wake another thread or an event loop.
        """
        self._watchers += (call,)
        if self._tokens or self._finish is not None:
            call()

    def _notify(self) -> None:
        for call in self._watchers:
            call()

    def token(self, i: int) -> int | None:
        """Return token i, making steps if no other thread does; None where it ended before."""
        return self._driver._wait_for(self, i)

    def __repr__(self) -> str:
        ended = self.finish_reason or "not finished"
        return f"<GenerationRequest: {len(self._tokens)} tokens, {ended}>"

    # For the generator ------------------------------------------------------------------------

    def _look(self) -> None:
        """Look at the last tokens, which may be the end."""
        try:
            self._read()
        except ClosedError as error:  # the model was closed: its tokens have no text
            self._end("error", error)
            return
        lane, tokens = self._lane, self._tokens
        if lane.error is not None:
            self._end("error", lane.error)
        elif (
            lane.is_over
            or self._stream.stopped is not None
            or (tokens and tokens[-1] in self._stop.tokens)
        ):
            self._end("stop")
        elif lane.is_full:
            self._end("length")

    def _read(self) -> None:
        """Search the new tokens for stop strings, and make their log-probabilities."""
        tokens, rows = self._tokens, self._lane.rows
        for i in range(self._seen, len(tokens)):
            if self._n_logprobs and len(self._logprobs) == i:
                row = rows[i - len(tokens)]
                self._logprobs.append(likeliest(row, self._n_logprobs, tokens[i]))
            if self._stop.strings and tokens[i] not in self._stop.tokens:
                self._stream.feed(self._sequence.context.model.token_to_piece(tokens[i]))
            self._seen = i + 1
        rows.clear()

    def _end(self, reason: FinishReason, error: Exception | None = None) -> None:
        if self._finish is None:
            if self._abort and reason != "error":
                reason = "aborted"  # as it says already
            if self._stop.strings:
                with contextlib.suppress(ClosedError):  # the model's: its text is gone
                    self._text = self._read_text(True)
            self._error = error
            self.times.finished = time.perf_counter()
            self._finish = reason
            self._notify()
