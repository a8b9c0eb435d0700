"""Threads: they wait for each other on one context, and run side by side on two."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from binding.conftest import Child, assert_quiet
from binding.kit import differ, lengths, words
from pykvcache import ClosedError
from support.models import RIGHT

PATIENCE = 60
"""Seconds after which a thread counts as stuck."""


def together(*works: Callable[[], None]) -> None:
    """Run functions in threads of their own and raise what one of them raised."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        try:
            barrier.wait()
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a thread is stuck"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba"])
def test_contexts_of_one_model_run_side_by_side(
    make_context: Any, fresh_logits: Any, name: str
) -> None:
    rows: dict[int, Any] = {}
    contexts = [make_context(name) for _ in range(4)]

    def work(k: int) -> Callable[[], None]:
        def run() -> None:
            for token in words(40, k):
                contexts[k].decode([token])
            rows[k] = contexts[k].logits()

        return run

    together(*map(work, range(4)))
    for k in range(4):
        assert differ(rows[k], fresh_logits(name, words(40, k))) < RIGHT


@pytest.mark.parametrize("name", ["llama", "qwen2vl", "mamba"])
@pytest.mark.parametrize("unified", [True, False])
def test_threads_share_a_context_without_a_wrong_result(
    make_context: Any, fresh_logits: Any, name: str, unified: bool
) -> None:
    ctx = make_context(name, kv_unified=unified, n_ctx=1024)

    def work(seq: int) -> Callable[[], None]:
        def run() -> None:
            tokens = words(40, seq)
            for _ in range(3):
                assert ctx.clear_kv_cache_seq(seq)
                for i, token in enumerate(tokens):
                    ctx.decode([token], seq_id=seq)
                    assert ctx.kv_cache_seq_pos_max(seq) == i
                    assert ctx.kv_cache_seq_pos_min(seq) in (0, i)

        return run

    together(*map(work, range(4)))
    assert ctx.tokens_evaluated == 4 * 3 * 40
    for seq in range(4):
        ctx.decode([7], seq_id=seq)
        assert differ(ctx.logits(), fresh_logits(name, [*words(40, seq), 7])) < RIGHT


def test_generations_in_threads_do_not_take_each_others_logits(make_context: Any) -> None:
    def generate(ctx: Any, seq: int) -> list[int]:
        return list(ctx.generate([5, 6, 7 + seq], 60, seq_id=seq))

    alone = make_context("llama_none", n_ctx=1024)
    expected = {seq: generate(alone, seq) for seq in range(4)}
    assert len({tuple(tokens) for tokens in expected.values()}) == 4
    ctx = make_context("llama_none", n_ctx=1024)
    for _ in range(4):
        ctx.clear_kv_cache()
        got: dict[int, list[int]] = {}

        def work(seq: int, got: Any = got) -> Callable[[], None]:
            return lambda: got.__setitem__(seq, generate(ctx, seq))

        together(*map(work, range(4)))
        assert got == expected


def test_queries_wait_for_a_decode(make_context: Any) -> None:
    ctx = make_context("llama", n_ctx=2048)
    done = threading.Event()

    def decode() -> None:
        try:
            for _ in range(5):
                ctx.clear_kv_cache_seq(0)
                ctx.decode(words(1500))
        finally:
            done.set()

    def ask() -> None:
        while not done.is_set():
            assert ctx.kv_cache_seq_pos_max(0) in (-1, 1499)
            assert ctx.kv_cache_seq_pos_min(0) in (-1, 0)
            ctx.copy_kv_cache_seq(1, 2)
            ctx.kv_cache_update()
            ctx.perf()
            assert "LlamaContext" in repr(ctx)

    together(decode, ask, ask)
    assert lengths(ctx) == {0: 1500}


def test_close_waits_for_a_decode_and_what_follows_is_closed(make_context: Any) -> None:
    for wait in (0.0, 0.002, 0.02):
        ctx = make_context("llama", n_ctx=2048)
        ended: list[str] = []

        def decode(ctx: Any = ctx, ended: list[str] = ended) -> None:
            try:
                while True:
                    ctx.clear_kv_cache()
                    ctx.decode(words(500))
                    ctx.logits()
            except ClosedError:
                ended.append("closed")

        def close(ctx: Any = ctx, wait: float = wait) -> None:
            time.sleep(wait)
            ctx.close()

        together(decode, decode, close, close)
        assert ended == ["closed"] * 2


def test_other_threads_run_during_a_decode(make_context: Any) -> None:
    ctx = make_context("llama", n_ctx=2048, n_batch=2048)
    counts: list[int] = []
    running = threading.Event()

    def decode() -> None:
        start = time.perf_counter()
        running.set()
        # One call into llama.cpp: with the GIL held nobody could count meanwhile.
        ctx.decode(words(2000))
        running.clear()
        assert time.perf_counter() - start > 0.02

    def count() -> None:
        running.wait()
        n = 0
        while running.is_set():
            n += 1
        counts.append(n)

    together(decode, count)
    assert counts[0] > 1000


def test_tokens_that_change_during_a_decode_do_no_harm(child: Child, model: Any) -> None:
    code = """
import sys, threading
import numpy as np
from pykvcache import LlamaBatch, LlamaContext, LlamaModel, KvCacheError
ctx = LlamaContext(LlamaModel(sys.argv[1]), n_ctx=512, n_ubatch=16, n_threads=2)
tokens = np.full(64, 5, np.int32)
batch = LlamaBatch(64)
stop = False
def change():
    while not stop:
        tokens[:] = 2**31 - 1
        batch.clear(); batch.add_sequence(tokens, 2**31 - 1, start=77)
        tokens[:] = 5
        batch.clear(); batch.add_sequence(tokens, 0)
thread = threading.Thread(target=change); thread.start()
for i in range(300):
    for what in (tokens, batch):
        try: ctx.decode(what)
        except (KvCacheError, IndexError): pass
        ctx.clear_kv_cache()
stop = True
thread.join()
"""
    done = child(code, model("llama").path, timeout=PATIENCE)
    assert_quiet(done)
