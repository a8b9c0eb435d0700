"""llama.cpp's own state files: what they contain, and that every other file is refused.

`test_llama_peer.py` compares with llama.cpp itself.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from memory.kit import Case
from pykvcache import LlamaContext, SequenceState
from pykvcache._native import lib
from pykvcache.errors import (
    ClosedError,
    NoKvCacheSlot,
    PositionError,
    SequenceIdError,
    StateDamaged,
    StateError,
    StateFileError,
    StateFileNotFound,
    StateFormatError,
    StateLayoutMismatch,
    StateModelMismatch,
    StateTrailingBytes,
    StateTruncated,
    StateVersionError,
    UnsupportedOperation,
)
from pykvcache.state import LlamaStateFile
from state.kit import CASES, WORDS, cells_of, next_logits, refused
from support.builds import SOURCES

if TYPE_CHECKING:
    from conftest import ContextFactory, FreshLogits

GGSQ, GGSN, (OF_SEQUENCES, OF_CONTEXTS) = 0x67677371, 0x6767736E, lib.state_file_versions
READ = (2, 3) if OF_SEQUENCES == 3 else (OF_SEQUENCES,)
TOKENS = WORDS[:12]


def packed(*words: int) -> bytes:
    return np.array(words, np.int64).astype("<u4").tobytes()


def file_of(magic: int, version: int, tokens: bytes, state: bytes) -> bytes:
    return struct.pack("<III", magic, version, len(tokens) // 4) + tokens + state


def server_tokens(tokens: Any, media: tuple[tuple[int, bytes], ...] = ()) -> bytes:
    """Tokens as llama-server packs them, with images at some places."""
    data = packed(-1, 1, len(tokens), *tokens, len(media), *(at for at, _ in media))
    data += b"".join(struct.pack("<I", len(chunk)) + chunk for _, chunk in media)
    return data + bytes(-len(data) % 4)


@pytest.fixture
def taken(make_context: ContextFactory) -> tuple[LlamaContext, bytes, bytes]:
    """A context, and earlier raw states of its 12 tokens and of all of it."""
    ctx = make_context("llama")
    ctx.decode(TOKENS, seq_id=1)
    sequence, whole = ctx.get_state(1).tobytes(), ctx.get_state().tobytes()
    ctx.decode(WORDS[40:45], seq_id=1)
    ctx.decode(WORDS[50:57], seq_id=2)
    return ctx, sequence, whole


def test_a_file_is_a_header_tokens_and_the_state(
    taken: tuple[LlamaContext, bytes, bytes], tmp_path: Path
) -> None:
    ctx, sequence, whole = taken
    want = file_of(GGSQ, OF_SEQUENCES, packed(*TOKENS), sequence[8:])
    assert LlamaStateFile(sequence, TOKENS).to_bytes() == want
    assert LlamaStateFile(sequence, TOKENS).save(tmp_path / "f") == len(want)
    assert (tmp_path / "f").read_bytes() == want
    file = LlamaStateFile.load(tmp_path / "f")
    assert (file.kind, file.version, file.n_media) == ("sequence", OF_SEQUENCES, 0)
    assert file.tokens.tolist() == TOKENS.tolist()
    assert not file.tokens.flags.writeable
    ctx.set_state(file.state, 1)
    assert cells_of(ctx, 1) == sequence[8:]
    assert repr(file).startswith(f"<LlamaStateFile: sequence, version {OF_SEQUENCES}, 12 tokens, ")
    want = file_of(GGSN, OF_CONTEXTS, packed(7), whole)
    assert LlamaStateFile(whole, [7]).to_bytes() == want
    other = LlamaStateFile.from_bytes(bytearray(want))
    assert (other.kind, other.version, other.tokens.tolist()) == ("context", OF_CONTEXTS, [7])
    assert other.state.tobytes() == whole
    assert LlamaStateFile(whole).to_bytes() == file_of(GGSN, OF_CONTEXTS, b"", whole)


@pytest.mark.parametrize("case", CASES)
def test_every_memory_goes_through_a_file(
    case: Case, make_context: ContextFactory, fresh_logits: FreshLogits, tmp_path: Path
) -> None:
    ctx = make_context(case.name, **case.options)
    ctx.decode(WORDS[:40], seq_id=1)
    size = ctx.save_llama_file(tmp_path / "s", 1, WORDS[:40])
    assert size == (tmp_path / "s").stat().st_size
    ctx.save_llama_file(tmp_path / "c", tokens=WORDS[:40])
    ctx.decode(WORDS[70:75], seq_id=2)
    assert ctx.load_llama_file(tmp_path / "s", 2).tokens.tolist() == WORDS[:40].tolist()
    want = fresh_logits(case.name, [*WORDS[:40], 9])
    assert np.abs(next_logits(ctx, 2) - want).max() < case.tolerance
    assert ctx.load_llama_file(tmp_path / "c", mapped=False).kind == "context"
    assert list(ctx.sequences()) == [1]
    assert np.abs(next_logits(ctx, 1) - want).max() < case.tolerance


@pytest.mark.hazard("S11", "S12")
@pytest.mark.parametrize("name", ["llama", "mamba", "jamba"])
def test_tokens_are_as_many_as_the_positions(
    name: str, make_context: ContextFactory, tmp_path: Path
) -> None:
    ctx = make_context(name)
    ctx.decode(TOKENS, seq_id=1)
    for wrong in (TOKENS[:11], WORDS[:13], []):
        with pytest.raises(ValueError, match=f"{len(wrong)} tokens given, but the .* holds 12"):
            ctx.save_llama_file(tmp_path / "f", 1, wrong)
    with pytest.raises(TypeError):
        ctx.save_llama_file(tmp_path / "f", 1, [0.5] * 12)  # type: ignore[list-item]
    assert not list(tmp_path.iterdir())
    ctx.save_llama_file(tmp_path / "f", 1)
    assert len(ctx.load_llama_file(tmp_path / "f", 1).tokens) == 0
    ctx.save_llama_file(tmp_path / "f", 3, [])
    ctx.load_llama_file(tmp_path / "f", 1)
    assert ctx.kv_cache_seq_pos_max(1) == -1


def test_tokens_of_llama_server_are_unpacked(
    taken: tuple[LlamaContext, bytes, bytes], tmp_path: Path
) -> None:
    """Newer servers pack them in every file version; older ones wrote plain tokens."""
    ctx, sequence, _ = taken
    image = (*TOKENS[:4], -1, -1, -1, *TOKENS[7:])
    plain, own = packed(*TOKENS), server_tokens(TOKENS)
    odd = server_tokens(image, ((4, b"odd image"),))
    contents = ((TOKENS, 0, plain), (TOKENS, 0, own), (image, 1, odd))
    for version, (tokens, n_media, data) in product(READ, contents):
        (tmp_path / "f").write_bytes(file_of(GGSQ, version, data, sequence[8:]))
        file = ctx.load_llama_file(tmp_path / "f", 1)
        assert (file.version, file.n_media) == (version, n_media)
        assert file.tokens.tolist() == list(tokens)
        assert cells_of(ctx, 1) == sequence[8:]


IMAGE = server_tokens((5, -1, 6), ((1, b"chunk"),))
WRONG: dict[str, tuple[bytes, type[StateError]]] = {
    "nothing after the mark": (packed(-1), StateDamaged),
    "another version": (packed(-1, 2, 0, 0), StateVersionError),
    "too many tokens": (packed(-1, 1, 2**32 - 1, 5), StateDamaged),
    "no media": (packed(-1, 1, 1, 5), StateDamaged),
    "too many media": (packed(-1, 1, 1, -1, 2**31, 0), StateDamaged),
    "media where a token is": (server_tokens((5, 6), ((1, b"chunk"),)), StateDamaged),
    "media after the last token": (server_tokens((5, -1), ((2, b"chunk"),)), StateDamaged),
    "no data of the media": (IMAGE[:-12], StateDamaged),
    "data of the media cut short": (IMAGE[:-8], StateDamaged),
    "words after the end": (IMAGE + packed(0), StateDamaged),
    "a media place without media": (server_tokens((5, -1)), StateDamaged),
    "a token below 0": (server_tokens((5, -2)), StateModelMismatch),
    "a plain token below 0": (packed(5, -1), StateModelMismatch),
    "a token of another model": (packed(5, 10**6), StateModelMismatch),
}


@pytest.mark.parametrize("name", WRONG)
def test_tokens_that_cannot_be_are_refused(
    name: str, taken: tuple[LlamaContext, bytes, bytes], tmp_path: Path
) -> None:
    ctx, sequence, _ = taken
    tokens, error = WRONG[name]
    (tmp_path / "f").write_bytes(file_of(GGSQ, OF_SEQUENCES, tokens, sequence[8:]))
    with refused(ctx, error):
        ctx.load_llama_file(tmp_path / "f", 1)


def test_other_files_are_refused(taken: tuple[LlamaContext, bytes, bytes], tmp_path: Path) -> None:
    ctx, sequence, whole = taken
    path = tmp_path / "f"
    own = tmp_path / "own"
    ctx.save_sequence(own, 1)
    good = file_of(GGSQ, OF_SEQUENCES, packed(*TOKENS), sequence[8:])
    for data, error, match in (
        (b"", StateFormatError, "empty"),
        (b"qsg", StateFormatError, "does not start with ggsq or ggsn"),
        (b"GGUF" + good[4:], StateFormatError, "does not start with ggsq or ggsn"),
        (own.read_bytes(), StateFormatError, "load_sequence"),
        (good[:4] + packed(1) + good[8:], StateVersionError, f"version 1: .*.*{OF_SEQUENCES}"),
        (good[:4] + packed(99) + good[8:], StateVersionError, "version 99"),
        (good[:8] + packed(2**32 - 1) + good[12:], StateTruncated, "within its 4294967295 tokens"),
        (good + b"x", StateTrailingBytes, ""),
        (file_of(GGSN, 9, b"", whole), StateVersionError, f"version 9: .*{OF_CONTEXTS}"),
        (file_of(GGSN, OF_CONTEXTS, b"", whole), StateFormatError, "holds a context"),
        (file_of(GGSQ, OF_SEQUENCES, b"", whole), StateError, ""),
    ):
        path.write_bytes(data)
        with refused(ctx, *((error,) if error is not StateError else ()), match=match or None):
            ctx.load_llama_file(path, 1)
    path.write_bytes(good)
    with refused(ctx, StateFormatError, match="holds a sequence: pass its new seq_id"):
        ctx.load_llama_file(path)
    with refused(ctx, StateFormatError, match="load_llama_file"):
        ctx.load_sequence(path, 1)
    with pytest.raises(StateFormatError, match="load_llama_file"):
        SequenceState.load(path)
    for seq_id in (-1, 4):
        with refused(ctx, SequenceIdError):
            ctx.load_llama_file(path, seq_id)
        with refused(ctx, SequenceIdError):
            ctx.save_llama_file(path, seq_id)
    with pytest.raises(StateFileNotFound):
        ctx.load_llama_file(tmp_path / "none", 1)
    with pytest.raises(StateFileError):
        ctx.load_llama_file(tmp_path, 1)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(StateFileError):
            ctx.load_llama_file(tmp_path / "pipe", 1)
    for raw in (b"", b"abc", bytes(3), b"\xff" * 8):
        with pytest.raises(StateFormatError):
            LlamaStateFile(raw)


@pytest.mark.hazard("S8", "S9")
@pytest.mark.parametrize("kind", ["sequence", "context"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba"])
def test_every_truncation_is_refused(
    kind: str, name: str, make_context: ContextFactory, tmp_path: Path
) -> None:
    ctx = make_context(name)
    ctx.decode(TOKENS, seq_id=1)
    seq_id = 1 if kind == "sequence" else None
    ctx.save_llama_file(tmp_path / "f", seq_id, TOKENS)
    whole = (tmp_path / "f").read_bytes()
    ctx.decode(WORDS[50:57], seq_id=2)
    cuts = {*range(1, 400, 9), *np.linspace(400, len(whole) - 1, 16).astype(int).tolist()}
    with refused(ctx, StateTruncated, StateFormatError):
        for n in sorted(cuts):
            (tmp_path / "f").write_bytes(whole[:n])
            with pytest.raises((StateTruncated, StateFormatError)):
                ctx.load_llama_file(tmp_path / "f", seq_id)
        ctx.load_llama_file(tmp_path / "f", seq_id)


@pytest.mark.parametrize("kind", ["sequence", "context"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba"])
def test_damage_before_the_values_is_an_error_or_another_valid_state(
    kind: str, name: str, make_context: ContextFactory, tmp_path: Path
) -> None:
    """Random bytes before the values: an error with nothing changed, or another valid state."""
    ctx = make_context(name)
    ctx.decode(TOKENS, seq_id=1)
    seq_id = 1 if kind == "sequence" else None
    ctx.save_llama_file(tmp_path / "f", seq_id, TOKENS)
    good = (tmp_path / "f").read_bytes()
    (tmp_path / "g").write_bytes(good)
    before = ctx.get_state().tobytes()
    rng = np.random.default_rng(int(os.environ.get("PYKVCACHE_FUZZ_SEED", "11")))
    rounds = 5000 if "PYKVCACHE_FUZZ_SEED" in os.environ else 60  # `make fuzz`
    outcomes = {"refused": 0, "loaded": 0}
    for _ in range(rounds):
        data = bytearray(good)
        for _ in range(rng.integers(1, 4)):
            data[rng.integers(0, 500)] = rng.integers(0, 256)
        (tmp_path / "f").write_bytes(data)
        try:
            ctx.load_llama_file(tmp_path / "f", seq_id)
        except (StateError, NoKvCacheSlot, PositionError):
            outcomes["refused"] += 1
            assert ctx.get_state().tobytes() == before
        else:
            outcomes["loaded"] += 1  # another token or position, or a value
            if ctx.kv_cache_seq_pos_max(1) < 1000:
                next_logits(ctx, 1, 5)
            ctx.clear_kv_cache()
            ctx.load_llama_file(tmp_path / "g", seq_id)
            assert ctx.get_state().tobytes() == before
    assert outcomes["refused"] > rounds / 3
    ctx.load_llama_file(tmp_path / "g", seq_id)


def test_values_that_are_not_numbers_are_refused(
    taken: tuple[LlamaContext, bytes, bytes], tmp_path: Path
) -> None:
    """A file has no checksum, but NaN and infinity would reach other sequences."""
    ctx, sequence, _ = taken
    for value in (np.nan, np.inf):
        data = bytearray(LlamaStateFile(sequence, TOKENS).to_bytes())
        data[-4:] = np.float32(value).tobytes()
        (tmp_path / "f").write_bytes(data)
        with refused(ctx, StateDamaged):
            ctx.load_llama_file(tmp_path / "f", 1)


def test_the_file_of_another_memory_is_refused(
    make_context: ContextFactory, tmp_path: Path
) -> None:
    llama, jamba, other = (
        make_context("llama"),
        make_context("jamba"),
        make_context("llama", type_k="f16"),
    )
    for ctx in (llama, jamba, other):
        ctx.decode(TOKENS)
    llama.save_llama_file(tmp_path / "f", 0, TOKENS)
    for ctx in (jamba, other):
        with refused(ctx, StateLayoutMismatch, StateDamaged, StateTruncated):
            ctx.load_llama_file(tmp_path / "f", 0)


@pytest.mark.skipif(OF_SEQUENCES > 3, reason="newer files say how keys are rotated")
def test_an_old_file_does_not_say_whether_keys_are_rotated(
    make_context: ContextFactory, tmp_path: Path
) -> None:
    """Between the two versions quantised keys began to be stored in a Hadamard basis."""
    ctx = make_context("llama_h64", type_k="q8_0")
    ctx.decode(TOKENS)
    ctx.save_llama_file(tmp_path / "f", 0, TOKENS)
    data = bytearray((tmp_path / "f").read_bytes())
    ctx.load_llama_file(tmp_path / "f", 1)
    data[4] = 2
    (tmp_path / "f").write_bytes(data)
    with refused(ctx, StateLayoutMismatch, match="version 2"):
        ctx.load_llama_file(tmp_path / "f", 1)


def test_models_without_states_and_closed_contexts(
    make_context: ContextFactory, taken: tuple[LlamaContext, bytes, bytes], tmp_path: Path
) -> None:
    ctx, sequence, _ = taken
    LlamaStateFile(sequence, TOKENS).save(tmp_path / "f")
    bert = make_context("bert")
    calls: tuple[Callable[[], Any], ...] = (
        lambda: bert.save_llama_file(tmp_path / "g", 0),
        lambda: bert.load_llama_file(tmp_path / "f", 0),
    )
    for call in calls:
        with pytest.raises((UnsupportedOperation, StateModelMismatch)):
            call()
    ctx.close()
    for call in (
        lambda: ctx.save_llama_file(tmp_path / "g", 1),
        lambda: ctx.load_llama_file(tmp_path / "none", 1),
    ):
        with pytest.raises(ClosedError):
            call()
    assert not (tmp_path / "g").exists()


def test_a_save_that_fails_leaves_the_old_file(
    taken: tuple[LlamaContext, bytes, bytes], tmp_path: Path
) -> None:
    ctx, _, _ = taken
    path = tmp_path / "f"
    ctx.save_llama_file(path, 1, sync=False)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="tokens given"):
        ctx.save_llama_file(path, 1, [1])
    with pytest.raises(StateFileError):
        ctx.save_llama_file(tmp_path / "no" / "f", 1)
    with pytest.raises(TypeError, match="save_llama_file"):
        ctx.save_llama_file(1, path)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        ctx.save_llama_file(path, 1, sync=1)  # type: ignore[arg-type]
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_example_of_the_document_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """docs/state-format.md: a slot of llama-server is loaded, continued and written again."""
    text = (Path(__file__).parents[2] / "docs" / "state-format.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "state-format.md", "exec"), {})
    assert capsys.readouterr().out == "7 tokens: Lucy has a red kite.\n"
    assert len(LlamaStateFile.load("slot.bin").tokens) > 7 + 8


@pytest.mark.skipif(not SOURCES.is_dir(), reason="llama.cpp's sources are elsewhere")
def test_the_versions_are_those_of_the_header() -> None:
    text = (SOURCES / "include" / "llama.h").read_text(encoding="utf-8")
    found = [re.search(rf"LLAMA_{n}_VERSION (\d+)", text) for n in ("STATE_SEQ", "SESSION")]
    assert tuple(int(m[1]) for m in found if m) == lib.state_file_versions
