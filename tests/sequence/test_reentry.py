"""Code that runs in the middle of a sequence's call: it may not change what is being computed."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import Any

import pytest

from binding.conftest import needs_timers
from memory.kit import Fresh, Make, apart, words
from pykvcache import BatchGenerator, LlamaContext, LlamaSequence, Sampler
from pykvcache.errors import ReentryError
from support.models import RIGHT

EDITS: dict[str, Callable[[LlamaSequence], object]] = {
    "truncate": lambda one: one.truncate(3),
    "append": lambda one: one.append([7] * 20),
    "sync": lambda one: one.sync(words(9, 30)),
    "park": lambda one: one.park(),
    "close": lambda one: one.close(),
    "evaluate": lambda one: one.evaluate(),
    "fork": lambda one: one.fork(),
}


class Logs(logging.Handler):
    """A handler of a user's own that uses a sequence."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.act, self.errors, self.calls = act, list[type[BaseException]](), 0

    def emit(self, record: logging.LogRecord) -> None:
        self.calls += 1
        try:
            self.act()
        except ReentryError as error:
            self.errors.append(type(error))


def shifted(ctx: LlamaContext, seq_id: int) -> None:
    """Leave a shift pending: the next decode applies it, and llama.cpp says so in its log."""
    ctx.native.decode_tokens(words(8, 5), seq_id)
    ctx.kv_cache_seq_add(seq_id, 0, None, 1)


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("how", ["sequence", "generator"])
def test_a_log_handler_may_not_use_a_sequence_being_evaluated(
    how: str, edit: str, make_context: Make, fresh_logits: Fresh
) -> None:
    log = logging.getLogger("pykvcache.llama")
    prompt, level = words(1, 17), log.level
    log.setLevel(logging.DEBUG)  # before: what nobody wants when a context is made is not collected
    ctx = make_context("llama", n_ctx=512)
    one = LlamaSequence(ctx, prompt)
    generator = BatchGenerator(ctx)
    sampler = Sampler(temperature=0, logit_bias={ctx.model.token_eos: -100.0})
    if how == "generator":
        handle = generator.submit(one, 6, sampler)
        generator.step()
    shifted(ctx, 0)
    logs = Logs(lambda: EDITS[edit](one))
    log.addHandler(logs)
    try:
        if how == "generator":
            generator.run()
        else:
            one.evaluate()
    finally:
        log.removeHandler(logs)
        log.setLevel(level)
    assert logs.calls
    assert len(logs.errors) == logs.calls
    n = len(prompt) + (len(handle.tokens) if how == "generator" else 0)
    tokens = one.tokens.tolist()
    assert len(tokens) == n
    assert tokens[: len(prompt)] == prompt
    assert apart(one.logits(), fresh_logits("llama", tokens)) < RIGHT
    generator.close()


@needs_timers
@pytest.mark.parametrize("edit", ["truncate", "close"])
def test_a_signal_handler_may_not_use_a_sequence_being_evaluated(
    edit: str, make_context: Make, fresh_logits: Fresh
) -> None:
    """Between two parts of a long prompt: what it raises stops the evaluation."""
    ctx = make_context("llama", n_ctx=4096, n_batch=16, n_ubatch=16)
    tokens = words(2, 3000)
    one = LlamaSequence(ctx, tokens)

    def handle(*_: Any) -> None:
        try:
            ctx.kv_cache_seq_pos_max(0)
        except ReentryError:  # in the middle of a decode, not before it
            signal.setitimer(signal.ITIMER_REAL, 0)
            EDITS[edit](one)

    def evaluate() -> None:
        for _ in range(50):  # where the signal does not come in the middle of it
            signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
            one.evaluate()
            one.truncate(0)
            one.append(tokens)

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with pytest.raises(ReentryError, match="called a sequence of it"):
            evaluate()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert one.tokens.tolist() == tokens
    assert one.n_evaluated < len(tokens)
    one.truncate(200)
    assert apart(one.logits(), fresh_logits("llama", tokens[:200])) < RIGHT


@needs_timers
def test_a_signal_handler_between_two_lines_of_a_call(
    make_context: Make, fresh_logits: Fresh
) -> None:
    """It comes anywhere, and may not use a sequence in the middle of a call of one."""
    ctx = make_context("llama", n_ctx=512)
    tokens = words(3, 40)
    one = LlamaSequence(ctx, tokens)
    one.logits()
    end = Sampler(temperature=0, logit_bias={ctx.model.token_eos: 1e6})
    seen = {"used": 0, "refused": 0}

    def handle(*_: Any) -> None:
        try:
            if len(one) > 5:
                one.truncate(len(one) - 1)
            seen["used"] += 1
        except ReentryError:
            seen["refused"] += 1

    before = signal.signal(signal.SIGALRM, handle)
    try:
        for n in range(400):
            signal.setitimer(signal.ITIMER_REAL, 2e-5 + (n % 50) * 2e-6)
            assert list(one.generate(1, end)) == []
            if n % 7 == 0:
                one.truncate(max(5, len(one) - 2))
            signal.setitimer(signal.ITIMER_REAL, 0)
            have = one.tokens.tolist()
            assert have == tokens[: len(have)]
            assert apart(one.logits(), fresh_logits("llama", have)) < RIGHT
            if len(one) < 12:
                one.sync(tokens)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert sum(seen.values())
