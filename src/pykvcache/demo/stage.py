"""Stage: the model, the script and the measurements that the acts of the demo share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pykvcache.batch import LlamaBatch
from pykvcache.context import LlamaContext
from pykvcache.demo.screen import Screen
from pykvcache.errors import InvalidBatch
from pykvcache.model import LlamaModel
from pykvcache.sampling import Sampler

__all__ = ["ANY_MODEL", "STORY_MODEL", "Fresh", "Logits", "Meter", "Row", "Script", "Stage"]

Logits = npt.NDArray[np.float32]

RIGHT = 1e-3
"""Logits that differ by less are equal on any model: batches of other sizes round differently."""

COARSE = 0.05
"""Rounding that moves logits further than this is that of quantised weights."""

ELSEWHERE = (64, 100, 300)
"""Other positions at which `Fresh.calibrate` evaluates the same tokens."""


# The script ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Script:
    """The texts for one kind of model.

    Attributes
    ----------
    prompt
        The beginning of the story, with the facts that the questions ask for.
    questions
        Three questions. Each ends where the model's answer begins.
    scene
        What the story continues with when the model has ended it.
    """

    prompt: str
    questions: tuple[str, str, str]
    scene: str


_FACTS = (
    "Once upon a time there was a little village by the sea. "
    "This is the story of Lucy, Tom and Mara.\n"
    "Lucy has a red kite. Lucy lives by the river. Lucy likes plums. "
    "Tom is a baker. Tom has a dog called Biscuit. Tom lives on the hill. "
    "Mara is a sailor. Mara has a silver bell. Mara likes pancakes."
)


def _asked(question: str) -> str:
    return f'\nThe reader asks, "{question}" The story says, "'


STORY_MODEL = Script(
    prompt=_FACTS + "\n",
    questions=(
        _asked("What does Lucy like?"),
        _asked("What is Tom's dog called?"),
        _asked("What does Mara like?"),
    ),
    scene="\nThe next morning Tom walks to the mill.",
)

ANY_MODEL = Script(
    prompt=_FACTS + "\nOne morning",
    questions=(
        "\nQuestion: Where does Lucy live?\nAnswer: Lucy lives",
        "\nQuestion: What is Tom's dog called?\nAnswer: Tom's dog is called",
        "\nQuestion: What does Mara like?\nAnswer: Mara likes",
    ),
    scene="\nThe next morning",
)


# Measurements -------------------------------------------------------------------------------------


@dataclass
class Row:
    """One operation in the table at the end; without differences, one that was refused."""

    operation: str
    tokens: int = 0
    tokens_anew: int = 0
    seconds: float = 0.0
    differences: list[float] = field(default_factory=list)
    mark: str = ""
    """Refers to a line under the table."""


class Meter:
    """Counts the tokens that a context evaluates in ``with`` blocks, and the time."""

    def __init__(self, ctx: LlamaContext) -> None:
        self._ctx = ctx
        self.tokens = 0
        self.seconds = 0.0

    def __enter__(self) -> Meter:
        self._tokens = self._ctx.tokens_evaluated
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds += time.perf_counter() - self._start
        self.tokens += self._ctx.tokens_evaluated - self._tokens


class Fresh:
    """Evaluates tokens in new contexts, to compare with.

    The contexts store K and V as float32, without flash attention, which rounds them to float16.
    So the logits depend as little as possible on the batches in which the tokens come.

    Parameters
    ----------
    model
        The model.
    n_threads
        Threads per context.
    """

    def __init__(self, model: LlamaModel, n_threads: int | None) -> None:
        self._model = model
        self._n_threads = n_threads
        self.noise = 0.0
        self.tolerance = RIGHT

    def context(self, n_ctx: int, n_seq_max: int = 1) -> LlamaContext:
        """Return a new context."""
        return LlamaContext(
            self._model,
            n_ctx=n_ctx,
            n_seq_max=n_seq_max,
            n_threads=self._n_threads,
            type_k="f32",
            type_v="f32",
            flash_attn="disabled",
        )

    def difference(self, logits: Logits, tokens: list[int]) -> float:
        """Return how far logits are from those of a fresh run over the tokens, in one call."""
        with self.context(len(tokens)) as ctx:
            ctx.decode(tokens)
            return apart(logits, ctx.logits())

    def calibrate(self, tokens: list[int]) -> None:
        """Measure how far rounding alone moves the logits of this model, and allow for it.

        The same tokens are evaluated at several positions. Attention depends on distances, so
        only rounding changes the logits. Quantised weights amplify it, because activations are
        quantised too, and one last bit may change a step.
        """
        here = self._logits_at(tokens, 0)
        try:
            self.noise = max(apart(here, self._logits_at(tokens, start)) for start in ELSEWHERE)
        except InvalidBatch:  # this memory's positions index the cells, and begin at 0
            self.noise = 0.0
        self.tolerance = max(RIGHT, self.noise * self.factor)

    @property
    def factor(self) -> int:
        """How many times the measured rounding is allowed."""
        return 2 if self.is_coarse else 5

    @property
    def is_coarse(self) -> bool:
        """Whether rounding alone moves the logits far enough to change words."""
        return self.noise > COARSE

    def _logits_at(self, tokens: list[int], start: int) -> Logits:
        n = len(tokens)
        positions = np.arange(start, start + n, dtype=np.int32)
        wanted = np.arange(n) == n - 1
        with self.context(n) as ctx:
            ctx.decode(LlamaBatch.from_arrays(tokens, positions, 0, wanted))
            return ctx.logits()


def apart(a: Logits, b: Logits) -> float:
    """Return the largest difference; infinite if there is a NaN."""
    worst = float(np.abs(a - b).max())
    return worst if worst == worst else float("inf")


# The stage ----------------------------------------------------------------------------------------


@dataclass
class Stage:
    """State that the acts share; each adds rows and notes to the summary."""

    model: LlamaModel
    ctx: LlamaContext
    fresh: Fresh
    script: Script
    screen: Screen
    seed: int
    n_story: int
    n_fork: int
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    story: list[int] = field(default_factory=list)
    """Tokens of the story so far; sequence 0 holds all but the last."""

    def tokens(self, text: str, *, first: bool = False) -> list[int]:
        """Tokenize; cut so that the prompt alone does not fill a small cache."""
        words: list[int] = self.model.tokenize(text, add_special=first).tolist()
        return words[: self.ctx.n_ctx // 4]

    @property
    def prompt(self) -> list[int]:
        """The tokens of the prompt."""
        return self.tokens(self.script.prompt, first=True)

    def text(self, tokens: list[int]) -> str:
        """Detokenize, without the rest of a character that was cut in two."""
        return self.model.detokenize(tokens).rstrip("\ufffd")

    def sampler(self, temperature: float, repeat_penalty: float = 1, *, seed: int = 0) -> Sampler:
        """Return a sampler; ``seed`` is added to the demo's own."""
        return Sampler(
            temperature=temperature, repeat_penalty=repeat_penalty, seed=self.seed + seed
        )

    def show_answer(self, question: list[int], answer: list[int], label: str = "") -> None:
        """Show a question, and the first sentence of its answer."""
        line = self.text(answer).strip("\n").split("\n")[0]
        for end in ('."', "."):
            if end in line:
                line = line[: line.index(end) + len(end)]
                break
        self.screen.given(label, " ".join(self.text(question).split()), line)

    def equal_texts(self, n_equal: int, n: int) -> str:
        """Say how many texts came out word for word the same, and why not more."""
        if n_equal == n:
            return f"all {n} texts are the same word for word"
        return (
            f"{n_equal} of {n} texts are the same word for word. Batches of other sizes round "
            f"differently, by about {self.fresh.noise:.1g} per logit: where two words are about "
            "equally likely, that decides"
        )
