"""Chat templates: what is given to them, as plain copies; `_jinja` renders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pykvcache._convert import as_bool
from pykvcache.errors import ArgumentError

if TYPE_CHECKING:
    from pykvcache._native import lib

__all__ = ["render", "special_token_texts"]

MAX_VALUES = 1_000_000
MAX_DEPTH = 90  # below what a template may write
# Names of a message's reasoning; transformers reads the first that is there.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class _Copier:
    """Copies of plain values, without a part in common; counts what it copies."""

    def __init__(self) -> None:
        self.nodes = self.size = 0

    def copy(self, value: object, name: str, depth: int = 0) -> Any:
        """Return a value made of Python's own plain types."""
        self.nodes += 1
        if self.nodes > MAX_VALUES:
            raise ArgumentError(
                f"{name} holds more than {MAX_VALUES} values", what=name, limit=MAX_VALUES
            )
        if depth > MAX_DEPTH:
            raise ArgumentError(f"{name} is nested deeper than {MAX_DEPTH}", name, depth, MAX_DEPTH)
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):  # an enumeration's member, too
            self.size += len(value)
            return str.__str__(value)
        if isinstance(value, int):
            return int.__int__(value)
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, Mapping):
            return {
                self.copy(key, name, depth + 1): self.copy(one, name, depth + 1)
                for key, one in value.items()
            }
        if isinstance(value, (list, tuple)):
            items = [self.copy(one, name, depth + 1) for one in value]
            return items if isinstance(value, list) else tuple(items)
        raise TypeError(f"{name} holds a {type(value).__name__}: a chat template reads plain data")

    def mappings(self, values: object, name: str, content: str) -> list[dict[Any, Any]] | None:
        """Return a list of mappings; an empty one for None."""
        if values is None and name != "messages":
            return None
        is_sequence = isinstance(values, Sequence) and not isinstance(values, (str, bytes))
        if not is_sequence or not all(isinstance(one, Mapping) for one in values):  # type: ignore[attr-defined]
            raise TypeError(f"{name} must be a sequence of mappings with {content}")
        return [self.copy(one, name) for one in values]  # type: ignore[attr-defined]


def _message(given: dict[Any, Any]) -> dict[Any, Any]:
    """Return a message without empty keys, and its reasoning under every name that is read."""
    message = {key: value for key, value in given.items() if value is not None}
    found = [message[key] for key in _REASONING if key in message]
    if not found:
        return message
    return {"thinking": found[0], **message, "reasoning_content": found[0]}


def _check_role(message: Mapping[Any, Any], i: int) -> None:
    """Refuse a message that most templates would leave out without a word."""
    role = message.get("role")
    if role is None:
        why = ", ".join(map(repr, message))[:200] or "none"
        raise ArgumentError(
            f"messages[{i}] has no 'role': its keys are {why}", f"messages[{i}]", list(message)
        )
    if not isinstance(role, str):
        raise TypeError(f"the 'role' of messages[{i}] must be a str, not {type(role).__name__}")


def special_token_texts(model: lib.Model) -> dict[str, str]:
    """Return a model's special tokens by the names that templates know; those that there are."""
    bos, eos, _, sep, _, pad, mask, _ = model.special_tokens()
    number = model.metadata.get("tokenizer.ggml.unknown_token_id", "")
    unk = int(number) if number.isdecimal() and int(number) < model.n_vocab else -1
    found = {"bos": bos, "eos": eos, "unk": unk, "sep": sep, "pad": pad, "mask": mask}
    return {
        f"{name}_token": model.token_to_piece(token, True).decode("utf-8", "replace")
        for name, token in found.items()
        if token >= 0
    }


def render(
    template: str, given: Mapping[str, object], variables: Mapping[str, object], generate: bool
) -> str:
    """Render a template on messages, tools and documents, and further variables."""
    try:
        from pykvcache._jinja.render import render_template
    except ImportError as error:
        raise ImportError(
            f"chat templates need Jinja2 3.1.6 or newer: pip install 'pykvcache[chat]' ({error})"
        ) from None

    if not isinstance(template, str):
        raise TypeError(f"template must be text, not {type(template).__name__}")
    copier = _Copier()
    messages = copier.mappings(given["messages"], "messages", "'role' and 'content'") or []
    for i, one in enumerate(messages):
        _check_role(one, i)
    values = {
        "messages": [_message(one) for one in messages],
        "tools": copier.mappings(given["tools"], "tools", "a JSON schema each"),
        "documents": copier.mappings(given["documents"], "documents", "'title' and 'text'"),
        "add_generation_prompt": as_bool(generate, "add_generation_prompt"),
        **copier.copy(variables, "a variable"),
    }
    return render_template(template, values, copier.nodes, copier.size)
