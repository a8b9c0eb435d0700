"""The memory of a context is changed by ``sequence_facts`` alone, which keeps what is known of it.

The compiler sees to most of this: what changes a memory asks for a key that only `sequence_facts`
can make, and Cython holds the memory as ``const``. These tests read the sources, so that nobody
opens another way: a declaration of llama.h that changes a memory, or one that takes it without
``const``.
"""

from __future__ import annotations

import re
from pathlib import Path

NATIVE = Path(__file__).resolve().parents[1] / "src" / "pykvcache" / "_native"
DECLARATIONS = ("libllama.pxd", "libpykv.pxd")

CHANGING_CALL = re.compile(
    r"\bllama_(memory_\w+|decode|encode|kv_self_\w+|kv_cache_\w+|state_set_data|state_load_file"
    r"|state_seq_(set_data|load_file)\w*|set_embeddings|opt_\w+)\("
)
"""Functions of llama.h that change what a context holds."""


def source(name: str) -> str:
    """Return a file without its comments and docstrings."""
    (path,) = NATIVE.rglob(name)
    text = path.read_text(encoding="utf-8")
    return re.sub(r"(#|//).*", "", re.sub(r'""".*?"""', "", text, flags=re.DOTALL))


def edits() -> set[str]:
    """Return the names of what edit.h declares to ask for the key."""
    return set(re.findall(r"(\w+)\(edit_key,", source("edit.h")))


def test_what_changes_a_memory_is_not_declared_for_cython() -> None:
    changing = edits()
    assert {"remove_cells", "copy_cells", "state_read", "run_decode", "flush"} <= changing
    for file in [*DECLARATIONS, *(path.name for path in NATIVE.rglob("*.pxi"))]:
        text = source(file)
        assert not CHANGING_CALL.search(text), file
        for name in changing:
            assert not re.search(rf"\b(lib\.{name}|{name}\(.*memory\*)", text), (file, name)


def test_cython_has_the_memory_as_const() -> None:
    declared = "\n".join(source(file) for file in DECLARATIONS)
    assert re.search(r"\bconst memory\*", declared)
    assert not re.search(r"(?<!const )\bmemory\*", declared)
    for path in NATIVE.rglob("*.pxi"):
        assert not re.search(r"(?<!const )\blib\.memory\*", source(path.name)), path.name


def test_only_sequence_facts_makes_the_key() -> None:
    (key,) = re.findall(r"class edit_key \{(.*?)\};", source("edit.h"), re.DOTALL)
    assert key.split() == ["friend", "class", "sequence_facts;", "edit_key()", "{}"]
    for path in [*NATIVE.rglob("*.cpp"), *NATIVE.rglob("*.h")]:
        if path.name not in ("edit.h", "sequences.cpp"):
            assert not re.search(r"edit_key\s*[({]\s*[)}]", source(path.name)), path.name


def test_every_change_has_a_verb_that_keeps_the_facts() -> None:
    """Of each function that changes a memory, the verb that calls it tells the facts as well."""
    body = source("sequences.cpp")
    verbs = re.split(r"\n(?=\w[\w ]* sequence_facts::)", body)
    keeps = re.compile(
        r"\b(removed|moved|copied|restored|cleared|decoded|failed)\(|\+\+changes|\bdamaged\."
    )
    used = set()
    for verb in verbs:
        called = {name for name in edits() if re.search(rf"\b{name}\(\{{\}}", verb)}
        used |= called
        if called - {"set_first"}:
            assert keeps.search(verb), verb.splitlines()[0]
    assert used == edits()


LLAMA_CHANGES = re.compile(
    r"(->|\.)(seq_(rm|cp|keep|add|div)|state_read|memory_update)\(|\bllama_(memory_\w+|decode|encode)\("
)
"""Functions of llama.cpp that change cells, as C++ calls them."""


def test_what_opens_cells_or_writes_tensors_asks_for_the_key() -> None:
    """Behind edit.h, too: a function that only has the memory as const cannot write to it."""
    assert "open_cells(const edit_key &, llama_kv_cache & cache" in source("fast/open_cells.h")
    assert "explicit tensor_writes(const edit_key &)" in source("transfers.h")
    callers = set()
    for path in [*NATIVE.rglob("*.cpp"), *NATIVE.rglob("*.h")]:
        text = source(path.name)
        assert "ggml_backend_tensor_set" not in text or path.name == "transfers.cpp", path.name
        assert "tensor_copies<const" not in text or path.name.startswith("transfers."), path.name
        for function in text.split("\n}"):
            if LLAMA_CHANGES.search(function):
                callers.add(path.name)
                assert "edit_key" in function, f"{path.name}: {function}"
    assert callers == {
        "edit.h",
        "edit.cpp",
        "moves.cpp",
        "plain.cpp",
        "rollback.cpp",
        "state_io.cpp",
    }
