"""Talks out of files: those that the chat saved, and sequences with messages beside them."""

from __future__ import annotations

from typing import Any

from pykvcache._models import embedded_model_path
from pykvcache.cli.talk import FORMAT, Talk, Turn
from pykvcache.context import LlamaContext
from pykvcache.errors import ChatTemplateError, StateError, StateLayoutMismatch
from pykvcache.sequence.sequence import LlamaSequence
from pykvcache.state import ContextState, SequenceState, StateInfo, describe_state

__all__ = ["load_talk"]


def load_talk(ctx: LlamaContext, path: str, template: str | None = None) -> Talk:
    """Read a talk; of one that the chat saved nothing is evaluated again.

    Also a file of `LlamaSequence.save` with ``{"messages": [...]}`` beside it, where the model has
    a template: its tokens become those of the messages, and what both begin with is kept.

    Raises
    ------
    StateError
        It is not a talk, or not one of this model.
    """
    found = describe_state(path)
    beside: Any = found.metadata.get("metadata", {})
    try:
        beside = dict(beside)
        note = beside.pop(FORMAT, None)
        messages = _messages((note or beside)["messages"])
        beside["messages"] = messages
        turns, text = _turns(note) if note else ([], "")
        has_template = template is not None or ctx.model.chat_template is not None
        if not note and not (has_template and messages):
            raise ValueError("messages alone are no text")
    except (KeyError, TypeError, ValueError, OverflowError):
        # Damage is said first.
        (SequenceState if found.kind == "sequence" else ContextState).load(path)
        raise StateError(
            f"{path}: not a talk that 'pykvcache chat' saved, nor a sequence with messages "
            "of a role and a text each"
        ) from None
    try:
        talk = Talk(LlamaSequence.load(ctx, path), messages, turns, text, beside, template=template)
    except StateLayoutMismatch as error:
        raise _other_types(path, found, ctx) or error from None
    n_tokens = len(talk.sequence)
    if not (note and note.get("n_tokens", n_tokens) == n_tokens and _fits(talk)):
        why = "the model has no template to make them so"
        if talk.has_template:
            try:
                talk.lay_out()
                return talk
            except ChatTemplateError as error:
                why = str(error)
        talk.sequence.close()
        raise StateError(f"{path}: its tokens are not those of its messages: {why}")
    return talk


def _fits(talk: Talk) -> bool:
    """Whether places of turns can be those of its tokens and text."""
    known = [turn for turn in talk.turns if turn.is_known]
    for places in (
        [0, *(turn.n_tokens for turn in known), len(talk.sequence)],
        [0, *(turn.n_text for turn in known), len(talk.text)],
    ):
        if places != sorted(places):
            return False
    return len(talk.turns) == sum(message["role"] == "user" for message in talk.messages)


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
    """Say what to do where a file stores other types of keys and values than the context."""
    theirs = {part: found.types.get(part) for part in ("k", "v")}
    here = ctx.memory_info
    ours = {"k": here.type_k.name.lower(), "v": here.type_v.name.lower()}
    if theirs == ours:
        return None
    used = ctx.model.path
    model = "" if used == embedded_model_path() else f"-m {used} "
    said, other = (" ".join(f"--type-{part} {t[part]}" for part in t) for t in (theirs, ours))
    return StateLayoutMismatch(
        f"{path}: it was saved with {said}: give these, or convert the file first: "
        f"pykvcache state convert {model}{path} OUT {other}",
        what="types",
        value=tuple(theirs.values()),
        limit=tuple(ours.values()),
    )
