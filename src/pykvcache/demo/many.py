"""The upper half of the demo: many texts at once, known prefixes, a second process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from pykvcache.context import LlamaContext
from pykvcache.demo.acts import Stage, answer_of, one_line, time_of
from pykvcache.demo.measure import Meter, Row
from pykvcache.generate import BatchGenerator
from pykvcache.prefix.cache import PrefixCache
from pykvcache.sampling import Sampler
from pykvcache.sequence import LlamaSequence

__all__ = ["batch", "reuse"]

N_TEXTS = 8
BLOCK = 16
#: How long a second process may take to load the model and answer.
PATIENCE = 600


def batch(stage: Stage) -> None:
    """Generate eight texts from one prompt, one decode per step; then one after the other."""
    stage.screen.heading("5  Batch: eight texts, one decode per step")
    prompt = stage.tokens(stage.script.prompt, first=True)
    samplers = [Sampler(temperature=0.9, seed=stage.seed + i) for i in range(N_TEXTS)]
    n_cells = len(prompt) + N_TEXTS * (stage.n_fork + 1)
    with stage.fresh.context(n_cells, n_seq_max=N_TEXTS + 1) as ctx:
        with Meter(ctx) as meter:
            first = LlamaSequence(ctx, prompt)
            first.evaluate()
            texts = [first.fork() for _ in range(N_TEXTS)]
            generator = BatchGenerator(ctx)
            for text, sampler in zip(texts, samplers, strict=True):
                generator.submit(text, stage.n_fork, sampler.clone())
            generator.run()
        row = Row(f"{N_TEXTS} texts in one batch", meter.tokens, 0, meter.seconds)
        for text in texts[:2]:
            tokens = text.tokens.tolist()
            row.differences.append(stage.fresh.difference(text.logits(), tokens))
        shown = [stage.text(text.tokens[len(prompt) :].tolist()) for text in texts]
    with stage.fresh.context(n_cells) as ctx, Meter(ctx) as alone:
        same = 0
        for sampler, expected in zip(samplers, shown, strict=True):
            with LlamaSequence(ctx, prompt) as text:
                new = list(text.generate(stage.n_fork, sampler))
            same += stage.text(new) == expected
    row.tokens_anew = alone.tokens
    stage.rows.append(row)
    for number in range(2):
        stage.screen.given(str(number + 1), "... ", one_line(shown[number]))
    stage.screen.figures(
        f"{N_TEXTS} texts of {stage.n_fork} tokens in {time_of(meter.seconds)}; one after the "
        f"other {time_of(alone.seconds)}, and {same} of {N_TEXTS} are the same"
    )


def reuse(stage: Stage) -> None:
    """Ask two questions over one prefix; then let another process ask one."""
    stage.screen.heading("6  A prefix cache: what is new, and nothing else")
    prefix = stage.tokens(stage.script.prompt, first=True)
    questions = [
        stage.tokens(q) for q in (*stage.script.questions, stage.script.question_after_shift)
    ]
    with tempfile.TemporaryDirectory(prefix="pykvcache-demo-") as folder:
        with (
            stage.fresh.context(2 * stage.ctx.n_ctx, n_seq_max=4) as ctx,
            PrefixCache(ctx, block_size=BLOCK, tiers=[folder]) as cache,
        ):
            for question in questions[:2]:
                _ask(stage, ctx, cache, prefix + question, question)
        _second_process(stage, Path(folder), prefix + questions[2], questions[2])


def _ask(
    stage: Stage, ctx: LlamaContext, cache: PrefixCache, tokens: list[int], question: list[int]
) -> None:
    """Ask a question; where its prefix is known, show what that saves."""
    with Meter(ctx) as meter, cache.sequence(tokens) as sequence:
        logits = sequence.logits()
        answer = list(sequence.generate(12))
    stage.screen.given("", one_line(stage.text(question)), answer_of(stage.text(answer)))
    if sequence.reuse.evaluated < len(tokens):
        _add(stage, "a prefix that is known", sequence.reuse.evaluated, tokens, meter)
        stage.rows[-1].differences.append(stage.fresh.difference(logits, tokens))
        stage.screen.figures(
            f"{sequence.reuse.evaluated} of {len(tokens)} tokens evaluated: {sequence.reuse.reason}"
        )


def _second_process(stage: Stage, folder: Path, tokens: list[int], question: list[int]) -> None:
    """Let another process begin where this one stopped: it finds the blocks in the folder."""
    task = {
        "model": stage.model.path,
        "n_ctx": 2 * stage.ctx.n_ctx,
        "n_threads": stage.ctx.n_threads,
        "block_size": BLOCK,
        "tokens": tokens,
        "folder": str(folder),
    }
    done = subprocess.run(
        [sys.executable, "-m", "pykvcache.demo.second"],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the second process failed: {done.stderr.strip().splitlines()[-1:]}")
    found = json.loads(done.stdout)
    logits = np.load(folder / "logits.npy")
    row = Row("a second process", found["evaluated"], len(tokens), found["seconds"])
    row.differences.append(stage.fresh.difference(logits, tokens))
    stage.rows.append(row)
    asked = one_line(stage.text(question))
    stage.screen.given("another process", asked, answer_of(stage.text(found["answer"])))
    stage.screen.figures(
        f"it evaluates {found['evaluated']} of {len(tokens)} tokens: {found['disk']} come from a "
        f"folder that this process wrote; first logits after {time_of(found['seconds'])}"
    )


def _add(stage: Stage, name: str, evaluated: int, tokens: list[int], meter: Meter) -> None:
    stage.rows.append(Row(name, evaluated, len(tokens), meter.seconds))
