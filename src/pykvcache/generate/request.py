"""GenerationRequest: one request of a BatchGenerator, with its tokens, text and end."""

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

FinishReason = Literal["stop", "length", "full", "aborted", "error"]


@dataclass
class RequestTimes:
    """Times of a request, by ``time.perf_counter()``, in seconds.

    Attributes
    ----------
    queued
        Submission.
    tokens
        Choice of each token; the first gives the time to first token.
    finished
        End; None before.
    """

    queued: float = field(default_factory=time.perf_counter)
    tokens: list[float] = field(default_factory=list)
    finished: float | None = None

    @property
    def first_token(self) -> float | None:
        """Time of the first token; None before."""
        return self.tokens[0] if self.tokens else None


class Driver(Protocol):
    """The interface of `BatchGenerator` that a request uses."""

    def _wait_for(self, request: GenerationRequest, i: int) -> int | None:
        """Return token i of a request, making steps if needed; None if it ended before."""

    def _end_aborted(self) -> None:
        """End aborted requests, now or in the step under way."""


class GenerationRequest:
    """A request inside its generator; users have a `GenerationHandle`, which can be dropped.

    Parameters
    ----------
    driver
        Makes its tokens.
    sequence
        The sequence it continues.
    max_tokens
        Maximum number of new tokens.
    sampler, stop, n_logprobs, priority
        As in `BatchGenerator.submit`.
    order
        Number in order of submission.
    owns
        Whether to close the sequence at the end.
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
        self._seen = 0  # tokens that `_look` has processed
        self._text: str | None = None
        # Number of tokens read by `text`, their text, and the decoder's state; replaced together.
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
        #: The user's handle; None once dropped.
        self.handle: Callable[[], GenerationHandle | None] = lambda: None
        self._tokens = self._lane.tokens
        self._logprobs: list[dict[int, float]] = []
        self._finish: FinishReason | None = None
        self._error: Exception | None = None
        self._abort = False
        self._watchers: tuple[Callable[[], object], ...] = ()
        self.times = RequestTimes(tokens=self._lane.times)

    # Results ----------------------------------------------------------------------------------

    @property
    def tokens(self) -> IntArray:
        """The new tokens so far, a copy: int32, shape (n,)."""
        return np.array(self._tokens, np.int32)

    @property
    def text(self) -> str:
        """The text of the new tokens so far; it ends before a stop string.

        Incomplete characters are omitted until the end. To read it after the model is closed, read
        it once before.
        """
        if self._text is None:
            is_whole = self._finish is not None
            text = self._read_text(is_whole)
            if not is_whole:
                return text
            self._text = text
        return self._text

    def _read_text(self, is_whole: bool) -> str:
        """Return the text so far; reads only tokens that are new since the last call."""
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
        """The model's log-probabilities for each token, as dicts by token id; a copy.

        Contains the ``logprobs`` likeliest tokens and the chosen one; empty if not requested.
        """
        return [dict(one) for one in self._logprobs]

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended; None while it runs.

        ``"stop"`` (an end-of-generation token or a stop), ``"length"`` (``max_tokens``),
        ``"full"`` (no room in the context), ``"aborted"``, ``"error"`` (see `error`).
        """
        return "aborted" if self._finish is None and self._abort else self._finish

    @property
    def error(self) -> Exception | None:
        """The exception behind ``"error"``; iterating raises it."""
        return self._error

    @property
    def sequence(self) -> LlamaSequence:
        """The sequence of the request; closed at the end unless the caller submitted it."""
        return self._sequence

    @property
    def priority(self) -> int:
        """Requests of larger priority run first."""
        return self._priority

    def abort(self) -> None:
        """End the request before its next token; its tokens stay. Does nothing if it has ended."""
        if self._finish is None and not self._abort:
            self._abort = True
            self._driver._end_aborted()

    @property
    def is_owned(self) -> bool:
        """Whether the request created its sequence, so that only its handle refers to it."""
        return self._owns

    @property
    def n_tokens(self) -> int:
        """Number of new tokens so far."""
        return len(self._tokens)

    @property
    def n_logprobs(self) -> int:
        """Number of likeliest tokens recorded for each token."""
        return self._n_logprobs

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the request, or None."""
        return self._stream.stopped

    def watch(self, call: Callable[[], object]) -> None:
        """Set a function to call after each step that made tokens of this request, and at its end.

        It runs in the thread that makes the step and must not call this context; use it to wake
        another thread or an event loop.
        """
        self._watchers += (call,)
        if self._tokens or self._finish is not None:
            call()

    def _notify(self) -> None:
        for call in self._watchers:
            call()

    def token(self, i: int) -> int | None:
        """Return token i, making steps if no other thread does; None if it ended before."""
        return self._driver._wait_for(self, i)

    def __repr__(self) -> str:
        ended = self.finish_reason or "not finished"
        return f"<GenerationRequest: {len(self._tokens)} tokens, {ended}>"

    # For the generator ------------------------------------------------------------------------

    def _look(self) -> None:
        """Process new tokens, and end the request if one of them ends it."""
        try:
            self._read()
        except ClosedError as error:  # the model is closed, so tokens cannot become text
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
        """Search the new tokens for stop strings, and record their log-probabilities."""
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
                reason = "aborted"  # `finish_reason` already says so
            if self._stop.strings:
                with contextlib.suppress(ClosedError):  # the model is closed
                    self._text = self._read_text(True)
            self._error = error
            self.times.finished = time.perf_counter()
            self._finish = reason
            self._notify()
