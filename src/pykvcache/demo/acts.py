"""The acts of the demo, in order."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pykvcache.context import LlamaContext
from pykvcache.demo.stage import Fresh, Logits, Meter, Row, Stage, apart
from pykvcache.errors import NoKvCacheSlot, UnsupportedOperation
from pykvcache.generate import BatchGenerator
from pykvcache.model import LlamaModel
from pykvcache.prefix.cache import PrefixCache
from pykvcache.sequence import LlamaSequence

__all__ = ["ACTS"]

WAYS = {
    "greedy": (0.0, 1.0),
    "temperature 0.7": (0.7, 1.0),
    "temperature 1.5": (1.5, 1.0),
    "no repetition": (0.8, 1.3),
}
"""Temperature and repeat penalty of the continuations."""

ENDINGS = 3
"""How often a model may end its story before the demo takes the story as it is."""

SPARE = 7
"""A sequence that keeps a copy for memories that cannot be rewound."""

MOVE = 64
"""Positions by which the whole sequence moves."""

N_TEXTS = 8
BLOCK = 16
ANSWER = 12
"""Tokens of an answer."""

PATIENCE = 600
"""Seconds that the second process may take to load the model and answer."""


def held(ctx: LlamaContext, seq: int, tokens: list[int]) -> list[int]:
    """Return the tokens that a sequence holds: the last one may not be decoded yet."""
    return tokens[: ctx.kv_cache_seq_pos_max(seq) + 1]


def time_of(seconds: float) -> str:
    """Return a time with its unit."""
    return f"{seconds * 1e3:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


# Story --------------------------------------------------------------------------------------------


def story(stage: Stage) -> None:
    """Generate a story, which the next acts work on."""
    prompt = stage.prompt
    with Meter(stage.ctx) as meter:
        new = _write(stage, prompt)
    stage.story = prompt + new
    stage.screen.given("", stage.text(prompt), stage.text(new))
    stage.screen.figures(
        f"{meter.tokens} tokens evaluated in {time_of(meter.seconds)}: "
        f"{len(prompt)} of the prompt, {meter.tokens - len(prompt)} of the story"
    )
    evaluated = held(stage.ctx, 0, stage.story)
    stage.fresh.calibrate(evaluated)
    difference = stage.fresh.difference(stage.ctx.logits(), evaluated)
    stage.rows.append(
        Row("prompt and story", meter.tokens, len(evaluated), meter.seconds, [difference])
    )
    if stage.story == evaluated:
        # The model has ended the story: sequence 0 must lack one token.
        stage.story = evaluated + stage.tokens(stage.script.scene)[:1]


def _write(stage: Stage, prompt: list[int]) -> list[int]:
    """Generate `Stage.n_story` tokens; where the model ends the story, a new scene begins."""
    sampler = stage.sampler(0.8)
    scene = stage.tokens(stage.script.scene)
    new: list[int] = []
    given = prompt
    for _ in range(ENDINGS):
        left = max(stage.n_story - len(new), 1)
        new += (part := list(stage.ctx.generate(given, left, sampler)))
        if len(part) == left:
            return new
        given = scene
        new += scene
    return new[: -len(scene)]


# Fork, rewind, move -------------------------------------------------------------------------------


def fork(stage: Stage) -> None:
    """Continue the story in several ways, then do the same without forks."""
    ctx, begun = stage.ctx, stage.story
    row = Row(f"{len(WAYS)} forks, {stage.n_fork} tokens each")
    meter = Meter(ctx)
    texts = []
    lead = "... " + " ".join(stage.text(begun).split()[-3:])
    for seq, (name, how) in enumerate(WAYS.items(), start=1):
        with meter:
            ctx.copy_kv_cache_seq(0, seq)
            new = list(ctx.generate(begun[-1:], stage.n_fork, stage.sampler(*how), seq))
        row.differences.append(stage.fresh.difference(ctx.logits(), held(ctx, seq, begun + new)))
        texts.append(stage.text(new))
        stage.screen.given(name, lead, texts[-1].replace("\n", " "))

    with stage.fresh.context(ctx.n_ctx) as naive:
        anew = Meter(naive)
        n_equal = 0
        for text, how in zip(texts, WAYS.values(), strict=True):
            with anew:
                naive.clear_kv_cache()
                new = list(naive.generate(begun, stage.n_fork, stage.sampler(*how)))
            n_equal += stage.text(new) == text
    row.tokens, row.seconds, row.tokens_anew = meter.tokens, meter.seconds, anew.tokens
    stage.rows.append(row)
    stage.screen.figures(
        f"the {len(begun) - 1} tokens before the fork were evaluated once: {meter.tokens} tokens "
        f"in {time_of(meter.seconds)}. Without forks it takes {anew.tokens} tokens and "
        f"{time_of(anew.seconds)}; {stage.equal_texts(n_equal, len(WAYS))}"
    )
    for seq in range(1, len(WAYS) + 1):
        ctx.clear_kv_cache_seq(seq)


def rewind(stage: Stage) -> None:
    """Ask a question, take question and answer back, ask another."""
    ctx, start = stage.ctx, len(stage.story) - 1
    ctx.copy_kv_cache_seq(0, SPARE)
    first, second = (stage.tokens(question) for question in stage.script.questions[:2])
    stage.show_answer(first, list(ctx.generate(stage.story[-1:] + first, ANSWER)))
    n_rewound = ctx.kv_cache_seq_pos_max(0) + 1 - start
    with Meter(ctx) as meter:
        can_rewind = ctx.clear_kv_cache_seq(0, start)
        if not can_rewind:
            ctx.copy_kv_cache_seq(SPARE, 0)
        answer = list(ctx.generate(stage.story[-1:] + second, ANSWER))
    evaluated = held(ctx, 0, stage.story + second + answer)
    difference = stage.fresh.difference(ctx.logits(), evaluated)
    stage.show_answer(second, answer)
    if can_rewind:
        how, name = f"{n_rewound} tokens were removed", f"rewind {n_rewound}, ask again"
    else:
        how = (
            f"{ctx.memory_kind} memory cannot be rewound: a copy made before took the place "
            "of the sequence"
        )
        name = "return to a copy, ask again"
    stage.screen.figures(f"{how}; {meter.tokens} evaluated in {time_of(meter.seconds)}")
    stage.rows.append(Row(name, meter.tokens, len(evaluated), meter.seconds, [difference]))
    stage.story = evaluated
    ctx.kv_cache_seq_keep(0)


def move(stage: Stage) -> None:
    """Move a whole sequence: attention depends on distances, so the logits stay."""
    ctx, n = stage.ctx, len(stage.story)
    row = Row(f"move all by {MOVE}, add a token")
    stage.rows.append(row)
    token = stage.tokens(stage.script.scene)[-1]
    try:
        with Meter(ctx) as meter:
            ctx.kv_cache_seq_add(0, None, None, MOVE)
            ctx.decode([token])
    except UnsupportedOperation as error:
        stage.notes.append(f"refused: {error.reason}")
        stage.screen.figures(f"refused, and nothing was changed: {error.reason}")
        return
    row.tokens, row.seconds, row.tokens_anew = meter.tokens, meter.seconds, n + 1
    row.differences.append(stage.fresh.difference(ctx.logits(), [*stage.story, token]))
    stage.screen.figures(
        f"{n} tokens moved up by {MOVE} positions without being evaluated, and one was added, in "
        f"{time_of(meter.seconds)}"
    )


# Shift --------------------------------------------------------------------------------------------


def shift(stage: Stage) -> None:
    """Fill a small cache, drop the tokens after the prompt, close the gap, continue."""
    if stage.ctx.memory_kind == "recurrent":
        stage.screen.line("A recurrent memory never fills: it keeps one state per sequence.")
        return
    # The dropped half makes room for some scenes and a question.
    least = 2 * len(stage.prompt) + 256
    with stage.fresh.context(max(256, stage.ctx.n_ctx // 4, least)) as ctx:
        full = _FullCache(stage, ctx)
        token = full.fill()
        if full.close_gap(token):
            full.go_on(token)


class _FullCache:
    """A small cache that gets full: its first ``keep`` tokens stay, the next ``drop`` go."""

    def __init__(self, stage: Stage, ctx: LlamaContext) -> None:
        self.stage, self.ctx = stage, ctx
        self.keep = len(stage.prompt)
        self.drop = (ctx.n_ctx - self.keep) // 2
        self.sampler = stage.sampler(0.8)
        self.tokens: list[int] = []
        self.feed(stage.prompt)

    def feed(self, tokens: list[int]) -> None:
        self.ctx.decode(tokens)
        self.tokens += tokens

    def next(self) -> list[int]:
        """Sample a token, or begin a new scene where the model ends its story."""
        token = self.sampler.sample(self.ctx)
        is_end = self.stage.model.is_eog(token)
        return self.stage.tokens(self.stage.script.scene) if is_end else [token]

    def fill(self) -> int:
        """Generate until the cache is full; return the token that found no cell."""
        while True:
            for token in self.next():
                try:
                    self.feed([token])
                except NoKvCacheSlot:
                    return token

    def close_gap(self, token: int) -> bool:
        """Drop the middle, move the rest down, decode the token that found no cell."""
        stage, ctx, keep, end = self.stage, self.ctx, self.keep, self.keep + self.drop
        row = Row(f"full: drop {self.drop}, shift, continue", mark=" *")
        stage.rows.append(row)
        before, last = self.tokens, ctx.kv_cache_seq_pos_max(0)
        with Meter(ctx) as meter:
            is_dropped = ctx.kv_cache_can_shift() and ctx.clear_kv_cache_seq(0, keep, end)
            if is_dropped:
                ctx.kv_cache_seq_add(0, end, None, -self.drop)
                ctx.decode([token])
        if not is_dropped:
            stage.screen.line(
                f"The cache is full at {last + 1} tokens. {ctx.memory_kind.capitalize()} memory of "
                "this model cannot drop a part of a sequence and close the gap: nothing was "
                "changed."
            )
            return False
        logits = ctx.logits()
        self.tokens = before[:keep] + before[end:] + [token]
        row.tokens, row.seconds, row.tokens_anew = meter.tokens, meter.seconds, len(self.tokens)
        stage.screen.figures(
            f"NoKvCacheSlot at {last + 1} tokens: dropped {self.drop} after the prompt and moved "
            f"the rest down in {time_of(meter.seconds)}; the last position moved from {last} to "
            f"{ctx.kv_cache_seq_pos_max(0)}"
        )
        self._compare(row, before, token, logits)
        return True

    def _compare(self, row: Row, before: list[int], token: int, logits: Logits) -> None:
        """Compare with a fresh context that closes the same gap from the other side."""
        stage, keep, end = self.stage, self.keep, self.keep + self.drop
        with stage.fresh.context(self.ctx.n_ctx + 256) as other:
            other.decode(before)
            other.clear_kv_cache_seq(0, keep, end)
            other.kv_cache_seq_add(0, 0, keep, self.drop)
            other.decode([token])
            row.differences.append(apart(logits, other.logits()))
        alone = stage.fresh.difference(logits, self.tokens)
        stage.notes.append(
            "* compared with a fresh context that drops the same tokens and moves the prompt up "
            "instead of the rest down: the distances are the same. A fresh run over the kept "
            f"tokens alone is {alone:.2g} away, as it should be: the kept tokens were computed "
            "when the dropped ones were in view."
        )

    def go_on(self, token: int) -> None:
        """Continue the story; then ask for a fact of the prompt, which was kept."""
        stage, new = self.stage, [token]
        for _ in range(stage.n_fork):
            more = self.next()
            self.feed(more)
            new += more
        stage.screen.given("continued", "", "... " + " ".join(stage.text(new).split()))
        question = stage.tokens(stage.script.questions[2])
        if self.ctx.n_ctx - len(self.tokens) > len(question) + ANSWER:
            stage.show_answer(question, list(self.ctx.generate(question, ANSWER)))


# Batch --------------------------------------------------------------------------------------------


def batch(stage: Stage) -> None:
    """Generate eight texts from one prompt, one decode per step; then one after the other."""
    prompt = stage.prompt
    samplers = [stage.sampler(0.9, seed=i) for i in range(N_TEXTS)]
    n_cells = len(prompt) + N_TEXTS * (stage.n_fork + 1)
    with stage.fresh.context(n_cells, n_seq_max=N_TEXTS + 1) as ctx:
        with Meter(ctx) as meter:
            first = LlamaSequence(ctx, prompt)
            first.evaluate()
            forks = [first.fork() for _ in range(N_TEXTS)]
            generator = BatchGenerator(ctx)
            for one, sampler in zip(forks, samplers, strict=True):
                generator.submit(one, stage.n_fork, sampler.clone())
            generator.run()
        row = Row(f"{N_TEXTS} texts in one batch", meter.tokens, 0, meter.seconds)
        for one in forks[:2]:
            difference = stage.fresh.difference(one.logits(), one.tokens.tolist())
            row.differences.append(difference)
        texts = [stage.text(one.tokens[len(prompt) :].tolist()) for one in forks]
    with stage.fresh.context(n_cells) as ctx, Meter(ctx) as alone:
        n_equal = 0
        for sampler, text in zip(samplers, texts, strict=True):
            with LlamaSequence(ctx, prompt) as sequence:
                new = list(sequence.generate(stage.n_fork, sampler))
            n_equal += stage.text(new) == text
    row.tokens_anew = alone.tokens
    stage.rows.append(row)
    for i in range(2):
        stage.screen.given(str(i + 1), "... ", " ".join(texts[i].split()))
    stage.screen.figures(
        f"{N_TEXTS} texts of {stage.n_fork} tokens in {time_of(meter.seconds)}; one after the "
        f"other in {time_of(alone.seconds)}; {stage.equal_texts(n_equal, N_TEXTS)}"
    )


# Prefix cache -------------------------------------------------------------------------------------


def reuse(stage: Stage) -> None:
    """Ask two questions over one prefix; then let another process ask a third."""
    questions = [stage.tokens(question) for question in stage.script.questions]
    prompts = [stage.prompt + question for question in questions]
    with tempfile.TemporaryDirectory(prefix="pykvcache-demo-") as folder:
        with (
            stage.fresh.context(2 * stage.ctx.n_ctx, n_seq_max=4) as ctx,
            PrefixCache(ctx, block_size=BLOCK, tiers=[folder]) as cache,
        ):
            for question, tokens in zip(questions[:2], prompts[:2], strict=True):
                with Meter(ctx) as meter, cache.sequence(tokens) as sequence:
                    logits = sequence.logits()
                    answer = list(sequence.generate(ANSWER))
                stage.show_answer(question, answer)
                n = sequence.reuse.evaluated
                if n < len(tokens):
                    difference = stage.fresh.difference(logits, tokens)
                    stage.rows.append(
                        Row("a known prefix", n, len(tokens), meter.seconds, [difference])
                    )
                    stage.screen.figures(
                        f"{n} of {len(tokens)} tokens evaluated: {sequence.reuse.reason}"
                    )
        task = {
            "model": stage.model.path,
            "n_ctx": 2 * stage.ctx.n_ctx,
            "n_threads": stage.ctx.n_threads,
            "tokens": prompts[2],
            "folder": folder,
        }
        found, logits = _in_another_process(task)
    difference = stage.fresh.difference(logits, prompts[2])
    evaluated, seconds = found["evaluated"], found["seconds"]
    stage.rows.append(Row("a second process", evaluated, len(prompts[2]), seconds, [difference]))
    stage.show_answer(questions[2], found["answer"], "another process")
    stage.screen.figures(
        f"it evaluates {evaluated} of {len(prompts[2])} tokens: {found['disk']} come from a folder "
        f"that this process wrote; first logits after {time_of(seconds)}"
    )


def _in_another_process(task: dict[str, Any]) -> tuple[dict[str, Any], Logits]:
    """Return the figures and logits of a new process that finds the blocks in the folder."""
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import second_process; second_process()"],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the second process failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout), np.load(Path(task["folder"]) / "logits.npy")


def second_process() -> None:
    """Read a task from stdin, write figures to stdout."""
    task = json.load(sys.stdin)
    with (
        LlamaModel(task["model"]) as model,
        Fresh(model, task["n_threads"]).context(task["n_ctx"], n_seq_max=4) as ctx,
        PrefixCache(ctx, block_size=BLOCK, tiers=[task["folder"]], tier_seconds=10) as cache,
    ):
        start = time.perf_counter()
        sequence = cache.sequence(task["tokens"])
        logits = sequence.logits()
        seconds = time.perf_counter() - start
        np.save(Path(task["folder"]) / "logits.npy", logits)
        found = {
            "evaluated": ctx.tokens_evaluated,
            "disk": sequence.reuse.disk,
            "seconds": seconds,
            "answer": list(sequence.generate(ANSWER)),
        }
    print(json.dumps(found))


ACTS: tuple[tuple[str, Callable[[Stage], None]], ...] = (
    ("A story", story),
    ("Fork: one story, four continuations", fork),
    ("Rewind: take a question back, ask another", rewind),
    (f"Move: all positions change by {MOVE}, the logits stay", move),
    ("Shift: a full cache continues", shift),
    ("Batch: eight texts, one decode per step", batch),
    ("A prefix cache: only what is new is evaluated", reuse),
)
"""Titles and functions, in order: each works on what the acts before it left."""
