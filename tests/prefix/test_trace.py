"""How far a reader has to follow a prompt that hits: few calls, in few files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import pykvcache
from pykvcache import LlamaContext, PrefixCache
from pykvcache.prefix.sequence import CachedSequence

PACKAGE = str(Path(pykvcache.__file__).parent)


def calls(action: Callable[[], object]) -> list[str]:
    """Return the file of every Python call of the package that an action makes."""
    files = list[str]()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return files


def test_a_prompt_that_hits_passes_few_calls_and_files(
    make_context: Callable[..., LlamaContext],
) -> None:
    """From the prompt to its logits, and until the cache has what was new."""
    text, found = list(range(10, 257)), list[CachedSequence]()

    def hit() -> None:
        sequence = cache.sequence([*text, 7, 8])
        sequence.logits()
        sequence.close()
        found.append(sequence)

    with PrefixCache(make_context("llama", n_ctx=1024, n_seq_max=4)) as cache:
        for last in (5, 6):
            with cache.sequence([*text, last]) as sequence:
                sequence.logits()
        files = calls(hit)
    assert found[0].reuse.ram == 247
    assert len(files) <= 150
    assert len(set(files)) <= 15, sorted(set(files))


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_stats_and_lookups_take_a_constant_number_of_calls(
    name: str, make_context: Callable[..., LlamaContext]
) -> None:
    found = []
    with PrefixCache(make_context(name, n_ctx=512), block_size=8) as cache:
        for begin in (0, 10):
            for i in range(begin, 2 * begin + 4):
                with cache.sequence([10 + i] * 20, namespace=str(i)) as sequence:
                    sequence.logits()
            found.append(
                (len(calls(cache.stats)), len(calls(lambda: cache.sequence([9] * 20).close())))
            )
    assert found[0] == found[1]
