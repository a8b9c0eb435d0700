"""The generated test models: what each is, and `make_model`, which writes one.

Weights are random but seeded, all F32, 0.1 to 0.9 MB and a few milliseconds per file.
They are scaled such that every cell matters: see ``test_support_models.py``.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from . import attention_models, pooled_models, recurrent_models, sparse_models, vocab
from .blueprint import Blueprint, Key, Sizes

Memory = Literal[
    "attention", "sliding-window", "recurrent", "hybrid", "hybrid-sliding-window", "other", "none"
]

EVERY_MODEL = bool(os.environ.get("PYKVCACHE_EVERY_MODEL"))
"""Whether tests over all memories take every model (`make test-all`), or one per memory class."""

USUAL = (
    *("llama", "gemma3", "qwen2vl", "mamba", "jamba", "lfm2_swa", "t5", "bert"),
    *("dots3note", "deepseek4", "qwen4exp"),
)
"""One model per class of memory in llama.cpp, and one for each way of positions."""


def usual(names: Iterable[str]) -> list[str]:
    """Return the models that this run uses, out of the given ones."""
    return [name for name in names if EVERY_MODEL or name in USUAL]


EXACT: Mapping[str, Any] = MappingProxyType(
    {"type_k": "f32", "type_v": "f32", "flash_attn": "disabled"}
)
"""Context options under which equal caches give logits equal within `RIGHT`.

Flash attention is off because it rounds K and V to f16 whatever their type: the same tokens in
one batch and in two then differ by up to 0.03 instead of 1e-5.
"""

RIGHT = 1e-3
"""Largest difference between logits that are meant to be the same.

Models with GELU (gemma3) reach it for one prompt in a hundred, as llama.cpp rounds its argument to
f16: tests whose prompts depend on time use step35.
"""

RIGHT_ON_A_DEVICE = 0.045
"""The same on a device, whose kernels round by the number of tokens (Vulkan: up to 0.04)."""

WRONG = 0.05
"""Least difference that one missing, extra or moved cell makes among 64."""


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a generated model for tests."""

    name: str
    arch: str
    plan: Callable[[Sizes, int], Blueprint]
    memory: Memory = "attention"
    vocab: Callable[[], vocab.Vocab] = vocab.spm
    sizes: Sizes = field(default_factory=Sizes)
    has_rope: bool = True
    """Whether K is rotated by position; without it only the order of decoding may matter."""
    has_mrope: bool = False
    has_encoder: bool = False
    """Whether `encode` must come before `decode`."""
    is_embedder: bool = False
    """Whether it gives one embedding per sequence instead of logits."""
    can_shift: bool = True
    """Whether llama.cpp shifts positions rightly, with ``swa_full=True`` and an F32 K cache."""
    can_stream: bool = True
    """Whether ``kv_unified=False`` with several sequences gives a context at all."""
    can_unify: bool = True
    """Whether ``kv_unified=True`` with several sequences gives one pool of cells."""
    rollback: bool = False
    """Whether a recurrent state can step back when ``n_rs_seq`` asks for it."""
    has_window: bool = False
    """Whether a memory of kind "other" has a sliding window in it."""
    bounded: bool = False
    """Whether positions index the cells: they begin at 0 and end with the context."""

    @property
    def n_vocab(self) -> int:
        """Number of tokens."""
        return len(self.vocab())

    @property
    def has_memory(self) -> bool:
        """Whether a context has a memory."""
        return self.memory != "none"

    @property
    def has_recurrent_state(self) -> bool:
        """Whether some layer is recurrent."""
        return self.memory in ("recurrent", "hybrid", "hybrid-sliding-window")

    @property
    def has_states(self) -> bool:
        """Whether the model's sequences have states."""
        return self.has_memory and not self.has_encoder and self.arch != "deepseek4"

    @property
    def can_cache(self) -> bool:
        """Whether a `PrefixCache` can store sequences, at least within its context."""
        return self.has_memory and not self.has_encoder

    @property
    def has_rest(self) -> bool:
        """Whether a part of the memory cannot be rewound: a window or a state."""
        return self.has_recurrent_state or bool(self.n_swa) or self.arch == "deepseek4"

    @property
    def has_arrays(self) -> bool:
        """Whether the memory consists of keys, values and states only."""
        return self.has_states and not self.bounded

    @property
    def can_couple(self) -> bool:
        """Whether a token may belong to several sequences of one pool."""
        return self.can_remove_partial and not self.bounded

    @property
    def n_swa(self) -> int:
        """Length of the sliding window, 0 without one."""
        return self.sizes.n_swa if self.has_window or "sliding-window" in self.memory else 0

    @property
    def can_remove_partial(self) -> bool:
        """Whether cells can be removed from the middle or the tail of a sequence."""
        return self.has_memory and not self.has_recurrent_state and self.arch != "deepseek4"

    @property
    def can_copy_partial(self) -> bool:
        """Whether part of a sequence can be copied within one stream."""
        return self.can_remove_partial


_att = attention_models
_rec = recurrent_models
_sparse = sparse_models


def _other(name: str, arch: str, plan: Callable[[Sizes, int], Blueprint], **more: Any) -> ModelInfo:
    return ModelInfo(name, arch, plan, "other", can_shift=False, bounded=True, **more)


MODELS = MappingProxyType(
    {
        info.name: info
        for info in (
            ModelInfo("llama", "llama", _att.llama),
            ModelInfo("llama3l", "llama", _att.llama, sizes=Sizes(n_layer=3)),
            ModelInfo("llama_h64", "llama", _att.llama, sizes=Sizes(n_embd=256)),
            ModelInfo("llama_none", "llama", _att.llama, vocab=vocab.without_tokenizer),
            ModelInfo("llama_bpe", "llama", _att.llama, vocab=vocab.bpe),
            ModelInfo("llama_test", "llama", _att.llama, vocab=vocab.dummy),
            ModelInfo("gemma3", "gemma3", _att.gemma3, "sliding-window", sizes=Sizes(n_layer=4)),
            ModelInfo(
                "qwen2vl",
                "qwen2vl",
                _att.qwen2vl,
                vocab=lambda: vocab.bpe("qwen2"),
                has_mrope=True,
                can_shift=False,
            ),
            ModelInfo("mamba", "mamba", _rec.mamba1, "recurrent", has_rope=False),
            ModelInfo("mamba2", "mamba2", _rec.mamba2_only, "recurrent", has_rope=False),
            ModelInfo("jamba", "jamba", _rec.jamba, "hybrid", has_rope=False),
            ModelInfo("granitehybrid", "granitehybrid", _rec.granitehybrid, "hybrid"),
            ModelInfo(
                "granite_nope",
                "granitehybrid",
                _rec.granite_nope,
                "hybrid",
                has_rope=False,
                can_shift=False,
            ),
            ModelInfo("lfm2", "lfm2", _rec.lfm2, "hybrid", rollback=True),
            ModelInfo(
                "lfm2_swa",
                "lfm2",
                _rec.lfm2_swa,
                "hybrid-sliding-window",
                can_shift=False,
                rollback=True,
            ),
            ModelInfo(
                "nemotron_h",
                "nemotron_h",
                _rec.nemotron_h,
                "hybrid",
                has_rope=False,
                can_shift=False,
                rollback=True,
            ),
            ModelInfo(
                "bert",
                "bert",
                _att.bert,
                "none",
                vocab.wpm,
                has_rope=False,
                is_embedder=True,
                can_shift=False,
            ),
            ModelInfo("t5", "t5", _att.t5, has_rope=False, has_encoder=True, can_stream=False),
            ModelInfo(
                "llama4",
                "llama4",
                _att.llama4,
                "sliding-window",
                sizes=Sizes(n_layer=4, n_swa=8192),  # which llama.cpp gives every one
                can_shift=False,
            ),
            ModelInfo("step35", "step35", _sparse.step35, "sliding-window", can_shift=False),
            _other("deepseek32", "deepseek32", _sparse.deepseek32),
            _other("dots3note", "dots3note", _sparse.dots3note, has_window=True),
            _other("minimax_m3", "minimax-m3", _sparse.minimax_m3),
            _other(
                "deepseek4",
                "deepseek4",
                _sparse.deepseek4,
                sizes=Sizes(n_layer=4),
                can_unify=False,
            ),
            ModelInfo(
                "qwen4exp",
                "qwen4exp",
                _sparse.qwen4exp,
                "hybrid",
                has_mrope=True,
                can_shift=False,
                rollback=True,
                can_unify=False,
                bounded=True,
            ),
            ModelInfo(
                "glm5_next",
                "glm5-next",
                pooled_models.glm5_next,
                "hybrid",
                has_rope=False,
                can_shift=False,
                rollback=True,
                can_unify=False,
                bounded=True,
            ),
        )
    }
)
"""Every generated model by name."""


def make_model(name: str, folder: Path, *, seed: int = 0, **overrides: int) -> Path:
    """Write the model `name` into `folder`, unless it is there already.

    Parameters
    ----------
    name
        A key of `MODELS`.
    folder
        Where the file goes; several processes may share it (see `shared_folder`).
    seed
        Of the weights.
    **overrides
        Fields of `Sizes`, such as ``n_layer=3`` or ``n_ctx_train=4096``.

    Returns
    -------
    Path
        The GGUF file. Equal arguments give the same path.
    """
    info = MODELS[name]
    details = "".join(f"-{key}={value}" for key, value in sorted(overrides.items()))
    path = folder / f"{name}-seed={seed}{details}.gguf"
    if path.exists():
        return path
    words = info.vocab()
    plan = info.plan(replace(info.sizes, **overrides), len(words))
    folder.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=folder, prefix=f".{name}-", suffix=".part")
    os.close(handle)
    try:
        write_gguf(Path(draft), plan, words, seed)
        # Another process may have been first, and may have loaded its file already: that one stays.
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        Path(draft).unlink(missing_ok=True)
    return path


def write_gguf(
    path: Path, plan: Blueprint, words: vocab.Vocab, seed: int, *, split_max_tensors: int = 0
) -> None:
    """Draw the weights of `plan` and write a model to `path`, or to several files next to it."""
    writer = gguf.GGUFWriter(path, plan.arch, split_max_tensors=split_max_tensors)
    for key, value in plan.keys.items():
        _add_key(writer, f"{plan.arch}{key}" if key.startswith(".") else key, value)
    words.write(writer)
    for name, tensor in plan.tensors.items():
        writer.add_tensor(name, tensor.values(name, seed))
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write a GGUF file to its path."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def with_keys(
    source: Path,
    target: Path,
    values: Mapping[str, str | int],
    change: Callable[[str, Any], Any] = lambda name, data: data,
    more: Mapping[str, NDArray[Any]] = MappingProxyType({}),
) -> Path:
    """Copy a model with other metadata, changed weights, or more tensors."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for entry in reader.fields.values():
        if entry.name.startswith("GGUF.") or entry.name in ("general.architecture", *values):
            continue
        kind = entry.types[0]
        inner = entry.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(entry.name, entry.contents(), kind, inner)
    for key, value in values.items():
        _add_key(writer, key, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, change(tensor.name, tensor.data.copy()))
    for name, data in more.items():
        writer.add_tensor(name, data)
    finish(writer)
    return target


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one folder for the models of this test session, the same for every worker."""
    base = tmp_path_factory.getbasetemp()
    # Under pytest-xdist each worker's base lies inside the session's.
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    return base / "models"


def _add_key(writer: gguf.GGUFWriter, key: str, value: Key) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, np.ndarray):
        kinds = gguf.GGUFValueType
        writer.add_key_value(key, value.tolist(), kinds.ARRAY, sub_type=kinds.UINT64)
    else:
        writer.add_array(key, value)
