"""Conversation: messages, and the sequence whose tokens they are; in memory and in a file."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from pykvcache._models import embedded_model_path
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

__all__ = ["FORMAT", "Conversation", "Turn", "TurnFigures", "closing_quote"]

#: Key in the metadata of a saved conversation.
FORMAT = "pykvcache.chat"

_QUOTES = {'"': '"', "\u201c": "\u201d", "\u00ab": "\u00bb", "`": "`"}


def closing_quote(prompt: str) -> tuple[str, ...]:
    """Return the quote that ends an answer, where the prompt ends with an opening quote."""
    quote = _QUOTES.get(prompt[-1:])
    return () if quote is None else (quote,)


@dataclass
class TurnFigures:
    """Tokens and seconds of a turn.

    Attributes
    ----------
    n_prompt, reused, evaluated
        Tokens of the prompt, and of these the ones that were in the cache and the others.
    is_evaluated
        False where the answer was interrupted before its first token.
    dropped
        Turns that were dropped to make room.
    generated
        Tokens of the answer.
    evaluating, generating
        Seconds.
    finish
        How the answer ended.
    """

    n_prompt: int = 0
    reused: int = 0
    evaluated: int = 0
    is_evaluated: bool = False
    dropped: int = 0
    generated: int = 0
    evaluating: float = 0.0
    generating: float = 0.0
    finish: str | None = None


@dataclass
class Turn:
    """Where a turn begins: in the tokens of the sequence, and in their text.

    Both are -1 where the template has since rendered earlier messages in another way.
    """

    n_tokens: int = -1
    n_text: int = -1

    @property
    def is_known(self) -> bool:
        """Whether the sequence can be truncated there."""
        return self.n_tokens >= 0


@dataclass
class Conversation:
    """Messages, and the sequence whose tokens they are; forks share the evaluated tokens.

    With a chat template the messages are rendered, and the new part of the text is appended. A
    model without one continues the text to the end of the line. Messages, and without a template
    the text, are the truth: if an interrupt leaves the tokens out of sync, they are rebuilt before
    the next change.

    Attributes
    ----------
    sequence
        Holds the tokens.
    messages
        A role and a content each.
    turns
        Where each message of the user begins.
    text
        The text of the tokens.
    metadata
        Of the file that it was loaded from; saved again.
    in_sync
        False while tokens and text may not be those of the messages.
    template
        A chat template in place of the model's own.
    """

    sequence: LlamaSequence
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    text: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    in_sync: bool = True
    template: str | None = None

    @property
    def context(self) -> LlamaContext:
        """The context of the sequence."""
        return self.sequence.context

    @property
    def has_template(self) -> bool:
        """Whether messages can be rendered."""
        return self.template is not None or self.context.model.chat_template is not None

    def render(self, messages: list[dict[str, str]], *, answer: bool = True) -> str:
        """Return messages as text; with `answer`, up to where the assistant's begins."""
        own: dict[str, Any] = {} if self.template is None else {"template": self.template}
        model = self.context.model
        return model.apply_chat_template(messages, add_generation_prompt=answer, **own)

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

        Where the cache is too small for the whole conversation, its oldest turns are dropped
        first. However it ends, the text that was yielded is part of the conversation.
        """
        if not self.in_sync:
            self.rebuild()
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
        ends = (*stop, *closing_quote(self.text)) if self.has_template else (*stop, "\n")
        stream = self.sequence.stream(max_tokens, sampler, stop=ends, on_full="stop")
        said: list[str] = []
        self.in_sync = False
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
                self.in_sync = True  # nothing was generated
                self.rewind(1)
            else:
                self._close_answer(before, "".join(said), stream, figures)
                figures.generating = time.perf_counter() - start - figures.evaluating

    def _close_answer(
        self, before: int, said: str, stream: TextGeneration, figures: TurnFigures
    ) -> None:
        tokens = self.sequence.tokens[before:]
        answer = self.context.model.detokenize(tokens)
        # The stop string is among the tokens, and not part of the answer.
        self.messages[-1]["content"] = said if stream.finish_reason == "stop" else answer
        self.text, self.in_sync = self.text + answer, True
        figures.generated = len(tokens)
        figures.finish = stream.finish_reason or "interrupted"

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Leave tokens and text out of sync where the block is interrupted."""
        self.in_sync = False
        yield
        self.in_sync = True

    def _extend(self, text: str) -> None:
        model = self.context.model
        if not self.has_template:
            added = text + "\n" if self.text else text
            with self._changing():
                self.sequence.append(added)
                self.text += added
            return
        whole = self.render(self.messages)
        if not self.text:
            self._begin_with_system(whole)
        if not (self.text and whole.startswith(self.text)):
            self._replace(whole)
            return
        # Tokens that the model chose stay, even where tokenizing the text would give others.
        new = model.tokenize(whole[len(self.text) :], add_special=False, parse_special=True)
        with self._changing():
            self.sequence.append(new)
            self.text = whole

    def _replace(self, whole: str) -> None:
        """Make the sequence hold a text; turns stay known up to the first difference."""
        tokens = self.context.model.tokenize(whole, add_special=False, parse_special=True)
        n_text = _n_equal(self.text, whole) if self.in_sync else 0
        n = common_prefix(self.sequence.tokens, tokens) if self.in_sync else 0
        turns = [t if t.n_tokens <= n and t.n_text <= n_text else Turn() for t in self.turns]
        with self._changing():
            self.sequence.sync(tokens)
            self.turns, self.text = turns, whole

    def rebuild(self) -> None:
        """Make the sequence hold the messages, and find where turns begin.

        Raises
        ------
        ChatTemplateError
            The template refuses the messages.
        """
        with self._changing():
            tokens, turns, text = self._layout() if self.has_template else self._plain_layout()
            if tokens:
                self.sequence.sync(tokens)
            else:
                self.sequence.truncate(0)
            self.turns, self.text = turns, text

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
                continue  # it requires a user's message first
            if not whole.startswith(
                text
            ):  # it renders earlier messages in another way when more follow
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
        except ChatTemplateError:  # it requires a user's message
            return
        if text and whole.startswith(text):
            tokens = model.tokenize(text, add_special=False, parse_special=True)
            turns = [*self.turns[:-1], Turn(len(tokens), len(text))]
            with self._changing():
                self.sequence.sync(tokens)
                self.turns, self.text = turns, text

    def _make_room(self, max_tokens: int, figures: TurnFigures) -> None:
        """Drop the oldest turns until the answer has room."""
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
            self._drop_oldest()
            figures.dropped += 1

    def _alone(self) -> int:
        """Return the tokens of the last turn and of the messages before the first turn."""
        first, last = self.turns[0], self.turns[-1]
        if first.is_known and last.is_known:
            return first.n_tokens + len(self.sequence) - last.n_tokens
        messages = [*self.messages[: self._users()[0]], self.messages[-1]]
        whole = self.render(messages)
        return len(self.context.model.tokenize(whole, add_special=False, parse_special=True))

    def _users(self) -> list[int]:
        return [i for i, m in enumerate(self.messages) if m["role"] == "user"]

    def _drop_oldest(self) -> None:
        (first, second), (at, end) = self.turns[:2], self._users()[:2]
        messages = self.messages[:at] + self.messages[end:]
        if not (first.is_known and second.is_known):
            whole = self.render(messages)
            self.in_sync = False
            self.messages, self.turns = messages, [Turn() for _ in self.turns[1:]]
            self._replace(whole)
            return
        gone, cut = second.n_tokens - first.n_tokens, second.n_text - first.n_text
        turns = [
            Turn(t.n_tokens - gone, t.n_text - cut) if t.is_known else t for t in self.turns[1:]
        ]
        text = self.text[: first.n_text] + self.text[second.n_text :]
        with self._changing():
            self.messages, self.turns, self.text = messages, turns, text
            self.sequence.discard(first.n_tokens, second.n_tokens, reevaluate=True)

    def rewind(self, n: int) -> int:
        """Remove the last n turns; return how many were removed."""
        n = min(n, len(self.turns))
        if not n:
            return 0
        first, messages = self.turns[-n], self.messages[: self._users()[-n]]
        can_cut = self.in_sync and first.is_known
        self.in_sync = False
        self.messages, self.turns = messages, self.turns[:-n]
        self.text = self.text[: max(0, first.n_text)]
        if can_cut:
            self.sequence.truncate(first.n_tokens)
            self.in_sync = True
        else:
            self.rebuild()
        return n

    def fork(self) -> Conversation:
        """Return another conversation that begins with all of this one."""
        messages = [dict(message) for message in self.messages]
        return Conversation(
            self.sequence.fork(),
            messages,
            list(self.turns),
            self.text,
            dict(self.metadata),
            self.in_sync,
            self.template,
        )

    # Files ----------------------------------------------------------------------------------

    def snapshot(self) -> object:
        """Return a value that is equal as long as no turn is added, dropped or removed."""
        said = tuple((message["role"], message["content"]) for message in self.messages)
        turns = tuple((turn.n_tokens, turn.n_text) for turn in self.turns)
        return len(self.sequence), self.text, turns, said

    def save(self, path: str) -> int:
        """Write it with the evaluated tokens; return the size of the file in bytes."""
        if not self.in_sync:
            self.rebuild()
        turns = [[turn.n_tokens, turn.n_text] for turn in self.turns]
        note = {"messages": self.messages, "turns": turns, "text": self.text}
        # `state cut` keeps the metadata: the number shows that the tokens are fewer.
        note["n_tokens"] = len(self.sequence)
        return self.sequence.save(path, self.metadata | {"messages": self.messages, FORMAT: note})

    @classmethod
    def load(cls, ctx: LlamaContext, path: str, template: str | None = None) -> Conversation:
        """Read a file of `save`, of which nothing is evaluated again.

        Also reads a file of `LlamaSequence.save` with ``{"messages": [...]}`` as metadata, where
        the model has a template: the messages are rendered, and the common prefix is kept.

        Raises
        ------
        StateError
            The file holds no conversation, or one of another model.
        """
        found = describe_state(path)
        metadata: Any = found.metadata.get("metadata", {})
        try:
            metadata = dict(metadata)
            note = metadata.pop(FORMAT, None)
            messages = metadata["messages"] = _messages((note or metadata)["messages"])
            turns, text = _turns(note) if note else ([], "")
            has_template = template is not None or ctx.model.chat_template is not None
            if not note and not (has_template and messages):
                raise ValueError("messages alone are no text")
        except (KeyError, TypeError, ValueError, OverflowError):
            # Damage is reported first.
            (SequenceState if found.kind == "sequence" else ContextState).load(path)
            raise StateError(
                f"{path}: neither a chat that 'pykvcache chat' saved, nor a sequence with messages "
                "of a role and a text each"
            ) from None
        try:
            sequence = LlamaSequence.load(ctx, path)
        except StateLayoutMismatch as error:
            raise _other_types(path, found, ctx) or error from None
        one = cls(sequence, messages, turns, text, metadata, template=template)
        if note and note.get("n_tokens", len(sequence)) == len(sequence) and one._has_valid_turns():
            return one
        why = "the model has no template to render them"
        if one.has_template:
            try:
                one.rebuild()
                return one
            except ChatTemplateError as error:
                why = str(error)
        sequence.close()
        raise StateError(f"{path}: its tokens are not those of its messages: {why}")

    def _has_valid_turns(self) -> bool:
        """Whether the turns can lie where they say, in the tokens and in the text."""
        known = [turn for turn in self.turns if turn.is_known]
        for places in (
            [0, *(turn.n_tokens for turn in known), len(self.sequence)],
            [0, *(turn.n_text for turn in known), len(self.text)],
        ):
            if places != sorted(places):
                return False
        return len(self.turns) == len(self._users())


def _turns(note: Any) -> tuple[list[Turn], str]:
    if not isinstance(note["text"], str):
        raise TypeError("the text is not text")
    return [Turn(int(n), int(at)) for n, at in note["turns"]], note["text"]


def _messages(given: Any) -> list[dict[str, str]]:
    messages = [{"role": m["role"], "content": m["content"]} for m in given]
    if not all(isinstance(part, str) for m in messages for part in m.values()):
        raise TypeError("a message is not text")
    if any(len(m) > 2 for m in given):
        raise ValueError("a message has more than a text")
    return messages


def _other_types(path: str, found: StateInfo, ctx: LlamaContext) -> StateLayoutMismatch | None:
    """Return an error that says what to do, where a file stores K and V in other types."""
    theirs = {part: found.types.get(part) for part in ("k", "v")}
    here = ctx.memory_info
    ours = {"k": here.type_k.name.lower(), "v": here.type_v.name.lower()}
    if theirs == ours:
        return None
    used = ctx.model.path
    model = "" if used == embedded_model_path() else f"-m {used} "
    saved, wanted = (" ".join(f"--type-{part} {t[part]}" for part in t) for t in (theirs, ours))
    return StateLayoutMismatch(
        f"{path}: it was saved with {saved}: give these, or convert the file first: "
        f"pykvcache state convert {model}{path} OUT {wanted}",
        what="types",
        value=tuple(theirs.values()),
        limit=tuple(ours.values()),
    )


def _n_equal(one: str, other: str) -> int:
    """Return how many leading characters are equal."""
    n = min(len(one), len(other))
    if one[:n] == other[:n]:
        return n
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
