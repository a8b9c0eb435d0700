"""Arrays that `LlamaContext.kv` returns and `write_kv` takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, SupportsIndex

import numpy as np
import numpy.typing as npt

from pykvcache._arguments import as_int, as_list
from pykvcache._drawing import draw_norms
from pykvcache.errors import ArgumentError, OutOfRangeError, UnsupportedOperation
from pykvcache.kv.view import CacheView

__all__ = ["Array", "LayerKV", "LayerState", "RecurrentState", "SequenceKV"]

Array = npt.NDArray[Any] | CacheView

# The type of keys and values, so that a type checker can tell arrays from views.
if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from typing_extensions import TypeVar

    A = TypeVar("A", bound=Array, default=npt.NDArray[Any])
else:
    from typing import TypeVar

    A = TypeVar("A", bound=Array)


@dataclass(frozen=True, repr=False)
class LayerKV(Generic[A]):
    """Keys and values of one layer.

    Attributes
    ----------
    keys
        Shape (n_tokens, n_head_kv, head_dim).
    values
        Shape (n_tokens, n_head_kv, value head_dim); empty if keys hold both (MLA).
    layer
        Which layer of the model this is; -1 if it does not matter.
    """

    keys: A
    values: A
    layer: int = -1

    def __repr__(self) -> str:
        return f"<LayerKV {self.layer}: K {_shown(self.keys)}, V {_shown(self.values)}>"


@dataclass(frozen=True, repr=False)
class LayerState:
    """The states of one recurrent layer, as flat float32 arrays.

    Attributes
    ----------
    r
        The last inputs of the convolution.
    s
        The state proper; empty in layers that are a convolution only.
    layer
        Layer index in the model; -1 if unspecified.
    """

    r: Array
    s: Array
    layer: int = -1

    def __repr__(self) -> str:
        return f"<LayerState {self.layer}: r {_shown(self.r)}, s {_shown(self.s)}>"


@dataclass(frozen=True, repr=False)
class RecurrentState:
    """Recurrent states of a sequence.

    Attributes
    ----------
    position
        Position of the last token in the states; -1 for none.
    layers
        One entry per recurrent layer.
    first
        Position of the first token in the states.
    """

    position: int
    layers: Sequence[LayerState]
    first: int = 0

    def __repr__(self) -> str:
        return f"<RecurrentState: {_counted(self.layers)}, tokens {self.first}..{self.position}>"


@dataclass(frozen=True, repr=False)
class SequenceKV(Generic[A]):
    """Content of a sequence: positions, and keys and values per layer.

    Attributes
    ----------
    positions
        Position of each token; int32, shape (n_tokens,), in the order of the arrays.
    layers
        One entry per full-attention layer.
    extended
        For models with M-RoPE: x, y and token id of each token; int32, (n_tokens, 3).
    window
        For sliding-window memories: the window layers, with the tokens they still hold.
    recurrent
        For recurrent and hybrid memories: the states.
    rope
        Whether the keys are rotated to their positions.
    """

    positions: npt.NDArray[np.int32]
    layers: Sequence[LayerKV[A]]
    extended: npt.NDArray[np.int32] | None = None
    window: SequenceKV[A] | None = None
    recurrent: RecurrentState | None = None
    rope: bool = True

    def __len__(self) -> int:
        return len(self.positions)

    def __repr__(self) -> str:
        parts = [f"{_span(self.positions)}, {_counted(self.layers)}"]
        if isinstance(self.layers, (list, tuple)) and self.layers:
            first = self.layers[0]
            parts.append(f"K {_shown(first.keys)}" if isinstance(first, LayerKV) else repr(first))
        if self.window is not None:
            parts.append(f"window of {_span(getattr(self.window, 'positions', None))}")
        if self.recurrent is not None:
            parts.append("recurrent state")
        return f"<SequenceKV: {', '.join(parts)}{', before RoPE' if self.rope is False else ''}>"

    def plot(self) -> Figure:
        """Draw the norms of keys and values by layer, head and token (extra ``plot``).

        Layers that see a window are blank where it holds no token.

        Returns
        -------
        matplotlib.figure.Figure
            Not registered with pyplot: ``figure.savefig("norms.svg")``; notebooks show it.

        Raises
        ------
        ImportError
            matplotlib is not installed.
        ValueError
            Arrays do not fit their positions.
        """
        parts = [self] if self.window is None else [self, self.window]
        for part in parts:
            _need_drawable(part)
        places = np.unique(np.concatenate([np.asarray(part.positions) for part in parts]))
        layers = [
            (
                layer.layer,
                _spread(layer.keys, part.positions, places),
                _spread(layer.values, part.positions, places),
            )
            for part in parts
            for layer in part.layers
            if isinstance(layer, LayerKV)
        ]
        layers.sort(key=lambda layer: layer[0])
        return draw_norms(places, layers, f"{len(self)} tokens")

    def select(self, tokens: npt.ArrayLike) -> SequenceKV[A]:
        """Select tokens; they keep their positions.

        Parameters
        ----------
        tokens
            Indices of the tokens to keep, or a mask of shape (n_tokens,).

        Raises
        ------
        UnsupportedOperation
            A recurrent state covers all tokens; or tokens of a window share a position, so they
            cannot be distinguished.
        """
        if self.recurrent is not None:
            raise UnsupportedOperation(
                "select", "a recurrent state cannot drop single tokens", "sequence"
            )
        if not all(isinstance(layer, LayerKV) for layer in self.layers):
            raise TypeError("layers must be a sequence of LayerKV")
        index = _indices(tokens, len(self))
        window = self.window
        if window is not None:
            kept = np.isin(window.positions, self.positions[index])
            if np.isin(self.positions[index], np.delete(self.positions, index)).any():
                raise UnsupportedOperation(
                    "select",
                    "tokens that share a position must be kept or dropped together",
                    "sequence",
                )
            window = window.select(kept)
        return replace(
            self,
            positions=self.positions[index],
            layers=[_taken(layer, index) for layer in self.layers],
            extended=None if self.extended is None else self.extended[index],
            window=window,
        )

    @staticmethod
    def concat(parts: Sequence[SequenceKV], *, first: SupportsIndex = 0) -> SequenceKV:
        """Return the tokens of several sequences one after the other, at new positions.

        For texts that were evaluated apart, such as documents: `LlamaContext.write_kv` rotates the
        keys to their new places. It is an approximation: a token of a later part was computed
        without those of the parts before it, so that logits differ from those of a fresh run.

        Parameters
        ----------
        parts
            Taken with ``kv(seq_id, rope=False)``: keys before rotation.
        first
            Position of the first token.

        Raises
        ------
        ValueError
            There is no part, keys are rotated, parts are of different layers, or two tokens of a
            part share a position.
        UnsupportedOperation
            A part has a recurrent state, which cannot be joined to another, or several positions
            per token (M-RoPE).
        """
        found = as_list(parts, "parts", "SequenceKV")
        if not found:
            raise ArgumentError("there is no part to concatenate", "parts")
        for part in found:
            _need_joinable(part, found[0])
        begin = as_int(first, "first", 0, 2**31 - 2)
        positions, windows = [], []
        for part in found:
            order = np.argsort(part.positions, kind="stable")
            known = np.asarray(part.positions)[order]
            if (known[1:] == known[:-1]).any():
                raise ArgumentError("two tokens of a part share a position", "parts")
            places = np.empty(len(part), np.int32)
            places[order] = np.arange(begin, begin + len(part), dtype=np.int32)
            positions.append(places)
            if part.window is not None:
                at = np.searchsorted(known, part.window.positions)
                windows.append(replace(part.window, positions=(begin + at).astype(np.int32)))
            begin += len(part)
        window = None
        if windows:
            window = SequenceKV(
                np.concatenate([one.positions for one in windows]), _joined(windows), rope=False
            )
        return SequenceKV(np.concatenate(positions), _joined(found), window=window, rope=False)


# A repr must not fail, whatever the fields hold.


def _shown(array: object) -> str:
    shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
    if not isinstance(shape, tuple):
        return type(array).__name__
    view = " view" if isinstance(array, CacheView) else ""
    return f"{'x'.join(map(str, shape)) or 'scalar'} {dtype}{view}"


def _counted(layers: object) -> str:
    if not isinstance(layers, (list, tuple)):
        return type(layers).__name__
    return f"{len(layers)} layer{'' if len(layers) == 1 else 's'}"


def _span(positions: object) -> str:
    if not isinstance(positions, np.ndarray) or positions.ndim != 1:
        return _shown(positions)
    where = f" at {positions.min()}..{positions.max()}" if len(positions) else ""
    return f"{len(positions)} token{'' if len(positions) == 1 else 's'}{where}"


def _need_joinable(part: SequenceKV, other: SequenceKV) -> None:
    """Refuse a part that cannot be joined to another."""
    if not isinstance(part, SequenceKV):
        raise TypeError(f"parts must be SequenceKV objects, not {type(part).__name__}")
    if part.recurrent is not None:
        raise UnsupportedOperation(
            "concat", "a recurrent state cannot be joined to another", "sequence"
        )
    if part.extended is not None:
        raise UnsupportedOperation("concat", "tokens have several positions (M-RoPE)", "sequence")
    if part.rope:
        message = (
            "keys of a part are rotated to their positions: take it with kv(seq_id, rope=False)"
        )
        raise ArgumentError(message, "parts")
    mine, theirs = ([layer.layer for layer in one.layers] for one in (part, other))
    if mine != theirs or (part.window is None) != (other.window is None):
        raise ArgumentError("the parts are of different layers", "parts")
    if part.window is not None:
        assert other.window is not None
        _need_joinable(part.window, other.window)


def _joined(parts: Sequence[SequenceKV]) -> list[LayerKV]:
    """Return the layers of several sequences, their tokens one after the other."""
    return [
        LayerKV(
            np.concatenate([np.asarray(layer.keys) for layer in layers]),
            np.concatenate([np.asarray(layer.values) for layer in layers]),
            layers[0].layer,
        )
        for layers in zip(*(part.layers for part in parts), strict=True)
    ]


def _need_drawable(part: SequenceKV[Any]) -> None:
    """Refuse arrays that do not fit their positions."""
    if np.ndim(part.positions) != 1:
        shape = np.shape(part.positions)
        raise ArgumentError(f"positions have shape {shape}, not (n_tokens,)", "positions", shape)
    n = len(part.positions)
    for layer in part.layers:
        if isinstance(layer, LayerKV):
            for array in (layer.keys, layer.values):
                if len(shape := np.shape(array)) != 3 or shape[0] != n:
                    message = (
                        f"layer {layer.layer} has arrays of shape {shape}: (n_tokens, n_head_kv, "
                        "head_dim) is expected, for as many tokens as there are positions"
                    )
                    raise ArgumentError(message, "layers", shape)


def _spread(
    array: Any, positions: npt.NDArray[np.int32], places: npt.NDArray[np.int32]
) -> npt.NDArray[np.float32]:
    """Return the rows of an array at their places, NaN at the others."""
    rows = np.asarray(array, np.float32)
    if len(places) == len(positions):
        return rows  # several tokens may share a position
    found = np.full((len(places), *rows.shape[1:]), np.nan, np.float32)
    found[np.searchsorted(places, positions)] = rows
    return found


def _taken(layer: LayerKV[Any], index: npt.NDArray[np.intp]) -> LayerKV[Any]:
    return replace(layer, keys=layer.keys[index], values=layer.values[index])


def _indices(tokens: npt.ArrayLike, n: int) -> npt.NDArray[np.intp]:
    wanted = np.asarray(tokens)
    if wanted.ndim != 1:
        message = f"tokens must be one-dimensional, not {wanted.ndim}-dimensional"
        raise ArgumentError(message, "tokens", wanted.ndim, 1)
    if wanted.size and wanted.dtype.kind not in "biu":
        raise TypeError(f"tokens must be indices or a mask, not {wanted.dtype}")
    if wanted.dtype.kind == "b":
        if len(wanted) != n:
            message = f"the mask has {len(wanted)} entries, but the sequence holds {n} tokens"
            raise OutOfRangeError(message, "tokens", len(wanted), n)
        return np.flatnonzero(wanted)
    for index in (wanted.min(), wanted.max()) if wanted.size else ():
        if not -n <= int(index) < n:
            raise OutOfRangeError(f"token {index} is outside [0, {n})", "tokens", int(index), n)
    return wanted.astype(np.intp)
