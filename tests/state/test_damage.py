"""The damage matrix: no damaged file is ever accepted, and none changes what was there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from memory.kit import Make
from pykvcache import LlamaContext, LlamaSequence, SequenceState, describe_state
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
from pykvcache.state import ContextState
from pykvcache.state.container import parse
from state.kit import WORDS, refused
from support.examples import examples

KINDS = ["sequence", "context"]
# One with several parts, one with transposed values, one with a state.
NAMES = ["llama", "gemma3", "jamba"]

Bad = tuple[type[StateError], ...]
FLIPPED: Bad = (
    StateDamaged,
    StateFormatError,
    StateVersionError,
    StateTruncated,
    StateTrailingBytes,
)


def saved(ctx: LlamaContext, kind: str, path: Path) -> bytes:
    """Save 12 tokens of sequence 1, and leave other things in the context."""
    ctx.decode(WORDS[:12], seq_id=1)
    meta = {"name": "a \N{SNOWMAN} conversation"}
    if kind == "sequence":
        ctx.save_sequence(path, 1, tokens=WORDS[:12], metadata=meta)
    else:
        ctx.save_context(path, tokens={1: WORDS[:12]}, metadata=meta)
    ctx.decode(WORDS[40:45], seq_id=1)
    ctx.decode(WORDS[50:57], seq_id=2)
    return path.read_bytes()


def damaged(data: bytes) -> Iterator[tuple[bytes, Bad]]:
    """Yield damaged files, and what may be said of them."""
    rng = np.random.default_rng(1)
    tensors = parse(np.frombuffer(data, np.uint8)).tensors
    at = len(data) - sum(t.data.nbytes for t in tensors.values())
    places = list(range(at))  # the length, the header, the checksums
    cuts = {0, 1, 7, 8, 9, at - 1, at, at + 1}
    for tensor in tensors.values():
        if tensor.dtype == "I32":
            places += range(at, at + tensor.data.nbytes)
        at += tensor.data.nbytes
        cuts |= {at - 1, at, at + 1}
    places = places[:: 100 // examples(100)] + rng.integers(0, len(data), examples(1500)).tolist()
    for i, place in enumerate(places):
        bad = bytearray(data)
        bad[place] ^= 1 << int(rng.integers(8)) if i % 7 else 255
        yield bytes(bad), FLIPPED
    cuts |= {*rng.integers(0, len(data), examples(500)).tolist()}
    for n in sorted(n for n in cuts if n < len(data)):
        yield data[:n], (StateTruncated if n else StateFormatError,)
    for more in (b"\0", b" ", bytes(8), bytes(4096), data):
        yield data + more, (StateTrailingBytes,)


@pytest.mark.hazard("S8", "S9", "S24", "S29")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_no_damaged_file_is_accepted(
    name: str, kind: str, make_context: Make, tmp_path: Path
) -> None:
    """Bits and bytes that differ, an end that is missing, bytes after the end."""
    ctx = make_context(name)
    path = tmp_path / "a"
    data = saved(ctx, kind, path)
    read = SequenceState.from_bytes if kind == "sequence" else ContextState.from_bytes

    def load() -> object:
        return ctx.load_sequence(path, 1) if kind == "sequence" else ctx.load_context(path)

    before = ctx.get_state().tobytes()
    for i, (bad, wanted) in enumerate(damaged(data)):
        with pytest.raises(wanted):
            read(bad)
        if i % 50 and len(bad) <= len(data):
            continue
        path.write_bytes(bad)
        with pytest.raises(wanted, match=f"\\A{re.escape(str(path))}: "):
            load()
        if len(bad) != len(data):
            with pytest.raises(wanted):
                describe_state(path)
    assert ctx.get_state().tobytes() == before
    path.write_bytes(data)
    load()


def gguf_of(folder: Path) -> bytes:
    from support.models import make_model

    return make_model("llama", folder).read_bytes()


def plain_safetensors(_: Path) -> bytes:
    numpy = pytest.importorskip("safetensors.numpy")
    data: bytes = numpy.save({"k": np.zeros((3, 4), np.float32)}, {"format": "pt"})
    return data


FOREIGN: dict[str, Callable[[Path], bytes]] = {
    "empty": lambda _: b"",
    "png": lambda _: b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 4,
    "text": lambda _: b"Once upon a time there was a little girl named Lily.\n" * 10,
    "zeros": lambda _: bytes(4096),
    "gguf": gguf_of,
    "safetensors": plain_safetensors,
    "json": lambda _: (12).to_bytes(8, "little") + b'{"a":[1,2]} ',
    "list": lambda _: (8).to_bytes(8, "little") + b"[1,2,3] ",
    "deep": lambda _: (100_000).to_bytes(8, "little") + b"[" * 50_000 + b"]" * 50_000,
    "number": lambda _: (8).to_bytes(8, "little") + b"1" * 8,
    "digits": lambda _: (9000).to_bytes(8, "little") + b'{"a": ' + b"1" * 8993 + b"}",
    "utf-16": lambda _: (8).to_bytes(8, "little") + "{}  ".encode("utf-16-le"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_other_files_are_refused_as_states(
    what: str, make_context: Make, model_folder: Path, tmp_path: Path
) -> None:
    ctx = make_context("llama")
    ctx.decode(WORDS[:5], seq_id=1)
    path = tmp_path / "foreign"
    path.write_bytes(FOREIGN[what](model_folder))
    with refused(ctx, StateFormatError):
        ctx.load_sequence(path, 1)
    with refused(ctx, StateFormatError):
        ctx.load_context(path)
    with pytest.raises(StateFormatError):
        describe_state(path)
    with pytest.raises(StateFormatError):
        SequenceState.load(path, mapped=False)


def test_file_errors_begin_with_the_name(
    make_context: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the message contains the name by chance."""
    ctx = make_context("llama")
    ctx.decode(WORDS[:5], seq_id=1)
    monkeypatch.chdir(tmp_path)
    ctx.save_sequence("a", 1)
    with pytest.raises(StateError, match=r"\Aa: .*file holds no tokens"):
        LlamaSequence.load(ctx, "a")
    for other in (make_context("gemma3"), make_context("llama", type_k="f16")):
        with refused(other, StateModelMismatch, StateLayoutMismatch, match=r"\Aa: "):
            other.load_sequence("a", 1)
    ctx.save_llama_file("llama", 1, WORDS[:5])
    reads: list[Callable[[str], object]] = [
        lambda path: ctx.load_sequence(path, 1),
        lambda path: LlamaSequence.load(ctx, path),
        lambda path: ctx.load_llama_file(path, 1),
        SequenceState.load,
        ctx.load_context,
        ContextState.load,
        describe_state,
    ]
    for bad in (b"", b"ab", b"hello", b"text" * 9):
        Path("a").write_bytes(bad)
        for read in reads:
            with pytest.raises(StateError, match=r"\Aa: ") as error:
                read("a")
            assert str(error.value).count("a: ") == 1


def test_sequence_files_are_not_context_files(make_context: Make, tmp_path: Path) -> None:
    ctx = make_context("llama")
    saved(ctx, "sequence", tmp_path / "one")
    ctx.clear_kv_cache()
    saved(ctx, "context", tmp_path / "all")
    with refused(ctx, StateFormatError, match="state of a context"):
        ctx.load_sequence(tmp_path / "all", 1)
    for raw in (ctx.get_state(1), ctx.get_state()):
        with refused(ctx, StateFormatError):
            SequenceState.from_bytes(raw)
    with refused(ctx, StateFormatError, match="state of a sequence"):
        ctx.load_context(tmp_path / "one")
    with refused(ctx, TypeError):
        ctx.restore_context(SequenceState.load(tmp_path / "one"))  # type: ignore[arg-type]
    with refused(ctx, TypeError):
        ctx.restore_sequence(ContextState.load(tmp_path / "all"), 1)  # type: ignore[arg-type]


def test_an_unsupported_version_is_named(
    make_context: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = make_context("llama")
    ctx.decode(WORDS[:5], seq_id=1)
    for version in ("0", "2", "", "999999999999999999999", "one"):
        with monkeypatch.context() as patch:
            patch.setattr("pykvcache.state.container.VERSION", version)
            ctx.save_sequence(tmp_path / "a", 1)
        with refused(ctx, StateVersionError, match=f"format version {version}"):
            ctx.load_sequence(tmp_path / "a", 1)
        with pytest.raises(StateVersionError):
            describe_state(tmp_path / "a")
