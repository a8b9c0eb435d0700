"""A conversation: messages, and the sequence whose tokens they are."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from pykvcache.cli.terminal import watched
from pykvcache.context import LlamaContext
from pykvcache.errors import ChatTemplateError, KvCacheError, NoKvCacheSlot
from pykvcache.sampling import Sampler
from pykvcache.sequence.ledger import common_prefix
from pykvcache.sequence.sequence import LlamaSequence, TextGeneration

__all__ = ["FORMAT", "Figures", "Talk", "Turn", "closing"]

#: In the metadata of a saved talk.
FORMAT = "pykvcache.chat"


#: What a template may open for an answer, and what the answer ends with then.
_QUOTES = {'"': '"', "\u201c": "\u201d", "\u00ab": "\u00bb", "`": "`"}


def closing(prompt: str) -> tuple[str, ...]:
    """Return the quote that ends an answer, where a prompt ends with one that opens it."""
    quote = _QUOTES.get(prompt[-1:])
    return () if quote is None else (quote,)


@dataclass
class Figures:
    """What a turn took: tokens of the prompt, how many of them were there already, and times.

    An answer that was interrupted before it began has ``is_evaluated`` False.
    """

    n_prompt: int = 0
    reused: int = 0
    evaluated: int = 0
    is_evaluated: bool = False
    forgotten: int = 0
    generated: int = 0
    evaluating: float = 0.0
    generating: float = 0.0
    finish: str | None = None


@dataclass
class Turn:
    """Where a turn begins: in the tokens of the sequence, and in the text that they stand for.

    -1 where a template has put earlier messages otherwise since.
    """

    n_tokens: int = -1
    n_text: int = -1

    @property
    def is_known(self) -> bool:
        """Whether the sequence can be cut there."""
        return self.n_tokens >= 0


@dataclass
class Talk:
    """A sequence and the messages it consists of; forks share what was evaluated.

    With a chat template the messages are rendered, and what is new of the text is appended; a
    model without one goes on with the text as it stands, to the end of the line. Messages, and
    without a template the text, are the truth: where an interrupt left the rest otherwise, it is
    laid out anew before anything else is done.
    """

    sequence: LlamaSequence
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    text: str = ""
    beside: dict[str, Any] = field(default_factory=dict)  # what a file had with it, and keeps
    is_whole: bool = True  # False while tokens and text may not be those of the messages
    template: str | None = None  # in place of the model's own

    @property
    def context(self) -> LlamaContext:
        """Where it is evaluated."""
        return self.sequence.context

    @property
    def has_template(self) -> bool:
        """Whether there is a template that says what a conversation looks like."""
        return self.template is not None or self.context.model.chat_template is not None

    def render(self, messages: list[dict[str, str]], *, answer: bool = True) -> str:
        """Return messages as text; with `answer` up to where the assistant's begins."""
        own: dict[str, Any] = {} if self.template is None else {"template": self.template}
        model = self.context.model
        return model.apply_chat_template(messages, add_generation_prompt=answer, **own)

    # Turns ----------------------------------------------------------------------------------

    def say(
        self,
        text: str,
        max_tokens: int,
        sampler: Sampler,
        figures: Figures,
        stop: tuple[str, ...] = (),
    ) -> Generator[str, None, None]:
        """Take what the user says, and yield the answer; ``figures`` tells what it took.

        Where the cache is too small for the whole talk, its oldest turns are dropped first.
        However it ends, what was yielded is part of the talk.
        """
        if not self.is_whole:
            self.lay_out()
        turn, message = Turn(len(self.sequence), len(self.text)), {"role": "user", "content": text}
        self.turns, self.messages = [*self.turns, turn], [*self.messages, message]
        try:
            self._extend(text)
            self._make_room(max_tokens, figures)
        except BaseException:
            self.rewind(1)
            raise
        before, evaluated = len(self.sequence), self.context.tokens_evaluated
        figures.n_prompt = before
        ends = (*stop, *closing(self.text)) if self.has_template else (*stop, "\n")
        stream = self.sequence.stream(max_tokens, sampler, stop=ends, on_full="stop")
        said: list[str] = []
        self.is_whole = False
        self.messages.append({"role": "assistant", "content": ""})
        start, was_refused = time.perf_counter(), False
        figures.reused = self.sequence.n_evaluated
        try:
            try:
                with watched(self.context, before - self.sequence.n_evaluated):
                    self.sequence.logits()  # evaluates; the first token is chosen from them
                figures.is_evaluated = True
            finally:
                figures.evaluating = time.perf_counter() - start
                figures.evaluated = self.context.tokens_evaluated - evaluated
            figures.reused = before - figures.evaluated
            for piece in stream:
                said.append(piece)
                yield piece
        except KvCacheError:
            was_refused = not said
            raise
        finally:
            if was_refused:
                self.is_whole = True  # nothing was generated
                self.rewind(1)
            else:
                self._close_answer(before, "".join(said), stream, figures)
                figures.generating = time.perf_counter() - start - figures.evaluating

    def _close_answer(
        self, before: int, said: str, stream: TextGeneration, figures: Figures
    ) -> None:
        tokens = self.sequence.tokens[before:]
        answer = self.context.model.detokenize(tokens)
        # The text that ended it is among the tokens, and not part of what was said.
        self.messages[-1]["content"] = said if stream.finish_reason == "stop" else answer
        self.text, self.is_whole = self.text + answer, True
        figures.generated = len(tokens)
        figures.finish = stream.finish_reason or "interrupted"

    def _extend(self, text: str) -> None:
        model = self.context.model
        if not self.has_template:
            added = text + "\n" if self.text else text
            self.is_whole = False
            self.sequence.append(added)
            self.text, self.is_whole = self.text + added, True
            return
        whole = self.render(self.messages)
        if not self.text:
            self._begin_with_system(whole)
        if not (self.text and whole.startswith(self.text)):
            self._put(whole)
            return
        # The tokens that the model chose stay, however the text would be cut anew.
        new = model.tokenize(whole[len(self.text) :], add_special=False, parse_special=True)
        self.is_whole = False
        self.sequence.append(new)
        self.text, self.is_whole = whole, True

    def _put(self, whole: str) -> None:
        """Let the sequence hold a text; turns are known up to where it differs from before."""
        tokens = self.context.model.tokenize(whole, add_special=False, parse_special=True)
        n_text = _n_equal(self.text, whole) if self.is_whole else 0
        n = common_prefix(self.sequence.tokens, tokens) if self.is_whole else 0
        turns = [t if t.n_tokens <= n and t.n_text <= n_text else Turn() for t in self.turns]
        self.is_whole = False
        self.sequence.sync(tokens)
        self.turns, self.text, self.is_whole = turns, whole, True

    def lay_out(self) -> None:
        """Make the sequence that of the messages, and find where turns begin.

        Raises
        ------
        ChatTemplateError
            The template refuses the messages.
        """
        self.is_whole = False
        tokens, turns, text = self._layout() if self.has_template else self._plain_layout()
        if tokens:
            self.sequence.sync(tokens)
        else:
            self.sequence.truncate(0)
        self.turns, self.text, self.is_whole = turns, text, True

    def _layout(self) -> tuple[list[int], list[Turn], str]:
        model, tokens, text = self.context.model, list[int](), ""
        turns: list[Turn] = []
        for i, message in enumerate(self.messages):
            if message["role"] == "user":
                turns.append(Turn(len(tokens), len(text)))
            try:
                part = self.messages[: i + 1]
                whole = self.render(part, answer=False)
            except ChatTemplateError:
                if i + 1 == len(self.messages) and turns:
                    raise
                continue  # it wants a user's message first
            if not whole.startswith(text):  # it puts earlier messages otherwise when more follow
                whole = self.render(self.messages, answer=False)
                ids = model.tokenize(whole, add_special=False, parse_special=True).tolist()
                n = sum(m["role"] == "user" for m in self.messages)
                return ids, [Turn() for _ in range(n)], whole
            new = whole[len(text) :]
            tokens += model.tokenize(new, add_special=False, parse_special=True).tolist()
            text = whole
        return tokens, turns, text

    def _plain_layout(self) -> tuple[list[int], list[Turn], str]:
        cuts = [0, *(turn.n_text for turn in self.turns), len(self.text)]
        tokens, turns = list[int](), list[Turn]()
        for i, (begin, end) in enumerate(pairwise(cuts)):
            if i:
                turns.append(Turn(len(tokens), begin))
            if begin < end:
                part = self.text[begin:end]
                tokens += self.context.model.tokenize(part, add_special=not tokens).tolist()
        return tokens, turns, self.text

    def _begin_with_system(self, whole: str) -> None:
        """Let the first turn begin after the system message, which stays when turns are dropped."""
        model, first = self.context.model, self.messages[:-1]
        try:
            text = self.render(first, answer=False) if first else ""
        except ChatTemplateError:  # it wants a user's message
            return
        if text and whole.startswith(text):
            tokens = model.tokenize(text, add_special=False, parse_special=True)
            turns = [*self.turns[:-1], Turn(len(tokens), len(text))]
            self.is_whole = False
            self.sequence.sync(tokens)
            self.turns, self.text, self.is_whole = turns, text, True

    def _make_room(self, max_tokens: int, figures: Figures) -> None:
        """Drop the oldest turns until the answer has room, and close the gap."""
        room, alone = self.context.n_ctx_seq, self._alone()
        if alone > room:
            raise NoKvCacheSlot(
                f"this turn alone needs {alone} tokens, and there is room for {room}: "
                "start the chat with a larger --n-ctx; it was not added",
                1,
                n_tokens=alone,
                n_cells=room,
            )
        while len(self.turns) > 1 and len(self.sequence) + max_tokens > room:
            self._forget_oldest()
            figures.forgotten += 1

    def _alone(self) -> int:
        """How many tokens the last turn has, with what comes before the first."""
        first, last = self.turns[0], self.turns[-1]
        if first.is_known and last.is_known:
            return first.n_tokens + len(self.sequence) - last.n_tokens
        messages = [*self.messages[: self._users()[0]], self.messages[-1]]
        whole = self.render(messages)
        return len(self.context.model.tokenize(whole, add_special=False, parse_special=True))

    def _users(self) -> list[int]:
        return [i for i, m in enumerate(self.messages) if m["role"] == "user"]

    def _forget_oldest(self) -> None:
        (first, second), (at, end) = self.turns[:2], self._users()[:2]
        messages = self.messages[:at] + self.messages[end:]
        if not (first.is_known and second.is_known):
            whole = self.render(messages)
            self.is_whole = False
            self.messages, self.turns = messages, [Turn() for _ in self.turns[1:]]
            self._put(whole)
            return
        gone, cut = second.n_tokens - first.n_tokens, second.n_text - first.n_text
        turns = [
            Turn(t.n_tokens - gone, t.n_text - cut) if t.is_known else t for t in self.turns[1:]
        ]
        text = self.text[: first.n_text] + self.text[second.n_text :]
        self.is_whole = False
        self.messages, self.turns, self.text = messages, turns, text
        self.sequence.discard(first.n_tokens, second.n_tokens, reevaluate=True)
        self.is_whole = True

    def rewind(self, n: int) -> int:
        """Take back the last n turns; return how many there were to take back."""
        n = min(n, len(self.turns))
        if not n:
            return 0
        first, messages = self.turns[-n], self.messages[: self._users()[-n]]
        can_cut = self.is_whole and first.is_known
        self.is_whole = False
        self.messages, self.turns = messages, self.turns[:-n]
        self.text = self.text[: max(0, first.n_text)]
        if can_cut:
            self.sequence.truncate(first.n_tokens)
            self.is_whole = True
        else:
            self.lay_out()
        return n

    def fork(self) -> Talk:
        """Return another talk that begins with all of this one."""
        messages = [dict(message) for message in self.messages]
        one = Talk(self.sequence.fork(), messages, list(self.turns), self.text, dict(self.beside))
        one.is_whole, one.template = self.is_whole, self.template
        return one

    # Files ----------------------------------------------------------------------------------

    def snapshot(self) -> object:
        """Return what can be compared: equal as long as nothing is said, dropped or taken back."""
        said = tuple((message["role"], message["content"]) for message in self.messages)
        turns = tuple((turn.n_tokens, turn.n_text) for turn in self.turns)
        return len(self.sequence), self.text, turns, said

    def save(self, path: str) -> int:
        """Write the talk, with what was evaluated; return the bytes."""
        if not self.is_whole:
            self.lay_out()
        turns = [[turn.n_tokens, turn.n_text] for turn in self.turns]
        note = {"messages": self.messages, "turns": turns, "text": self.text}
        # A file that is cut keeps what lies beside it: so it shows that its tokens are others.
        note["n_tokens"] = len(self.sequence)
        return self.sequence.save(path, self.beside | {"messages": self.messages, FORMAT: note})


def _n_equal(one: str, other: str) -> int:
    """Return how many leading characters are equal."""
    n = min(len(one), len(other))
    if one[:n] == other[:n]:
        return n
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
