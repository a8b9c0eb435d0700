"""Chat templates; the one module that needs Jinja2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from pykvcache.model import LlamaModel

__all__ = ["render"]


class _Refused(ValueError):
    """The template itself called ``raise_exception``."""


def render(
    model: LlamaModel, template: str, messages: Sequence[Mapping[str, str]], generate: bool
) -> str:
    """Render a GGUF's template in a sandbox: it is text from a downloaded file."""
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ImportError("chat templates need Jinja2: pip install 'pykvcache[chat]'") from None

    if not isinstance(template, str):
        raise TypeError(f"template must be text, not {type(template).__name__}")
    if isinstance(messages, (str, bytes)) or not all(isinstance(m, Mapping) for m in messages):
        raise TypeError("messages must be a sequence of mappings with 'role' and 'content'")

    def raise_exception(message: str) -> NoReturn:
        raise _Refused(f"the chat template refused the messages: {message}")

    def piece(token: int | None) -> str:
        if token is None:
            return ""
        return model.token_to_piece(token, special=True).decode("utf-8", "replace")

    tokens = {"bos_token": piece(model.token_bos), "eos_token": piece(model.token_eos)}
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    try:
        return environment.from_string(template).render(
            messages=list(messages),
            add_generation_prompt=generate,
            **tokens,
        )
    except _Refused:
        raise
    except Exception as error:  # a template is a program: it may fail in any way
        raise ValueError(
            f"the chat template cannot be rendered: {type(error).__name__}: {error}"
        ) from error
