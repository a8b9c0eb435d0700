"""Every C++ function that Cython calls is declared ``except +``, or throws nothing.

An exception that leaves a function without ``except +`` ends the process. Such a function must be
``noexcept`` in its header, where a guard catches what it throws, or one of the readers below, which
look at numbers that exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

NATIVE = Path(__file__).resolve().parents[1] / "src" / "pykvcache" / "_native"
OUR_DECLARATIONS = ("libprobe.pxd", "libsampler.pxd", "libshadow.pxd", "libstate.pxd")

READERS = {
    "probe.h": "heads_divisible kind class_name why_no_shift bounded picks_blocks windowed "
    "n_stream look_at_context next_cell n_used n_spanned n_free n_held extent first_kept "
    "first_of holds last_before window_intact window_dropped shared "
    "same_cells add_check div_check is_plain can_compact "
    "max_position",
    "probe_values.h": "largest_value",
    "probe_kv.h": "has_part in_window has_extended has_keys bytes_of block_of",
    "probe_state.h": "owned_alone",
    "state_pieces.h": "n_cell_ids",
    "part_edit.h": "window_has_room",
    "rollback.h": "n_back can_step_back",
    "disk.h": "claim_blocks",
    "sequences.h": "cells epoch is_pending needs_removal was_damaged whole_only next_pos input_key "
    "removal_of can_resume_at is_version row_is_held row_pos rows_are_whole was_restored suspect",
    "choices.h": "set code token",
    "shadow/tree.h": "n_known uses_at max_bytes n_bytes n_blocks n_runs memory gone policy",
    "shadow/votes.h": "knows of size withdraw forget drop alike memory",
    "sync.h": "try_lock lock lock_for_good unlock is_mine begin arm end is_wanted ask is_exiting "
    "finish",
}
"""Functions that allocate nothing, by header; of classes, their methods."""

LLAMA_ALLOCATES = re.compile(
    r"llama_(sampler_(?!free)|model_(meta|desc|chat|load)|supports|init)|_tokenize"
)
"""Functions of llama.h that allocate; the rest of those that are declared read a number."""


def declarations(file: str) -> Iterator[tuple[str, str, str]]:
    """Header, name and what follows the parentheses, of each function that a .pxd declares."""
    header = ""
    pending = ""
    for line in (NATIVE / file).read_text(encoding="utf-8").splitlines():
        found = re.match(r'cdef extern from "(.*?)"', line)
        if found:
            header = found[1]
            continue
        pending = (
            (pending + " " + line.split("#")[0]).strip() if pending else line.split("#")[0].rstrip()
        )
        if pending.count("(") > pending.count(")"):
            continue
        call = re.fullmatch(
            r"\s*[\w\[\]*&, ]*?[\s*&](\w+)\((?!\*).*\)\s*(except \+|noexcept)?", pending
        )
        if header and call:
            yield header, call[1], call[2] or ""
        pending = ""


def is_noexcept(header: str, name: str) -> bool:
    """Whether the header declares the function so, or defines it."""
    text = re.sub("//.*", "", (NATIVE / header).read_text(encoding="utf-8"))
    found = re.findall(rf"[\s*&]{name}\([^;{{}}]*?\)\s*(?:const\s*)?(noexcept)?\s*[;{{]", text)
    return bool(found) and all(found)


def our_declarations() -> Iterator[tuple[str, str, str]]:
    """What the .pxd files of our own headers declare, as `declarations` gives it."""
    for file in OUR_DECLARATIONS:
        yield from declarations(file)


def test_what_may_throw_is_caught_at_the_border() -> None:
    seen = list(our_declarations())
    assert len(seen) > 100
    bare = {
        f"{header}: {name}"
        for header, name, what in seen
        if not what
        and name not in READERS.get(header, "").split()
        and not is_noexcept(header, name)
    }
    assert bare == set()


def test_the_readers_exist() -> None:
    known = {(header, name) for header, name, _ in our_declarations()}
    assert {(h, name) for h, names in READERS.items() for name in names.split()} <= known


def test_what_allocates_in_llama_cpp_is_caught_at_the_border() -> None:
    seen = list(declarations("libllama.pxd"))
    assert len(seen) > 40
    assert {name for _, name, what in seen if not what and LLAMA_ALLOCATES.search(name)} == set()


def test_no_string_of_c_is_decoded_by_a_copy() -> None:
    """``text.decode()`` copies a std::string where nothing catches: ``_text(text)`` does not."""
    of_strings = re.compile(r"(lib\.(caught|take_notes)\(\)|\b(why|problem|notes|text))\.decode\(")
    for path in sorted(NATIVE.glob("*.pxi")):
        source = path.read_text(encoding="utf-8")
        strings = set(re.findall(r"cdef string (\w+)", source))
        for found in of_strings.finditer(source):
            name = found[3]
            assert name, f"{path.name}: {found[0]}"
            assert name not in strings, f"{path.name}: {found[0]}"


def test_no_string_is_made_from_bytes_by_cython() -> None:
    """It copies the std::string that it made where nothing catches; the copy in C++ is guarded."""
    for_tests = {"split_text"}
    text = "\n".join((NATIVE / file).read_text(encoding="utf-8") for file in OUR_DECLARATIONS)
    taking = re.findall(r"(\w+)\([^()]*const (?:vector\[)?string\b[^()]*\)", text)
    assert for_tests <= set(taking)
    assert set(taking) == for_tests


def definitions(folder: str) -> set[str]:
    """The functions that the files of a folder define and a header beside the folder declares."""
    headers = "\n".join(path.read_text(encoding="utf-8") for path in sorted(NATIVE.glob("*.h")))
    declared = set(re.findall(r"^[a-z][\w:<> *&]*?[ *&](\w+)\(", headers, flags=re.MULTILINE))
    found: set[str] = set()
    for path in sorted((NATIVE / folder).glob("*.cpp")):
        text = path.read_text(encoding="utf-8")
        shared = re.sub(r"^namespace \{$.*?^\}.*?$", "", text, flags=re.DOTALL | re.MULTILINE)
        starts = re.findall(
            r"^[a-z][\w:<> *&]*?[ *&](\w+)\([^;{}]*\)[ \w]*\{", shared, re.MULTILINE
        )
        found.update(starts)
    return found & declared


def test_a_build_without_the_fast_paths_has_every_function() -> None:
    fast, plain = definitions("fast"), definitions("plain")
    assert {"remove_cells", "move_cells_down", "seq_state_new", "state_place"} <= fast
    assert plain == fast
