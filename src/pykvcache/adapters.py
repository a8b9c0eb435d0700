"""LoRA adapters and control vectors: they change keys and values, not the model."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from pykvcache._arguments import as_float, as_list, as_path, file_id
from pykvcache._native import lib
from pykvcache.errors import ArgumentError, ModelLoadError

if TYPE_CHECKING:
    from pykvcache.model import LlamaModel

__all__ = ["AdapterInput", "Adapters", "ControlVector", "LoraAdapter"]


class LoraAdapter:
    """A LoRA adapter of a model, made by `LlamaModel.load_adapter`.

    It has no effect until a context uses it (`LlamaContext.set_adapters`). Its memory is freed when
    neither the program nor a context refers to it, or with the model.
    """

    kind = "lora"

    def __init__(self, model: LlamaModel, path: str | os.PathLike[str]) -> None:
        self._path = as_path(path)
        try:
            known = file_id(self._path)
            digest = hashlib.sha256()
            with open(self._path, "rb") as file:
                while piece := file.read(1 << 20):
                    digest.update(piece)
        except OSError as error:
            raise ModelLoadError(f"cannot read the adapter: {error}") from error
        self._native = lib.Adapter(model.native, os.fsencode(self._path))
        if file_id(self._path) != known:
            raise ModelLoadError.of(self._path, "it was changed while it was loaded")
        self._digest, self._model = digest.hexdigest(), model.native

    @property
    def native(self) -> lib.Adapter:
        """The object of the compiled layer."""
        return self._native

    @property
    def path(self) -> str:
        """Path of its file."""
        return self._path

    @property
    def digest(self) -> str:
        """SHA-256 of the file in hexadecimal; identifies it in states and prefix caches."""
        return self._digest

    @property
    def metadata(self) -> Mapping[str, str]:
        """The file's metadata, without arrays."""
        return dict(self._native.metadata)

    @property
    def invocation_tokens(self) -> tuple[int, ...]:
        """Tokens that activate an aLoRA adapter; empty for other adapters.

        An aLoRA adapter was trained to take effect from these tokens on; earlier tokens use the
        base model. `LlamaSequence` and everything built on it switch at these tokens automatically:
        see `LlamaContext.set_adapters`.
        """
        return self._native.invocation

    def __repr__(self) -> str:
        return f"<LoraAdapter {os.path.basename(self._path)!r}, {self._digest[:16]}>"


class ControlVector:
    """Directions that are added to the outputs of layers (``llama_set_adapter_cvec``).

    Parameters
    ----------
    values
        One direction per layer: float32, shape (n_layer, n_embd). The first row must be zero.

    Raises
    ------
    ValueError
        The shape is wrong, values are not finite, or the first row is not zero.
    """

    kind = "control"

    def __init__(self, values: npt.ArrayLike) -> None:
        found = np.array(values, np.float32, order="C")
        if found.ndim != 2 or found.shape[0] < 2:
            raise ArgumentError(
                f"values have shape {found.shape}: (n_layer, n_embd) is expected",
                "values",
                found.shape,
            )
        if not np.isfinite(found).all():
            raise ArgumentError("values are not all finite", "values")
        if found[0].any():
            raise ArgumentError("the first row must be zero", "values")
        found.setflags(write=False)
        self._values = found
        self._digest = hashlib.sha256(found.astype("<f4", copy=False).tobytes()).hexdigest()

    @property
    def values(self) -> npt.NDArray[np.float32]:
        """The directions; float32, shape (n_layer, n_embd), read-only."""
        return self._values

    @property
    def digest(self) -> str:
        """SHA-256 of the values, in hexadecimal."""
        return self._digest

    def __repr__(self) -> str:
        return f"<ControlVector of {len(self._values)} layers, {self._digest[:16]}>"


#: An adapter, or the path of a LoRA adapter's file.
AnyAdapter: TypeAlias = LoraAdapter | ControlVector | str | os.PathLike[str]
#: An adapter, alone or with a scale.
AdapterInput: TypeAlias = AnyAdapter | tuple[AnyAdapter, float]


class Adapters:
    """The adapters of a context whose scales are not zero; those given as files are loaded."""

    def __init__(self, model: LlamaModel, given: Sequence[AdapterInput] = ()) -> None:
        if isinstance(given, str | os.PathLike):
            raise TypeError(f"adapters must be a list, such as [{os.fspath(given)!r}]")
        found = [_pair(model, one) for one in as_list(given, "adapters", "adapters")]
        self.items = tuple((one, scale) for one, scale in found if scale)
        shape = model.native.n_layer, model.native.n_embd
        seen = set[tuple[str, str]]()
        for one, _ in found:
            if (one.kind, one.digest) in seen:
                raise ArgumentError(
                    f"{one!r} is given twice: pass it once, with a scale", "adapters"
                )
            seen.add((one.kind, one.digest))
            if isinstance(one, LoraAdapter) and one._model is not model.native:
                raise ArgumentError(
                    f"{one!r} belongs to another LlamaModel: load it with this model", "adapters"
                )
            if isinstance(one, ControlVector) and one.values.shape != shape:
                raise ArgumentError(
                    f"the control vector has shape {one.values.shape}; the model's is {shape}",
                    "adapters",
                    one.values.shape,
                    shape,
                )
        activated = [one for one, _ in self.items if _is_activated(one)]
        if len(activated) > 1:
            raise ArgumentError(
                f"{activated[0]!r} and {activated[1]!r} are both activated by tokens (aLoRA): "
                "use one at a time",
                "adapters",
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Digests and scales, sorted, which identify this set."""
        return _names(self.items)

    def apply(self, context: lib.Context) -> None:
        """Make a context use them; clears its memory if they differ from the previous ones."""
        if context.adapter_names == self.names:
            return
        loras = [(one, scale) for one, scale in self.items if isinstance(one, LoraAdapter)]
        control = None
        vectors = [
            one.values[1:] * np.float32(scale)
            for one, scale in self.items
            if isinstance(one, ControlVector)
        ]
        if vectors:
            control = np.ascontiguousarray(np.sum(vectors, axis=0, dtype=np.float32)).reshape(-1)
        natives, scales = tuple(one.native for one, _ in loras), tuple(s for _, s in loras)
        base = _names([item for item in self.items if not _is_activated(item[0])])
        context.set_adapters(self.names, base, natives, scales, control)


def _is_activated(one: LoraAdapter | ControlVector) -> bool:
    return isinstance(one, LoraAdapter) and bool(one.invocation_tokens)


def _names(items: Sequence[tuple[LoraAdapter | ControlVector, float]]) -> tuple[str, ...]:
    return tuple(sorted(f"{one.kind}:{one.digest}:{scale!r}" for one, scale in items))


def _pair(model: LlamaModel, given: object) -> tuple[LoraAdapter | ControlVector, float]:
    one, number = given if isinstance(given, tuple) and len(given) == 2 else (given, 1.0)
    # float32, as in llama.cpp: scales that are equal there are equal here.
    scale = float(np.float32(as_float(number, "scale", -1e6, 1e6)))
    if isinstance(one, str | os.PathLike):
        return model.load_adapter(os.path.expanduser(one)), scale
    if not isinstance(one, LoraAdapter | ControlVector):
        raise TypeError(
            "adapters must be LoraAdapter or ControlVector objects or paths, or tuples of one and "
            f"its scale, not {type(one).__name__}"
        )
    return one, scale
