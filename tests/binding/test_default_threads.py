"""How many threads a context has that was asked for none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pykvcache._params import default_threads, usable_cpus


def test_a_small_model_has_one_thread_for_a_token_and_all_for_a_batch(model: Any) -> None:
    from pykvcache import LlamaContext

    with LlamaContext(model("llama"), n_ctx=64) as ctx:
        assert (ctx.n_threads, ctx.n_threads_batch) == (1, usable_cpus())
    with LlamaContext(model("llama"), n_ctx=64, n_threads=2) as ctx:
        assert (ctx.n_threads, ctx.n_threads_batch) == (2, 2)
    with LlamaContext(model("llama"), n_ctx=64, n_threads_batch=3) as ctx:
        assert (ctx.n_threads, ctx.n_threads_batch) == (1, 3)


def test_a_large_model_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pykvcache._params.usable_cpus", lambda: 6)
    assert default_threads(0) == (1, 6)
    assert default_threads(61 * 10**6) == (4, 6)
    assert default_threads(10**10) == (6, 6)


@pytest.mark.hazard("N43")
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity here")
def test_affinity_and_the_quotas_of_all_cgroups_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    own = tmp_path / "own"
    own.write_text("0::/pod/one\n")
    folder = tmp_path / "cgroup" / "pod" / "one"
    folder.mkdir(parents=True)
    cgroups = tmp_path / "cgroup"
    assert usable_cpus(cgroups, own) == 8
    (folder / "cpu.max").write_text("max 100000\n")
    assert usable_cpus(cgroups, own) == 8
    (folder.parent / "cpu.max").write_text("250000 100000\n")
    assert usable_cpus(cgroups, own) == 3
    (folder / "cpu.max").write_text("50000 100000\n")
    assert usable_cpus(cgroups, own) == 1
    for damaged in ("", "x y", "1 0", "-5 100000"):
        (folder / "cpu.max").write_text(damaged)
        assert usable_cpus(cgroups, own) >= 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4096)))
    assert usable_cpus(tmp_path / "none", own) == 512
