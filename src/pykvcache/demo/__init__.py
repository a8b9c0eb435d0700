"""A tour of the cache: forked, rewound, shifted and shared, each result checked."""

from __future__ import annotations

import os
import time

from pykvcache.demo.acts import ACTS
from pykvcache.demo.screen import Screen
from pykvcache.demo.stage import ANY_MODEL, STORY_MODEL, Row, Stage
from pykvcache.model import LlamaModel
from pykvcache.sequence.sequence import LlamaSequence

__all__ = ["run"]

STORIES = "pykvcache stories"
"""Name of the model that ships with the package, which needs its own script."""

SMALL = 64 * 2**20
"""Bytes of tensors below which threads wait for each other longer than they compute."""

_NO_TEXT = "this model does not generate text by itself: the demo needs one that does"


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
        name = model.metadata.get("general.name") or os.path.basename(model_path)
        script = STORY_MODEL if name == STORIES else ANY_MODEL
        n_story, n_fork = (n_ctx // 16, 8) if quick else (n_ctx // 8, 24)
        stage = Stage(model, script, screen, seed, n_ctx, n_threads, n_story, n_fork)
        with stage.context(n_ctx, n_seq_max=8) as ctx:
            if ctx.memory_kind == "none":
                raise ValueError(_NO_TEXT)
            kind = model.description.replace(" ?B", "")  # llama.cpp's word for an unknown size
            screen.line(
                f"{name}: {kind}, {model.n_params / 1e6:.1f} M parameters, "
                f"{model.n_layer} layers, {ctx.memory_kind}, {ctx.n_ctx} cells"
            )
            screen.legend()
            story = LlamaSequence(ctx, stage.prompt)
            for number, (title, act) in enumerate(ACTS, 1):
                screen.heading(f"{number}  {title}")
                act(stage, story)
    return _summary(stage, time.perf_counter() - start)


def _summary(stage: Stage, seconds: float) -> bool:
    screen, tolerance = stage.screen, stage.tolerance
    screen.heading("Summary")
    screen.table(
        ("operation", "tokens", "fresh run", "time", "same result?"),
        [(row.operation, *_figures(row), _verdict(row, stage)) for row in stage.rows],
    )
    for note in stage.notes:
        screen.line(note)
    rounding = (
        f", {stage.factor} times what rounding alone does on the weights of this "
        f"model ({stage.noise:.2g}, measured with the same tokens at other positions)"
    )
    screen.line(
        "tokens: evaluated by the operation; fresh run: evaluated by a fresh run. yes: no logit "
        f"is further from the fresh run's than {tolerance:.2g}"
        f"{rounding if tolerance == stage.noise * stage.factor else ''}."
        f"{COARSE if stage.is_coarse else ''} All in {seconds:.1f} s."
    )
    return all(max(row.differences, default=0.0) <= tolerance for row in stage.rows)


COARSE = (
    " Quantized weights round that much. This changes words when two are about equally likely, so "
    "texts may differ between two correct runs."
)


def _figures(row: Row) -> tuple[str, str, str]:
    if not row.differences:
        return "-", "-", "-"
    return str(row.meter.tokens), str(row.tokens_anew), row.meter.time


def _verdict(row: Row, stage: Stage) -> str:
    if not row.differences:
        return "refused"
    worst = max(row.differences)
    if worst > stage.tolerance:
        return f"NO, {worst:.1g} off{row.mark}"
    if not worst:
        return f"yes, exactly{row.mark}"
    how = f"rounding {worst:.1f}" if stage.is_coarse else f"within {worst:.1g}"
    return f"yes, {how}{row.mark}"
