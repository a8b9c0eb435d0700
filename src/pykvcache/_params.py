"""Checks of context parameters, so that llama.cpp gets only values that it supports."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from pykvcache._arguments import as_bool, as_float, as_int, choose
from pykvcache.enums import (
    AttentionType,
    FlashAttention,
    GgmlType,
    PoolingType,
    RopeScalingType,
)
from pykvcache.errors import ContextCreateError
from pykvcache.model import LlamaModel

__all__ = ["N_CTX_DEFAULT", "cache_bytes", "check_params", "default_threads"]

#: Enough for a chat, and at most a gigabyte of cache even on an 8B model without GQA.
N_CTX_DEFAULT = 2048
MAX_SEQUENCES = 256
MAX_EARLIER_STATES = 2**16
#: llama.cpp's bookkeeping per cell: position, 2D position, shift and 256 sequence bits.
CELL_BYTES = 52

#: Minimum bytes of weights per thread and token: with less, threads wait for each other longer than
#: they save (benchmarks/waiting.py).
BYTES_PER_THREAD = 16 * 2**20
THREADS_MAX = 512


_ENUMS: dict[str, type[IntEnum]] = {
    "type_k": GgmlType,
    "type_v": GgmlType,
    "pooling_type": PoolingType,
    "attention_type": AttentionType,
    "rope_scaling_type": RopeScalingType,
}
#: Parameters with their minimum and maximum.
_INTEGERS = {
    "n_ctx": (0, 2**31 - 1),
    "n_batch": (1, 2**31 - 1),
    "n_ubatch": (1, 2**31 - 1),
    "n_seq_max": (1, MAX_SEQUENCES),
    "n_rs_seq": (0, MAX_EARLIER_STATES),
    "n_threads": (1, THREADS_MAX),
    "n_threads_batch": (1, THREADS_MAX),
    "yarn_orig_ctx": (0, 2**31 - 1),
}
_FLAGS = ("kv_unified", "swa_full", "embeddings", "offload_kqv", "op_offload", "no_perf")
#: Parameters with their minimum, which takes the model's value.
_FLOATS = {
    "rope_freq_base": 0.0,
    "rope_freq_scale": 0.0,
    "yarn_ext_factor": -1.0,
    "yarn_attn_factor": -1.0,
    "yarn_beta_fast": -1.0,
    "yarn_beta_slow": -1.0,
}


def _flash(given: Any) -> Any:
    """Return a choice of flash attention; True and False are accepted."""
    if isinstance(given, bool):
        return FlashAttention.ENABLED if given else FlashAttention.DISABLED
    return given


def usable_cpus(
    cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> int:
    """Return the number of CPUs that this process may use, by affinity and cgroup quotas."""
    affinity = getattr(os, "sched_getaffinity", None)
    n = len(affinity(0)) if affinity else os.cpu_count() or 4
    try:
        name = own.read_text().rpartition("0::/")[2].strip()
        folder = cgroups / name
        for place in (folder, *folder.parents):
            if place.is_relative_to(cgroups) and (place / "cpu.max").is_file():
                quota, period = (place / "cpu.max").read_text().split()
                if quota != "max":
                    n = min(n, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError, ZeroDivisionError):
        pass  # not Linux, or an older version
    return max(1, min(n, THREADS_MAX))


def default_threads(model_size: int) -> tuple[int, int]:
    """Return the threads for one token of a model of this size, and for a batch."""
    n = usable_cpus()
    return min(n, max(1, math.ceil(model_size / BYTES_PER_THREAD))), n


def check_params(model: LlamaModel, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return every field of ``llama_context_params`` that is set; raise like `LlamaContext`."""
    if model.vocab_only:
        raise ContextCreateError(
            "the model was loaded with vocab_only=True: it has no weights", "model"
        )
    asked = dict(given)
    if asked["n_ctx"] is None:
        asked["n_ctx"] = min(N_CTX_DEFAULT, model.n_ctx_train or N_CTX_DEFAULT)
    if asked["n_threads"] is None:
        asked["n_threads"], n_batch_threads = default_threads(model.size)
    else:
        n_batch_threads = asked["n_threads"]
    if asked["n_threads_batch"] is None:
        asked["n_threads_batch"] = n_batch_threads
    params: dict[str, Any] = {
        name: as_int(asked[name], name, least, most) for name, (least, most) in _INTEGERS.items()
    }
    params["flash_attn"] = choose(_flash(given["flash_attn"]), FlashAttention, "flash_attn")
    for name, kind in _ENUMS.items():
        params[name] = choose(given[name], kind, name)
    for name, least in _FLOATS.items():
        params[name] = as_float(given[name], name, least, 1e30)
    for name in _FLAGS:
        params[name] = as_bool(given[name], name)
    _check_together(model, params)
    return params


def _check_together(model: LlamaModel, params: dict[str, Any]) -> None:
    # From the file, because llama.cpp changes its n_ctx_train with each context that uses YaRN.
    n_ctx = params["n_ctx"] = params["n_ctx"] or model.n_ctx_train
    if n_ctx == 0:
        raise ContextCreateError(
            "n_ctx=0 asks for the model's own context length, which it lacks", "n_ctx", 0
        )
    # llama.cpp allocates an array of this size, and clips it to n_ctx only for causal attention. A
    # longer call would be refused anyway.
    most = max(n_ctx + 256 * params["n_seq_max"], params["n_ubatch"])
    params["n_batch"] = min(params["n_batch"], most)
    n_batch = min(params["n_batch"], n_ctx)
    if n_batch < params["n_seq_max"]:
        raise ContextCreateError(
            f"n_batch is {n_batch} (at most n_ctx): it must not be below n_seq_max, which is "
            f"{params['n_seq_max']}",
            "n_batch",
            n_batch,
            params["n_seq_max"],
        )
    if (
        model.has_encoder
        and model.has_decoder
        and params["n_seq_max"] > 1
        and not params["kv_unified"]
    ):
        raise ContextCreateError(
            "an encoder-decoder model needs kv_unified=True or n_seq_max=1",
            "kv_unified",
            False,
            True,
        )
    _check_types(model, params)
    available = _physical_memory()
    states = 4 * (1 + params["n_rs_seq"]) * params["n_seq_max"] * model.native.state_values
    for what, held, total, n_fixed in (
        ("n_ctx", "a cache of", cache_bytes(model, params, n_ctx), 0),
        ("n_rs_seq", "recurrent states with", states, 1),
    ):
        if available and total > available:
            value = params[what]
            raise ContextCreateError(
                f"{held} {what}={value} would take {total / 2**30:.1f} GiB; this machine has "
                f"{available / 2**30:.1f} GiB",
                what,
                value,
                (value + n_fixed) * available // total - n_fixed,
            )


def _check_types(model: LlamaModel, params: dict[str, Any]) -> None:
    for what, keys in (("type_k", True), ("type_v", False)):
        kind: GgmlType = params[what]
        if kind.is_quantized and not model.native.heads_divisible(int(kind), keys):
            raise ContextCreateError(
                f"{what}={kind.name.lower()!r} stores blocks of {kind.block_size} values, "
                "which do not divide this model's head size: use 'f16'",
                what,
                kind.name.lower(),
                "f16",
            )
    if params["type_v"].is_quantized and params["flash_attn"] == FlashAttention.DISABLED:
        raise ContextCreateError(
            f"type_v={params['type_v'].name.lower()!r} needs flash_attn='enabled' or 'auto'",
            "flash_attn",
            "disabled",
            "enabled",
        )


def cache_bytes(model: LlamaModel, params: Mapping[str, Any], n_ctx: int) -> int:
    """Return an upper bound on the bytes of the attention cache and its bookkeeping."""
    streams = 1 if params["kv_unified"] else params["n_seq_max"]
    per_stream = -(-n_ctx // streams)
    cells = streams * (-(-per_stream // 256) * 256)
    keys, values = model.native.cell_sizes
    per_cell = (
        CELL_BYTES + _type_bytes(params["type_k"], keys) + _type_bytes(params["type_v"], values)
    )
    return int(cells * per_cell)


def _type_bytes(kind: GgmlType, values: int) -> int:
    return values * kind.block_bytes // kind.block_size


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
