"""Draw the pictures of the documents: ``python docs/pictures.py``. Needs the extra ``plot``."""

from __future__ import annotations

from pathlib import Path

from pykvcache import (
    BatchGenerator,
    CellHistory,
    LlamaContext,
    LlamaModel,
    LlamaSequence,
    PrefixCache,
    Sampler,
    embedded_model_path,
)

FOLDER = Path(__file__).parent / "pictures"
STORY = (
    "Lucy has a red kite. Tom has a brown dog. Lucy lives by the river. Tom is a baker.\nOne day"
)


def forks(ctx: LlamaContext) -> None:
    """Draw a story and three continuations of it."""
    story = LlamaSequence(ctx, STORY)
    story.evaluate()
    ways = [story.fork() for _ in range(3)]
    for seed, way in enumerate(ways):
        list(way.generate(12 + 8 * seed, Sampler(temperature=1.0, seed=seed)))
    ctx.plot().savefig(FOLDER / "forks.svg", metadata={"Date": None})


def norms(ctx: LlamaContext) -> None:
    """Draw the norms of a story's keys and values."""
    story = LlamaSequence(ctx, STORY)
    list(story.generate(20))
    assert story.seq_id is not None
    ctx.kv(story.seq_id).plot().savefig(FOLDER / "norms.svg", metadata={"Date": None})


def history(ctx: LlamaContext) -> None:
    """Draw requests that come and go."""
    seen, generator = CellHistory(ctx), BatchGenerator(ctx)
    handles = list(generator.submit(STORY, 60, Sampler(seed=1), n=3))
    steps = 0
    while generator.step():
        seen()
        steps += 1
        if steps == 30:
            handles.append(generator.submit("Once upon a time", 80))
    seen.seconds = [float(i) for i in range(len(seen))]
    figure = seen.plot()
    figure.axes[0].set_xlabel("step")
    figure.savefig(FOLDER / "history.svg", metadata={"Date": None})


def tree(ctx: LlamaContext) -> None:
    """Draw prompts that share a prefix, in blocks."""
    with PrefixCache(ctx, block_size=16) as cache:
        for question in ("Who has the red kite?", "Who is the baker?", "Who lives by the river?"):
            with cache.sequence(STORY + f' the reader asks, "{question}" The story') as sequence:
                list(sequence.generate(16))
        if hasattr(cache, "plot"):
            cache.plot().savefig(FOLDER / "tree.svg", metadata={"Date": None})


def main() -> None:
    """Draw all."""
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "pykvcache"
    FOLDER.mkdir(exist_ok=True)
    with LlamaModel(embedded_model_path()) as model:
        for draw in (forks, norms, history, tree):
            with LlamaContext(model, n_ctx=512, n_seq_max=6) as ctx:
                draw(ctx)


if __name__ == "__main__":
    main()
