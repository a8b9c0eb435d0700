"""The progress bar of `run`: in a terminal, with rich, and nowhere else."""

from __future__ import annotations

import sys

import pytest

from memory.kit import Make
from pykvcache import BatchGenerator, LlamaContext, Sampler


class Kept(BatchGenerator):
    """A generator that keeps its handles, without which requests end."""

    handles: list[object]


def submit(ctx: LlamaContext) -> BatchGenerator:
    generator = Kept(ctx)
    sampler = Sampler(temperature=1, seed=1)
    generator.handles = [
        generator.submit([5 + i], 6, sampler, n=1 + 2 * (i == 1)) for i in range(3)
    ]
    return generator


def test_a_bar_counts_requests_to_the_end(
    make_context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = pytest.importorskip("rich.progress")
    ctx, seen = make_context("llama"), list[tuple[float, float | None]]()

    class Bar(progress.Progress):  # type: ignore[misc]
        def update(self, *args: object, **more: object) -> None:
            super().update(*args, **more)
            seen.append((self.tasks[0].completed, self.tasks[0].total))

    monkeypatch.setattr(progress, "Progress", Bar)
    submit(ctx).run(progress=True)
    assert seen[-1] == (5, 5), "samples count, too"
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_the_bar_is_off_without_a_terminal_or_rich(
    make_context: Make, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ctx = make_context("llama")
    submit(ctx).run()
    assert capfd.readouterr() == ("", "")
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    submit(ctx).run()
    generator = submit(ctx)
    with pytest.raises(ImportError, match=r"extra cli"):
        generator.run(progress=True)
    assert len(generator._schedule) == 3, "nothing was done"
    assert capfd.readouterr() == ("", "")
    generator.run(progress=False)
