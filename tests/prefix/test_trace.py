"""How far a reader has to follow a prompt that hits: few calls, in few files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pykvcache
from pykvcache import LlamaContext, PrefixCache

PACKAGE = str(Path(pykvcache.__file__).parent)


def test_a_prompt_that_hits_passes_few_calls_and_files(
    make_context: Callable[..., LlamaContext],
) -> None:
    """From the prompt to its logits, and until the cache has what was new."""
    text, files = list(range(10, 257)), list[str]()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.append(frame.f_code.co_filename)

    with PrefixCache(make_context("llama", n_ctx=1024, n_seq_max=4)) as cache:
        for last in (5, 6):
            with cache.sequence([*text, last]) as sequence:
                sequence.logits()
        sys.setprofile(note)
        try:
            sequence = cache.sequence([*text, 7, 8])
            sequence.logits()
            sequence.close()
        finally:
            sys.setprofile(None)
        assert sequence.reuse.ram == 247
    assert len(files) <= 150
    assert len(set(files)) <= 15, sorted(set(files))
