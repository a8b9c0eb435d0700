"""Conversation: messages, and the sequence whose tokens they are; in memory and in a file."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pykvcache import embedded_model_path
from pykvcache.cli.terminal import watched
from pykvcache.context import LlamaContext
from pykvcache.errors import (
    ChatTemplateError,
    KvCacheError,
    NoKvCacheSlot,
    StateError,
    StateLayoutMismatch,
)
from pykvcache.sampling import Sampler
from pykvcache.sequence.ledger import common_prefix
from pykvcache.sequence.sequence import LlamaSequence, TextGeneration
from pykvcache.state import ContextState, SequenceState, StateInfo, describe_state

__all__ = ["FORMAT", "Conversation", "TurnFigures", "closing_quote"]

#: Key in the metadata of a saved conversation.
FORMAT = "pykvcache.chat"

_QUOTES = {'"': '"', "\u201c": "\u201d", "\u00ab": "\u00bb", "`": "`"}


def closing_quote(prompt: str) -> tuple[str, ...]:
    """Return the quote that ends an answer if the prompt ends with an opening quote."""
    quote = _QUOTES.get(prompt[-1:])
    return () if quote is None else (quote,)


@dataclass
class TurnFigures:
    """Tokens of a turn's prompt and answer, seconds, and how the answer ended."""

    n_prompt: int = 0
    reused: int = 0  # tokens of the prompt that were in the cache
    evaluated: int = 0  # the other tokens of the prompt
    is_evaluated: bool = False  # whether the answer came to its first token
    dropped: int = 0  # turns that were dropped to make room
    generated: int = 0
    evaluating: float = 0.0
    generating: float = 0.0
    finish: str | None = None


@dataclass
class Conversation:
    """Messages, and a sequence that holds their tokens; forks share the evaluated tokens.

    Messages decide the tokens. With a chat template they are rendered; without one their contents
    are the text, and the model continues it to the end of the line.

    Attributes
    ----------
    sequence
        Holds the tokens.
    messages
        A role and a content each.
    text
        The text of the tokens; empty while they are unknown, after an interrupted change.
    marks
        Length of the text and number of tokens before a message, by its index. A user's message
        has no mark if the template has since rendered earlier messages differently.
    metadata
        Metadata of the file that it was loaded from; `save` writes it again.
    template
        A chat template in place of the model's own.
    gap
        Where turns were dropped, and the end of the last dropped answer, which is still there: the
        text is a rendering of the messages with this inserted.
    """

    sequence: LlamaSequence
    messages: list[dict[str, str]] = field(default_factory=list)
    text: str = ""
    marks: dict[int, tuple[int, int]] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    template: str | None = None
    gap: tuple[int, str] = 0, ""

    @property
    def context(self) -> LlamaContext:
        """The context of the sequence."""
        return self.sequence.context

    @property
    def has_template(self) -> bool:
        """Whether messages can be rendered."""
        return self.template is not None or self.context.model.chat_template is not None

    @property
    def turns(self) -> list[int]:
        """The indices of the user's messages."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "user"]

    # Messages as tokens ---------------------------------------------------------------------

    def render(self, messages: list[dict[str, str]], *, answer: bool = False) -> str:
        """Return messages as text; with `answer`, up to where the assistant's begins."""
        if not (self.has_template and messages):
            return "".join(message["content"] for message in messages)
        own: dict[str, Any] = {} if self.template is None else {"template": self.template}
        model = self.context.model
        try:
            return model.apply_chat_template(messages, add_generation_prompt=answer, **own)
        except ChatTemplateError:
            if any(message["role"] == "user" for message in messages):
                raise
            return ""  # it requires a user's message

    def hold(self, whole: str) -> None:
        """Make the sequence hold a text; marks stay up to the first difference."""
        text, self.text = self.text, ""
        at, rest = self.gap
        inserted = whole[:at] + rest + whole[at:]
        if text and inserted.startswith(text):
            whole = inserted
            # Tokens that the model chose stay, even if tokenizing the text gives other tokens.
            self.sequence.append(self._tokens(whole[len(text) :], first=False))
        else:
            self.gap = 0, ""
            tokens = self._tokens(whole, first=True)
            n = common_prefix(self.sequence.tokens, tokens)
            self.marks = {
                i: (k, k_tokens)
                for i, (k, k_tokens) in self.marks.items()
                if whole[:k] == text[:k] and k_tokens <= n
            }
            if len(tokens):
                self.sequence.sync(tokens)
            else:
                self.sequence.truncate(0)
        self.text = whole

    def _tokens(self, text: str, *, first: bool) -> npt.NDArray[np.int32]:
        if not text:
            return np.zeros(0, np.int32)
        is_plain = not self.has_template
        return self.context.model.tokenize(
            text, add_special=first and is_plain, parse_special=not is_plain
        )

    def _settle(self) -> None:
        """Make the sequence hold the messages again, if a change was interrupted."""
        if not self.text:
            self.hold(self.render(self.messages))

    # Turns ----------------------------------------------------------------------------------

    def say(
        self,
        text: str,
        max_tokens: int,
        sampler: Sampler,
        figures: TurnFigures,
        stop: tuple[str, ...] = (),
    ) -> Generator[str, None, None]:
        """Add a message of the user, and yield the answer; ``figures`` is filled in.

        If the cache is too small for the whole conversation, its oldest turns are dropped
        first. However it ends, the text that was yielded is part of the conversation.
        """
        self._settle()
        self.marks[len(self.messages)] = len(self.text), len(self.sequence)
        content = text if self.has_template or not self.messages else text + "\n"
        self.messages = [*self.messages, {"role": "user", "content": content}]
        try:
            self.hold(self._prompt(content))
            self._make_room(max_tokens, figures)
        except BaseException:
            self.rewind(1)
            raise
        before, evaluated = len(self.sequence), self.context.tokens_evaluated
        figures.n_prompt = before
        ends = (*stop, *closing_quote(self.text)) if self.has_template else (*stop, "\n")
        stream = self.sequence.stream(max_tokens, sampler, stop=ends, on_full="stop")
        said: list[str] = []
        prompt, self.text = self.text, ""
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
            if was_refused:  # nothing was generated
                self.text = prompt
                self.rewind(1)
            else:
                self._close_answer(before, prompt, "".join(said), stream, figures)
                figures.generating = time.perf_counter() - start - figures.evaluating

    def _prompt(self, content: str) -> str:
        """Return the text up to where the answer to the last message begins."""
        is_plain = not self.has_template and self.text
        return self.text + content if is_plain else self.render(self.messages, answer=True)

    def _close_answer(
        self, before: int, prompt: str, said: str, stream: TextGeneration, figures: TurnFigures
    ) -> None:
        tokens = self.sequence.tokens[before:]
        answer = self.context.model.detokenize(tokens)
        # The stop string is among the tokens, but is not part of a templated answer.
        is_cut = stream.finish_reason == "stop" and self.has_template
        self.messages[-1]["content"] = said if is_cut else answer
        self.text = prompt + answer
        figures.generated = len(tokens)
        figures.finish = stream.finish_reason or "interrupted"

    def _make_room(self, max_tokens: int, figures: TurnFigures) -> None:
        """Drop the oldest turns until the answer has room."""
        room, alone = self.context.n_ctx_seq, self._alone()
        if alone > room:
            raise NoKvCacheSlot(
                f"this turn alone needs {alone} tokens, but there is room for {room}, so it was "
                "not added: start the chat with a larger --n-ctx",
                1,
                n_tokens=alone,
                n_cells=room,
            )
        while len(self.turns) > 1 and len(self.sequence) + max_tokens > room:
            self._drop_oldest()
            figures.dropped += 1

    def _alone(self) -> int:
        """Return the tokens of the last turn and of the messages before the first turn."""
        first, last = self.turns[0], self.turns[-1]
        if first in self.marks and last in self.marks:
            return self.marks[first][1] + len(self.sequence) - self.marks[last][1]
        whole = self.render([*self.messages[:first], self.messages[-1]], answer=True)
        return len(self._tokens(whole, first=True))

    def _drop_oldest(self) -> None:
        first, second = self.turns[:2]
        self.messages = self.messages[:first] + self.messages[second:]
        begin, end = self.marks.pop(first, None), self.marks.get(second)
        if begin is None or end is None:
            self.marks = {}
            self.hold(self.render(self.messages, answer=True))
            return
        n_text, n = end[0] - begin[0], end[1] - begin[1]
        self.marks = {
            i - (second - first): (mark[0] - n_text, mark[1] - n) for i, mark in self.marks.items()
        }
        text, self.text = self.text, ""
        self.sequence.discard(begin[1], end[1], reevaluate=True)
        self.text = text[: begin[0]] + text[end[0] :]
        if self.has_template:
            whole = self.render(self.messages, answer=True)
            n = len(self.text) - len(whole)
            rest = self.text[begin[0] : begin[0] + max(n, 0)]
            if whole[: begin[0]] + rest + whole[begin[0] :] == self.text:
                self.gap = begin[0], rest

    def rewind(self, n: int) -> int:
        """Remove the last n turns; return how many were removed."""
        n = min(n, len(self.turns))
        if not n:
            return 0
        first = self.turns[-n]
        self.messages = self.messages[:first]
        mark = self.marks.get(first) if self.text else None
        self.marks = {i: mark for i, mark in self.marks.items() if i < first}
        if mark is None:
            self.hold(self.render(self.messages))
        else:
            text, self.text = self.text, ""
            self.sequence.truncate(mark[1])
            self.text = text[: mark[0]]
            if mark[0] <= self.gap[0]:
                self.gap = 0, ""
        return n

    def fork(self) -> Conversation:
        """Return another conversation that begins with all of this one."""
        return Conversation(
            self.sequence.fork(),
            [dict(message) for message in self.messages],
            self.text,
            dict(self.marks),
            dict(self.metadata),
            self.template,
            self.gap,
        )

    # Files ----------------------------------------------------------------------------------

    def snapshot(self) -> object:
        """Return a value that is equal as long as no turn is added, dropped or removed."""
        said = tuple((message["role"], message["content"]) for message in self.messages)
        return len(self.sequence), self.text, said

    def save(self, path: str) -> int:
        """Write it with the evaluated tokens; return the size of the file in bytes."""
        self._settle()
        # `state cut` keeps the metadata: the number shows that the tokens are fewer.
        note = {
            "messages": self.messages,
            "text": self.text,
            "n_tokens": len(self.sequence),
            "marks": [[i, *mark] for i, mark in self.marks.items()],
            "gap": self.gap,
        }
        return self.sequence.save(path, self.metadata | {"messages": self.messages, FORMAT: note})

    @classmethod
    def load(cls, ctx: LlamaContext, path: str, template: str | None = None) -> Conversation:
        """Read a file of `save`; its tokens are not evaluated again.

        Also reads a file of `LlamaSequence.save` with ``{"messages": [...]}`` as metadata, if
        the model has a template: the messages are rendered, and the common prefix is kept.

        Raises
        ------
        StateError
            The file holds no conversation, or one of another model.
        """
        found = describe_state(path)
        metadata: Any = found.metadata.get("metadata", {})
        has_template = template is not None or ctx.model.chat_template is not None
        try:
            metadata = dict(metadata)
            note = metadata.pop(FORMAT, None)
            messages = metadata["messages"] = _messages((note or metadata)["messages"])
            text = note["text"] if note else ""
            if not isinstance(text, str):
                raise TypeError("the text is not text")
            if not note and not (has_template and messages):
                raise ValueError("messages alone are no text")
        except (KeyError, TypeError, ValueError):
            # Damage is reported first.
            (SequenceState if found.kind == "sequence" else ContextState).load(path)
            raise StateError(
                f"{path}: neither a chat that 'pykvcache chat' saved, nor a sequence with messages "
                "that each have a role and a text"
            ) from None
        try:
            sequence = LlamaSequence.load(ctx, path)
        except StateLayoutMismatch as error:
            raise _other_types(path, found, ctx) or error from None
        except NoKvCacheSlot as error:
            raise NoKvCacheSlot(
                f"{path}: its {error.n_tokens} tokens do not fit into {error.n_cells} cells: give "
                "a larger --n-ctx",
                1,
                n_tokens=error.n_tokens,
                n_cells=error.n_cells,
            ) from None
        one = cls(sequence, messages, metadata=metadata, template=template)
        if note and note.get("n_tokens", len(sequence)) == len(sequence):
            one.text = text
            with contextlib.suppress(KeyError, TypeError, ValueError):
                one.marks = _marks(note["marks"], len(text), len(sequence))
                at, rest = note["gap"]
                one.gap = int(at), str(rest)
            return one
        why = "the model has no template to render them"
        if has_template:
            try:
                one.hold(one.render(messages))
                return one
            except ChatTemplateError as error:
                why = str(error)
        sequence.close()
        raise StateError(f"{path}: its tokens are not those of its messages: {why}")


def _marks(given: Any, n_text: int, n_tokens: int) -> dict[int, tuple[int, int]]:
    marks = {int(i): (int(text), int(tokens)) for i, text, tokens in given}
    if not all(0 <= a <= n_text and 0 <= b <= n_tokens for a, b in marks.values()):
        raise ValueError("a mark is outside the text")
    return marks


def _messages(given: Any) -> list[dict[str, str]]:
    messages = [{"role": m["role"], "content": m["content"]} for m in given]
    if not all(isinstance(part, str) for m in messages for part in m.values()):
        raise TypeError("a message is not text")
    if any(len(m) > 2 for m in given):
        raise ValueError("a message has more than a text")
    return messages


def _other_types(path: str, found: StateInfo, ctx: LlamaContext) -> StateLayoutMismatch | None:
    """Return an error with the remedy if a file stores K and V in other types, else None."""
    theirs = {part: found.types.get(part) for part in ("k", "v")}
    here = ctx.memory_info
    ours = {"k": here.type_k.name.lower(), "v": here.type_v.name.lower()}
    if theirs == ours:
        return None
    used = ctx.model.path
    model = "" if used == embedded_model_path() else f"-m {used} "
    saved, wanted = (" ".join(f"--type-{part} {t[part]}" for part in t) for t in (theirs, ours))
    return StateLayoutMismatch(
        f"{path}: it was saved with {saved}: pass these options, or convert the file first: "
        f"pykvcache state convert {model}{path} OUT {wanted}",
        what="types",
        value=tuple(theirs.values()),
        limit=tuple(ours.values()),
    )
