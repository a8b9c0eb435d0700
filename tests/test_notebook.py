"""The notebook runs from top to bottom, and shows pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pykvcache._native.lib", reason="not built", exc_type=ImportError)
pytest.importorskip("matplotlib", reason="pip install '.[plot]'")
nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")
nbformat = pytest.importorskip("nbformat", reason="pip install nbclient ipykernel")

NOTEBOOK = Path(__file__).parents[1] / "examples" / "forked_story.ipynb"


def shown(cell: Any) -> set[str]:
    """Return the media types of what a cell shows."""
    return {kind for output in cell.outputs for kind in output.get("data", {})}


def test_the_notebook_runs(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    cells = {cell.source.splitlines()[-1]: cell for cell in notebook.cells if "outputs" in cell}
    assert "<svg" in cells["ctx"].outputs[0].data["text/html"]
    assert "text/html" in shown(cells["story"])
    assert "image/svg+xml" in shown(cells["ctx.kv(story.seq_id).plot()"])
    assert "to evaluate" in cells["sequence.reuse"].outputs[-1].data["text/html"]
