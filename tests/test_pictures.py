"""Pictures: they show what the tables say, for every memory; notebooks get them without pyplot."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from support.models import make_model

pytest.importorskip("pykvcache._native.lib", reason="not built", exc_type=ImportError)
pytest.importorskip("matplotlib", reason="pip install '.[plot]'")

from matplotlib.colors import to_rgba

from pykvcache import (
    BatchGenerator,
    CellHistory,
    LlamaContext,
    LlamaModel,
    LlamaSequence,
    PrefixCache,
    embedded_model_path,
)
from pykvcache._drawing import SHARED
from pykvcache.errors import UnsupportedOperation
from pykvcache.kv import SequenceKV
from pykvcache.prefix.report import ReuseReport


def boxes(axes) -> list[tuple[float, float, float, str]]:
    """Return (row, begin, end, colour) of all that was drawn."""
    found = []
    for bar in axes.collections:
        for path, color in zip(bar.get_paths(), bar.get_facecolors(), strict=True):
            low, high = path.vertices.min(axis=0), path.vertices.max(axis=0)
            row = round(float(low[1] + high[1]) / 2)
            found.append((row, float(low[0]), float(high[0]), tuple(color)))
    return found


def test_plot_shows_every_cell_once_and_what_is_shared() -> None:
    with (
        LlamaModel(embedded_model_path()) as model,
        LlamaContext(model, n_ctx=256, n_seq_max=3) as ctx,
    ):
        ctx.decode(range(3, 13), seq_id=0)
        ctx.copy_kv_cache_seq(0, 2, 0, 6)
        ctx.decode(range(3, 8), seq_id=2)
        above, below = ctx.plot().axes
        shared = to_rgba(SHARED)
        drawn = sorted((r, b, e, c == shared) for r, b, e, c in boxes(above))
        assert drawn == [
            (0, -0.5, 5.5, True),
            (0, 5.5, 9.5, False),
            (1, -0.5, 5.5, True),
            (1, 5.5, 10.5, False),
        ]
        assert [label.get_text() for label in above.get_yticklabels()] == ["0", "2"]
        used = sum(end - begin for _, begin, end, _ in boxes(below)[1:])
        assert used == ctx.n_cells_used == 15


@pytest.mark.parametrize(
    ("name", "kv_unified"),
    [("llama", False), ("gemma3", True), ("mamba", True)],
)
def test_every_memory_has_a_picture(name: str, kv_unified: bool, model_folder: Path) -> None:
    with (
        LlamaModel(make_model(name, model_folder)) as model,
        LlamaContext(model, n_ctx=512, n_seq_max=2, kv_unified=kv_unified) as ctx,
    ):
        assert "<svg" in ctx._repr_html_(), "an empty one, too"
        ctx.decode([1, 2, 3], seq_id=1)
        assert len(ctx.plot().axes) == 2
        ElementTree.fromstring(ctx.plot()._repr_svg_())
        if ctx.memory_kind in ("attention", "sliding-window"):
            figure = ctx.kv(1).plot()
            images = [image for axes in figure.axes for image in axes.get_images()]
            assert len(images) == 2
    assert "closed" in ctx._repr_html_()


def test_what_has_no_cells_has_no_picture(model_folder: Path) -> None:
    with (
        LlamaModel(make_model("bert", model_folder)) as model,
        LlamaContext(model, embeddings=True) as ctx,
    ):
        with pytest.raises(UnsupportedOperation):
            ctx.plot()
        assert "none" in ctx._repr_html_()


def test_norms_are_those_of_the_arrays() -> None:
    with LlamaModel(embedded_model_path()) as model, LlamaContext(model, n_ctx=256) as ctx:
        ctx.decode(range(3, 20))
        kv = ctx.kv(0)
        first = kv.plot().axes[0].get_images()[0].get_array()
        layer = np.linalg.norm(kv.layers[0].keys.astype(np.float32), axis=-1).T
        assert np.array_equal(first[: len(layer)], layer)


def test_history_counts_own_and_shared_cells() -> None:
    with LlamaModel(embedded_model_path()) as model, LlamaContext(model, n_ctx=512) as ctx:
        history, generator = CellHistory(ctx), BatchGenerator(ctx)
        history()
        handles = generator.submit("Once upon a time", 6, n=2)
        while generator.step():
            history()
            assert sum(history.own[-1].values()) + history.shared[-1] == ctx.n_cells_used
        assert len(history) > 4
        assert len(handles) == 2
        assert history.own[0] == {}
        assert max(history.shared) > 0
        assert "<svg" in (history._repr_svg_() or "")
        assert CellHistory(ctx).plot() is not None, "nothing noted yet"


def test_sequences_and_reports_show_a_bar() -> None:
    with LlamaModel(embedded_model_path()) as model, LlamaContext(model, n_ctx=512) as ctx:
        seq = LlamaSequence(ctx, "Once upon a <b>time")
        seq.evaluate()
        seq.append("!")
        shown = seq._repr_html_()
        assert "pending: 1" in shown
        assert "<b>time" not in shown, "text is escaped"
        cache = PrefixCache(ctx, block_size=4)
        cache.sequence("Once upon a time there was").close()
        report = cache.sequence("Once upon a time there is").reuse
        assert f"to evaluate: {report.evaluated}" in report._repr_html_()
        seq.close()
        assert "closed" in seq._repr_html_()
    ElementTree.fromstring(ReuseReport()._repr_html_().replace("&nbsp;", " "))


def test_without_matplotlib_notebooks_get_text_and_calls_say_what_to_install(
    tmp_path: Path,
) -> None:
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text("raise ImportError('not here')")
    code = """
from pykvcache import CellHistory, LlamaContext, LlamaModel, embedded_model_path
ctx = LlamaContext(LlamaModel(embedded_model_path()), n_ctx=256)
assert "extra plot" in ctx._repr_html_()
assert CellHistory(ctx)._repr_svg_() is None
try:
    ctx.plot()
except ImportError as error:
    assert "extra plot" in str(error)
else:
    raise SystemExit("no error")
"""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_names_are_text_and_no_formulas(tmp_path: Path) -> None:
    """Matplotlib takes what stands between dollar signs for a formula, and fails elsewhere."""
    spaces = ["$\\frac$", "a$b", "\\$$_$", "\u4e2d\u6587", "a\x00\nb", "\u202ea", "x" * 300, ""]
    with (
        LlamaModel(embedded_model_path()) as model,
        LlamaContext(model, n_ctx=256) as ctx,
        PrefixCache(ctx, block_size=4) as cache,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")  # of letters that the font lacks, and of too little room
        for space in spaces:
            with cache.sequence("Once $\\frac$ upon $x_ a time", namespace=space) as sequence:
                sequence.evaluate()
        figure = cache.plot()
        figure.savefig(tmp_path / "tree.png")
        labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
        assert labels[:2] == ["'$\\\\frac$'", "'a$b'"]
        assert len(labels) == len(spaces)
        assert max(map(len, labels)) < 30
        for space in spaces:
            assert repr(space) in str(cache.tree())
        for space in spaces[:2]:
            ElementTree.fromstring(cache.plot(space)._repr_svg_())


def test_positions_of_another_shape_are_not_drawn() -> None:
    with pytest.raises(ValueError, match=r"positions have shape \(\)"):
        SequenceKV(np.array(3, np.int32), []).plot()
