"""Conversation: messages, and the sequence whose tokens they are; in memory and in a file."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

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
from pykvcache.sequence.sequence import LlamaSequence
from pykvcache.state import describe_state

__all__ = ["FORMAT", "Conversation", "TurnFigures", "closing_quote"]

#: Key in the metadata of a saved conversation.
FORMAT = "pykvcache.chat"

#: Texts in the order in which they were added, each with its number of tokens.
Parts: TypeAlias = tuple[tuple[str, int], ...]

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
    parts
        Texts in the order in which they were added, each with its number of tokens. The sequence
        begins with them.
    metadata
        Metadata of the file that it was loaded from; `save` writes it again.
    template
        A chat template in place of the model's own.
    """

    sequence: LlamaSequence
    messages: list[dict[str, str]] = field(default_factory=list)
    parts: Parts = ()
    metadata: dict[str, Any] = field(default_factory=dict)
    template: str | None = None

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

    @property
    def text(self) -> str:
        """The text of the parts."""
        return "".join(text for text, _ in self.parts)

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

    def hold(self, *, answer: bool = False) -> None:
        """Make the sequence hold the messages; with `answer`, up to where the assistant's begins.

        Parts at the beginning of the new text keep their tokens: the model chose some of them, and
        tokenizing the text may give others. Where turns were dropped, the parts after them move.
        """
        rest, n, kept = self.render(self.messages, answer=answer), 0, 0
        for text, n_tokens in self.parts:
            if not rest.startswith(text):
                break
            rest, n, kept = rest[len(text) :], n + n_tokens, kept + 1
        # The sequence begins with the parts at all times, as Ctrl-C may end any change.
        later, self.parts = self.parts[kept:], self.parts[:kept]
        n_dropped, last = self._ending(later, rest, n)
        if last:  # turns were dropped
            self.sequence.discard(n, n + n_dropped, reevaluate=True)
            self.parts += last
            rest, n = "", n + sum(n_tokens for _, n_tokens in last)
        tokens = self._tokens(rest, first=n == 0)
        self.sequence.sync(np.concatenate([self.sequence.tokens[:n], tokens]))
        if rest:
            self.parts += ((rest, len(tokens)),)

    def _ending(self, parts: Parts, text: str, n: int) -> tuple[int, Parts]:
        """Find a text at the end of parts, which begin after n tokens.

        Returns the number of their tokens before the text, and its parts; no parts if they do not
        end with it, or no token begins where it begins.
        """
        whole = "".join(part for part, _ in parts)
        if not text or not whole.endswith(text):
            return 0, ()
        begin = len(whole) - len(text)
        ends = list(accumulate(len(part) for part, _ in parts))
        at = next(i for i, end in enumerate(ends) if begin < end)
        (part, n_tokens), before = parts[at], sum(n_tokens for _, n_tokens in parts[:at])
        begun = part[begin - ends[at] :]
        if begun == part:
            return before, parts[at:]
        held = self.sequence.tokens[n + before :][:n_tokens]
        tokens = self._tokens(begun, first=False)
        if not np.array_equal(held[-len(tokens) :], tokens):
            return 0, ()
        return before + n_tokens - len(tokens), ((begun, len(tokens)), *parts[at + 1 :])

    def _tokens(self, text: str, *, first: bool) -> Any:
        if not text:
            return np.zeros(0, np.int32)
        is_plain = not self.has_template
        return self.context.model.tokenize(
            text, add_special=first and is_plain, parse_special=not is_plain
        )

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
        self.hold()
        content = text if self.has_template or not self.messages else text + "\n"
        self.messages.append({"role": "user", "content": content})
        try:
            self.hold(answer=True)
            figures.dropped = self._make_room(max_tokens)
        except BaseException:
            self.rewind(1)
            raise
        n, evaluated = len(self.sequence), self.context.tokens_evaluated
        figures.n_prompt, figures.reused = n, self.sequence.n_evaluated
        ends = (*stop, *closing_quote(self.text)) if self.has_template else (*stop, "\n")
        stream = self.sequence.stream(max_tokens, sampler, stop=ends, on_full="stop")
        said: list[str] = []
        self.messages.append({"role": "assistant", "content": ""})
        start, was_refused = time.perf_counter(), False
        try:
            try:
                with watched(self.context, n - figures.reused):
                    self.sequence.logits()  # evaluates; the first token is chosen from them
                figures.is_evaluated = True
            finally:
                figures.evaluating = time.perf_counter() - start
                figures.evaluated = self.context.tokens_evaluated - evaluated
            figures.reused = n - figures.evaluated
            for piece in stream:
                said.append(piece)
                yield piece
        except KvCacheError:
            was_refused = not said
            raise
        finally:
            if was_refused:  # nothing was generated
                self.rewind(1)
            else:
                tokens = self.sequence.tokens[n:]
                answer = self.context.model.detokenize(tokens)
                # The stop string is among the tokens, but is not part of a templated answer.
                is_cut = stream.finish_reason == "stop" and self.has_template
                self.messages[-1]["content"] = "".join(said) if is_cut else answer
                self.parts += ((answer, len(tokens)),)
                self.hold()
                figures.generated = len(tokens)
                figures.finish = stream.finish_reason or "interrupted"
                figures.generating = time.perf_counter() - start - figures.evaluating

    def _make_room(self, max_tokens: int) -> int:
        """Drop the oldest turns until the answer has room; return how many."""
        room, n_dropped = self.context.n_ctx_seq, 0
        if len(self.sequence) > room:
            alone = self.render([*self.messages[: self.turns[0]], self.messages[-1]], answer=True)
            n = len(self._tokens(alone, first=True))
            if n > room:
                raise NoKvCacheSlot(
                    f"this turn alone needs {n} tokens, but there is room for {room}, so it was "
                    "not added: start the chat with a larger --n-ctx",
                    1,
                    n_tokens=n,
                    n_cells=room,
                )
        while len(self.turns) > 1 and len(self.sequence) + max_tokens > room:
            first, second = self.turns[:2]
            del self.messages[first:second]
            self.hold(answer=True)
            n_dropped += 1
        return n_dropped

    def rewind(self, n: int) -> int:
        """Remove the last n turns; return how many were removed."""
        n = min(n, len(self.turns))
        if n:
            del self.messages[self.turns[-n] :]
            self.hold()
        return n

    def fork(self) -> Conversation:
        """Return another conversation that begins with all of this one."""
        messages = [dict(message) for message in self.messages]
        return replace(self, sequence=self.sequence.fork(), messages=messages)

    # Files ----------------------------------------------------------------------------------

    def snapshot(self) -> object:
        """Return a value that is equal as long as no turn is added, dropped or removed."""
        return [(message["role"], message["content"]) for message in self.messages]

    def save(self, path: str) -> int:
        """Write it with the evaluated tokens; return the size of the file in bytes."""
        self.hold()
        lengths = [[len(text), n_tokens] for text, n_tokens in self.parts]
        note = {"text": self.text, "parts": lengths}
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
        sequence = _load_sequence(ctx, path)
        one, n_tokens = cls(sequence, template=template), len(sequence)
        try:
            one.metadata = dict(sequence.metadata)
            one.messages = _messages(one.metadata["messages"])
            note = one.metadata.pop(FORMAT, None)
            if note is not None:
                one.parts = _parts(note, n_tokens)
            elif not (one.has_template and one.messages):
                raise ValueError("messages alone are no text")
        except (KeyError, TypeError, ValueError):
            raise StateError(
                f"{path}: neither a chat that 'pykvcache chat' saved, nor a sequence with messages "
                "that each have a role and a text"
            ) from None
        if one.parts or not n_tokens:
            return one
        why = "the model has no template to render them"
        if one.has_template:
            try:
                one.hold()
                return one
            except ChatTemplateError as error:
                why = str(error)
        raise StateError(f"{path}: its tokens are not those of its messages: {why}")


def _messages(given: Any) -> list[dict[str, str]]:
    messages = [{"role": m["role"], "content": m["content"]} for m in given]
    if not all(isinstance(part, str) for m in messages for part in m.values()):
        raise TypeError("a message is not text")
    if any(len(m) > 2 for m in given):
        raise ValueError("a message has more than a text")
    return messages


def _parts(note: Any, n_tokens: int) -> Parts:
    """Return the parts of a saved text; none if they are not those of this number of tokens.

    `pykvcache state cut` keeps the metadata, but not all tokens.
    """
    text = note["text"]
    if not isinstance(text, str):
        raise TypeError("the text is not text")
    # An earlier version wrote no parts.
    lengths = note.get("parts") or [[len(text), note.get("n_tokens", n_tokens)]]
    if not all(type(n) is int and n >= 0 for pair in lengths for n in pair):
        raise TypeError("a length is not a number")
    sums = [sum(column) for column in zip(*lengths, strict=False)]
    if not text or sums != [len(text), n_tokens]:
        return ()
    ends = accumulate(length for length, _ in lengths)
    pairs = zip(ends, lengths, strict=True)
    return tuple((text[end - length : end], n) for end, (length, n) in pairs)


def _load_sequence(ctx: LlamaContext, path: str) -> LlamaSequence:
    """Load a sequence; errors name the options that help."""
    try:
        return LlamaSequence.load(ctx, path)
    except StateLayoutMismatch:
        found, here = describe_state(path).types, ctx.memory_info
        theirs = found.get("k"), found.get("v")
        ours = here.type_k.name.lower(), here.type_v.name.lower()
        if theirs == ours:
            raise
        used = ctx.model.path
        model = "" if used == embedded_model_path() else f"-m {used} "
        saved, wanted = (f"--type-k {k} --type-v {v}" for k, v in (theirs, ours))
        raise StateLayoutMismatch(
            f"{path}: it was saved with {saved}: pass these options, or convert the file first: "
            f"pykvcache state convert {model}{path} OUT {wanted}",
            what="types",
            value=theirs,
            limit=ours,
        ) from None
    except NoKvCacheSlot as error:
        raise NoKvCacheSlot(
            f"{path}: its {error.n_tokens} tokens do not fit into {error.n_cells} cells: give "
            "a larger --n-ctx",
            1,
            n_tokens=error.n_tokens,
            n_cells=error.n_cells,
        ) from None
