"""Stage: the model, the texts and the measurements that the acts of the demo share."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pykvcache.batch import LlamaBatch
from pykvcache.context import LlamaContext, open_context
from pykvcache.demo.screen import Screen
from pykvcache.errors import InvalidBatch
from pykvcache.model import LlamaModel
from pykvcache.sampling import Sampler
from pykvcache.sequence.sequence import LlamaSequence

__all__ = [
    "ANY_MODEL",
    "STORY_MODEL",
    "Meter",
    "Row",
    "Script",
    "Stage",
    "apart",
    "measured",
    "open_exact",
]

Logits = npt.NDArray[np.float32]

RIGHT = 1e-3
"""Logits that differ by less are equal on any model: batches of other sizes round differently."""

COARSE = 0.05
"""Rounding that moves logits further than this is that of quantized weights."""

ELSEWHERE = (64, 100, 300)
"""Other positions at which `Stage.calibrate` evaluates the same tokens."""


@dataclass(frozen=True)
class Script:
    """The texts for one kind of model."""

    #: The beginning of the story, with the facts that the questions ask for.
    prompt: str
    #: Each ends where the model's answer begins.
    questions: tuple[str, str, str]
    #: Continues the story when the model has ended it.
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


@dataclass
class Meter:
    """Tokens that were evaluated, and seconds."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def time(self) -> str:
        """The seconds with their unit."""
        ms = self.seconds * 1e3
        return (
            f"{ms:.1f} ms" if ms < 100 else f"{ms:.0f} ms" if ms < 10_000 else f"{ms / 1e3:.1f} s"
        )


@contextmanager
def measured(ctx: LlamaContext, meter: Meter | None = None) -> Iterator[Meter]:
    """Add what a context evaluates in the block to a meter."""
    meter = meter or Meter()
    tokens, start = ctx.tokens_evaluated, time.perf_counter()
    yield meter
    meter.seconds += time.perf_counter() - start
    meter.tokens += ctx.tokens_evaluated - tokens


@dataclass
class Row:
    """An operation in the table at the end; without differences, one that was refused."""

    operation: str
    meter: Meter = field(default_factory=Meter)
    tokens_anew: int = 0
    differences: Sequence[float] = ()
    mark: str = ""
    """Refers to a note under the table."""


def open_exact(
    model: LlamaModel, n_ctx: int, n_seq_max: int, n_threads: int | None
) -> LlamaContext:
    """Open a context whose logits depend as little as possible on the batches of the tokens.

    K and V are float32; flash attention would round them to float16.
    """
    options = {"type_k": "f32", "type_v": "f32", "flash_attn": "disabled", "n_threads": n_threads}
    return open_context(model, n_ctx=n_ctx, n_seq_max=n_seq_max, **options)


@dataclass
class Stage:
    """State that the acts share; each adds rows and notes to the summary."""

    model: LlamaModel
    script: Script
    screen: Screen
    seed: int
    n_ctx: int
    n_threads: int | None
    n_story: int
    n_fork: int
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    noise: float = 0.0
    """How far rounding alone moves the logits of this model."""

    def context(self, n_ctx: int, n_seq_max: int = 1) -> LlamaContext:
        """Open a context."""
        return open_exact(self.model, n_ctx, n_seq_max, self.n_threads)

    # Texts ----------------------------------------------------------------------------------

    def tokens(self, text: str, *, first: bool = False) -> list[int]:
        """Tokenize; cut so that the prompt alone does not fill a small cache."""
        words: list[int] = self.model.tokenize(text, add_special=first).tolist()
        return words[: self.n_ctx // 4]

    @property
    def prompt(self) -> list[int]:
        """The tokens of the prompt."""
        return self.tokens(self.script.prompt, first=True)

    def text(self, tokens: Iterable[int]) -> str:
        """Detokenize, without control characters and the rest of a character cut in two."""
        text = self.model.detokenize(list(tokens)).rstrip("\ufffd")
        return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)

    def sampler(self, temperature: float, repeat_penalty: float = 1) -> Sampler:
        """Return a sampler with the demo's seed."""
        return Sampler(temperature=temperature, repeat_penalty=repeat_penalty, seed=self.seed)

    def show_answer(self, question: list[int], answer: list[int], label: str = "") -> None:
        """Show a question, and the first sentence of its answer."""
        line = self.text(answer).strip("\n").split("\n")[0]
        for end in ('."', "."):
            if end in line:
                line = line[: line.index(end) + len(end)]
                break
        self.screen.given(label, " ".join(self.text(question).split()), line)

    def one_by_one(
        self, prompt: list[int], samplers: Sequence[Sampler], texts: Sequence[str]
    ) -> tuple[Meter, str]:
        """Generate texts one after the other, each from an empty cache; compare with `texts`."""
        with self.context(len(prompt) + self.n_fork + 1) as ctx, measured(ctx) as meter:
            n_equal = 0
            for sampler, text in zip(samplers, texts, strict=True):
                with LlamaSequence(ctx, prompt) as one:
                    new = list(one.generate(self.n_fork, sampler))
                n_equal += self.text(new) == text
        if n_equal == len(texts):
            return meter, f"all {n_equal} texts match those of fresh runs, word for word"
        return meter, (
            f"{n_equal} of {len(texts)} texts match those of fresh runs, word for word. Batches of "
            f"other sizes round differently, by about {self.noise:.1g} per logit: where two words "
            "are about equally likely, that decides"
        )

    # Checks ---------------------------------------------------------------------------------

    def add(
        self,
        operation: str,
        meter: Meter,
        held: Sequence[tuple[LlamaSequence, list[int]]],
        anew: int | None = None,
    ) -> None:
        """Add a row: compare sequences with fresh runs over the tokens that they should hold."""
        differences = [self.difference(one.logits(), tokens) for one, tokens in held]
        self.rows.append(Row(operation, meter, anew or len(held[0][1]), differences))

    def difference(self, logits: Logits, tokens: list[int]) -> float:
        """Return how far logits are from those of a fresh run over the tokens, in one call."""
        with self.context(len(tokens)) as ctx:
            ctx.decode(tokens)
            return apart(logits, ctx.logits())

    def calibrate(self, tokens: list[int]) -> None:
        """Measure how far rounding alone moves the logits of this model.

        The same tokens are evaluated at several positions. Attention depends on distances, so
        only rounding changes the logits. Quantized weights amplify it, because activations are
        quantized too, and one last bit may change a step.
        """
        here = self._logits_at(tokens, 0)
        try:
            self.noise = max(apart(here, self._logits_at(tokens, start)) for start in ELSEWHERE)
        except InvalidBatch:  # this memory's positions index the cells, and begin at 0
            self.noise = 0.0

    @property
    def is_coarse(self) -> bool:
        """Whether rounding alone moves the logits far enough to change words."""
        return self.noise > COARSE

    @property
    def tolerance(self) -> float:
        """Largest difference at which logits count as equal."""
        return max(RIGHT, self.noise * self.factor)

    @property
    def factor(self) -> int:
        """How many times the measured rounding is allowed."""
        return 2 if self.is_coarse else 5

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
