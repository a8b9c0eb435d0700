"""Sampler: chooses the next token."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    NoReturn,
    SupportsIndex,
    TypeAlias,
    cast,
)

import numpy as np
import numpy.typing as npt

from pykvcache._arguments import as_bool, as_float, as_int, as_list, check_kind
from pykvcache._grammar import check_grammar
from pykvcache._json_schema import as_schema, schema_grammar
from pykvcache._native import lib
from pykvcache.chat_format import ChatFormat
from pykvcache.errors import ArgumentError

if TYPE_CHECKING:
    from pykvcache.context import LlamaContext
    from pykvcache.model import LlamaModel

__all__ = ["Sampler"]

FloatArray = npt.NDArray[np.float32]

#: A custom stage: maps token ids and logits to new logits.
StageCall: TypeAlias = Callable[
    [npt.NDArray[np.int32], npt.NDArray[np.float32]], "npt.NDArray[Any] | None"
]

#: Texts that end a repetition for DRY, as in llama.cpp.
DRY_BREAKERS = ("\n", ":", '"', "*")

#: ``LLAMA_DEFAULT_SEED``, for which llama.cpp draws a random seed.
RANDOM_SEED = 0xFFFFFFFF
INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Setting:
    """A number in [low, high] that a sampler takes; None only if that is the default."""

    default: float | None
    low: float
    high: float
    #: Whether `repr` shows the default, too.
    is_shown: bool = False

    @property
    def kind(self) -> type[int] | type[float]:
        """The type of its values."""
        return int if isinstance(self.default, int) else float

    def checked(self, name: str, value: Any) -> float | None:
        """Return a value of this setting; raise if it is out of range or of another type."""
        if type(value) is type(self.default) and value == self.default:
            return self.default
        if self.kind is int:
            return as_int(value, name, int(self.low), int(self.high))
        return as_float(value, name, self.low, self.high)


#: The numbers of `Sampler`, whose signature has the same defaults.
SETTINGS = {
    "temperature": Setting(0.8, 0.0, 1e4, is_shown=True),
    "top_k": Setting(40, 0, INT32_MAX, is_shown=True),
    "top_p": Setting(0.95, 0.0, 1.0, is_shown=True),
    "min_p": Setting(0.05, 0.0, 1.0, is_shown=True),
    "repeat_penalty": Setting(1.0, 1e-6, 1e6, is_shown=True),
    "frequency_penalty": Setting(0.0, -1e6, 1e6, is_shown=True),
    "presence_penalty": Setting(0.0, -1e6, 1e6, is_shown=True),
    "penalty_last_n": Setting(64, 0, 2**20, is_shown=True),
    "typical_p": Setting(1.0, 1e-6, 1.0),
    "top_n_sigma": Setting(0.0, 0.0, 1e6),
    "xtc_probability": Setting(0.0, 0.0, 1.0),
    "xtc_threshold": Setting(0.1, 0.0, 1.0),
    "dry_multiplier": Setting(0.0, 0.0, 1e6),
    "dry_base": Setting(1.75, 1.0, 1e6),
    "dry_allowed_length": Setting(2, 0, 2**20),
    "dry_last_n": Setting(1024, 0, 2**20),
    "mirostat": Setting(0, 0, 2),
    "mirostat_tau": Setting(5.0, 0.0, 1e4),
    "mirostat_eta": Setting(0.1, 0.0, 1e4),
    "adaptive_target": Setting(None, 0.0, 1.0),
    "adaptive_decay": Setting(0.9, 0.0, 0.99),
}


@dataclass(frozen=True)
class Stage:
    """A stage: its settings as ``context/stages.cpp`` takes them, and when it has an effect."""

    settings: tuple[str, ...]
    is_on: Callable[[Mapping[str, Any]], object]
    #: Whether it acts at temperature 0, too.
    if_greedy: bool = False
    #: Whether it acts before Mirostat, too.
    if_mirostat: bool = False
    #: Whether excluded tokens must be dropped before it, because it would count or choose them.
    counts_excluded: bool = False


#: The stages in llama.cpp's order.
STAGES = {
    "penalties": Stage(
        ("penalty_last_n", "repeat_penalty", "frequency_penalty", "presence_penalty"),
        lambda s: (
            s["penalty_last_n"]
            and (s["repeat_penalty"] != 1 or s["frequency_penalty"] or s["presence_penalty"])
        ),
        if_greedy=True,
        if_mirostat=True,
    ),
    "dry": Stage(
        ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_last_n"),
        lambda s: s["dry_multiplier"] and s["dry_last_n"],
        if_greedy=True,
        if_mirostat=True,
    ),
    "top_n_sigma": Stage(("top_n_sigma",), lambda s: s["top_n_sigma"]),
    "top_k": Stage(("top_k",), lambda s: s["top_k"]),
    "typical_p": Stage(("typical_p",), lambda s: s["typical_p"] < 1, counts_excluded=True),
    "top_p": Stage(("top_p",), lambda s: s["top_p"] < 1),
    "min_p": Stage(("min_p",), lambda s: s["min_p"]),
    "xtc": Stage(
        ("xtc_probability", "xtc_threshold", "seed"),
        lambda s: s["xtc_probability"],
        counts_excluded=True,
    ),
    "temperature": Stage(("temperature",), lambda s: True, if_mirostat=True),
}

#: A stage as the compiled layer takes it: its name and those of its settings, or a call.
NativeStage: TypeAlias = tuple["str | StageCall", tuple[str, ...]]

#: The last stage, which chooses the token; indexed by the value of `mirostat`.
_CHOICES: tuple[NativeStage, ...] = (
    ("dist", ("seed",)),
    ("mirostat_1", ("n_vocab", "seed", "mirostat_tau", "mirostat_eta")),
    ("mirostat_2", ("seed", "mirostat_tau", "mirostat_eta")),
)
_GREEDY: NativeStage = ("greedy", ())
_POSSIBLE: NativeStage = ("possible", ())
_ADAPTIVE: NativeStage = ("adaptive", ("adaptive_target", "adaptive_decay"))


class Sampler:
    """Chooses tokens with llama.cpp's samplers.

    It applies, in this order: ``logit_bias``; grammar; the stages penalties, DRY, ``top_n_sigma``,
    ``top_k``, ``typical_p``, ``top_p``, ``min_p``, XTC and ``temperature``, or those of ``stages``;
    and the choice. A sampler has the history of one text (penalties, grammar, random state): use
    one per sequence, from one thread at a time. `clone` and ``copy.copy`` return an independent
    sampler with the same history. Tokens are chosen in compiled code, so `generate` and requests
    refuse a subclass that overrides `sample`; use ``stages`` for custom code.

    Parameters
    ----------
    temperature
        0 chooses the largest logit (greedy) after ``logit_bias``, grammar, penalties, DRY and
        calls in ``stages``; other stages and ``seed`` then have no effect. At most 1e4.
    top_k
        Keep the k most likely tokens; 0 keeps all.
    top_p, min_p
        Nucleus and minimum-probability cuts in [0, 1]; 1 and 0 turn them off.
    repeat_penalty, frequency_penalty, presence_penalty, penalty_last_n
        Penalties over the last n tokens. 1, 0 and 0 turn them off; 0 tokens turn off all
        three. Within [1e-6, 1e6], [-1e6, 1e6], [-1e6, 1e6] and [0, 2^20].
    typical_p
        Locally typical sampling, in (0, 1]; 1 turns it off.
    top_n_sigma
        Keep logits that are at most this many standard deviations below the largest; 0 keeps all.
    xtc_probability, xtc_threshold
        XTC: with this probability, drop all tokens whose probability is at least the threshold,
        except the least likely of them. Both in [0, 1]; probability 0 turns it off.
    dry_multiplier, dry_base, dry_allowed_length, dry_last_n, dry_sequence_breakers
        DRY: a token that would continue a repetition of n tokens loses
        ``multiplier * base ** (n - allowed_length)``. Only the last ``dry_last_n`` tokens count,
        and repetitions end at the breakers. Multiplier 0 turns it off. Needs ``model``.
    mirostat, mirostat_tau, mirostat_eta
        Mirostat 1 or 2 chooses, after only penalties, DRY and temperature, with a surprise of tau
        bits and a learning rate of eta. 0 turns it off. Version 1 needs ``model``.
    adaptive_target, adaptive_decay
        Adaptive-p, after all stages: favours tokens whose probability is near the target in
        [0, 1]; None turns it off. Decay in [0, 0.99].
    stages
        The stages in order, each at most once: ``"penalties"``, ``"dry"``, ``"top_n_sigma"``,
        ``"top_k"``, ``"typical_p"``, ``"top_p"``, ``"min_p"``, ``"xtc"`` and ``"temperature"``.
        Also functions: ``call(ids, logits)`` gets the remaining candidates (int32 and float32,
        shape (n,)) and returns new logits, ``-inf`` to exclude tokens, or changes them in place
        and returns None. It must not call the context. Its exceptions end the call that asked for
        a token.
    seed
        Equal seeds give equal choices; in [0, 2^32 - 2]. ``None`` and -1 draw a random seed.
    logit_bias
        Numbers to add to logits, by token id: within [-1e6, 1e6], or ``-math.inf`` for tokens
        that must never be chosen.
    grammar, grammar_root
        A GBNF grammar that the text must follow, and its first rule. Needs ``model``.
    json_schema, strict
        A JSON schema that the text must follow, in place of ``grammar``: a mapping or JSON text.
        Properties come in the schema's order, required ones first; ``oneOf`` counts as ``anyOf``.
        Needs ``model``. Keywords that a grammar cannot enforce (``multipleOf``, bounds of
        non-integers, ``uniqueItems``, ...) raise a `GrammarError` that names them; with
        ``strict=False`` they are ignored.
    chat_format
        A `ChatFormat` whose grammar the text must follow, in place of ``grammar``: from the start,
        or from a tool call on. Needs ``model``.
    model
        The model for which a grammar is made.

    Raises
    ------
    ValueError, TypeError
        A value is out of range or of the wrong type.
    GrammarError
        The grammar cannot be parsed (see ``line`` and ``column``), or the schema cannot become a
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
        typical_p: float = 1.0,
        top_n_sigma: float = 0.0,
        xtc_probability: float = 0.0,
        xtc_threshold: float = 0.1,
        dry_multiplier: float = 0.0,
        dry_base: float = 1.75,
        dry_allowed_length: int = 2,
        dry_last_n: int = 1024,
        dry_sequence_breakers: Sequence[str] = DRY_BREAKERS,
        mirostat: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        adaptive_target: float | None = None,
        adaptive_decay: float = 0.9,
        stages: Sequence[str | StageCall] | None = None,
        seed: int | None = None,
        logit_bias: Mapping[int, float] | None = None,
        grammar: str | None = None,
        grammar_root: str = "root",
        json_schema: Mapping[str, Any] | str | None = None,
        strict: bool = True,
        chat_format: ChatFormat | None = None,
        model: LlamaModel | None = None,
    ) -> None:
        arguments = locals()
        native_model = _native_model(model)
        given = {"grammar": grammar, "json_schema": json_schema, "chat_format": chat_format}
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            raise ArgumentError(f"{names[0]} and {names[1]} are given: pass one of them", names[1])
        if names and model is None:
            raise ArgumentError("a grammar needs model=: it is made for one vocabulary", "model")
        for what, text in (("grammar", grammar), ("grammar_root", grammar_root)):
            if text is not None:
                check_kind(text, str, what)
        if not grammar_root.isascii() or "\0" in grammar_root:
            raise ArgumentError(
                f"grammar_root is {grammar_root!r}: names of rules are ASCII, without NUL",
                "grammar_root",
                grammar_root,
            )
        strict = as_bool(strict, "strict")
        begin = None
        if json_schema is not None:
            grammar = schema_grammar(as_schema(json_schema, "json_schema"), strict=strict)
        elif chat_format is not None:
            check_kind(chat_format, ChatFormat, "chat_format")
            grammar, triggers = chat_format.grammar, chat_format.triggers
            # The text that the grammar has already read, or its triggers.
            prefix = chat_format.generation_prompt if triggers is None else ""
            begin = prefix.encode(), [one.encode() for one in triggers or ()]
        if grammar is not None:
            check_grammar(grammar)
        self._model = model
        self._params: dict[str, Any] = {
            **{name: one.checked(name, arguments[name]) for name, one in SETTINGS.items()},
            "dry_sequence_breakers": _breakers(dry_sequence_breakers),
            "stages": _stages(stages),
            "seed": _seed(seed),
            "logit_bias": _bias(logit_bias),
            "grammar": grammar,
            "grammar_root": grammar_root,
        }
        self._native_stages = native_stages(self._params)
        for what, stage in (("dry_multiplier", "dry"), ("mirostat", "mirostat_1")):
            if model is None and any(stage == one for one, _ in self._native_stages):
                raise ArgumentError(f"{what} needs model=: it is made for one vocabulary", "model")
        self._native = lib.Sampler(self._params, self._native_stages, native_model, begin)

    @property
    def native(self) -> lib.Sampler:
        """The object of the compiled layer."""
        return self._native

    def sample(self, source: LlamaContext | npt.NDArray[np.float32], i: SupportsIndex = -1) -> int:
        """Choose a token and accept it (``llama_sampler_apply``, ``llama_sampler_accept``).

        Parameters
        ----------
        source
            A context, to use the logits of token i of its last decode; or logits: float32, shape
            (n_vocab,), finite or ``-inf``, which are not changed.
        i
            Index as in `LlamaContext.logits`; only for a context.

        Raises
        ------
        IndexError
            Token i has no valid logits, or ``logit_bias`` names a token that does not exist.
        DecodeError
            The context's logits contain NaN or infinity, or all tokens are excluded.
        ValueError, TypeError
            The array does not contain valid logits, or the grammar is for another model.
        """
        return self._native.sample(*_logits(source, i))

    def logprobs(
        self, source: LlamaContext | npt.NDArray[np.float32], i: SupportsIndex = -1
    ) -> FloatArray:
        """Return, for each token, the log-probability that the next `sample` chooses it.

        Includes bias, grammar, penalties, cuts and temperature: excluded tokens have ``-inf``; at
        temperature 0 the single choice has 0. Does not change the sampler. For the model's own
        log-probabilities use ``Sampler(temperature=1, top_k=0, top_p=1, min_p=0)``.

        Parameters
        ----------
        source, i
            As in `sample`, including errors.

        Returns
        -------
        ndarray of float32, shape (n_vocab,)
        """
        return self._native.logprobs(*_logits(source, i))

    def accept(
        self, token: SupportsIndex, model: LlamaModel | None = None, *, grammar: bool = False
    ) -> None:
        """Accept a token that `sample` did not choose (``llama_sampler_accept``); all or nothing.

        Parameters
        ----------
        token
            Token id, counted by the penalties.
        model
            The token's model. Default: that of the grammar, or of the last logits.
        grammar
            Whether it belongs to the text that must follow the grammar (a prompt does not).

        Raises
        ------
        IndexError
            The token is not one of the model's.
        ValueError
            The grammar does not allow the token here.
        """
        native_model = _native_model(model)
        self._native.accept(token, native_model, as_bool(grammar, "grammar"))

    def reset(self) -> None:
        """Forget the history; restart the grammar and the random state."""
        self._native.reset()

    def clone(self, *, seed: int | None = None) -> Sampler:
        """Return an independent sampler with this history (``llama_sampler_clone``).

        Penalties, grammar and random state are copied, so both choose the same tokens from the
        same logits.

        Parameters
        ----------
        seed
            Restart the random state with this seed, in [0, 2^32 - 2]; -1 draws one.
        """
        clone = object.__new__(type(self))
        clone.__dict__.update(self.__dict__)
        if seed is not None:
            clone._params = dict(self._params, seed=_seed(seed))
        clone._native = self._native.clone(clone._params, self._native_stages, seed is not None)
        return clone

    def with_format(self, chat_format: ChatFormat, model: LlamaModel) -> Sampler:
        """Return a new sampler with these settings and a chat format."""
        settings = {name: self._params[name] for name in self._params if "grammar" not in name}
        settings["seed"] = self.seed
        return Sampler(**settings, chat_format=chat_format, model=model)

    @property
    def stages(self) -> tuple[str | StageCall, ...] | None:
        """The given stages; None for the default ones."""
        stages: tuple[str | StageCall, ...] | None = self._params["stages"]
        return stages

    @property
    def seed(self) -> int | None:
        """The seed; None if a random one was drawn."""
        seed: int = self._params["seed"]
        return None if seed == RANDOM_SEED else seed

    def __copy__(self) -> Sampler:
        return self.clone()

    def __deepcopy__(self, memo: dict[int, object]) -> Sampler:
        # The model is shared: it cannot be copied, and the grammar depends on it.
        return self.clone()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Sampler cannot be pickled: its random and grammar state are llama.cpp's. Make it "
            "again from its settings, or copy it with clone()"
        )

    def __repr__(self) -> str:
        bias, grammar = self._params["logit_bias"] or None, self._params["grammar"]
        shown = {**self._params, "seed": self.seed, "model": self._model}
        texts = {"logit_bias": reprlib.repr(bias), "grammar": _SHORT.repr(grammar)}
        settings = (
            f"{name}={texts.get(name) or repr(value)}"
            for name, value in shown.items()
            if name not in _QUIET or value != _QUIET[name]
        )
        return f"Sampler({', '.join(settings)})"


#: Settings that are shown only if they differ from these.
_QUIET: dict[str, object] = {
    **{name: one.default for name, one in SETTINGS.items() if not one.is_shown},
    "dry_sequence_breakers": DRY_BREAKERS,
    "stages": None,
}
_SHORT = reprlib.Repr()
_SHORT.maxstring = 60


# Methods that compiled code replaces or relies on.
_COMPILED = ("native", "sample", "accept", "logprobs", "reset", "clone", "seed")


def check_sampler(sampler: object, model: LlamaModel) -> Sampler:
    """Return a sampler that can generate with a model, greedy for None; raise for others."""
    if sampler is None:
        sampler = Sampler(temperature=0)
    kind = type(sampler)
    if not issubclass(kind, Sampler):  # isinstance() trusts a proxy's __class__
        raise TypeError(f"sampler must be a Sampler, not {kind.__name__}")
    own = vars(sampler)
    for name in _COMPILED:
        if getattr(kind, name) is not getattr(Sampler, name) or name in own:
            raise TypeError(
                f"{kind.__name__} replaces {name}: generate() and requests choose tokens in "
                "compiled code, which would ignore it. To choose tokens yourself, use "
                "sequence.logits() and sequence.append([token])"
            )
    if "_native" not in own:
        raise TypeError(f"{kind.__name__}.__init__ does not call Sampler.__init__")
    checked = cast(Sampler, sampler)
    checked.native.check(model.native)
    return checked


def native_stages(params: Mapping[str, Any]) -> list[NativeStage]:
    """Return the stages that have an effect, in order; the last one chooses."""
    is_greedy, mirostat = params["temperature"] == 0, params["mirostat"]
    found: list[NativeStage] = []
    for one in STAGES if params["stages"] is None else params["stages"]:
        if callable(one):
            found.append((one, ()))
            continue
        stage = STAGES[one]
        if is_greedy:
            is_wanted = stage.if_greedy
        else:
            is_wanted = stage.if_mirostat or not mirostat or params["stages"] is not None
        if is_wanted and stage.is_on(params):
            if stage.counts_excluded:
                found.append(_POSSIBLE)
            found.append((one, stage.settings))
    if is_greedy:
        return [*found, _GREEDY]
    if mirostat:
        found.append(_POSSIBLE)
    elif params["adaptive_target"] is not None:
        found.append(_ADAPTIVE)
    return [*found, _CHOICES[mirostat]]


def _stages(given: Sequence[str | StageCall] | None) -> tuple[str | StageCall, ...] | None:
    if given is None:
        return None
    if isinstance(given, str):
        raise TypeError("stages must be a list of names and calls, not a str")
    found = tuple(as_list(given, "stages", "names and calls"))
    for i, one in enumerate(found):
        if callable(one):
            continue
        if not isinstance(one, str):
            raise TypeError(f"a stage must be a name or a call, not {type(one).__name__}")
        if one not in STAGES:
            raise ArgumentError(
                f"{one!r} is not a stage: use {', '.join(STAGES)} or calls", "stages", one
            )
        if one in found[:i]:
            raise ArgumentError(f"stages names {one!r} twice", "stages", one)
    return found


def _breakers(given: Sequence[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise TypeError("dry_sequence_breakers must be a list of strings, not a str")
    found = tuple(as_list(given, "dry_sequence_breakers", "texts"))
    for one in found:
        if not isinstance(one, str):
            kind = type(one).__name__
            raise TypeError(f"dry_sequence_breakers must hold only strings, not {kind}")
        if not one or "\0" in one or len(one.encode("utf-8", "surrogatepass")) > 40:
            raise ArgumentError(
                "each of dry_sequence_breakers must have 1 to 40 bytes, without NUL",
                "dry_sequence_breakers",
                one,
            )
    return found


def _seed(seed: int | None) -> int:
    if seed is None:
        return RANDOM_SEED
    found = as_int(seed, "seed", -1, 2**32 - 2)
    return RANDOM_SEED if found == -1 else found


def _native_model(model: object) -> lib.Model | None:
    if model is None:
        return None
    native = getattr(model, "native", None)
    if not isinstance(native, lib.Model):
        raise TypeError(f"model must be a LlamaModel, not {type(model).__name__}")
    return native


def _logits(
    source: LlamaContext | npt.NDArray[np.float32], i: SupportsIndex
) -> tuple[lib.Context | None, FloatArray]:
    """Return a context and its logits, or None and a checked array."""
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
    as_int(i, "i (with an array, leave it out)", -1, -1)
    # A copy, because another thread may change the array during the call.
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
