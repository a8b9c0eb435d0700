"""A tour of the cache: forked, rewound, shifted and shared, each result checked."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

import click
import numpy as np
import numpy.typing as npt

from pykvcache.batch import LlamaBatch
from pykvcache.context import LlamaContext, open_context
from pykvcache.errors import InvalidBatch, NoKvCacheSlot, UnsupportedOperation
from pykvcache.generate import BatchGenerator
from pykvcache.model import LlamaModel
from pykvcache.prefix.cache import PrefixCache
from pykvcache.sampling import Sampler
from pykvcache.sequence.sequence import LlamaSequence

__all__ = ["run"]

Logits = npt.NDArray[np.float32]


def run(
    model_path: str,
    *,
    seed: int = 1,
    n_ctx: int = 1024,
    n_threads: int | None = None,
    quick: bool = False,
    plain: bool = False,
) -> bool:
    """Fork, rewind, shift and share a model's cache; compare each result with a fresh run.

    The options are those of ``pykvcache demo``. Return whether every comparison came out equal;
    raise ValueError for a model that does not generate text.
    """
    start = time.perf_counter()
    screen = Screen(plain=plain)
    with LlamaModel(model_path) as model:
        if model.has_encoder or not model.has_decoder:
            raise ValueError(_NO_TEXT)
        if n_threads is None and model.size < SMALL:
            n_threads = 1
        stage = Stage(model, screen, seed, n_ctx, n_threads, quick)
        with stage.context(n_ctx, n_seq_max=8) as ctx:
            if ctx.memory_kind == "none":
                raise ValueError(_NO_TEXT)
            kind = model.description.replace(" ?B", "")  # llama.cpp's word for an unknown size
            screen.line(
                f"{stage.name}: {kind}, {model.n_params / 1e6:.1f} M parameters, "
                f"{model.n_layer} layers, {ctx.memory_kind}, {ctx.n_ctx} cells"
            )
            screen.legend()
            story = LlamaSequence(ctx, stage.prompt)
            for number, (title, act) in enumerate(ACTS, 1):
                screen.heading(f"{number}  {title}")
                act(stage, story)
    return stage.sum_up(time.perf_counter() - start)


SMALL = 64 * 2**20
"""Bytes of tensors below which threads wait for each other longer than they compute."""

_NO_TEXT = "this model does not generate text by itself: the demo needs one that does"


# Texts --------------------------------------------------------------------------------------------


class Script(NamedTuple):
    """The texts for one kind of model."""

    #: The beginning of the story, with the facts that the questions ask for.
    prompt: str
    #: Each ends where the model's answer begins.
    questions: tuple[str, str, str]
    #: Continues the story when the model has ended it.
    scene: str


STORIES = "pykvcache stories"
"""Name of the model that ships with the package, which needs its own script."""

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


# Screen -------------------------------------------------------------------------------------------

WIDTH = 80
WIDEST = 100
#: Characters around the model's own words while lines are broken; replaced before printing.
START, END = "\x02", "\x03"


class Screen:
    """Writes the demo's headings, texts, figures and table, in colour on a terminal."""

    def __init__(self, *, plain: bool = False) -> None:
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
        self.width = min(shutil.get_terminal_size().columns, WIDEST) if is_terminal else WIDTH
        is_dumb = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        self.has_color = is_terminal and not plain and not is_dumb

    def heading(self, text: str) -> None:
        """Begin a part of the demo."""
        self._write("\n" + click.style(text, fg="cyan", bold=True))
        if not self.has_color:
            self._write("-" * len(text))

    def line(self, text: str) -> None:
        """Write a remark."""
        self._write(textwrap.fill(text, self.width))

    def figures(self, text: str) -> None:
        """Write figures."""
        filled = textwrap.fill(f"=> {text}", self.width, subsequent_indent="   ")
        self._write(click.style(filled, fg="yellow"))

    def legend(self) -> None:
        """Say how the model's own words are marked."""
        if self.has_color:
            own, given = click.style("green", fg="green"), click.style("dim", dim=True)
            self._write(f"Text by the model is {own}, the text that it was given is {given}.")
        else:
            self.line("Text by the model is in [brackets], after the text that it was given.")

    def given(self, label: str, given: str, written: str) -> None:
        """Write text of the model after text that it was given."""
        lead = f"{label}: " if label else ""
        text = re.sub(r"\s*\n\s*", "\n", f"{lead}{given}{START}{written.rstrip()}{END}")
        parts = text.replace(f"\n{START}\n", f"{START}\n").split("\n")
        shown = textwrap.indent("\n".join(textwrap.fill(p, self.width - 2) for p in parts), "  ")
        if self.has_color:
            n = 2 + len(lead)
            before, own = shown[n:].rstrip(END).split(START)
            styled = click.style(shown[:n], bold=True) + click.style(before, dim=True)
            self._write(styled + click.style(own, fg="green"))
        else:
            self._write(shown.replace(START, "[").replace(END, "]"))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Write a table; the columns between the first and the last are numbers."""
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]

        def line(row: Sequence[str], last: str) -> str:
            numbers = map(str.rjust, row[1:-1], widths[1:-1])
            return "  ".join([row[0].ljust(widths[0]), *numbers, last])

        self._write(click.style(line(columns, columns[-1]), bold=True))
        self._write(click.style("  ".join("-" * width for width in widths), dim=True))
        for row in rows:
            verdict = row[-1]
            color = {"yes": "green", "NO,": "red"}.get(verdict[:3], "yellow")
            self._write(line(row, click.style(verdict, fg=color, bold=color == "red" or None)))

    def _write(self, text: str) -> None:
        click.echo(text, color=self.has_color)


# Measuring and checking ---------------------------------------------------------------------------

RIGHT = 1e-3
"""Logits that differ by less are equal on any model: batches of other sizes round differently."""

COARSE = 0.05
"""Rounding that moves logits further than this is that of quantized weights."""

ELSEWHERE = (64, 100, 300)
"""Other positions at which `Stage.calibrate` evaluates the same tokens."""


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
def measured(ctx: LlamaContext) -> Iterator[Meter]:
    """Measure what a context evaluates in the block."""
    meter = Meter()
    tokens, start = ctx.tokens_evaluated, time.perf_counter()
    yield meter
    meter.seconds = time.perf_counter() - start
    meter.tokens = ctx.tokens_evaluated - tokens


def apart(a: Logits, b: Logits) -> float:
    """Return the largest difference; infinite if there is a NaN."""
    worst = float(np.abs(a - b).max())
    return worst if worst == worst else float("inf")


def open_exact(
    model: LlamaModel, n_ctx: int, n_seq_max: int, n_threads: int | None
) -> LlamaContext:
    """Open a context whose logits depend as little as possible on the batches of the tokens.

    K and V are float32; flash attention would round them to float16.
    """
    options = {"type_k": "f32", "type_v": "f32", "flash_attn": "disabled", "n_threads": n_threads}
    return open_context(model, n_ctx=n_ctx, n_seq_max=n_seq_max, **options)


@dataclass
class Row:
    """An operation in the table at the end."""

    operation: str
    meter: Meter | None = None  # None: the operation was refused
    tokens_anew: int = 0
    difference: float = 0.0
    mark: str = ""
    """Refers to a note under the table."""


class Stage:
    """What the acts share: the model, its texts, the screen, and the table at the end."""

    def __init__(
        self,
        model: LlamaModel,
        screen: Screen,
        seed: int,
        n_ctx: int,
        n_threads: int | None,
        quick: bool,
    ) -> None:
        self.model, self.screen, self.seed = model, screen, seed
        self.n_ctx, self.n_threads = n_ctx, n_threads
        self.n_story, self.n_fork = (n_ctx // 16, 8) if quick else (n_ctx // 8, 24)
        self.name = model.metadata.get("general.name") or os.path.basename(model.path)
        self.script = STORY_MODEL if self.name == STORIES else ANY_MODEL
        self.prompt = self.tokens(self.script.prompt, first=True)
        self.rows: list[Row] = []
        self.notes: list[str] = []
        #: How far rounding alone moves the logits of this model.
        self.noise = 0.0

    def context(self, n_ctx: int, n_seq_max: int = 1) -> LlamaContext:
        """Open a context."""
        return open_exact(self.model, n_ctx, n_seq_max, self.n_threads)

    def sampler(self, temperature: float, repeat_penalty: float = 1) -> Sampler:
        """Return a sampler with the demo's seed."""
        return Sampler(temperature=temperature, repeat_penalty=repeat_penalty, seed=self.seed)

    # Texts ----------------------------------------------------------------------------------

    def tokens(self, text: str, *, first: bool = False) -> list[int]:
        """Tokenize; cut so that the prompt alone does not fill a small cache."""
        words: list[int] = self.model.tokenize(text, add_special=first).tolist()
        return words[: self.n_ctx // 4]

    def text(self, tokens: Iterable[int]) -> str:
        """Detokenize, without control characters and the rest of a character cut in two."""
        text = self.model.detokenize(list(tokens)).rstrip("\ufffd")
        return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)

    def show_answer(self, question: list[int], answer: list[int], label: str = "") -> None:
        """Show a question, and the first sentence of its answer."""
        line = self.text(answer).strip("\n").split("\n")[0]
        if sentence := re.match(r'.*?\."', line) or re.match(r".*?\.", line):
            line = sentence[0]
        self.screen.given(label, " ".join(self.text(question).split()), line)

    # Checks ---------------------------------------------------------------------------------

    def add(
        self,
        operation: str,
        meter: Meter,
        found: Sequence[tuple[Logits, list[int]]],
        anew: int | None = None,
    ) -> Row:
        """Add a row: compare logits with those of fresh runs over their tokens, in one call each.

        A fresh run evaluates ``anew`` tokens; by default the first of these lists.
        """
        difference = max(apart(logits, self._logits_at(tokens, 0)) for logits, tokens in found)
        self.rows.append(Row(operation, meter, anew or len(found[0][1]), difference))
        return self.rows[-1]

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

    def calibrate(self, tokens: list[int]) -> None:
        """Measure how far rounding alone moves the logits of this model.

        The same tokens are evaluated at several positions. Attention depends on distances, so
        only rounding changes the logits. Quantized weights amplify it, because activations are
        quantized too, and one last bit may change a step.
        """
        here = self._logits_at(tokens, 0)
        with suppress(InvalidBatch):  # this memory's positions index the cells, and begin at 0
            self.noise = max(apart(here, self._logits_at(tokens, start)) for start in ELSEWHERE)

    def _logits_at(self, tokens: list[int], start: int) -> Logits:
        n = len(tokens)
        positions = np.arange(start, start + n, dtype=np.int32)
        wanted = np.arange(n) == n - 1
        with self.context(n) as ctx:
            ctx.decode(LlamaBatch.from_arrays(tokens, positions, 0, wanted))
            return ctx.logits()

    # Summary --------------------------------------------------------------------------------

    @property
    def is_coarse(self) -> bool:
        """Whether rounding alone moves the logits far enough to change words."""
        return self.noise > COARSE

    def sum_up(self, seconds: float) -> bool:
        """Show the table of all operations; return whether every result was right."""
        factor = 2 if self.is_coarse else 5  # allowed times of the measured rounding
        tolerance = max(RIGHT, self.noise * factor)
        self.screen.heading("Summary")
        self.screen.table(
            ("operation", "tokens", "fresh run", "time", "same result?"),
            [
                (row.operation, "-", "-", "-", "refused")
                if row.meter is None
                else (
                    row.operation,
                    str(row.meter.tokens),
                    str(row.tokens_anew),
                    row.meter.time,
                    self._verdict(row.difference, tolerance) + row.mark,
                )
                for row in self.rows
            ],
        )
        for note in self.notes:
            self.screen.line(note)
        text = (
            "tokens: evaluated by the operation; fresh run: evaluated by a fresh run. yes: no "
            f"logit is further from the fresh run's than {tolerance:.2g}"
        )
        if tolerance > RIGHT:
            text += (
                f", {factor} times what rounding alone does on the weights of this model "
                f"({self.noise:.2g}, measured with the same tokens at other positions)"
            )
        text += "."
        if self.is_coarse:
            text += (
                " Quantized weights round that much. This changes words when two are about equally "
                "likely, so texts may differ between two correct runs."
            )
        self.screen.line(f"{text} All in {seconds:.1f} s.")
        return all(row.difference <= tolerance for row in self.rows)

    def _verdict(self, difference: float, tolerance: float) -> str:
        if difference > tolerance:
            return f"NO, {difference:.1g} off"
        if not difference:
            return "yes, exactly"
        if self.is_coarse:
            return f"yes, rounding {difference:.1f}"
        return f"yes, within {difference:.1g}"


# The acts -----------------------------------------------------------------------------------------

WAYS = {
    "greedy": (0.0, 1.0),
    "temperature 0.7": (0.7, 1.0),
    "temperature 1.5": (1.5, 1.0),
    "no repetition": (0.8, 1.3),
}
"""Temperature and repeat penalty of the continuations."""

ENDINGS = 3
"""How often a model may end its story before the demo takes the story as it is."""

MOVE = 64
"""Positions by which the whole sequence moves."""

N_TEXTS = 8
BLOCK = 16
ANSWER = 12
"""Tokens of an answer."""


def tell(stage: Stage, story: LlamaSequence) -> None:
    """Generate a story, which the next acts work on."""
    prompt, new = stage.prompt, list[int]()
    sampler, scene = stage.sampler(0.8), stage.tokens(stage.script.scene)
    with measured(story.context) as meter:
        for _ in range(ENDINGS):
            new += story.generate(stage.n_story - len(new), sampler)
            if len(new) >= stage.n_story:
                break
            story.append(scene)  # the model has ended the story
            new += scene
        story.evaluate()
    stage.screen.given("", stage.text(prompt), stage.text(new))
    stage.screen.figures(
        f"{meter.tokens} tokens evaluated in {meter.time}: {len(prompt)} of the prompt, "
        f"{len(new)} of the story"
    )
    stage.calibrate(prompt + new)
    stage.add("prompt and story", meter, [(story.logits(), prompt + new)])


def fork(stage: Stage, story: LlamaSequence) -> None:
    """Continue the story in several ways, then do the same without forks."""
    begun = story.tokens.tolist()
    held = list[tuple[LlamaSequence, list[int]]]()
    with measured(story.context) as meter:
        for how in WAYS.values():
            one = story.fork()
            new = list(one.generate(stage.n_fork, stage.sampler(*how)))
            one.evaluate()
            held.append((one, begun + new))
    texts = [stage.text(tokens[len(begun) :]) for _, tokens in held]
    lead = "... " + " ".join(stage.text(begun).split()[-3:])
    for name, text in zip(WAYS, texts, strict=True):
        stage.screen.given(name, lead, text.replace("\n", " "))
    samplers = [stage.sampler(*how) for how in WAYS.values()]
    anew, equal = stage.one_by_one(begun, samplers, texts)
    stage.screen.figures(
        f"the {len(begun)} tokens before the fork were evaluated once: {meter.tokens} tokens in "
        f"{meter.time}. Without forks it takes {anew.tokens} tokens and {anew.time}; {equal}"
    )
    found = [(one.logits(), tokens) for one, tokens in held]
    stage.add(f"{len(WAYS)} forks, {stage.n_fork} tokens each", meter, found, anew.tokens)
    for one, _ in held:
        one.close()


def rewind(stage: Stage, story: LlamaSequence) -> None:
    """Ask a question, take question and answer back, ask another."""
    begun = story.tokens.tolist()
    first, second = (stage.tokens(question) for question in stage.script.questions[:2])
    stage.show_answer(first, _ask(story, first))
    n = len(story) - len(begun)
    with measured(story.context) as meter:
        story.truncate(len(begun))
        answer = _ask(story, second)
        story.evaluate()
    stage.show_answer(second, answer)
    how = f"{n} tokens were removed"
    if meter.tokens > len(second) + ANSWER:
        how = f"a part of {story.context.memory_kind} memory was evaluated again to remove {n}"
    stage.screen.figures(f"{how}; {meter.tokens} evaluated in {meter.time}")
    stage.add(f"rewind {n}, ask again", meter, [(story.logits(), begun + second + answer)])


def _ask(sequence: LlamaSequence, question: list[int]) -> list[int]:
    sequence.append(question)
    return list(sequence.generate(ANSWER))


def move(stage: Stage, story: LlamaSequence) -> None:
    """Move all cells: attention depends on distances, so the logits stay."""
    tokens, more = story.tokens.tolist(), stage.tokens(stage.script.scene)[-1]
    operation = f"move all by {MOVE}, add a token"
    with stage.context(len(tokens) + 1) as ctx:
        ctx.decode(tokens)
        try:
            with measured(ctx) as meter:
                ctx.kv_cache_seq_add(0, None, None, MOVE)
                ctx.decode([more])
        except UnsupportedOperation as error:
            stage.notes.append(f"refused: {error.reason}")
            stage.screen.figures(f"refused, and nothing was changed: {error.reason}")
            stage.rows.append(Row(operation))
            return
        stage.add(operation, meter, [(ctx.logits(), [*tokens, more])])
    stage.screen.figures(
        f"{len(tokens)} tokens moved up by {MOVE} positions without being evaluated, and one was "
        f"added, in {meter.time}"
    )


def shift(stage: Stage, story: LlamaSequence) -> None:
    """Fill a small cache, drop the tokens after the prompt, close the gap, continue."""
    if story.context.memory_kind == "recurrent":
        stage.screen.line("A recurrent memory never fills: it keeps one state per sequence.")
        return
    sampler, scene = stage.sampler(0.8), stage.tokens(stage.script.scene)
    # The dropped half makes room for some scenes and a question.
    n_ctx = max(256, stage.n_ctx // 4, 2 * len(stage.prompt) + 256)
    with stage.context(n_ctx) as ctx, LlamaSequence(ctx, stage.prompt) as one:
        _continue(one, ctx.n_ctx_seq, sampler, scene)
        whole, token = one.tokens.tolist(), scene[0]
        keep = len(stage.prompt)
        end = keep + (len(whole) - keep) // 2
        one.append([token])
        with suppress(NoKvCacheSlot):
            one.evaluate()
        can_shift = True
        with measured(ctx) as meter:
            try:
                one.discard(keep, end)
            except UnsupportedOperation:
                can_shift = False
                one.discard(keep, end, reevaluate=True)
            one.evaluate()
        how = "moved the rest down" if can_shift else "evaluated the rest again"
        stage.screen.figures(
            f"NoKvCacheSlot at {len(whole)} tokens: dropped {end - keep} after the prompt and "
            f"{how} in {meter.time}; the last position is {len(one) - 1} now"
        )
        kept = [*whole[:keep], *whole[end:], token]
        row = stage.add(f"full: drop {end - keep}, shift, continue", meter, [(one.logits(), kept)])
        if can_shift:
            stage.notes.append(SHIFTED.format(row.difference))
            row.mark = " *"
            with stage.context(len(whole) + 256) as other:
                other.decode(whole[:-1])
                other.clear_kv_cache_seq(0, keep, end)
                other.kv_cache_seq_add(0, 0, keep, end - keep)
                other.decode([whole[-1], token])  # a sequence evaluates its last token again, too
                row.difference = apart(one.logits(), other.logits())
        _continue(one, len(one) + stage.n_fork, sampler, scene)
        text = stage.text(one.tokens[-stage.n_fork :].tolist())
        stage.screen.given("continued", "... ", " ".join(text.split()))
        question = stage.tokens(stage.script.questions[2])
        if len(one) + len(question) + ANSWER <= ctx.n_ctx_seq:
            stage.show_answer(question, _ask(one, question))


def _continue(one: LlamaSequence, n: int, sampler: Sampler, scene: list[int]) -> None:
    """Generate up to n tokens in all; a new scene begins if the model ends its story."""
    while len(one) < n:
        list(one.generate(n - len(one), sampler))
        one.append(scene[: n - len(one)])


SHIFTED = (
    "* compared with a fresh context that drops the same tokens but moves the prompt towards the "
    "rest, so that the distances are the same. A fresh run over the kept tokens alone is {:.2g} "
    "away, as it should be: the kept tokens were computed when the dropped ones were in view."
)


def batch(stage: Stage, story: LlamaSequence) -> None:
    """Generate eight texts from one prompt, one decode per step; then one after the other."""
    prompt, sampler = stage.prompt, stage.sampler(0.9)
    n_cells = len(prompt) + N_TEXTS * (stage.n_fork + 1)
    with stage.context(n_cells, n_seq_max=N_TEXTS) as ctx, BatchGenerator(ctx) as generator:
        with measured(ctx) as meter:
            first = LlamaSequence(ctx, prompt)
            found = generator.submit(first, stage.n_fork, sampler, n=N_TEXTS)
            generator.run(progress=False)
        texts = [stage.text(each.tokens.tolist()) for each in found]
        # Sample i has the sampler's seed plus i.
        samplers = [sampler.clone(seed=stage.seed + i) for i in range(N_TEXTS)]
        anew, equal = stage.one_by_one(prompt, samplers, texts)
        one = first.logits(), prompt + found[0].tokens.tolist()
        stage.add(f"{N_TEXTS} texts in one batch", meter, [one], anew.tokens)
    for i, text in enumerate(texts[:2], 1):
        stage.screen.given(str(i), "... ", " ".join(text.split()))
    stage.screen.figures(
        f"{N_TEXTS} texts of {stage.n_fork} tokens in {meter.time}; one after the other in "
        f"{anew.time}; {equal}"
    )


def reuse(stage: Stage, story: LlamaSequence) -> None:
    """Ask two questions over one prefix; then let another process ask a third."""
    questions = [stage.tokens(question) for question in stage.script.questions]
    n_ctx = 2 * stage.n_ctx
    with tempfile.TemporaryDirectory(prefix="pykvcache-demo-") as folder:
        with (
            stage.context(n_ctx, n_seq_max=4) as ctx,
            PrefixCache(ctx, block_size=BLOCK, tiers=[folder]) as cache,
        ):
            for question in questions[:2]:
                tokens = stage.prompt + question
                with cache.sequence(tokens) as one:
                    with measured(ctx) as meter:
                        one.evaluate()
                    report = one.reuse
                    if report.evaluated < len(tokens):
                        stage.add("a cached prefix", meter, [(one.logits(), tokens)])
                    stage.show_answer(question, list(one.generate(ANSWER)))
            stage.screen.figures(
                f"{report.evaluated} of {len(tokens)} tokens evaluated: {report.reason}"
            )
        spawn = multiprocessing.get_context("spawn")
        tokens = stage.prompt + questions[2]
        with ProcessPoolExecutor(1, spawn) as pool:
            meter, n_disk, logits, answer = pool.submit(
                ask_elsewhere, stage.model.path, n_ctx, stage.n_threads, folder, tokens
            ).result()
    stage.add("a second process", meter, [(logits, tokens)])
    stage.show_answer(questions[2], answer, "another process")
    stage.screen.figures(
        f"it evaluates {meter.tokens} of {len(tokens)} tokens: {n_disk} come from a folder "
        f"that this process wrote; first logits after {meter.time}"
    )


def ask_elsewhere(
    path: str, n_ctx: int, n_threads: int | None, folder: str, tokens: list[int]
) -> tuple[Meter, int, Logits, list[int]]:
    """Evaluate a prompt whose blocks are in a folder.

    Returns figures, the number of tokens from the folder, logits, and an answer.
    """
    with (
        LlamaModel(path) as model,
        open_exact(model, n_ctx, 4, n_threads) as ctx,
        PrefixCache(ctx, block_size=BLOCK, tiers=[folder], tier_seconds=10) as cache,
    ):
        with measured(ctx) as meter:
            sequence = cache.sequence(tokens)
            logits = sequence.logits()
        return meter, sequence.reuse.disk, logits, list(sequence.generate(ANSWER))


ACTS: tuple[tuple[str, Callable[[Stage, LlamaSequence], None]], ...] = (
    ("A story", tell),
    ("Fork: one story, four continuations", fork),
    ("Rewind: take a question back, ask another", rewind),
    (f"Move: all positions change by {MOVE}, the logits stay the same", move),
    ("Shift: a full cache continues", shift),
    ("Batch: eight texts, one decode per step", batch),
    ("A prefix cache: only what is new is evaluated", reuse),
)
"""Titles and functions, in order: each works on the story as the acts before it left it."""
