"""What holds whichever way a sequence is taken and put: it continues, or nothing changes."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memory.kit import Case, Fresh, Make, apart
from pykvcache import LlamaContext, describe_state
from pykvcache.errors import (
    ClosedError,
    NoKvCacheSlot,
    SeqIdTooLarge,
    SequenceIdError,
    StateFileError,
    StateFileNotFound,
)
from state.kit import CASES, WORDS, cells_of, next_logits, refused
from support.builds import PLAIN
from support.models import RIGHT


@dataclass(frozen=True)
class Way:
    """The methods that take a sequence, or a whole context, and put it again."""

    taking: str
    putting: str
    is_whole: bool = False

    def take(self, ctx: LlamaContext, seq: Any, path: Path) -> Any:
        ids = () if self.is_whole else (seq,)
        if "save" not in self.taking:
            return getattr(ctx, self.taking)(*ids)
        getattr(ctx, self.taking)(path, *ids)
        return path

    def put(self, ctx: LlamaContext, taken: Any, seq: Any) -> None:
        getattr(ctx, self.putting)(taken, *(() if self.is_whole else (seq,)))

    def __str__(self) -> str:
        return self.taking + (" of all" if self.is_whole else "")


ARRAYS = Way("kv", "write_kv")
SEQUENCES = (
    Way("get_state", "set_state"),
    Way("save_sequence", "load_sequence"),
    Way("save_llama_file", "load_llama_file"),
    ARRAYS,
)
WHOLE = (
    Way("get_state", "set_state", is_whole=True),
    Way("save_context", "load_context", is_whole=True),
    Way("save_llama_file", "load_llama_file", is_whole=True),
)
OBJECTS = (
    Way("sequence_state", "restore_sequence"),
    Way("context_state", "restore_context", is_whole=True),
)
FILES = tuple(way for way in SEQUENCES + WHOLE if "save" in way.taking)
every_sequence = pytest.mark.parametrize("way", SEQUENCES, ids=str)
every_way = pytest.mark.parametrize("way", SEQUENCES + WHOLE, ids=str)


def on_every_case(*ways: Way) -> pytest.MarkDecorator:
    """``way`` and ``case``: each way on every memory that it fits."""
    pairs = product(ways, (case.values[0] for case in CASES))
    return pytest.mark.parametrize(
        ("way", "case"),
        [
            pytest.param(way, case, id=f"{way}-{case}")
            for way, case in pairs
            if way is not ARRAYS or (case.info.has_arrays and case.name != "t5")  # type: ignore[union-attr]
        ],
    )


@on_every_case(*SEQUENCES)
@pytest.mark.parametrize("n", [3, 110])
def test_a_restored_sequence_continues(
    way: Way, case: Case, n: int, make_context: Make, fresh_logits: Fresh, tmp_path: Path
) -> None:
    ctx, other = (make_context(case.name, **case.options) for _ in range(2))
    ctx.decode(WORDS[:n], seq_id=1)
    taken = way.take(ctx, 1, tmp_path / "a")
    other.decode(WORDS[200:220], seq_id=1)
    other.decode(WORDS[200:207], seq_id=2)
    for seq in (1, 2):
        way.put(other, taken, seq)
        assert seq == 2 or cells_of(other, 1) == cells_of(ctx, 1)
    # llama.cpp's own loading reuses window cells that no next token sees.
    assert PLAIN or cells_of(other, 1) == cells_of(ctx, 1)
    want = fresh_logits(case.name, [*WORDS[:n], 9])
    for one, seq in ((other, 2), (other, 1), (ctx, 1)):
        assert apart(next_logits(one, seq), want) < case.tolerance
    more = fresh_logits(case.name, [*WORDS[:n], 9, 11])
    assert apart(next_logits(other, 2, 11), more) < case.tolerance
    other.clear_kv_cache_seq(2)
    way.put(other, taken, 2)  # over nothing, next to another sequence
    assert apart(next_logits(other, 2), want) < case.tolerance


@on_every_case(*WHOLE)
def test_a_restored_context_continues_and_cells_stay_shared(
    way: Way, case: Case, make_context: Make, fresh_logits: Fresh, tmp_path: Path
) -> None:
    ctx, other = (make_context(case.name, **case.options) for _ in range(2))
    held = {0: WORDS[:70], 2: WORDS[:74], 3: WORDS[80:90]}
    ctx.decode(held[0], seq_id=0)
    ctx.copy_kv_cache_seq(0, 2)
    ctx.decode(WORDS[70:74], seq_id=2)
    ctx.decode(held[3], seq_id=3)
    other.decode(WORDS[:5], seq_id=1)
    way.put(other, way.take(ctx, None, tmp_path / "all"), None)
    assert other.get_state().tobytes() == ctx.get_state().tobytes()
    assert other.sequences() == ctx.sequences()
    assert other.n_cells_used == ctx.n_cells_used
    for seq, tokens in held.items():
        want = fresh_logits(case.name, [*tokens, 9])
        assert apart(next_logits(other, seq), want) < case.tolerance


@pytest.mark.hazard("S28")
@on_every_case(*SEQUENCES, *WHOLE)
def test_restoring_nothing_empties_the_target(
    way: Way, case: Case, make_context: Make, tmp_path: Path
) -> None:
    ctx = make_context(case.name, **case.options)
    nothing = way.take(ctx, 0, tmp_path / "none")
    for seq in (1, 2):
        ctx.decode(WORDS[:10], seq_id=seq)
    way.put(ctx, nothing, 2)
    assert list(ctx.sequences()) == ([] if way.is_whole else [1])


@pytest.mark.hazard("S32")
@on_every_case(*SEQUENCES, *WHOLE)
def test_a_restored_sequence_has_no_logits_and_others_keep_theirs(
    way: Way, case: Case, make_context: Make, tmp_path: Path
) -> None:
    ctx = make_context(case.name, **case.options)
    ctx.decode(WORDS[:10])
    row = ctx.logits()
    taken = way.take(ctx, 0, tmp_path / "a")
    if not way.is_whole:
        way.put(ctx, taken, 1)
    np.testing.assert_array_equal(ctx.logits(), row)
    ctx.decode(WORDS[10:11], seq_id=0)
    way.put(ctx, taken, 0)
    with pytest.raises(IndexError, match="are gone"):
        ctx.logits()


@pytest.mark.hazard("S1")
@every_way
def test_a_pending_shift_is_applied_before_a_sequence_is_taken(
    way: Way, make_context: Make, tmp_path: Path
) -> None:
    ctx, other = make_context("llama"), make_context("llama")
    ctx.decode(WORDS[:20])
    ctx.kv_cache_seq_add(0, 0, None, 7)
    way.put(other, way.take(ctx, 0, tmp_path / "a"), 0)
    assert other.kv_cache_seq_pos_min(0) == 7
    assert apart(next_logits(other), next_logits(ctx)) < RIGHT


@pytest.mark.hazard("S2", "S3")
@every_way
def test_a_pending_stream_copy_is_applied_and_overwrites_nothing(
    way: Way, make_context: Make, fresh_logits: Fresh, tmp_path: Path
) -> None:
    ctx = make_context("llama", kv_unified=False, n_ctx=1024)
    ctx.decode(WORDS[:20])
    ctx.copy_kv_cache_seq(0, 1)
    taken = way.take(ctx, 1, tmp_path / "a")
    ctx.decode(WORDS[40:60], seq_id=3)
    ctx.copy_kv_cache_seq(3, 2)  # pending: must not overwrite the restored cells
    way.put(ctx, taken, 2)
    ctx.decode(WORDS[30:32], seq_id=0)  # where llama.cpp would carry the copy out
    want = fresh_logits("llama", [*WORDS[:20], 9])
    for seq in (1,) if way.is_whole else (1, 2):
        assert apart(next_logits(ctx, seq), want) < RIGHT


@pytest.mark.hazard("S7", "S27")
@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba"])
@every_sequence
def test_a_sequence_that_finds_no_room_changes_nothing(
    way: Way, name: str, make_context: Make, tmp_path: Path
) -> None:
    source, target = make_context(name), make_context(name)
    source.decode(WORDS[:100])
    taken = way.take(source, 0, tmp_path / "a")
    for seq in range(3):
        target.decode(WORDS[:64], seq_id=seq)
    with refused(target, NoKvCacheSlot, match="100 cells.* 192 of 256 are taken"):
        way.put(target, taken, 3)
    target.clear_kv_cache_seq(0)
    for _ in range(2):  # the replaced cells make room
        way.put(target, taken, 1)
        assert target.kv_cache_seq_pos_max(1) == 99
    assert apart(next_logits(target, 1), next_logits(source)) < 10 * RIGHT


@pytest.mark.hazard("S4", "S6")
@every_sequence
def test_sequences_that_a_context_lacks_are_refused(
    way: Way, make_context: Make, tmp_path: Path
) -> None:
    ctx = make_context("llama", n_seq_max=2)
    ctx.decode(WORDS[:12])
    taken = way.take(ctx, 0, tmp_path / "a")
    ids: list[tuple[Any, type[Exception]]] = [
        *((bad, SequenceIdError) for bad in (-1, 2, 300)),
        (2**40, SeqIdTooLarge),
        *((bad, TypeError) for bad in ("0", 1.0, True, b"\1")),
    ]
    for bad, error in ids:
        with refused(ctx, error):
            way.put(ctx, taken, bad)
        with refused(ctx, error):
            way.take(ctx, bad, tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.hazard("S13")
@pytest.mark.skipif(os.name == "nt", reason="pipes and devices of POSIX")
@pytest.mark.parametrize("way", FILES, ids=str)
def test_files_that_cannot_be_read_or_written(way: Way, make_context: Make, tmp_path: Path) -> None:
    """A pipe would wait for ever; a rename would put a file in the place of a device."""
    ctx = make_context("llama")
    ctx.decode(WORDS[:12])
    folder, pipe, nowhere = (tmp_path / name for name in ("folder", "pipe", "no/where"))
    folder.mkdir()
    os.mkfifo(pipe)
    paths: list[tuple[Any, type[Exception]]] = [
        *((path, StateFileNotFound) for path in (nowhere, "")),
        *((path, StateFileError) for path in (folder, f"{nowhere}\0", pipe, "/dev/null")),
        *((path, TypeError) for path in (5, None, 1.0)),
    ]
    for path, error in paths:
        with refused(ctx, error) as loading:
            way.put(ctx, path, 0)
        with refused(ctx, error) as saving:
            way.take(ctx, 0, path)
        with pytest.raises(error):
            describe_state(path)
        if error is not TypeError:
            assert loading.value.filename == saving.value.filename == str(path)
        if error is StateFileNotFound:
            assert isinstance(loading.value, FileNotFoundError)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert sorted(tmp_path.iterdir()) == [folder, pipe]


@pytest.mark.parametrize("way", SEQUENCES + WHOLE + OBJECTS, ids=str)
def test_a_closed_context_raises_closed_error_before_any_other(
    way: Way, make_context: Make, tmp_path: Path
) -> None:
    ctx, fresh = make_context("llama"), make_context("llama")
    ctx.decode(WORDS[:5])
    taken = [way.take(ctx, 0, tmp_path / "a")]
    taken += [tmp_path / "none"] if way in FILES else []
    for closed in (ctx, fresh):
        closed.close()
        for one in taken:
            with pytest.raises(ClosedError):
                way.put(closed, one, 0)
        with pytest.raises(ClosedError):
            way.take(closed, 0, tmp_path / "b")
    assert not (tmp_path / "b").exists()
