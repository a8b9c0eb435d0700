"""A conversation: messages, and the sequence whose tokens they are."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from pykvcache.cli.terminal import watched
from pykvcache.context import LlamaContext
from pykvcache.errors import ChatTemplateError, KvCacheError, NoKvCacheSlot
from pykvcache.sampling import Sampler
from pykvcache.sequence.generation import TextGeneration
from pykvcache.sequence.sequence import LlamaSequence

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
    """Where a turn begins: in the tokens of the sequence, and in the text that they stand for."""

    n_tokens: int
    n_text: int


@dataclass
class Talk:
    """A sequence and the messages it consists of; forks share what was evaluated.

    With a chat template the messages are rendered, and what is new of the text is appended; a
    model without one goes on with the text as it stands, to the end of the line.
    """

    sequence: LlamaSequence
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    text: str = ""
    beside: dict[str, Any] = field(default_factory=dict)  # what a file had with it, and keeps
    kept: object = None  # its `snapshot` when a file of its own last held it

    @property
    def context(self) -> LlamaContext:
        """Where it is evaluated."""
        return self.sequence.context

    @property
    def has_template(self) -> bool:
        """Whether the model says what a conversation looks like."""
        return self.context.model.chat_template is not None

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
        turn, message = Turn(len(self.sequence), len(self.text)), {"role": "user", "content": text}
        # Between these two no Ctrl-C can come.
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
        self.messages.append({"role": "assistant", "content": ""})
        said: list[str] = []
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
        self.text += answer
        figures.generated = len(tokens)
        figures.finish = stream.finish_reason or "interrupted"

    def _extend(self, text: str) -> None:
        if not self.has_template:
            self.sequence.append(text + "\n" if self.text else text)
            self.text += text
            return
        model = self.context.model
        whole = model.apply_chat_template(self.messages)
        if not self.text:
            self._begin_with_system(whole)
        if self.text and whole.startswith(self.text):
            # The tokens that the model chose stay, however the text would be cut anew.
            new = whole[len(self.text) :]
            self.sequence.append(model.tokenize(new, add_special=False, parse_special=True))
        else:
            self.sequence.sync(model.tokenize(whole, add_special=False, parse_special=True))
        self.text = whole

    def _begin_with_system(self, whole: str) -> None:
        """Let the first turn begin after the system message, which stays when turns are dropped."""
        model, first = self.context.model, self.messages[:-1]
        try:
            text = model.apply_chat_template(first, add_generation_prompt=False) if first else ""
        except ChatTemplateError:  # it wants a user's message
            return
        if text and whole.startswith(text):
            self.sequence.sync(model.tokenize(text, add_special=False, parse_special=True))
            self.text = text
            self.turns[-1] = Turn(len(self.sequence), len(text))

    def _make_room(self, max_tokens: int, figures: Figures) -> None:
        """Drop the oldest turns until the answer has room, and close the gap."""
        room = self.context.n_ctx_seq
        alone = self.turns[0].n_tokens + len(self.sequence) - self.turns[-1].n_tokens
        if alone > room:
            raise NoKvCacheSlot(
                f"this turn alone needs {alone} tokens, and there is room for {room}: "
                "start the chat with a larger --n-ctx; it was not added",
                1,
                n_tokens=alone,
                n_cells=room,
            )
        while len(self.turns) > 1 and len(self.sequence) + max_tokens > room:
            first, second = self.turns[:2]
            gone, cut = second.n_tokens - first.n_tokens, second.n_text - first.n_text
            turns = [Turn(t.n_tokens - gone, t.n_text - cut) for t in self.turns[1:]]
            text = self.text[: first.n_text] + self.text[second.n_text :]
            at, end = [i for i, m in enumerate(self.messages) if m["role"] == "user"][:2]
            messages = self.messages[:at] + self.messages[end:]
            self.sequence.discard(first.n_tokens, second.n_tokens, reevaluate=True)
            self.turns, self.text, self.messages = turns, text, messages
            figures.forgotten += 1

    def rewind(self, n: int) -> int:
        """Take back the last n turns; return how many there were to take back."""
        n = min(n, len(self.turns))
        for _ in range(n):
            turn = self.turns.pop()
            # Where a shift or a template left less, the next turn puts the rest right.
            self.sequence.truncate(min(turn.n_tokens, len(self.sequence)))
            self.text = self.text[: turn.n_text]
            last = max(i for i, m in enumerate(self.messages) if m["role"] == "user")
            del self.messages[last:]
        return n

    def fork(self) -> Talk:
        """Return another talk that begins with all of this one."""
        messages = [dict(message) for message in self.messages]
        return Talk(self.sequence.fork(), messages, list(self.turns), self.text, dict(self.beside))

    # Files ----------------------------------------------------------------------------------

    def snapshot(self) -> object:
        """Return what can be compared: equal as long as nothing is said, dropped or taken back."""
        said = tuple((message["role"], message["content"]) for message in self.messages)
        turns = tuple((turn.n_tokens, turn.n_text) for turn in self.turns)
        return len(self.sequence), self.text, turns, said

    def save(self, path: str) -> int:
        """Write the talk, with what was evaluated; return the bytes."""
        turns = [[turn.n_tokens, turn.n_text] for turn in self.turns]
        note = {"messages": self.messages, "turns": turns, "text": self.text}
        # A file that is cut keeps what lies beside it: so it shows that its tokens are others.
        note["n_tokens"] = len(self.sequence)
        return self.sequence.save(path, self.beside | {"messages": self.messages, FORMAT: note})
