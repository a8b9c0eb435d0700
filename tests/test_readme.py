"""What README.md and the table of operations say is true: code, methods and files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("pykvcache._native.lib", reason="not built", exc_type=ImportError)

import pykvcache
from pykvcache.memory import KvCacheMethods
from support.doc_blocks import agrees, outputs, read_blocks

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
OPERATIONS = (ROOT / "docs" / "reference" / "operations.md").read_text(encoding="utf-8")
BLOCKS = read_blocks(README)


def table_methods() -> set[str]:
    """Names of the first column of the table of operations."""
    rows = re.findall(r"^\| (`.+?) \|", OPERATIONS, re.M)
    return {name for row in rows for name in re.findall(r"`(\w+)", row)}


def test_the_first_screen_has_code_with_its_output() -> None:
    for block, output in zip(BLOCKS, outputs(BLOCKS), strict=True):
        assert len(block.code.splitlines()) <= 11
        assert block.output
        assert agrees(block, output), output


def test_methods_of_the_table_exist() -> None:
    assert table_methods()
    for name in table_methods():
        assert hasattr(pykvcache.LlamaContext, name), name


def test_no_memory_method_is_left_out() -> None:
    methods = {name for name, value in vars(KvCacheMethods).items() if callable(value)}
    assert {name for name in methods if not name.startswith("_")} <= table_methods()


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", README)
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^    make (\w+)", README, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_errors_that_are_named_exist() -> None:
    for name in re.findall(r"`(\w+(?:Error|TooLarge|Slot))`", README + OPERATIONS):
        assert hasattr(pykvcache.errors, name) or name == "TypeError", name


def test_position_queries_answer_where_other_methods_raise() -> None:
    """The sentence on sequence ids, for each method of the table that takes one."""
    assert "`SequenceIdError`, but the two position queries answer -1" in OPERATIONS
    path = pykvcache.embedded_model_path()
    with pykvcache.LlamaModel(path) as model, pykvcache.LlamaContext(model, n_ctx=64) as ctx:
        assert ctx.kv_cache_seq_pos_min(99) == ctx.kv_cache_seq_pos_max(99) == -1
        more = {"clear_kv_cache_seq": (0, 1), "copy_kv_cache_seq": (0,), "copy_cache": (0, 1)}
        more |= {"copy_prefix": (0, 1), "kv_cache_seq_keep": (), "kv_cache_seq_add": (0, 1, 1)}
        more |= {"kv_cache_seq_div": (0, 1, 2), "remove": (0, 1), "can_resume": (0,)}
        more |= {"get_state": (), "state_size": (), "get_partial_state": (), "kv": ()}
        more |= {"sequence_state": ()}
        for name, rest in more.items():
            with pytest.raises(pykvcache.errors.SequenceIdError):
                getattr(ctx, name)(99, *rest)
