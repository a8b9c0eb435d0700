"""llama.cpp's memory (KV cache) as a Python object that you can trust.

Load a GGUF with `LlamaModel`, decode with `LlamaContext`, and fork, rewind, shift
and clear its sequences. No argument can end the process, and after every successful
call the next logits are those of attention over exactly the cells of the sequence.

Classes and functions that programs start with are here; the rest is in modules:

=================  ==================================================================
`errors`           all exceptions; the most common ones are also here
`chat_format`      messages of a model: content, reasoning, tool calls
`enums`            option values, which may also be given as text
`state`            states of sequences and contexts, in memory and in files
`kv`               keys, values and recurrent states as arrays
`arrays`           array caches, which need no model
`generate`         types of `BatchGenerator`'s results
`introspection`    reports about a context's cells and buffers
`prefix`           reports, stores and policies of a prefix cache
`simulate`         eviction policies on traces of requests
=================  ==================================================================
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from pykvcache import errors
from pykvcache.errors import (
    ChatParseError,
    ClosedError,
    ContextCreateError,
    DecodeAborted,
    GrammarError,
    KvCacheError,
    ModelLoadError,
    NoKvCacheSlot,
    StateError,
    UnsupportedOperation,
)

if TYPE_CHECKING:
    from pykvcache import arrays, enums, kv, state
    from pykvcache._devices import Device, devices
    from pykvcache._native.lib import system_info
    from pykvcache.adapters import ControlVector, LoraAdapter
    from pykvcache.batch import LlamaBatch
    from pykvcache.context import LlamaContext
    from pykvcache.generate import BatchGenerator, GenerationHandle
    from pykvcache.llm import LLM
    from pykvcache.model import LlamaModel
    from pykvcache.pictures import CellHistory
    from pykvcache.prefix.cache import PrefixCache
    from pykvcache.prefix.stores import FolderStore, ObjectStore, RedisStore
    from pykvcache.sampling import Sampler
    from pykvcache.sequence import CheckpointPolicy, LlamaSequence
    from pykvcache.state import SequenceState, describe_state

    __version__: str

# The module of each public name. Imported on first use, because pykvcache.arrays needs NumPy
# only and must work without the compiled layer.
_HOMES = {
    "BatchGenerator": "generate",
    "CellHistory": "pictures",
    "CheckpointPolicy": "sequence",
    "Device": "_devices",
    "FolderStore": "prefix.stores",
    "GenerationHandle": "generate",
    "LLM": "llm",
    "LlamaBatch": "batch",
    "LoraAdapter": "adapters",
    "ControlVector": "adapters",
    "LlamaContext": "context",
    "LlamaModel": "model",
    "LlamaSequence": "sequence",
    "ObjectStore": "prefix.stores",
    "PrefixCache": "prefix.cache",
    "RedisStore": "prefix.stores",
    "Sampler": "sampling",
    "SequenceState": "state",
    "arrays": "",
    "describe_state": "state",
    "devices": "_devices",
    "enums": "",
    "kv": "",
    "state": "",
    "system_info": "_native.lib",
}

# Written out for type checkers.
__all__ = [
    "LLM",
    "BatchGenerator",
    "CellHistory",
    "ChatParseError",
    "CheckpointPolicy",
    "ClosedError",
    "ContextCreateError",
    "ControlVector",
    "DecodeAborted",
    "Device",
    "FolderStore",
    "GenerationHandle",
    "GrammarError",
    "KvCacheError",
    "LlamaBatch",
    "LlamaContext",
    "LlamaModel",
    "LlamaSequence",
    "LoraAdapter",
    "ModelLoadError",
    "NoKvCacheSlot",
    "ObjectStore",
    "PrefixCache",
    "RedisStore",
    "Sampler",
    "SequenceState",
    "StateError",
    "UnsupportedOperation",
    "__version__",
    "arrays",
    "describe_state",
    "devices",
    "embedded_model_path",
    "enums",
    "errors",
    "kv",
    "state",
    "system_info",
]

_UNBUILT = (
    "pykvcache is not built: this is a source tree without its compiled layer. "
    "Run 'pip install -e .' (or 'make venv') in the folder that contains pyproject.toml"
)

# Modules that work in a subinterpreter, where the compiled layer does not.
_FREE = (
    *("arrays", "errors", "enums", "simulate", "_native", "_arguments", "_drawing"),
    *("_ranges", "prefix.block_hash", "prefix.events", "prefix.node"),
    *("prefix.policies", "prefix.stores", "prefix.tree"),
)


class _RefuseInSubinterpreter:
    """Refuse other modules in a subinterpreter before they load NumPy.

    NumPy works only in the first interpreter that loads it, and the main one may need it later.
    """

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        home = name.removeprefix("pykvcache.")
        if home != name and home != "prefix" and not f"{home}.".startswith(_FREE_PREFIXES):
            raise ImportError(_MISSING, name=name)


_FREE_PREFIXES = tuple(f"{name}." for name in _FREE)

try:
    _MISSING = None if importlib.util.find_spec("pykvcache._native.lib") else _UNBUILT
except ImportError as _error:  # in a subinterpreter
    _MISSING = str(_error)
    sys.meta_path.insert(0, _RefuseInSubinterpreter)
if _MISSING is not None:
    warnings.warn(_MISSING, RuntimeWarning, stacklevel=2)


def embedded_model_path() -> str:
    """Return the path of the small trained model that ships with the package.

    Raises
    ------
    FileNotFoundError
        The package was built without it.
    """
    # An editable install has the code in the source tree and built files elsewhere.
    for folder in __path__:
        path = os.path.join(folder, "data", "stories.gguf")
        if os.path.isfile(path):
            return path
    raise FileNotFoundError("the embedded model stories.gguf is missing from this installation")


def _read_version() -> str:
    """Return the installed version; importlib.metadata is imported late because it is slow."""
    from importlib import metadata

    try:
        return metadata.version("pykvcache")
    except metadata.PackageNotFoundError:
        return "0+unbuilt"


def __getattr__(name: str) -> Any:
    if name == "__version__":
        globals()[name] = _read_version()
        return globals()[name]
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pykvcache' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"pykvcache.{home or name}")
    except ImportError:
        if _MISSING is None:
            raise
        raise ImportError(_MISSING) from None
    value = globals()[name] = getattr(module, name) if home else module
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
