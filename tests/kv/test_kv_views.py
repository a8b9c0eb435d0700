"""Views of a live cache: equal to copies, gone after every change, never dangling."""

from __future__ import annotations

import contextlib
import gc
import pickle
import threading
from collections import UserList, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memory.kit import Make
from pykvcache import LlamaContext, LlamaModel
from pykvcache._native import lib
from pykvcache.errors import ClosedError, ReentryError, StaleViewError, UnsupportedOperation
from pykvcache.kv import CacheView
from support.models import EXACT, MODELS, usual

from .kit import different, pairs, words

pytestmark = pytest.mark.not_on_a_device(reason="the CPU cannot look into its memory")

WITH_MEMORY = [name for name in usual(MODELS) if MODELS[name].has_arrays]


@pytest.fixture
def ctx(make_context: Make) -> LlamaContext:
    """A context that holds N tokens in sequence 0."""
    ctx = make_context("llama3l", n_ctx=1024)
    ctx.decode(words(ctx.model))
    return ctx


def first_keys(ctx: LlamaContext, seq_id: int = 0) -> CacheView:
    keys = ctx.kv(seq_id, copy=False).layers[0].keys
    assert isinstance(keys, CacheView)
    return keys


@pytest.mark.parametrize(("flash", "streams"), [("enabled", False), ("disabled", True)])
@pytest.mark.parametrize("name", WITH_MEMORY)
def test_views_equal_copies(name: str, streams: bool, flash: str, make_context: Make) -> None:
    options = {"flash_attn": flash, "kv_unified": not streams, "swa_full": False, "n_ctx": 1024}
    ctx = make_context(name, type_v="f16", **options)
    for seq_id in (0, 2):
        ctx.decode(words(ctx.model, seed=seq_id), seq_id=seq_id)
        views, copies = ctx.kv(seq_id, copy=False), ctx.kv(seq_id)
        assert different(views, copies) == []
        found = [view for name, view, _ in pairs(views, copies) if not name.endswith("positions")]
        assert all(isinstance(view, CacheView | np.ndarray) for view in found)
        assert any(isinstance(view, CacheView) for view in found)


def test_bits_are_viewed_where_numpy_lacks_the_type(make_context: Make) -> None:
    ctx = make_context("llama_h64", type_k="q8_0", type_v="bf16")
    ctx.decode(words(ctx.model))
    with pytest.raises(UnsupportedOperation, match="stored"):
        ctx.kv(0, copy=False)
    assert different(ctx.kv(0, copy=False, dtype="stored"), ctx.kv(0, dtype="stored")) == []


def test_nothing_is_copied(ctx: LlamaContext) -> None:
    """Two views of one cell begin at one address, which is inside the cache."""
    keys = first_keys(ctx)
    addresses: list[int] = []
    for view in (keys, keys[3:], first_keys(ctx)[3:]):
        lib.read_regions(
            [view._region], lambda a: addresses.append(a.__array_interface__["data"][0])
        )
    assert len(set(addresses)) == 1
    assert keys[3:].strides == keys.strides
    assert keys.nbytes == keys.copy().nbytes


def test_arithmetic_reads_the_memory_and_gives_arrays(ctx: LlamaContext) -> None:
    view = first_keys(ctx)
    copy = view.copy()
    results: list[tuple[Any, Any]] = [
        (view * 2 - view, copy),
        (-view, -copy),
        (view > 0, copy > 0),
        (np.exp(view), np.exp(copy)),
        (np.add.reduce(view, axis=1), np.add.reduce(copy, axis=1)),
        (view @ np.ones((view.shape[2], 3)), copy @ np.ones((view.shape[2], 3))),
        (np.linalg.norm(view, axis=-1), np.linalg.norm(copy, axis=-1)),
        (np.einsum("nhd,nhd->nh", view, view), np.einsum("nhd,nhd->nh", copy, copy)),
        (np.concatenate([view[:2], view[5:]]), np.concatenate([copy[:2], copy[5:]])),
        (np.swapaxes(view, 0, 1), np.swapaxes(copy, 0, 1)),  # works on a copy
        (view[np.array([3, 1])], copy[[3, 1]]),
        (view[view[:, 0, 0] > 0], copy[copy[:, 0, 0] > 0]),
        (list(view)[4], copy[4]),
        (view[2, 1, 3], copy[2, 1, 3]),
        (np.asarray(view, np.float64), copy.astype(np.float64)),
        (np.mean(view, axis=0), np.mean(copy, axis=0)),
    ]
    for got, expected in results:
        assert np.array_equal(got, expected)
    assert isinstance(view[3:5], CacheView)
    assert isinstance(view[..., None, 0], CacheView)
    assert view[3:5, 1].shape == (2, view.shape[2])
    assert (view.ndim, view.size, len(view)) == (3, copy.size, len(copy))
    assert repr(view) == f"<CacheView shape={view.shape}, dtype=float32>"


def test_what_comes_out_shares_no_memory_with_the_cache(ctx: LlamaContext) -> None:
    view = first_keys(ctx)
    results = [np.einsum("nhd->dhn", view), np.asarray(view), view.copy(), np.max(view, axis=0)]
    results += [np.positive(view), view[np.array([0])], np.where(True, view, 0)]
    before = [result.copy() for result in results]
    ctx.clear_kv_cache()  # zeroes the memory
    assert all(np.array_equal(a, b) for a, b in zip(results, before, strict=True))
    assert all(result.any() for result in results)


def test_views_are_read_only(ctx: LlamaContext) -> None:
    view = first_keys(ctx)
    with pytest.raises(TypeError):
        view[0] = 0  # type: ignore[index]
    with pytest.raises(ValueError, match="read-only"):
        np.add(view, 1, out=view)
    with pytest.raises((ValueError, TypeError)):
        np.add.at(view, 0, 1)
    with pytest.raises(ValueError, match="copies"):
        np.array(view, copy=False) if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else (
            view.__array__(copy=False)
        )
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(view)


CHANGES: dict[str, Callable[[LlamaContext], object]] = {
    "decode": lambda ctx: ctx.decode([7], seq_id=3),
    "generate": lambda ctx: list(ctx.generate([7], 1)),
    "clear_kv_cache": lambda ctx: ctx.clear_kv_cache(),
    "clear_kv_cache_seq": lambda ctx: ctx.clear_kv_cache_seq(0, 40, None),
    "copy_kv_cache_seq": lambda ctx: ctx.copy_kv_cache_seq(0, 1),
    "copy_cache": lambda ctx: ctx.copy_cache(0, 1, 5),
    "copy_prefix": lambda ctx: ctx.copy_prefix(0, 1, 5),
    "remove": lambda ctx: ctx.remove(0, 3, 5),
    "kv_cache_seq_keep": lambda ctx: ctx.kv_cache_seq_keep(0),
    "kv_cache_seq_add": lambda ctx: ctx.kv_cache_seq_add(0, None, None, 1),
    "kv_cache_seq_div": lambda ctx: ctx.kv_cache_seq_div(0, None, None, 2),
    "write_kv": lambda ctx: ctx.write_kv(ctx.kv(0), 2),
    "set_state": lambda ctx: ctx.set_state(ctx.get_state(0), 1),
}


@pytest.mark.hazard("N29")
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_ends_a_view(ctx: LlamaContext, change: str) -> None:
    view = first_keys(ctx)
    part = view[2:4]
    assert view.is_valid
    CHANGES[change](ctx)
    assert not view.is_valid
    assert "no longer valid" in repr(view)
    uses: list[Callable[[], object]] = [
        lambda: view + 1,
        lambda: np.sum(part),
        lambda: np.asarray(view),
        lambda: np.swapaxes(view, 0, 1),
        view.copy,
        lambda: view[0],
        lambda: view[[0]],
        lambda: list(part),
    ]
    for use in uses:
        with pytest.raises(StaleViewError):
            use()


def test_a_pending_shift_ends_a_view_when_it_is_applied(ctx: LlamaContext) -> None:
    ctx.kv_cache_seq_add(0, None, None, 3)
    view = first_keys(ctx)  # applies it
    ctx.kv_cache_update()
    assert view.is_valid
    ctx.kv_cache_seq_add(0, None, None, 3)
    assert not view.is_valid


def test_what_only_reads_leaves_views_alone(ctx: LlamaContext) -> None:
    view = first_keys(ctx)
    ctx.logits()
    ctx.kv(0)
    ctx.kv_cache_seq_pos_max(0)
    ctx.kv_cache_seq_pos_min(0)
    ctx.kv_cache_can_shift()
    ctx.kv_cache_update()
    ctx.cells()
    ctx.sequences()
    ctx.can_resume(0, 5)
    ctx.get_state(0)
    ctx.state_size()
    ctx.perf()
    ctx.set_n_threads(1)
    assert ctx.memory_info.n_cells
    assert ctx.n_cells_used
    assert view.is_valid
    assert np.array_equal(view, ctx.kv(0).layers[0].keys)


@pytest.mark.hazard("N29")
def test_a_closed_context_ends_its_views(ctx: LlamaContext) -> None:
    view = first_keys(ctx)
    ctx.close()
    assert not view.is_valid
    for use in (lambda: np.sum(view), view.copy, lambda: view[0]):
        with pytest.raises(ClosedError):
            use()


def test_a_view_keeps_its_context_from_being_collected(
    model: Callable[..., LlamaModel],
) -> None:
    ctx = LlamaContext(model("llama3l"), n_ctx=256, n_threads=1, **EXACT)
    ctx.decode(words(ctx.model))
    expected = ctx.kv(0).layers[0].keys
    view = first_keys(ctx)
    del ctx
    gc.collect()
    assert np.array_equal(view, expected)


def test_memory_that_gets_out_through_a_traceback_is_not_freed(ctx: LlamaContext) -> None:
    """The only way to an array over the cache: an exception inside NumPy, and its frames."""
    view = first_keys(ctx)
    kept: list[np.ndarray[Any, Any]] = []
    lib.read_regions([view._region], kept.append)
    expected = kept[0].copy()
    ctx.close()
    gc.collect()
    assert np.array_equal(kept[0], expected)
    assert not kept[0].flags.writeable
    kept.clear()  # frees the context
    gc.collect()
    with pytest.raises(ClosedError):
        ctx.kv(0)


def test_scattered_cells_are_refused_and_regular_ones_are_not(ctx: LlamaContext) -> None:
    for token in words(ctx.model, 6):
        ctx.decode([token], seq_id=1)
        ctx.decode([token], seq_id=2)
    assert different(ctx.kv(1, copy=False), ctx.kv(1)) == []  # every second cell
    ctx.clear_kv_cache_seq(1, 1, 2)
    with pytest.raises(UnsupportedOperation, match="evenly"):
        ctx.kv(1, copy=False)
    ctx.kv(1)


def test_options_that_need_a_copy_are_refused(ctx: LlamaContext) -> None:
    for options in ({"dtype": np.float32}, {"rope": False}):
        with pytest.raises(ValueError, match="copy=False"):
            ctx.kv(0, copy=False, **options)
    for dtype in (np.int32, "float64"):
        with pytest.raises(ValueError, match="dtype"):
            ctx.kv(0, dtype=dtype)


def test_a_callback_cannot_change_the_cache_under_a_view(ctx: LlamaContext) -> None:
    view = first_keys(ctx)

    def meddle(_: float) -> float:
        ctx.clear_kv_cache()
        return 0.0

    with pytest.raises(ReentryError, match="callback"):
        np.frompyfunc(meddle, 1, 1)(view)
    assert view.is_valid


def test_threads_read_a_view_or_get_a_stale_view_error(ctx: LlamaContext) -> None:
    expected = np.linalg.norm(ctx.kv(0).layers[0].keys)
    done = threading.Event()
    wrong: list[object] = []

    def read() -> None:
        while not done.is_set():
            try:
                if not np.isclose(np.linalg.norm(first_keys(ctx)), expected):
                    wrong.append("another norm")
            except StaleViewError:
                pass
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for token in words(ctx.model, 30):
            ctx.decode([token], seq_id=1)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert wrong == []


# The code of others: the memory of a cache gets out to nobody ------------------------------


def test_views_in_what_numpy_looks_into_and_this_does_not(ctx: LlamaContext) -> None:
    """No view was found in such arguments, and the list of none was read from."""
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


def not_of_a_cache(array: Any) -> bool:
    while isinstance(array, np.ndarray):
        array = array.base
    return array is None
