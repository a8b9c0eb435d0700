"""Ctrl-C inside one long call over text: signals are heard meanwhile, and may end it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pykvcache.model import TEXT_BYTES_MAX
from support.vocab import VOCABS

from .conftest import needs_timers
from .vocab_kit import load_vocab, write_vocab

if TYPE_CHECKING:
    from .conftest import Child

pytestmark = needs_timers

# The handler raises when it runs for the fifth time: a call that does not listen sees one or two.
INTERRUPT = """
import signal, sys
import numpy as np
from pykvcache import LlamaContext, LlamaModel
heard = []
def hear(*_):
    heard.append(1)
    if len(heard) == 5:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise KeyboardInterrupt
def during(call):
    heard.clear()
    signal.signal(signal.SIGALRM, hear)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.02)
    try:
        call()
    except KeyboardInterrupt:
        print("stopped", flush=True)
    else:
        print("went on")
    signal.setitimer(signal.ITIMER_REAL, 0)
model = LlamaModel(sys.argv[1], vocab_only=sys.argv[2] == "vocab")
"""
TOKENIZE = (
    INTERRUPT
    + """
before = model.tokenize("hello world").tolist()
text = sys.argv[3] * (10_000_000 // len(sys.argv[3]))
during(lambda: model.tokenize(text))
assert model.tokenize("hello world").tolist() == before
"""
)
DETOKENIZE = (
    INTERRUPT
    + """
tokens = np.full(20_000_000, model.tokenize("hello", add_special=False)[-1])
during(lambda: model.detokenize(tokens))
"""
)
GENERATE = (
    INTERRUPT
    + """
ctx = LlamaContext(model, n_ctx=64)
ctx.decode([5, 6, 7])
held, logits = ctx.cells(), ctx.logits()
text = "Hello world, 123! " * 600_000
during(lambda: next(ctx.generate(text, 4)))
assert repr(ctx.cells()) == repr(held) and (ctx.logits() == logits).all()
"""
)
# What takes longest: words, one word of all, no word.
LONG = [("spm", "x"), ("bpe", " "), ("bpe", "Hello world, 123!\n"), ("wpm", "Hello world, 123!\n")]


def is_stopped(forked: Child, code: str, *args: Any) -> None:
    done = forked(code, *args, timeout=60)
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stdout == "stopped\n"


@pytest.mark.parametrize(("kind", "unit"), LONG)
def test_one_long_text_can_be_interrupted(
    tmp_path: Path, forked: Child, kind: str, unit: str
) -> None:
    path = write_vocab(VOCABS[kind](), tmp_path / "m.gguf")
    is_stopped(forked, TOKENIZE, path, "vocab", unit)


def test_many_tokens_on_their_way_to_text_can_be_interrupted(tmp_path: Path, forked: Child) -> None:
    is_stopped(forked, DETOKENIZE, write_vocab(VOCABS["bpe"](), tmp_path / "m.gguf"), "vocab")


def test_a_long_prompt_can_be_interrupted_and_changes_nothing(model: Any, forked: Child) -> None:
    is_stopped(forked, GENERATE, model("llama").path, "whole")


@pytest.mark.parametrize("kind", [kind for kind in VOCABS if kind != "none"])
def test_the_text_of_tokens_is_that_of_llama_cpp(tmp_path: Path, kind: str) -> None:
    one = load_vocab(VOCABS[kind](), tmp_path)
    rng = np.random.default_rng(3)
    for n in (1, 2, 5, 40):
        for _ in range(50):
            tokens = rng.integers(0, one.n_vocab, n).astype(np.int32)
            for remove in (False, True):
                for special in (False, True):
                    text = one.native.detokenize(tokens, remove, special, 10**6)
                    assert text == one.native.detokenize_whole(tokens, remove, special)


def test_spaces_are_cleaned_as_llama_cpp_cleans_them(tmp_path: Path) -> None:
    # Llama 3's vocabularies ask for it.
    vocab = VOCABS["bpe"]("llama-bpe")  # type: ignore[call-arg]
    one = load_vocab(vocab, tmp_path)
    rng = np.random.default_rng(5)
    cleaned = 0
    for _ in range(300):
        text = "".join(rng.choice(list("   ''??!.,tdsmlrevx"), 60))
        tokens = one.tokenize(text, add_special=False)
        found = one.native.detokenize(tokens, False, False, 10**6)
        assert found == one.native.detokenize_whole(tokens, False, False), text
        cleaned += found != text.encode()
    assert cleaned > 250


def test_a_text_past_the_limit_is_refused(tmp_path: Path) -> None:
    one = load_vocab(VOCABS["bpe"](), tmp_path)
    tokens = one.tokenize("a" * 100)
    assert len(one.native.detokenize(tokens, True, False, 100)) == 100
    with pytest.raises(ValueError, match="100 tokens is too long: the limit is 99 bytes"):
        one.native.detokenize(tokens, True, False, 99)
    assert TEXT_BYTES_MAX == 2**31 - 1
