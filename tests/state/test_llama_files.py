"""llama.cpp's own state files: what they contain, and that every other file is refused.

`test_llama_peer.py` compares with llama.cpp itself.
"""

from __future__ import annotations

import struct
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memory.kit import Make
from pykvcache import LlamaContext, SequenceState
from pykvcache._native import lib
from pykvcache.errors import (
    StateDamaged,
    StateError,
    StateFormatError,
    StateLayoutMismatch,
    StateModelMismatch,
    StateTrailingBytes,
    StateTruncated,
    StateVersionError,
)
from pykvcache.state import LlamaStateFile
from state.kit import WORDS, cells_of, refused

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
def taken(make_context: Make) -> tuple[LlamaContext, bytes, bytes]:
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
    ctx.save_llama_file(tmp_path / "f", 1, sync=False)
    assert len(ctx.load_llama_file(tmp_path / "f", 1).tokens) == 0


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
def test_invalid_packed_tokens_are_refused(
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
    with pytest.raises(TypeError, match="save_llama_file"):
        ctx.save_llama_file(1, path)  # type: ignore[arg-type]
    for raw in (b"", b"abc", bytes(3), b"\xff" * 8):
        with pytest.raises(StateFormatError):
            LlamaStateFile(raw)


@pytest.mark.skipif(OF_SEQUENCES > 3, reason="newer files say how keys are rotated")
def test_an_old_file_does_not_say_whether_keys_are_rotated(
    make_context: Make, tmp_path: Path
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
