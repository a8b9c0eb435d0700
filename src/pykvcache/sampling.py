"""Choosing the next token."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, SupportsIndex, TypeVar

from pykvcache._convert import as_int
from pykvcache._grammar import check_grammar
from pykvcache._native import lib

if TYPE_CHECKING:
    from pykvcache.context import LlamaContext
    from pykvcache.model import LlamaModel

__all__ = ["Sampler"]

N = TypeVar("N", lib.Model, lib.Context)

#: ``LLAMA_DEFAULT_SEED``: llama.cpp then takes a random one.
RANDOM_SEED = 0xFFFFFFFF


class Sampler:
    """A chain of llama.cpp's samplers: penalties, top-k, top-p, min-p, temperature, choice.

    One sampler keeps the history of one text (penalties, grammar, random state):
    use one per sequence, from one thread at a time.

    Parameters
    ----------
    temperature
        0 takes the most likely token (greedy), whatever the other values are.
    top_k
        Keep the k most likely tokens; 0 keeps all.
    top_p, min_p
        Nucleus and minimum-probability cuts in [0, 1]; 1 and 0 turn them off.
    repeat_penalty, frequency_penalty, presence_penalty, penalty_last_n
        Penalties over the last n tokens; 1, 0 and 0 turn them off.
    seed
        Same seed, same choices; ``None`` draws a random one.
    grammar, grammar_root
        A GBNF grammar that the text must follow, and its first rule. Needs ``model``.
    model
        The model that a grammar is made for.

    Raises
    ------
    ValueError
        A value is out of range, or the grammar cannot be parsed.

    Examples
    --------
    >>> from pykvcache import Sampler
    >>> Sampler(temperature=0)
    Sampler(temperature=0.0)
    """

    def __init__(
        self,
        *,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        repeat_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        penalty_last_n: int = 64,
        seed: int | None = None,
        grammar: str | None = None,
        grammar_root: str = "root",
        model: LlamaModel | None = None,
    ) -> None:
        native_model = None if model is None else _native(model, "model", lib.Model)
        if grammar is not None and model is None:
            raise ValueError("a grammar needs model=: it is made for one vocabulary")
        for what, text in (("grammar", grammar), ("grammar_root", grammar_root)):
            if text is not None and (not isinstance(text, str) or "\0" in text):
                raise TypeError(f"{what} must be text without NUL")
        if grammar is not None:
            check_grammar(grammar)
        self._params: dict[str, float | int | str | None] = {
            "temperature": _number(temperature, "temperature", 0.0, 1e4),
            "top_k": as_int(top_k, "top_k", 0, 2**31 - 1),
            "top_p": _number(top_p, "top_p", 0.0, 1.0),
            "min_p": _number(min_p, "min_p", 0.0, 1.0),
            "repeat_penalty": _number(repeat_penalty, "repeat_penalty", 1e-6, 1e6),
            "frequency_penalty": _number(frequency_penalty, "frequency_penalty", -1e6, 1e6),
            "presence_penalty": _number(presence_penalty, "presence_penalty", -1e6, 1e6),
            "penalty_last_n": as_int(penalty_last_n, "penalty_last_n", 0, 2**20),
            "seed": RANDOM_SEED if seed is None else as_int(seed, "seed", 0, 2**32 - 2),
            "grammar": grammar,
            "grammar_root": grammar_root,
        }
        self._native = lib.Sampler(self._params, native_model)

    @property
    def native(self) -> lib.Sampler:
        """The object of the compiled layer."""
        return self._native

    def sample(self, ctx: LlamaContext, i: SupportsIndex = -1) -> int:
        """Choose a token from the logits of token i of the last decode, and accept it.

        Raises
        ------
        IndexError
            Token i has no logits, or no sequence holds it any more.
        DecodeError
            The logits hold NaN, or the grammar allows no further token.
        """
        native = _native(ctx, "ctx", lib.Context)
        return self._native.sample(native, native.logits(i))

    def accept(self, token: SupportsIndex, model: LlamaModel) -> None:
        """Count a token that came from elsewhere (a prompt) for the penalties."""
        self._native.accept(token, _native(model, "model", lib.Model))

    def reset(self) -> None:
        """Forget the history; the random state starts again from the seed."""
        self._native.reset()

    def __repr__(self) -> str:
        shown = self._params["temperature"]
        if not shown:
            return "Sampler(temperature=0.0)"
        return (
            f"Sampler(temperature={shown}, top_k={self._params['top_k']}, "
            f"top_p={self._params['top_p']}, min_p={self._params['min_p']})"
        )


def _native(value: object, what: str, kind: type[N]) -> N:
    native = getattr(value, "native", None)
    if not isinstance(native, kind):
        raise TypeError(f"{what} must be a Llama{kind.__name__}, not {type(value).__name__}")
    return native


def _number(value: float, what: str, lo: float, hi: float) -> float:
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise TypeError(f"{what} must be a number, not {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number) or not lo <= number <= hi:
        raise ValueError(f"{what} is {number}: it must be in [{lo:g}, {hi:g}]")
    return number
