"""Views of a live cache and the code of others: its memory gets out to nobody."""

from __future__ import annotations

import contextlib
import gc
from collections import UserList, deque
from typing import Any

import numpy as np
import pytest

from pykvcache import LlamaModel
from pykvcache._native import lib

from .test_kv_views import context, first_keys
from .test_kv_views import model as model

pytestmark = pytest.mark.not_on_a_device(reason="the CPU cannot look into its memory")


def test_views_in_what_numpy_looks_into_and_this_does_not(model: LlamaModel) -> None:
    """No view was found in such arguments, and the list of none was read from."""
    with context(model) as ctx:
        view = first_keys(ctx)
        for joined in (np.stack, np.concatenate, np.vstack, np.block):
            for given in (deque([view, view]), UserList([view, view])):
                with contextlib.suppress(TypeError, ValueError):
                    assert not_of_a_cache(joined(given))  # type: ignore[operator]
        with pytest.raises(TypeError, match="in a list or a tuple"):
            view.__array_function__(np.sum, (), (1,), {})
        with pytest.raises(TypeError, match="in a list or a tuple"):
            view.__array_ufunc__(np.add, "__call__", 1, 2)
        with pytest.raises(ValueError, match="no regions"):
            lib.read_regions([], lambda: 0)
        assert np.stack([view, view]).shape == (2, *view.shape)


def test_arrays_with_code_of_their_own_get_copies(model: LlamaModel) -> None:
    got: list[Any] = []

    class Mine(np.ndarray):
        def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
            got.extend([*inputs, *kwargs.get("out", ())])
            return 0

        def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            got.extend([*args, *kwargs.values()])
            return 0

    with context(model) as ctx:
        view = first_keys(ctx)
        mine = np.zeros(view.shape, np.float32).view(Mine)
        for call in (
            lambda: np.add(view, mine),
            lambda: np.add(mine, view),
            lambda: np.add(view, 1, out=mine),
            lambda: np.dot(view[:, 0], mine[:, 0].T),
            lambda: np.sum(view, out=mine),
            lambda: np.where(True, view, mine),
        ):
            call()
        arrays = [one for one in got if isinstance(one, np.ndarray) and not isinstance(one, Mine)]
        assert got
        for one in arrays:
            assert one.flags.owndata or one.base is None or not_of_a_cache(one)


def not_of_a_cache(array: Any) -> bool:
    while isinstance(array, np.ndarray):
        array = array.base
    return array is None


@pytest.mark.parametrize("name", ["Region", "Memory3D", "Partial"])
def test_what_the_compiled_layer_makes_is_made_by_nobody_else(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is made by"):
        getattr(lib, name)()


def test_an_array_keeps_its_memory_whatever_numpy_holds_of_it(model: LlamaModel) -> None:
    """np.frombuffer() gives a buffer back, and keeps the object."""
    ctx = context(model)
    kept: list[Any] = []

    def keep(array: Any) -> int:
        base = array.base
        while type(base).__name__ != "Memory3D":
            base = base.obj if isinstance(base, memoryview) else base.base
        kept.append(np.frombuffer(base, np.uint8))
        return 0

    view = first_keys(ctx)
    lib.read_regions([view._region], keep)
    before = kept[0].copy()
    ctx.close()
    gc.collect()
    assert np.array_equal(kept[0], before)
