"""The enumerations of ``llama.h`` and ``ggml.h`` that are options."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, TypeAlias

__all__ = [
    "AttentionType",
    "AttentionTypeName",
    "DeviceKind",
    "FlashAttention",
    "FlashAttentionName",
    "GgmlType",
    "GgmlTypeName",
    "LoadMode",
    "LoadModeName",
    "MemoryKind",
    "MemoryPart",
    "PoolingType",
    "PoolingTypeName",
    "RopeScalingType",
    "RopeScalingTypeName",
    "RopeType",
    "SplitMode",
    "SplitModeName",
]

# Texts that options accept in place of enum members, for type checkers and editors.
GgmlTypeName: TypeAlias = Literal[
    "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"
]
FlashAttentionName: TypeAlias = Literal["auto", "disabled", "enabled"]
PoolingTypeName: TypeAlias = Literal["unspecified", "none", "mean", "cls", "last", "rank"]
AttentionTypeName: TypeAlias = Literal["unspecified", "causal", "non_causal"]
RopeScalingTypeName: TypeAlias = Literal["unspecified", "none", "linear", "yarn", "longrope"]
SplitModeName: TypeAlias = Literal["none", "layer", "row", "tensor"]
LoadModeName: TypeAlias = Literal["auto", "none", "mmap", "mlock", "mmap_mlock", "direct_io"]

#: Values of `LlamaContext.memory_kind`.
MemoryKind: TypeAlias = Literal[
    "attention",
    "sliding-window",
    "recurrent",
    "hybrid",
    "hybrid-sliding-window",
    "none",
    "other",
]
#: Parts of a memory for `LlamaContext.cells`.
MemoryPart: TypeAlias = Literal["attention", "window", "recurrent", "index"]
#: Kinds of `Device`, in the order of ``enum ggml_backend_dev_type``.
DeviceKind: TypeAlias = Literal["cpu", "gpu", "integrated-gpu", "accelerator", "meta"]


class GgmlType(IntEnum):
    """``enum ggml_type``: types of a KV cache."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    IQ4_NL = 20
    BF16 = 30

    @property
    def block_size(self) -> int:
        """Number of values per block."""
        return 1 if self in (GgmlType.F32, GgmlType.F16, GgmlType.BF16) else 32

    @property
    def block_bytes(self) -> int:
        """Number of bytes per block."""
        return _BLOCK_BYTES[self]

    @property
    def is_quantized(self) -> bool:
        """Whether values are stored in blocks with a scale."""
        return self.block_size > 1


_BLOCK_BYTES = {
    GgmlType.F32: 4,
    GgmlType.F16: 2,
    GgmlType.BF16: 2,
    GgmlType.Q4_0: 18,
    GgmlType.Q4_1: 20,
    GgmlType.Q5_0: 22,
    GgmlType.Q5_1: 24,
    GgmlType.Q8_0: 34,
    GgmlType.IQ4_NL: 18,
}


class FlashAttention(IntEnum):
    """``enum llama_flash_attn_type``."""

    AUTO = -1
    DISABLED = 0
    ENABLED = 1


class PoolingType(IntEnum):
    """``enum llama_pooling_type``."""

    UNSPECIFIED = -1
    NONE = 0
    MEAN = 1
    CLS = 2
    LAST = 3
    RANK = 4


class AttentionType(IntEnum):
    """``enum llama_attention_type``."""

    UNSPECIFIED = -1
    CAUSAL = 0
    NON_CAUSAL = 1


class RopeScalingType(IntEnum):
    """``enum llama_rope_scaling_type``."""

    UNSPECIFIED = -1
    NONE = 0
    LINEAR = 1
    YARN = 2
    LONGROPE = 3


class RopeType(IntEnum):
    """``enum llama_rope_type``."""

    NONE = -1
    NORM = 0
    NEOX = 2
    MROPE = 8
    VISION = 24
    IMROPE = 40


class SplitMode(IntEnum):
    """``enum llama_split_mode``: how several GPUs share a model."""

    NONE = 0
    LAYER = 1
    ROW = 2
    TENSOR = 3


class LoadMode(IntEnum):
    """``enum llama_load_mode``: how the weights are read."""

    AUTO = -1
    NONE = 0
    MMAP = 1
    MLOCK = 2
    MMAP_MLOCK = 3
    DIRECT_IO = 4
