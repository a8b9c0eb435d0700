"""Files with valid checksums and invalid contents."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memory.kit import Make
from pykvcache import SequenceState, describe_state
from pykvcache.errors import (
    NoKvCacheSlot,
    StateDamaged,
    StateError,
    StateFormatError,
    StateLayoutMismatch,
    StateVersionError,
)
from pykvcache.state import ContextState
from pykvcache.state.container import Tensor
from state.kit import WORDS, Tensors, Text, forged, ints, refused

Edit = Callable[[Text, Tensors], None]
DEEP = "[" * 50_000 + "]" * 50_000


def text(**changes: Any) -> Edit:
    return lambda text, _: text.update(changes)


def layout(**changes: Any) -> Edit:
    """Change keys of the first part."""

    def edit(text: Text, _: Tensors) -> None:
        parts = json.loads(text["layout"])
        parts[0] |= changes
        text["layout"] = json.dumps(parts)

    return edit


def row(at: int, value: Any) -> Edit:
    """Change what the layout says of the first tensor."""

    def edit(text: Text, _: Tensors) -> None:
        parts = json.loads(text["layout"])
        parts[0]["rows"][0][at] = value
        text["layout"] = json.dumps(parts)

    return edit


def finger(**changes: Any) -> Edit:
    def edit(text: Text, _: Tensors) -> None:
        text["fingerprint"] = json.dumps(json.loads(text["fingerprint"]) | changes)

    return edit


def drop(name: str) -> Edit:
    return lambda _, tensors: tensors.pop(name) and None


def put(name: str, values: Any) -> Edit:
    return lambda _, tensors: ints(tensors, name, values)


def shape(name: str, shape: tuple[int, ...], dtype: str | None = None) -> Edit:
    def edit(_: Text, tensors: Tensors) -> None:
        old = tensors[name]
        tensors[name] = replace(old, shape=shape, dtype=dtype or old.dtype)

    return edit


def shorter(name: str) -> Edit:
    """One cell less, consistently said."""

    def edit(_: Text, tensors: Tensors) -> None:
        old = tensors[name]
        data = old.data.reshape(old.shape[0], -1)[:-1].reshape(-1)
        tensors[name] = Tensor(name, old.dtype, (old.shape[0] - 1, *old.shape[1:]), data)

    return edit


def spoil(_: Text, tensors: Tensors) -> None:
    """Make the last values NaN, in every type of float."""
    name = [name for name in tensors if name.rpartition(".")[2] in ("k", "v", "r", "s")][-1]
    data = tensors[name].data.copy()
    data.reshape(-1)[-8:] = 0xFF
    tensors[name] = replace(tensors[name], data=data)


P, K = "attention.positions", "attention.layers.0.k"
HERE = np.arange(12)
# What is refused when it is read, all as StateDamaged.
UNREADABLE: dict[str, Edit] = {
    "no fingerprint": lambda text, _: text.pop("fingerprint") and None,
    "no layout": lambda text, _: text.pop("layout") and None,
    "no user": lambda text, _: text.pop("user") and None,
    "no first": lambda text, _: text.pop("first") and None,
    "no n_tokens": lambda text, _: text.pop("n_tokens") and None,
    "n_tokens": text(n_tokens="13"),
    "first": text(first="3"),
    "negative first": text(first="-3"),
    "deep user": text(user=DEEP),
    "user depth": text(user='{"a": ' + "[" * 101 + "]" * 101 + "}"),
    "user list": text(user="[]"),
    "user nan": text(user='{"a": NaN}'),
    "fingerprint list": text(fingerprint="[]"),
    "model": finger(model=5),
    "memory": finger(memory=None),
    "rope": finger(rope=[1, 2]),
    "rope values": finger(rope={"base": "x"}),
    "digest": finger(rope_digest=1),
    "adapters": finger(adapters=[1]),
    "n_swa": finger(n_swa="x"),
    "unknown fact": finger(colour="red"),
    "layout text": text(layout="nonsense"),
    "layout empty": text(layout="[]"),
    "part": layout(part="whatever"),
    "rows": layout(rows="abc"),
    "short row": layout(rows=[["k", 0, 0]]),
    "n_layer": layout(n_layer=-1),
    "extended": layout(extended=True),
    "v_trans": layout(v_trans=False),
    "row bytes": row(4, 64),
    "huge row bytes": row(4, 2**61 + 128),
    "head": row(6, 7),
    "what": row(0, "../../k"),
    "type": row(2, 1),
    "negative type": row(2, -1),
    "metadata that is no text": text(note=5),
    "no positions": drop(P),
    "no keys": drop(K),
    "negative position": put(P, [-1, *range(1, 12)]),
    "disordered": put(P, [0, 2, 1, *range(3, 12)]),
    "fewer positions": put(P, HERE[:11]),
    "positions as floats": shape(P, (12,), "F32"),
    "keys as integers": shape(K, (12, 2, 16), "I32"),
    "keys of another shape": shape(K, (12, 16, 2)),
    "keys as bytes": shape(K, (12, 128), "U8"),
    "fewer keys": shorter(K),
    "fewer tokens": put("tokens", WORDS[:11]),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_inconsistent_files_are_damaged(what: str, make_context: Make, tmp_path: Path) -> None:
    ctx = make_context("llama")
    ctx.decode(WORDS[:12], seq_id=1)
    good = ctx.sequence_state(1, WORDS[:12], {"a": 1}).to_bytes()
    SequenceState.from_bytes(forged(good, lambda *_: None))
    path = tmp_path / "forged"
    path.write_bytes(forged(good, UNREADABLE[what]))
    with refused(ctx, StateDamaged):
        ctx.load_sequence(path, 1)
    with suppress(StateDamaged):
        describe_state(path)  # it sees the header only


LISTED: dict[str, dict[str, Any]] = {
    "overlapping": {"data_offsets": (-4, -4)},
    "a gap": {"data_offsets": (4, 4)},
    "another shape": {"shape": [13, 2, 16]},
    "another type": {"dtype": "F16"},
    "an unknown type": {"dtype": "F64"},
    "many dimensions": {"shape": [1] * 6 + [12, 2, 16]},
    "a float": {"shape": [12.0, 2, 16]},
}


@pytest.mark.parametrize("what", LISTED)
def test_tensors_that_are_listed_wrongly_are_damaged(what: str, make_context: Make) -> None:
    """The header's own checksum is right."""
    ctx = make_context("llama")
    ctx.decode(WORDS[:12])
    data = ctx.sequence_state(0).to_bytes(checksum="sha256")
    end = 8 + int.from_bytes(data[:8], "little")
    header, table = json.loads(data[8:end]), data[end + 32 :]
    for change in ({}, LISTED[what]):
        begin, stop = header[K]["data_offsets"]
        by = change.get("data_offsets", (0, 0))
        header[K] |= change | {"data_offsets": [begin + by[0], stop + by[1]]}
        text = json.dumps(header).encode()
        start = len(text).to_bytes(8, "little") + text
        bad = start + sha256(start).digest() + table
        if not change:
            SequenceState.from_bytes(bad)
    with pytest.raises(StateDamaged, match="list of tensors") as caught:
        SequenceState.from_bytes(bad)
    assert caught.value.what == "header"


# What can be read, but does not fit the context.
UNFIT: dict[str, tuple[str, Edit, type[StateError] | type[NoKvCacheSlot]]] = {
    "last position": ("llama", put(P, [*range(11), 2**31 - 1]), StateDamaged),
    "parts": ("gemma3", put("window.positions", [*range(11), 12]), StateDamaged),
    "no window": ("gemma3", put("window.positions", HERE + 1), StateDamaged),
    "states": ("jamba", put("recurrent.positions", [3]), StateDamaged),
    "two states": ("mamba", put("recurrent.positions", [11, 11]), StateDamaged),
    "attention": ("jamba", put(P, HERE * 2), StateDamaged),
    "adapters": ("llama", finger(adapters=["x"]), StateLayoutMismatch),
    "memory": ("llama", finger(memory="recurrent"), StateLayoutMismatch),
    "causal": ("llama", finger(causal=False), StateLayoutMismatch),
    "part": ("jamba", lambda t, _: first_part(t), StateLayoutMismatch),
    "layers": ("llama", layout(n_layer=3), StateLayoutMismatch),
    "tensors": ("llama", layout(rows=[]), StateLayoutMismatch),
    "layer": ("llama", row(1, 1), StateLayoutMismatch),
    "elements": ("llama", row(3, 2**62 - 1), StateLayoutMismatch),
    "rotation": ("llama", row(7, 64), StateLayoutMismatch),
    "huge rotation": ("llama", row(7, 2**40), StateLayoutMismatch),
    **{f"NaN in {n}": (n, spoil, StateDamaged) for n in ("llama", "gemma3", "mamba", "jamba")},
}


def apart(base: str, window: str) -> Edit:
    """Both parts end alike, and the window holds a position that the other part does not."""

    def edit(_: Text, tensors: Tensors) -> None:
        ints(tensors, base, [0, *range(2, 13)])
        ints(tensors, window, HERE + 1)

    return edit


@pytest.mark.parametrize("shift", [-1, -4])
def test_a_window_with_other_positions_is_damaged(shift: int, make_context: Make) -> None:
    """A shift that is valid for one part would move cells of the other below 0."""
    ctx = make_context("gemma3")
    ctx.decode(WORDS[:12], seq_id=1)
    one, whole = ctx.sequence_state(1).to_bytes(), ctx.context_state().to_bytes()
    bad = forged(one, apart(P, "window.positions"))
    with refused(ctx, StateDamaged, match="positions which its attention part"):
        ctx.restore_sequence(SequenceState.from_bytes(bad), 1)
    bad = forged(whole, apart("attention.0.positions", "window.0.positions"))
    with refused(ctx, StateDamaged, match="positions which its attention part"):
        ctx.restore_context(ContextState.from_bytes(bad))
    ctx.kv_cache_seq_add(1, 6, 12, 4)
    ctx.kv_cache_seq_add(1, 10, 16, shift)
    assert ctx.kv_cache_seq_pos_max(1) == 15 + shift


def first_part(text: Text) -> None:
    text["layout"] = json.dumps(json.loads(text["layout"])[:1])


@pytest.mark.hazard("S21")
@pytest.mark.parametrize("what", UNFIT)
def test_a_state_that_does_not_fit_changes_nothing(what: str, make_context: Make) -> None:
    name, edit, error = UNFIT[what]
    ctx = make_context(name)
    ctx.decode(WORDS[:12], seq_id=1)
    bad = forged(ctx.sequence_state(1).to_bytes(), edit)
    ctx.decode(WORDS[20:23], seq_id=1)
    for convert in (False, True):
        with refused(ctx, error):
            ctx.restore_sequence(SequenceState.from_bytes(bad), 1, convert=convert)


OFFSETS, IDS = "attention.0.offsets", "attention.0.sequences"
WHOLE: dict[str, Edit] = {
    "firsts": text(firsts="[]"),
    "more firsts": text(firsts="[[0,0],[1,0],[2,0],[3,0]]"),
    "first": text(firsts="[[0,3],[1,0],[2,0]]"),
    "firsts numbers": text(firsts="[0,1,2]"),
    "streams": text(streams="[2]"),
    "no streams": text(streams="[0]"),
    "streams missing": text(streams="[]"),
    "no parts": text(streams="[]", layout="[]"),
    "no offsets": drop(OFFSETS),
    "offsets": put(OFFSETS, np.arange(1, 14)),
    "offsets down": put(OFFSETS, [0, 3, 1, *range(3, 13)]),
    "huge offsets": put(OFFSETS, [*range(12), 2**31 - 1]),
    "sequences": put(IDS, [0] * 3),
    "twice": put(OFFSETS, [0, 2, *range(2, 13)]),
    "negative": put(IDS, [-1] * 12),
    "n_tokens": text(n_tokens="0"),
    "tokens": put("tokens.0", WORDS[:2]),
    "tokens of none": put("tokens.x", WORDS[:2]),
    "NaN": spoil,
}


@pytest.mark.parametrize("what", WHOLE)
def test_an_inconsistent_context_state_is_damaged(what: str, make_context: Make) -> None:
    ctx = make_context("llama")
    for seq in range(3):
        ctx.decode(WORDS[:4], seq_id=seq)
    good = ctx.context_state().to_bytes()
    ContextState.from_bytes(forged(good, lambda *_: None))
    with refused(ctx, StateDamaged):
        ctx.restore_context(ContextState.from_bytes(forged(good, WHOLE[what])))


def test_headers_that_name_other_checksums_or_formats(make_context: Make) -> None:
    ctx = make_context("llama")
    ctx.decode(WORDS[:4])
    good = ctx.sequence_state(0).to_bytes()
    for checksum in ("crc32", "", "sha256 "):
        with pytest.raises(StateVersionError, match="checksums of type"):
            SequenceState.from_bytes(forged(good, text(checksum=checksum)))
    with pytest.raises(StateFormatError):
        SequenceState.from_bytes(forged(good, text(format="pykvcache.other")))
    # The table has the other length, which is not checked without xxhash.
    with pytest.raises(StateDamaged if find_spec("xxhash") else StateVersionError):
        SequenceState.from_bytes(forged(good, text(checksum="xxh3-128")))
    for kind in ("sequences", "", "model"):
        with pytest.raises(StateFormatError):
            SequenceState.from_bytes(forged(good, text(kind=kind)))
