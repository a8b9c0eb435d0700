"""llama.cpp's memory (KV cache) as a Python object that can be trusted.

Load a GGUF with `LlamaModel`, decode with `LlamaContext`, and fork, rewind, shift
and clear its sequences. Nothing that is passed in can end the process, and after
every call that succeeds the next logits are right for what the sequence holds.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from pykvcache import errors
from pykvcache.errors import (
    CacheDTypeError,
    CacheFullError,
    CacheKeyError,
    CacheLayerError,
    CacheOrderError,
    CacheValueError,
    ChatTemplateError,
    ClosedError,
    ContextCreateError,
    DecodeAborted,
    DecodeError,
    GrammarError,
    InternalError,
    InvalidBatch,
    KvCacheConversionError,
    KvCacheError,
    KvCacheFull,
    ModelLoadError,
    NoKvCacheSlot,
    NoSlot,
    NotSupported,
    OutputNotFinite,
    P0TooLarge,
    P1TooLarge,
    PartialStateError,
    PositionError,
    ReprocessInputs,
    SeqIdTooLarge,
    SequenceIdError,
    SharedCellsError,
    StaleViewError,
    StateDamaged,
    StateError,
    StateFileError,
    StateFileNotFound,
    StateFormatError,
    StateLayoutMismatch,
    StateModelMismatch,
    StateTrailingBytes,
    StateTruncated,
    StateVersionError,
    StoreError,
    UnsupportedError,
    UnsupportedOperation,
)

if TYPE_CHECKING:
    from pykvcache._devices import Device, DeviceKind, devices
    from pykvcache._models import embedded_model_path
    from pykvcache._native.lib import system_info
    from pykvcache.batch import LlamaBatch
    from pykvcache.context import LlamaContext
    from pykvcache.enums import (
        AttentionType,
        AttentionTypeName,
        FlashAttention,
        FlashAttentionName,
        GgmlType,
        GgmlTypeName,
        LoadMode,
        LoadModeName,
        MemoryKind,
        MemoryPart,
        PoolingType,
        PoolingTypeName,
        RopeScalingType,
        RopeScalingTypeName,
        RopeType,
        SplitMode,
        SplitModeName,
    )
    from pykvcache.facts import PerfData
    from pykvcache.generate import BatchGenerator, GenerationHandle
    from pykvcache.introspection import BufferBytes, CellTable, MemoryInfo, SequenceRange
    from pykvcache.kv import (
        CacheView,
        LayerKV,
        LayerState,
        RecurrentState,
        SequenceKV,
        from_caches,
        to_caches,
    )
    from pykvcache.model import LlamaModel
    from pykvcache.pictures import CellHistory
    from pykvcache.prefix.cache import PrefixCache
    from pykvcache.prefix.reuse import ReuseReport
    from pykvcache.prefix.stores import FolderStore, ObjectStore, RedisStore
    from pykvcache.sampling import Sampler
    from pykvcache.sequence import CheckpointPolicy, LlamaSequence
    from pykvcache.state import (
        ContextState,
        Fingerprint,
        LlamaStateFile,
        PartialState,
        SequenceState,
        StateInfo,
        describe_state,
    )

try:
    __version__ = version("pykvcache")
except PackageNotFoundError:
    __version__ = "0+unbuilt"

# Where each public name lives. Loaded on first use: pykvcache.arrays needs NumPy
# only, and must import where the compiled layer was never built.
_HOMES = {
    "AttentionType": "enums",
    "AttentionTypeName": "enums",
    "BatchGenerator": "generate",
    "BufferBytes": "introspection",
    "CacheView": "kv",
    "CellHistory": "pictures",
    "CellTable": "introspection",
    "CheckpointPolicy": "sequence",
    "ContextState": "state",
    "Fingerprint": "state",
    "Device": "_devices",
    "DeviceKind": "_devices",
    "FlashAttention": "enums",
    "FlashAttentionName": "enums",
    "FolderStore": "prefix.stores",
    "GenerationHandle": "generate",
    "GgmlType": "enums",
    "GgmlTypeName": "enums",
    "LayerKV": "kv",
    "LayerState": "kv",
    "LlamaBatch": "batch",
    "LlamaContext": "context",
    "LlamaModel": "model",
    "LlamaSequence": "sequence",
    "LlamaStateFile": "state",
    "LoadMode": "enums",
    "LoadModeName": "enums",
    "MemoryInfo": "introspection",
    "MemoryKind": "enums",
    "MemoryPart": "enums",
    "ObjectStore": "prefix.stores",
    "PartialState": "state",
    "PerfData": "facts",
    "PoolingType": "enums",
    "PoolingTypeName": "enums",
    "PrefixCache": "prefix.cache",
    "RecurrentState": "kv",
    "RedisStore": "prefix.stores",
    "ReuseReport": "prefix.reuse",
    "RopeScalingType": "enums",
    "RopeScalingTypeName": "enums",
    "RopeType": "enums",
    "Sampler": "sampling",
    "SequenceKV": "kv",
    "SequenceRange": "introspection",
    "SequenceState": "state",
    "SplitMode": "enums",
    "SplitModeName": "enums",
    "StateInfo": "state",
    "describe_state": "state",
    "devices": "_devices",
    "embedded_model_path": "_models",
    "from_caches": "kv",
    "system_info": "_native.lib",
    "to_caches": "kv",
}

# Written out, errors included, so that type checkers see what is exported.
__all__ = [
    "AttentionType",
    "AttentionTypeName",
    "BatchGenerator",
    "BufferBytes",
    "CacheDTypeError",
    "CacheFullError",
    "CacheKeyError",
    "CacheLayerError",
    "CacheOrderError",
    "CacheValueError",
    "CacheView",
    "CellHistory",
    "CellTable",
    "ChatTemplateError",
    "CheckpointPolicy",
    "ClosedError",
    "ContextCreateError",
    "ContextState",
    "DecodeAborted",
    "DecodeError",
    "Device",
    "DeviceKind",
    "Fingerprint",
    "FlashAttention",
    "FlashAttentionName",
    "FolderStore",
    "GenerationHandle",
    "GgmlType",
    "GgmlTypeName",
    "GrammarError",
    "InternalError",
    "InvalidBatch",
    "KvCacheConversionError",
    "KvCacheError",
    "KvCacheFull",
    "LayerKV",
    "LayerState",
    "LlamaBatch",
    "LlamaContext",
    "LlamaModel",
    "LlamaSequence",
    "LlamaStateFile",
    "LoadMode",
    "LoadModeName",
    "MemoryInfo",
    "MemoryKind",
    "MemoryPart",
    "ModelLoadError",
    "NoKvCacheSlot",
    "NoSlot",
    "NotSupported",
    "ObjectStore",
    "OutputNotFinite",
    "P0TooLarge",
    "P1TooLarge",
    "PartialState",
    "PartialStateError",
    "PerfData",
    "PoolingType",
    "PoolingTypeName",
    "PositionError",
    "PrefixCache",
    "RecurrentState",
    "RedisStore",
    "ReprocessInputs",
    "ReuseReport",
    "RopeScalingType",
    "RopeScalingTypeName",
    "RopeType",
    "Sampler",
    "SeqIdTooLarge",
    "SequenceIdError",
    "SequenceKV",
    "SequenceRange",
    "SequenceState",
    "SharedCellsError",
    "SplitMode",
    "SplitModeName",
    "StaleViewError",
    "StateDamaged",
    "StateError",
    "StateFileError",
    "StateFileNotFound",
    "StateFormatError",
    "StateInfo",
    "StateLayoutMismatch",
    "StateModelMismatch",
    "StateTrailingBytes",
    "StateTruncated",
    "StateVersionError",
    "StoreError",
    "UnsupportedError",
    "UnsupportedOperation",
    "__version__",
    "describe_state",
    "devices",
    "embedded_model_path",
    "errors",
    "from_caches",
    "system_info",
    "to_caches",
]

_UNBUILT = (
    "pykvcache is not built: this is a source tree without its compiled layer. "
    "Run 'pip install -e .' (or 'make venv') in the folder of pyproject.toml"
)

# What works in a subinterpreter, where the compiled layer does not.
_FREE = (
    *("arrays", "errors", "enums", "simulate", "_native", "_integers", "_models"),
    *(f"prefix.{name}" for name in ("blocks", "policies", "runs", "stores", "tree")),
)


class _RefuseInSubinterpreter:
    """Refuse the other modules there before they load NumPy.

    NumPy serves the first interpreter that loads it, and the main one may need it later.
    """

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        home = name.removeprefix("pykvcache.")
        if home != name and home != "prefix" and not f"{home}.".startswith(_FREE_PREFIXES):
            raise ImportError(_MISSING, name=name)


_FREE_PREFIXES = tuple(f"{name}." for name in _FREE)

try:
    _MISSING = None if importlib.util.find_spec("pykvcache._native.lib") else _UNBUILT
except ImportError as _error:  # a subinterpreter
    _MISSING = str(_error)
    sys.meta_path.insert(0, _RefuseInSubinterpreter)
if _MISSING is not None:
    warnings.warn(_MISSING, RuntimeWarning, stacklevel=2)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pykvcache' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"pykvcache.{home}")
    except ImportError:
        if _MISSING is None:
            raise
        raise ImportError(_MISSING) from None
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
