"""Choosing the next token."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, SupportsIndex, TypeVar, cast

import numpy as np
import numpy.typing as npt

from pykvcache._convert import as_bool, as_float, as_int
from pykvcache._grammar import check_grammar
from pykvcache._json_schema import as_schema, schema_grammar
from pykvcache._native import lib
from pykvcache.chat_format import ChatFormat
from pykvcache.errors import ArgumentError

if TYPE_CHECKING:
    from pykvcache.model import LlamaModel

__all__ = ["Sampler"]

N = TypeVar("N", lib.Model, lib.Context)
FloatArray = npt.NDArray[np.float32]

#: ``LLAMA_DEFAULT_SEED``: llama.cpp then takes a random one.
RANDOM_SEED = 0xFFFFFFFF
INT32_MAX = 2**31 - 1


class HasContext(Protocol):
    """What a `LlamaContext` is to a sampler."""

    @property
    def native(self) -> lib.Context:
        """The object of the compiled layer."""


class Sampler:
    """Choose tokens with llama.cpp's samplers.

    In this order: ``logit_bias``, grammar, penalties, ``top_k``, ``top_p``, ``min_p``,
    ``temperature``, choice. One sampler keeps the history of one text (penalties, grammar,
    random state): use one per sequence, from one thread at a time. `clone` and ``copy.copy``
    give another one with the same history; from there each goes its own way. Tokens are chosen in
    compiled code: `generate` and requests refuse a subclass that has a `sample` of its own. For a
    choice of your own take `LlamaSequence.logits` and append the token.

    Parameters
    ----------
    temperature
        0 takes the token with the largest logit (greedy) after ``logit_bias``, grammar and
        penalties; ``top_k``, ``top_p``, ``min_p`` and ``seed`` then change nothing. At most 1e4.
    top_k
        Keep the k most likely tokens; 0 keeps all.
    top_p, min_p
        Nucleus and minimum-probability cuts in [0, 1]; 1 and 0 turn them off.
    repeat_penalty, frequency_penalty, presence_penalty, penalty_last_n
        Penalties over the last n tokens; 1, 0 and 0 turn them off, and 0 tokens turn off all
        three. Within [1e-6, 1e6], [-1e6, 1e6], [-1e6, 1e6] and [0, 2^20].
    seed
        Same seed, same choices, in [0, 2^32 - 2]; ``None`` draws a random one.
    logit_bias
        What to add to the logits of some tokens, by token id: within [-1e6, 1e6], or
        ``-math.inf`` for tokens that are never to be chosen.
    grammar, grammar_root
        A GBNF grammar that the text must follow, and its first rule. Needs ``model``.
    json_schema, strict
        A JSON schema that the text must follow, in place of ``grammar``: a mapping, or its JSON
        text. Properties come in the schema's order, the required ones first; ``oneOf`` counts as
        ``anyOf``. Needs ``model``. What a grammar does not hold to (``multipleOf``, bounds of
        numbers that are no integers, ``uniqueItems``, ...) is a `GrammarError` that names it; with
        ``strict=False`` it is left out.
    chat_format
        A `ChatFormat`, whose grammar the text must follow, in place of ``grammar``: at once, or
        from the tool call on that the model begins. Needs ``model``.
    model
        The model that a grammar is made for.

    Raises
    ------
    ValueError, TypeError
        A value is out of range, or not what is asked for.
    GrammarError
        The grammar cannot be parsed; ``line`` and ``column`` say where. Or the schema cannot be a
        grammar: nested deeper than 64, more than 200 optional properties in an object, ...
    IndexError
        ``logit_bias`` names a token that ``model`` does not have.

    Examples
    --------
    >>> from pykvcache import Sampler
    >>> Sampler(temperature=0, logit_bias={2: -1.5}).clone()
    Sampler(temperature=0.0, top_k=40, top_p=0.95, min_p=0.05, repeat_penalty=1.0, \
frequency_penalty=0.0, presence_penalty=0.0, penalty_last_n=64, seed=None, \
logit_bias={2: -1.5}, grammar=None, grammar_root='root', model=None)
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
        logit_bias: Mapping[int, float] | None = None,
        grammar: str | None = None,
        grammar_root: str = "root",
        json_schema: Mapping[str, Any] | str | None = None,
        strict: bool = True,
        chat_format: ChatFormat | None = None,
        model: LlamaModel | None = None,
    ) -> None:
        native_model = None if model is None else _native(model, "model", lib.Model)
        given = {"grammar": grammar, "json_schema": json_schema, "chat_format": chat_format}
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            raise ArgumentError(f"{names[0]} and {names[1]} are given: pass one of them", names[1])
        if names and model is None:
            raise ArgumentError("a grammar needs model=: it is made for one vocabulary", "model")
        for what, text in (("grammar", grammar), ("grammar_root", grammar_root)):
            if text is not None and not isinstance(text, str):
                raise TypeError(f"{what} must be a str, not {type(text).__name__}")
        if "\0" in grammar_root:
            raise ArgumentError("grammar_root must not hold NUL", "grammar_root", grammar_root)
        if not grammar_root.isascii():  # rules have plain names; surrogates cannot even be written
            raise ArgumentError(
                f"grammar_root is {grammar_root!r}: names of rules are ASCII",
                "grammar_root",
                grammar_root,
            )
        strict = as_bool(strict, "strict")
        prefix, triggers = "", None
        if json_schema is not None:
            grammar = schema_grammar(as_schema(json_schema, "json_schema"), strict=strict)
        elif chat_format is not None:
            if not isinstance(chat_format, ChatFormat):
                kind = type(chat_format).__name__
                raise TypeError(f"chat_format must be a ChatFormat, not {kind}")
            grammar, triggers = chat_format.grammar, chat_format.triggers
            prefix = chat_format.generation_prompt if triggers is None else ""
        if grammar is not None:
            check_grammar(grammar)
        self._model = model
        self._params: dict[str, Any] = {
            "temperature": as_float(temperature, "temperature", 0.0, 1e4),
            "top_k": as_int(top_k, "top_k", 0, INT32_MAX),
            "top_p": as_float(top_p, "top_p", 0.0, 1.0),
            "min_p": as_float(min_p, "min_p", 0.0, 1.0),
            "repeat_penalty": as_float(repeat_penalty, "repeat_penalty", 1e-6, 1e6),
            "frequency_penalty": as_float(frequency_penalty, "frequency_penalty", -1e6, 1e6),
            "presence_penalty": as_float(presence_penalty, "presence_penalty", -1e6, 1e6),
            "penalty_last_n": as_int(penalty_last_n, "penalty_last_n", 0, 2**20),
            "seed": RANDOM_SEED if seed is None else as_int(seed, "seed", 0, 2**32 - 2),
            "logit_bias": _bias(logit_bias),
            "grammar": grammar,
            "grammar_root": grammar_root,
        }
        # What the grammar reads before the first token, and what it waits for.
        begin = None
        if native_model is not None and grammar is not None:
            patterns = None if triggers is None else [one.encode() for one in triggers]
            begin = (_prefix_tokens(native_model, prefix), patterns)
        self._native = lib.Sampler(self._params, native_model, begin)

    @property
    def native(self) -> lib.Sampler:
        """The object of the compiled layer."""
        return self._native

    def sample(self, source: HasContext | npt.NDArray[np.float32], i: SupportsIndex = -1) -> int:
        """Choose a token and accept it (``llama_sampler_apply``, ``llama_sampler_accept``).

        Parameters
        ----------
        source
            A context, of which token i of the last decode is taken; or logits: float32, shape
            (n_vocab,), finite or ``-inf``. They are not changed.
        i
            Index as in `LlamaContext.logits`; of a context only.

        Raises
        ------
        IndexError
            Token i has no logits, or no sequence holds it any more; or ``logit_bias`` names a
            token that does not exist.
        DecodeError
            The context's logits hold NaN or infinity, or no token is left to choose from.
        ValueError, TypeError
            The array is not one of logits, or holds NaN or infinity; the grammar was made for
            another model.
        """
        return self._native.sample(*_logits(source, i))

    def logprobs(
        self, source: HasContext | npt.NDArray[np.float32], i: SupportsIndex = -1
    ) -> FloatArray:
        """Return the log-probability of each token to be the next that `sample` chooses.

        After bias, grammar, penalties, cuts and temperature: ``-inf`` for what they exclude; at
        temperature 0 the one choice has 0. Accepts nothing and draws nothing. The model's own
        log-probabilities are those of
        ``Sampler(temperature=1, top_k=0, top_p=1, min_p=0)``.

        Parameters
        ----------
        source, i
            As for `sample`, which says what is raised too.

        Returns
        -------
        ndarray of float32, shape (n_vocab,)
        """
        return self._native.logprobs(*_logits(source, i))

    def accept(
        self, token: SupportsIndex, model: LlamaModel | None = None, *, grammar: bool = False
    ) -> None:
        """Count a token that `sample` did not choose (``llama_sampler_accept``); all or nothing.

        Parameters
        ----------
        token
            Token id; the penalties count it.
        model
            The model whose token it is. Default: that of the grammar, or of the last logits.
        grammar
            Whether it belongs to the text that follows the grammar, as a prompt does not.

        Raises
        ------
        IndexError
            The token is not one of the model's.
        ValueError
            The grammar does not allow it here.
        """
        native_model = None if model is None else _native(model, "model", lib.Model)
        self._native.accept(token, native_model, as_bool(grammar, "grammar"))

    def reset(self) -> None:
        """Forget the history; the grammar begins again, and the random state with its seed."""
        self._native.reset()

    def clone(self, *, seed: int | None = None) -> Sampler:
        """Return another sampler with these settings and this history (``llama_sampler_clone``).

        Penalties, grammar and random state are as they are here, so both choose the same tokens
        from the same logits; neither changes the other.

        Parameters
        ----------
        seed
            Begin with another seed, in [0, 2^32 - 2], for other choices from here on.
        """
        clone = object.__new__(type(self))
        clone.__dict__.update(self.__dict__)
        if seed is not None:
            clone._params = dict(self._params, seed=as_int(seed, "seed", 0, 2**32 - 2))
        clone._native = self._native.clone(clone._params)
        return clone

    def with_format(self, chat_format: ChatFormat, model: LlamaModel) -> Sampler:
        """Return a new sampler with these settings that keeps to a chat format."""
        settings = {name: self._params[name] for name in self._params if "grammar" not in name}
        settings["seed"] = self.seed
        return Sampler(**settings, chat_format=chat_format, model=model)

    @property
    def seed(self) -> int | None:
        """The seed; None where a random one was drawn."""
        seed: int = self._params["seed"]
        return None if seed == RANDOM_SEED else seed

    def __copy__(self) -> Sampler:
        return self.clone()

    def __deepcopy__(self, memo: dict[int, object]) -> Sampler:
        # The model stays the same one: it cannot be copied, and the grammar was made for it.
        return self.clone()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Sampler cannot be pickled: its random and grammar state are llama.cpp's. Make it "
            "again from its settings, or copy it with clone()"
        )

    def __repr__(self) -> str:
        shown = dict(self._params, model=self._model)
        if shown["seed"] == RANDOM_SEED:
            shown["seed"] = None
        shown["logit_bias"] = shown["logit_bias"] or None
        texts = {
            "logit_bias": reprlib.repr(shown["logit_bias"]),
            "grammar": _SHORT.repr(shown["grammar"]),
        }
        settings = (f"{name}={texts.get(name) or repr(v)}" for name, v in shown.items())
        return f"Sampler({', '.join(settings)})"


def _prefix_tokens(model: lib.Model, text: str) -> list[int]:
    """Return tokens whose pieces are a text: without the space that some vocabularies put first."""
    tokens: list[int] = model.tokenize(text.encode(), False, True).tolist() if text else []
    pieces = [model.token_to_piece(token, True) for token in tokens]
    if b"".join(pieces) == b" " + text.encode():
        first = pieces[0][1:]
        known = (t for t in range(model.n_vocab) if model.token_to_piece(t, True) == first)
        tokens[:1] = [next(known)] if first else []
    return tokens


_SHORT = reprlib.Repr()
_SHORT.maxstring = 60


# What compiled code does by itself, or has to find as it is.
_COMPILED = ("native", "sample", "accept", "logprobs", "reset", "clone", "seed")


def check_sampler(sampler: object) -> Sampler:
    """Return a sampler for `generate` or a request; TypeError for one that they cannot use."""
    kind = type(sampler)
    if not issubclass(kind, Sampler):  # isinstance() believes what a proxy says of itself
        raise TypeError(f"sampler must be a Sampler, not {kind.__name__}")
    own = vars(sampler)
    for name in _COMPILED:
        if getattr(kind, name) is not getattr(Sampler, name) or name in own:
            raise TypeError(
                f"{kind.__name__} replaces {name}: generate() and requests choose tokens in "
                "compiled code, which knows nothing of it. For a choice of your own take "
                "sequence.logits(), and sequence.append([token])"
            )
    if "_native" not in own:
        raise TypeError(f"{kind.__name__}.__init__ does not call Sampler.__init__")
    return cast(Sampler, sampler)


def _native(value: object, what: str, kind: type[N]) -> N:
    native = getattr(value, "native", None)
    if not isinstance(native, kind):
        raise TypeError(f"{what} must be a Llama{kind.__name__}, not {type(value).__name__}")
    return native


def _logits(
    source: HasContext | npt.NDArray[np.float32], i: SupportsIndex
) -> tuple[lib.Context | None, FloatArray]:
    """Return a context and its logits, or None and an array that was checked."""
    native = getattr(source, "native", None)
    if isinstance(native, lib.Context):
        return native, native.logits(i)
    if not isinstance(source, np.ndarray):
        raise TypeError(
            f"source must be a LlamaContext or an array of logits, not {type(source).__name__}"
        )
    if source.dtype != np.float32:
        raise TypeError(f"logits must be float32, not {source.dtype}: use astype(np.float32)")
    if source.ndim != 1 or not 1 <= len(source) <= INT32_MAX:
        raise ArgumentError(
            f"logits have shape {source.shape}: (n_vocab,) is expected", "logits", source.shape
        )
    as_int(i, "i (of an array: leave it out)", -1, -1)
    # A copy: another thread may change the array meanwhile.
    return None, np.array(source, np.float32)


def _bias(given: Mapping[int, float] | None) -> dict[int, float]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"logit_bias must map tokens to numbers, not {type(given).__name__}")
    found: dict[int, float] = {}
    for token, value in given.items():
        key = as_int(token, "a token of logit_bias", 0, INT32_MAX)
        what = f"the logit_bias of token {key}"
        banned = isinstance(value, (float, np.floating)) and value == -math.inf
        found[key] = -math.inf if banned else as_float(value, what, -1e6, 1e6)
    return found
