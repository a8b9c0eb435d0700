"""The acts of the demo, in order."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress

from pykvcache.demo.stage import Logits, Meter, Row, Stage, apart, measured, open_exact
from pykvcache.errors import NoKvCacheSlot, UnsupportedOperation
from pykvcache.generate import BatchGenerator
from pykvcache.model import LlamaModel
from pykvcache.prefix.cache import PrefixCache
from pykvcache.sampling import Sampler
from pykvcache.sequence.sequence import LlamaSequence

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
    stage.add("prompt and story", meter, [(story, prompt + new)])


def fork(stage: Stage, story: LlamaSequence) -> None:
    """Continue the story in several ways, then do the same without forks."""
    meter, begun = Meter(), story.tokens.tolist()
    lead = "... " + " ".join(stage.text(begun).split()[-3:])
    held, texts = list[tuple[LlamaSequence, list[int]]](), list[str]()
    for name, how in WAYS.items():
        with measured(story.context, meter):
            one = story.fork()
            new = list(one.generate(stage.n_fork, stage.sampler(*how)))
            one.evaluate()
        held.append((one, begun + new))
        texts.append(stage.text(new))
        stage.screen.given(name, lead, texts[-1].replace("\n", " "))
    samplers = [stage.sampler(*how) for how in WAYS.values()]
    anew, equal = stage.one_by_one(begun, samplers, texts)
    stage.screen.figures(
        f"the {len(begun)} tokens before the fork were evaluated once: {meter.tokens} tokens in "
        f"{meter.time}. Without forks it takes {anew.tokens} tokens and {anew.time}; {equal}"
    )
    operation = f"{len(WAYS)} forks, {stage.n_fork} tokens each"
    stage.add(operation, meter, held, anew.tokens)
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
    stage.add(f"rewind {n}, ask again", meter, [(story, begun + second + answer)])


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
        difference = stage.difference(ctx.logits(), [*tokens, more])
    stage.rows.append(Row(operation, meter, len(tokens) + 1, [difference]))
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
        stage.add(f"full: drop {end - keep}, shift, continue", meter, [(one, kept)])
        if can_shift:
            _compare_shifted(stage, whole, keep, end, token, one.logits())
        _continue(one, len(one) + stage.n_fork, sampler, scene)
        text = stage.text(one.tokens[-stage.n_fork :].tolist())
        stage.screen.given("continued", "", "... " + " ".join(text.split()))
        question = stage.tokens(stage.script.questions[2])
        if len(one) + len(question) + ANSWER <= ctx.n_ctx_seq:
            stage.show_answer(question, _ask(one, question))


def _continue(one: LlamaSequence, n: int, sampler: Sampler, scene: list[int]) -> None:
    """Generate up to n tokens in all; a new scene begins if the model ends its story."""
    while len(one) < n:
        for _ in one.generate(n - len(one), sampler):
            pass
        one.append(scene[: n - len(one)])


def _compare_shifted(
    stage: Stage, whole: list[int], keep: int, end: int, token: int, logits: Logits
) -> None:
    """Compare with a fresh context that closes the same gap from the other side."""
    with stage.context(len(whole) + 256) as other:
        other.decode(whole[:-1])
        other.clear_kv_cache_seq(0, keep, end)
        other.kv_cache_seq_add(0, 0, keep, end - keep)
        other.decode([whole[-1], token])  # a sequence evaluates its last token again, too
        difference = apart(logits, other.logits())
    row = stage.rows[-1]
    (alone,) = row.differences
    row.differences, row.mark = [difference], " *"
    stage.notes.append(
        "* compared with a fresh context that drops the same tokens but moves the prompt towards "
        "the rest, so that the distances are the same. A fresh run over the kept "
        f"tokens alone is {alone:.2g} away, as it should be: the kept tokens were computed "
        "when the dropped ones were in view."
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
        held = [(first, prompt + found[0].tokens.tolist())]
        stage.add(f"{N_TEXTS} texts in one batch", meter, held, anew.tokens)
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
                        stage.add("a cached prefix", meter, [(one, tokens)])
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
    difference = stage.difference(logits, tokens)
    stage.rows.append(Row("a second process", meter, len(tokens), [difference]))
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
