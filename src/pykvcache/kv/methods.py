"""The array methods of `LlamaContext`."""

from __future__ import annotations

import operator
from typing import Any, Literal, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from pykvcache._arguments import as_bool, check_kind
from pykvcache._native import lib
from pykvcache.errors import ArgumentError, ClosedError, UnsupportedOperation, shown
from pykvcache.kv.rope import rotate
from pykvcache.kv.types import LayerKV, LayerState, RecurrentState, SequenceKV
from pykvcache.kv.view import CacheView
from pykvcache.kv.write import as_parts
from pykvcache.state.convert import NATURAL, as_floats, as_stored
from pykvcache.state.layout import set_parts

__all__ = ["KvMethods"]


class KvMethods:
    """The array methods of `LlamaContext`."""

    _native: lib.Context

    @overload
    def kv(
        self,
        seq_id: SupportsIndex,
        *,
        copy: Literal[True] = True,
        dtype: npt.DTypeLike | None = None,
        rope: bool = True,
    ) -> SequenceKV: ...
    @overload
    def kv(
        self,
        seq_id: SupportsIndex,
        *,
        copy: Literal[False],
        dtype: Literal["stored"] | None = None,
        rope: Literal[True] = True,
    ) -> SequenceKV[CacheView]: ...
    @overload
    def kv(
        self,
        seq_id: SupportsIndex,
        *,
        copy: bool,
        dtype: npt.DTypeLike | None = None,
        rope: bool = True,
    ) -> SequenceKV | SequenceKV[CacheView]: ...
    def kv(
        self,
        seq_id: SupportsIndex,
        *,
        copy: bool = True,
        dtype: npt.DTypeLike | None = None,
        rope: bool = True,
    ) -> SequenceKV | SequenceKV[CacheView]:
        """Return the keys and values of a sequence.

        Pending shifts and copies are applied first. Tokens are in the order of their positions. A
        sliding-window memory returns two parts, the window with the tokens it still holds;
        recurrent layers return their states.

        Parameters
        ----------
        seq_id
            Sequence id.
        copy
            ``False`` returns `CacheView` objects instead of arrays: nothing is copied, and they are
            valid until the next call that may change the cache.
        dtype
            ``None``: f32 and f16 as stored, other types as float32, with llama.cpp's Hadamard
            rotation of quantised types undone. ``np.float32``: everything as float32. ``"stored"``:
            the bits of the cache; types that NumPy lacks as uint16 (bf16) or, for blocks, as uint8
            of shape (n_tokens, n_head_kv, bytes per head).
        rope
            ``True``: keys as in the cache, rotated to their positions. ``False``: keys before RoPE,
            in float32.

        Raises
        ------
        SequenceIdError
            ``seq_id`` is not in ``[0, n_seq_max)``.
        UnsupportedOperation
            The model keeps no memory, or its kind is unknown; or the sequence holds remains of an
            aborted decode. With ``rope=False``: M-RoPE. With ``copy=False``: the cache is on a
            device, the cells are not evenly spaced, or NumPy lacks the type.
        """
        if seq_id is None:
            raise TypeError(
                "seq_id is None: a LlamaSequence has an id once it is evaluated (evaluate()), and "
                "none while it is parked"
            )
        copy, rope, wanted = as_bool(copy, "copy"), as_bool(rope, "rope"), _wanted(dtype)
        if not copy and (not rope or wanted not in (None, "stored")):
            raise ArgumentError(
                "with copy=False nothing can be converted: leave out dtype and rope", "copy", copy
            )
        found = {part: facts for part, *facts in self._native.take(seq_id, copy)}

        def read(
            part: str, window: Any = None, recurrent: RecurrentState | None = None
        ) -> SequenceKV[Any]:
            positions, extended, layers = found[part]
            edges = self._native.hadamard(part)
            each = [self._layer(layer, positions, edges, copy, wanted, rope) for layer in layers]
            return SequenceKV(positions, each, extended, window, recurrent, rope)

        recurrent = None
        if "recurrent" in found:
            positions, first, layers = found["recurrent"]
            states = [_state(layer, len(positions), copy) for layer in layers]
            recurrent = RecurrentState(int(positions[0]) if len(positions) else -1, states, first)
        window = read("window") if "window" in found else None
        if "attention" in found:
            return read("attention", window, recurrent)
        return SequenceKV(np.empty(0, np.int32), [], recurrent=recurrent, rope=rope)

    def _layer(
        self,
        layer: Any,
        positions: npt.NDArray[np.int32],
        edges: tuple[int, int],
        copy: bool,
        wanted: str | np.dtype[Any] | None,
        rope: bool,
    ) -> LayerKV[Any]:
        index, k_type, k, v_type, v = layer
        if not copy:
            return LayerKV(_view(k, k_type, wanted), _view(v, v_type, wanted), index)
        if v is None:  # MLA: values are computed from the keys
            v_type, v = k_type, k[..., :0]
        if rope:
            keys = _values(k, k_type, edges[0], wanted)
        else:
            facts = self._native.rope(index)
            keys = as_floats(k, k_type, edges[0])
            keys = rotate(keys, positions, facts, undo=True, operation="kv")
        return LayerKV(keys, _values(v, v_type, edges[1], wanted), index)

    def write_kv(self, arrays: SequenceKV | SequenceKV[CacheView], seq_id: SupportsIndex) -> None:
        """Replace a sequence with these keys and values.

        Atomic. Floats are converted to the type of the cache; bits from ``kv(dtype="stored")`` are
        stored as they are. Several tokens may share a position, as after a division. For
        sliding-window, hybrid and recurrent memories every part is required. The sequence has no
        logits until a token is decoded.

        Parameters
        ----------
        arrays
            From `kv`, `SequenceKV.select` or `from_caches`, or built by hand.
        seq_id
            Sequence id; its cells are replaced.

        Raises
        ------
        StateError
            Shapes, types, positions or parts do not fit this context, or values would overflow in
            attention.
        PositionError, NoKvCacheSlot
            A position is past `LlamaContext.max_position`, or there is no room for the cells.
        UnsupportedOperation
            As for `kv`; or the cells depend on an encoder's input.
        """
        if self._native.is_closed:
            raise ClosedError("the context is closed")
        check_kind(arrays, SequenceKV, "arrays", "write_kv(arrays, seq_id)")
        parts = as_parts(self._native, arrays)
        state = arrays.recurrent
        firsts = None if state is None else [(operator.index(seq_id), state.first)]
        set_parts(self._native, seq_id, [[part] for part in parts], firsts)


def _wanted(dtype: Any) -> str | np.dtype[Any] | None:
    if dtype is None:
        return None
    if isinstance(dtype, str) and dtype == "stored":
        return "stored"
    try:
        wanted: np.dtype[Any] | None = np.dtype(dtype)
    except (ValueError, SyntaxError):  # strings and lists that describe no dtype
        wanted = None
    except TypeError:
        raise TypeError(f"dtype must be None, float32 or 'stored', not {shown(dtype)}") from None
    if wanted is None or wanted != np.float32:
        message = f"dtype is {shown(dtype)}: it must be None, float32 or 'stored'"
        raise ArgumentError(message, "dtype", dtype, ("float32", "stored"))
    return wanted


def _values(rows: Any, kind: int, edge: int, wanted: str | np.dtype[Any] | None) -> Any:
    if wanted == "stored" or (wanted is None and kind in NATURAL and not edge):
        return as_stored(rows, kind)
    return as_floats(rows, kind, edge)


def _view(region: lib.Region | None, kind: int | None, wanted: Any) -> CacheView:
    if region is None or kind is None:
        raise UnsupportedOperation("kv", "MLA stores no values: pass copy=True")
    if kind not in NATURAL and wanted != "stored":
        raise UnsupportedOperation(
            "kv",
            "NumPy lacks the type of this cache: pass copy=True, or dtype='stored' for its bits",
            "context",
        )
    return CacheView(region)


def _state(layer: Any, n: int, copy: bool) -> LayerState:
    index, r_type, r, s_type, s = layer

    def flat(data: Any, kind: int | None) -> Any:
        if data is None or kind is None:
            return np.empty(0, np.float32)
        if not copy:
            return CacheView(data, ((0, 0),)) if n else np.empty(0, np.float32)
        return as_stored(data, kind).reshape(-1)

    return LayerState(flat(r, r_type), flat(s, s_type), index)
