"""Saved sequences: raw states at memory speed, and a verified container format."""

from pykvcache.state.facts import Fingerprint
from pykvcache.state.llama_files import LlamaFileMethods, LlamaStateFile
from pykvcache.state.partial import PartialState
from pykvcache.state.saved import StateInfo, describe_state
from pykvcache.state.sequence import SequenceState
from pykvcache.state.whole import ContextState

__all__ = [
    "ContextState",
    "Fingerprint",
    "LlamaFileMethods",
    "LlamaStateFile",
    "PartialState",
    "SequenceState",
    "StateInfo",
    "describe_state",
]
