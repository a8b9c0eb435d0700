"""Uncopied arrays: a live cache's memory, readable until the cache changes.

NumPy cannot revoke an array, so no array over the cache's memory is ever returned. A
`CacheView` computes with it instead while it holds the context: ufuncs and the functions of
`PURE` run on the memory itself, everything else on a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from pykvcache._native import lib
from pykvcache.errors import ArgumentError

__all__ = ["CacheView"]

#: Functions that never call user code, which could keep a reference to the memory.
_PURE = """
    all allclose amax amin any argmax argmin argsort array_equal concatenate count_nonzero cumsum
    dot einsum inner max mean median min prod ptp quantile sort stack std sum take tensordot
    var vdot where
"""
PURE = frozenset([np.linalg.norm, *(getattr(np, name) for name in _PURE.split())])


class CacheView(np.lib.mixins.NDArrayOperatorsMixin):
    """A read-only array over a live cache, see `LlamaContext.kv`.

    Arithmetic, comparisons, ufuncs and the usual reductions read the cache's memory in place and
    return new arrays. Slices are views too. Anything else, including ``np.asarray``, works on a
    copy. Reading holds the context: other threads wait.

    Valid until the next call that may change the cache; reading then raises `StaleViewError`,
    and `ClosedError` once the context is closed. A view keeps its context from being collected.
    """

    __slots__ = ("_indices", "_region", "dtype", "shape", "strides")

    #: dtype of the stored values.
    dtype: np.dtype[Any]
    #: Size along each axis.
    shape: tuple[int, ...]
    #: Bytes from one entry to the next along each axis, in the cache.
    strides: tuple[int, ...]

    def __init__(self, region: lib.Region, indices: tuple[Any, ...] = ()) -> None:
        self._region = region
        self._indices = indices
        self.dtype, self.shape, self.strides = _run(
            [self], lambda array: (array.dtype, array.shape, array.strides)
        )

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of values."""
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """Size of a copy in bytes."""
        return self.size * self.dtype.itemsize

    @property
    def is_valid(self) -> bool:
        """Whether the cache is unchanged since the view was created."""
        return self._region.is_valid

    def copy(self) -> npt.NDArray[Any]:
        """Return an ordinary array with the same values."""
        copied: npt.NDArray[Any] = _run([self], lambda array: array.copy())
        return copied

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a view without axes")
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        basic = index if isinstance(index, tuple) else (index,)
        if all(
            isinstance(i, int | np.integer | slice) or i is Ellipsis or i is None for i in basic
        ):
            return self._part(basic)
        return _run([self], lambda array: np.array(array[index]))

    def _part(self, index: tuple[Any, ...]) -> Any:
        part = CacheView(self._region, (*self._indices, index))
        return part if part.shape else part.copy()[()]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        if copy is False:
            raise ArgumentError(
                "an array over a live cache would outlive it: only copies can be made", "copy", copy
            )
        return self.copy().astype(dtype or self.dtype, copy=False)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out", ())
        if any(isinstance(target, CacheView) for target in out):
            raise ArgumentError("views of a cache are read-only", "out")
        known = (CacheView, np.ndarray, np.generic, int, float, complex, list, tuple)
        if not all(isinstance(value, known) for value in inputs):
            return NotImplemented
        call = getattr(ufunc, method)
        return (_apply if _is_plain((inputs, kwargs)) else _apply_to_copies)(call, inputs, kwargs)

    def __array_function__(
        self, func: Callable[..., Any], types: Any, args: Any, kwargs: Any
    ) -> Any:
        if not all(issubclass(kind, CacheView | np.ndarray) for kind in types):
            return NotImplemented
        is_pure = func in PURE and not isinstance(kwargs.get("out"), CacheView)
        apply = _apply if is_pure and _is_plain((args, kwargs)) else _apply_to_copies
        return apply(func, args, kwargs)

    if not TYPE_CHECKING:  # type checkers must still report missing attributes

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"CacheView has no {name!r}: use NumPy's functions, like np.mean(view), or copy()",
                name=name,
                obj=self,
            )

    def __repr__(self) -> str:
        state = "" if self.is_valid else ", no longer valid"
        return f"<CacheView shape={self.shape}, dtype={self.dtype}{state}>"

    def __reduce__(self) -> Any:
        raise TypeError("a view of a live cache cannot be pickled: use copy()")


def _leaves(value: Any) -> Iterator[Any]:
    """Yield everything in nested arguments that is no list, tuple or dict."""
    if isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value


def _replaced(value: Any, arrays: dict[int, npt.NDArray[Any]]) -> Any:
    """Replace views in nested arguments with arrays."""
    if isinstance(value, CacheView):
        return arrays[id(value)]
    if isinstance(value, list):
        return [_replaced(item, arrays) for item in value]
    if isinstance(value, tuple):
        return tuple(_replaced(item, arrays) for item in value)
    if isinstance(value, dict):
        return {key: _replaced(item, arrays) for key, item in value.items()}
    return value


def _is_plain(value: Any) -> bool:
    """Whether nested arguments have no ndarray subclass, whose code would get the memory."""
    return all(type(x) is np.ndarray for x in _leaves(value) if isinstance(x, np.ndarray))


def _found(args: Any, kwargs: Any) -> list[CacheView]:
    """Return the distinct views in arguments."""
    leaves = _leaves((args, kwargs))
    views = list({id(view): view for view in leaves if isinstance(view, CacheView)}.values())
    if not views:
        raise TypeError("pass views of a cache directly, or in a list or a tuple")
    return views


def _apply_to_copies(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function with copies of the views."""
    copies = {id(view): view.copy() for view in _found(args, kwargs)}
    args, kwargs = _replaced((args, kwargs), copies)
    return func(*args, **kwargs)


def _apply(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function on the memory of views; the result shares none of it."""
    views = _found(args, kwargs)
    # Views of a second context would need a second lock: they are copied first.
    owner = views[0]._region.owner
    first = [view for view in views if view._region.owner is owner]
    rest = {id(view): view.copy() for view in views if view._region.owner is not owner}

    def on_memory(*arrays: npt.NDArray[Any]) -> Any:
        found = {id(view): array for view, array in zip(first, arrays, strict=True)}
        real_args, real_kwargs = _replaced((args, kwargs), {**rest, **found})
        return _own(func(*real_args, **real_kwargs), arrays)

    return _run(first, on_memory)


def _own(result: Any, arrays: tuple[npt.NDArray[Any], ...]) -> Any:
    if isinstance(result, tuple):
        return tuple(_own(item, arrays) for item in result)
    if isinstance(result, np.ndarray) and any(np.may_share_memory(result, a) for a in arrays):
        return result.copy()
    return result


def _run(views: list[CacheView], func: Callable[..., Any]) -> Any:
    """Call a function on the memory of views of one context, which is held during the call."""

    def on_parts(*arrays: npt.NDArray[Any]) -> Any:
        parts = []
        for view, array in zip(views, arrays, strict=True):
            for index in view._indices:
                array = array[index]
            parts.append(array)
        return func(*parts)

    return lib.read_regions([view._region for view in views], on_parts)
