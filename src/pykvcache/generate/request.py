"""GenerationRequest: one request of a BatchGenerator, with its tokens, text and end."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pykvcache._native import lib
from pykvcache.errors import ClosedError
from pykvcache.sampling import Sampler
from pykvcache.sequence.logprobs import likeliest
from pykvcache.sequence.sequence import LlamaSequence
from pykvcache.sequence.text import Stop, TextStream

if TYPE_CHECKING:
    from pykvcache.generate.generator import BatchGenerator
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


class GenerationRequest:
    """A request inside its generator; users have a `GenerationHandle`, which can be dropped.

    It is number `order` in order of submission. If it `is_owned`, the request created its sequence:
    it closes it at the end, and only its handle refers to it.
    """

    def __init__(
        self,
        generator: BatchGenerator,
        sequence: LlamaSequence,
        max_tokens: int,
        sampler: Sampler,
        stop: Stop,
        n_logprobs: int,
        priority: int,
        order: int,
        *,
        is_owned: bool,
    ) -> None:
        self._generator = generator
        self.sequence = sequence
        self.cells = sequence._cells
        self.priority, self.order, self.is_owned = priority, order, is_owned
        self._stop = stop
        self._text: str | None = None
        # Number of tokens that were decoded, their text, and the decoder; replaced together,
        # because any thread may read the text.
        self._decoded = 0, "", TextStream(stop.strings)
        self.stop_string: str | None = None
        self.lane = lib.Lane(
            self.cells.ledger,
            sampler.native,
            max_tokens,
            stop.tokens,
            bool(stop.strings or n_logprobs),
            n_logprobs > 0,
        )
        #: Requests for other samples of the prompt, which wait for its evaluation.
        self.siblings: list[GenerationRequest] = []
        #: The user's handle; None once dropped.
        self.handle: Callable[[], GenerationHandle | None] = lambda: None
        self.tokens = self.lane.tokens
        self.n_logprobs = n_logprobs
        self.logprobs: list[dict[int, float]] = []
        self.finish: FinishReason | None = None
        self.error: Exception | None = None
        self.is_aborted = False
        self.watchers: tuple[Callable[[], object], ...] = ()
        self.times = RequestTimes(tokens=self.lane.times)

    # For the handle -----------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """The text of the new tokens so far; it ends before a stop string."""
        if self._text is None:
            is_whole = self.finish is not None
            text, stream = self._decode()
            if not is_whole:
                return text
            self._text = text + stream.finish()
        return self._text

    def _decode(self) -> tuple[str, TextStream]:
        """Return the text so far and a copy of its decoder; reads only tokens that are new."""
        n, text, known = self._decoded
        tokens, stream, parts = self.tokens[n:], copy.copy(known), [text]
        for token in tokens:
            if token not in self._stop.tokens:
                parts.append(stream.feed(self.sequence.context.model.token_to_piece(token)))
        text = "".join(parts)
        self._decoded = n + len(tokens), text, stream
        return text, copy.copy(stream)

    @property
    def finish_reason(self) -> FinishReason | None:
        """As in `GenerationHandle`: "aborted" as soon as `abort` was called."""
        return "aborted" if self.finish is None and self.is_aborted else self.finish

    def abort(self) -> None:
        """End the request before its next token; its tokens stay. Does nothing if it has ended."""
        if self.finish is None and not self.is_aborted:
            self.is_aborted = True
            self._generator._end_aborted()

    def watch(self, call: Callable[[], object]) -> None:
        """Call a function after each step that made tokens of this request, and at its end."""
        self.watchers += (call,)
        if self.tokens or self.finish is not None:
            call()

    def token(self, i: int) -> int | None:
        """Return token i, making steps if no other thread does; None if it ended before."""
        return self._generator._wait_for(self, i)

    # For the generator --------------------------------------------------------------------------

    def notify(self) -> None:
        """Call the functions that watch this request."""
        for call in self.watchers:
            call()

    def look(self) -> None:
        """Process new tokens, and end the request if one of them ends it."""
        try:
            self._read()
        except ClosedError as error:  # the model is closed, so tokens cannot become text
            self.end("error", error)
            return
        lane, tokens = self.lane, self.tokens
        if lane.error is not None:
            self.end("error", lane.error)
        elif (
            lane.is_over
            or self.stop_string is not None
            or (tokens and tokens[-1] in self._stop.tokens)
        ):
            self.end("stop")
        elif lane.is_full:
            self.end("length")

    def _read(self) -> None:
        """Search the new tokens for stop strings, and record their log-probabilities."""
        tokens, rows = self.tokens, self.lane.rows
        if self.n_logprobs:
            for i in range(len(self.logprobs), len(tokens)):
                row = rows[i - len(tokens)]
                self.logprobs.append(likeliest(row, self.n_logprobs, tokens[i]))
            rows.clear()
        if self._stop.strings:
            self.stop_string = self._decode()[1].stopped

    def end(self, reason: FinishReason, error: Exception | None = None) -> None:
        """Record why the request ended, unless it has ended before."""
        if self.finish is None:
            if self.is_aborted and reason != "error":
                reason = "aborted"  # `finish_reason` already says so
            if self._stop.strings:
                with contextlib.suppress(ClosedError):  # the model is closed
                    text, stream = self._decode()
                    self._text = text + stream.finish()
            self.error = error
            self.times.finished = time.perf_counter()
            self.finish = reason
            self.notify()
