"""Threads: they wait for each other on one context, and run side by side on two."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from binding.conftest import Child, assert_quiet
from binding.kit import differ, lengths, words
from pykvcache.errors import ClosedError
from support.models import RIGHT
from support.sanitizer import SLOWER

PATIENCE = 60 * SLOWER
"""Seconds after which a thread counts as stuck."""


HAMMER_SECONDS = float(os.environ.get("PYKVCACHE_FUZZ_SECONDS", "2"))
"""How long two threads use one context."""


def together(*works: Callable[[], None], patience: float = PATIENCE) -> None:
    """Run functions in separate threads and raise an exception of any of them."""
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
        thread.join(patience)
        assert not thread.is_alive(), "a thread is stuck"
    if errors:
        raise errors[0]


@pytest.mark.hazard("T1")
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


@pytest.mark.hazard("N19")
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


@pytest.mark.hazard("T3")
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
                    # The other thread may have cleared what this one decoded, logits and all.
                    with contextlib.suppress(IndexError):
                        ctx.logits()
            except ClosedError:
                ended.append("closed")

        def close(ctx: Any = ctx, wait: float = wait) -> None:
            time.sleep(wait)
            ctx.close()

        together(decode, decode, close, close)
        assert ended == ["closed"] * 2


@pytest.mark.hazard("T2", "T3")
def test_two_threads_hammer_one_context_without_a_wrong_result(make_context: Any) -> None:
    prompts = [[5 + k, 6, 7 + 2 * k] for k in range(8)]
    alone = make_context("llama", n_ctx=1024)
    expected = []
    for prompt in prompts:
        alone.clear_kv_cache()
        expected.append(list(alone.generate(prompt, 12)))
    ctx = make_context("llama", n_ctx=1024)
    until = time.monotonic() + HAMMER_SECONDS
    rounds = [0, 0]

    def work(me: int) -> Callable[[], None]:
        def run() -> None:
            rng = Random(me)
            seq, fork = 2 * me, 2 * me + 1
            while time.monotonic() < until or rounds[me] < 3:
                k = rng.randrange(len(prompts))
                assert ctx.clear_kv_cache_seq(seq)
                ctx.decode(prompts[k][:-1], seq_id=seq)
                ctx.copy_kv_cache_seq(seq, fork)
                for one in rng.sample([seq, fork], 2):
                    assert list(ctx.generate(prompts[k][-1:], 12, seq_id=one)) == expected[k]
                    held = ctx.kv_cache_seq_pos_max(one) + 1
                    assert held - len(prompts[k]) in (len(expected[k]) - 1, len(expected[k]))
                rounds[me] += 1

        return run

    together(work(0), work(1), patience=PATIENCE + HAMMER_SECONDS)
    assert min(rounds) >= 3


def test_other_threads_run_during_a_decode(make_context: Any) -> None:
    ctx = make_context("llama", n_ctx=2048, n_batch=2048)
    count, done = [0], threading.Event()

    def work() -> None:
        while not done.is_set():
            count[0] += 1
            time.sleep(0)  # lets go of the GIL

    thread = threading.Thread(target=work, daemon=True)
    interval = sys.getswitchinterval()
    # Nobody is made to give up the GIL: the counter gets it only while the decode is without it.
    sys.setswitchinterval(1000)
    try:
        thread.start()
        for _ in range(200):
            ctx.clear_kv_cache()
            before = count[0]
            ctx.decode(words(1000))
            advanced = count[0] - before
            if advanced > 10:
                break
    finally:
        done.set()
        sys.setswitchinterval(interval)
    thread.join(PATIENCE)
    assert advanced > 10


@pytest.mark.hazard("N11")
def test_tokens_that_change_during_a_decode_do_no_harm(forked: Child, model: Any) -> None:
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
    done = forked(code, model("llama").path, timeout=PATIENCE)
    assert_quiet(done)
