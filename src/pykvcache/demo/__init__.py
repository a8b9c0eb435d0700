"""A tour of the cache: forked, rewound, shifted and shared, each result checked."""

from __future__ import annotations

import os
import time

from pykvcache.demo.acts import ACTS
from pykvcache.demo.screen import Screen, open_screen
from pykvcache.demo.stage import ANY_MODEL, STORY_MODEL, Fresh, Row, Stage
from pykvcache.model import LlamaModel

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

    Parameters
    ----------
    model_path
        The GGUF.
    seed
        Seed of all sampling.
    n_ctx
        Cells of the cache; a quarter of it is filled to show shifting.
    n_threads
        Threads; default as `LlamaContext`, and 1 for a small model.
    quick
        Generate less.
    plain
        No colour, even if rich is installed.

    Returns
    -------
    bool
        Whether every comparison came out equal.

    Raises
    ------
    KvCacheError
        The model cannot be loaded, or has no vocabulary.
    ValueError
        The model does not generate text.
    """
    start = time.perf_counter()
    screen = open_screen(plain=plain)
    with LlamaModel(model_path) as model:
        if model.has_encoder or not model.has_decoder:
            raise ValueError(_NO_TEXT)
        if n_threads is None and model.size < SMALL:
            n_threads = 1
        fresh = Fresh(model, n_threads)
        with fresh.context(n_ctx, n_seq_max=8) as ctx:
            if ctx.memory_kind == "none":
                raise ValueError(_NO_TEXT)
            kind = model.description.replace(" ?B", "")  # llama.cpp's word for an unknown size
            name = model.metadata.get("general.name") or os.path.basename(model_path)
            screen.line(
                f"{name}: {kind}, {model.n_params / 1e6:.1f} M parameters, "
                f"{model.n_layer} layers, {ctx.memory_kind}, {ctx.n_ctx} cells"
            )
            screen.legend()
            stage = Stage(
                model,
                ctx,
                fresh,
                STORY_MODEL if name == STORIES else ANY_MODEL,
                screen,
                seed,
                n_story=ctx.n_ctx // (16 if quick else 8),
                n_fork=8 if quick else 24,
            )
            for number, (title, act) in enumerate(ACTS, 1):
                screen.heading(f"{number}  {title}")
                act(stage)
    return _summary(screen, stage, fresh, time.perf_counter() - start)


def _summary(screen: Screen, stage: Stage, fresh: Fresh, seconds: float) -> bool:
    screen.heading("Summary")
    screen.table(
        ("operation", "tokens\nevaluated", "anew", "time", "equal to a\nfresh run?"),
        [(row.operation, *_figures(row), _verdict(row, fresh)) for row in stage.rows],
    )
    for note in stage.notes:
        screen.line(note)
    screen.line(f"anew: tokens that a fresh run evaluates. {_equal(fresh)} All in {seconds:.1f} s.")
    return all(max(row.differences, default=0.0) <= fresh.tolerance for row in stage.rows)


def _equal(fresh: Fresh) -> str:
    """Explain the last column."""
    equal = f"Equal: no logit is further from the fresh run's than {fresh.tolerance:.2g}"
    if fresh.tolerance > fresh.noise * fresh.factor:
        return f"{equal}."
    measured = (
        f"{equal}, which is {fresh.factor} times what rounding alone does on the weights of this "
        f"model ({fresh.noise:.2g}, measured with the same tokens at other positions)."
    )
    if not fresh.is_coarse:
        return measured
    return (
        f"{measured} Quantised weights round that much. It changes words where two are about "
        "equally likely, so texts may differ between two right runs."
    )


def _figures(row: Row) -> tuple[str, str, str]:
    if not row.differences:
        return "-", "-", "-"
    ms = row.seconds * 1e3
    time = f"{ms:.1f} ms" if ms < 1000 else f"{ms:.0f} ms"
    return str(row.tokens), str(row.tokens_anew), time


def _verdict(row: Row, fresh: Fresh) -> str:
    if not row.differences:
        return "refused"
    worst = max(row.differences)
    if worst > fresh.tolerance:
        return f"NO, {worst:.1g} off{row.mark}"
    if not worst:
        return f"yes, exactly{row.mark}"
    how = f"rounding {worst:.1f}" if fresh.is_coarse else f"within {worst:.1g}"
    return f"yes, {how}{row.mark}"
