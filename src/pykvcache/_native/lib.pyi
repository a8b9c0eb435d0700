"""llama.cpp, 1:1, behind checks: pointers, locks, codes turned into exceptions."""

from collections.abc import Callable
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
from typing_extensions import Self, disjoint_base

_Ints = npt.NDArray[np.int32]
_Floats = npt.NDArray[np.float32]

def system_info() -> dict[str, Any]: ...

@disjoint_base
class Model:
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_embd_out: int
    n_layer: int
    n_head: int
    n_head_kv: int
    n_swa: int
    rope_type: int
    vocab_type: int
    is_recurrent: bool
    is_hybrid: bool
    has_encoder: bool
    has_decoder: bool
    is_diffusion: bool
    vocab_only: bool
    size: int
    n_params: int
    description: str
    chat_template: str | None
    metadata: dict[str, str]
    def __new__(
        cls, path: bytes, params: dict[str, Any], progress: Callable[[float], bool | None] | None
    ) -> Self: ...
    @property
    def is_closed(self) -> bool: ...
    def adds_special(self) -> tuple[bool, bool]: ...
    def cell_sizes(self) -> tuple[int, int]: ...
    def close(self) -> None: ...
    def detokenize(self, tokens: _Ints, remove_special: bool, unparse_special: bool) -> bytes: ...
    def heads_divisible(self, ggml_type: int, keys: bool) -> bool: ...
    def is_control(self, token: SupportsIndex) -> bool: ...
    def is_eog(self, token: SupportsIndex) -> bool: ...
    def special_tokens(self) -> tuple[int, int, int, int, int, int, int, int]: ...
    def token_to_piece(self, token: SupportsIndex, special: bool) -> bytes: ...
    def tokenize(self, text: bytes, add_special: bool, parse_special: bool) -> _Ints: ...

@disjoint_base
class Handle:
    model: Model
    n_ctx: int
    n_ctx_seq: int
    n_batch: int
    n_ubatch: int
    n_seq_max: int
    embeddings: bool
    causal: bool
    pooling_type: int
    def __new__(cls, model: Model, params: dict[str, Any]) -> Self: ...
    @property
    def is_closed(self) -> bool: ...
    def abort(self) -> bool: ...
    def close(self) -> None: ...
    def perf(self) -> tuple[float, float, float, int, int, int]: ...
    def perf_reset(self) -> None: ...
    def set_n_threads(self, n_threads: SupportsIndex, n_threads_batch: SupportsIndex) -> None: ...

@disjoint_base
class Memory(Handle):
    @property
    def memory_kind(self) -> str: ...
    @property
    def n_streams(self) -> int: ...
    def can_shift(self) -> bool: ...
    def clear(self, data: bool) -> None: ...
    def seq_add(
        self,
        seq_id: SupportsIndex,
        p0: SupportsIndex | None,
        p1: SupportsIndex | None,
        delta: SupportsIndex,
    ) -> None: ...
    def seq_cp(
        self,
        src: SupportsIndex,
        dst: SupportsIndex,
        p0: SupportsIndex | None,
        p1: SupportsIndex | None,
        operation: str,
    ) -> None: ...
    def seq_div(
        self,
        seq_id: SupportsIndex,
        p0: SupportsIndex | None,
        p1: SupportsIndex | None,
        d: SupportsIndex,
    ) -> None: ...
    def seq_keep(self, seq_id: SupportsIndex) -> None: ...
    def seq_pos(self, seq_id: SupportsIndex, want_max: bool) -> int: ...
    def seq_rm(
        self,
        seq_id: SupportsIndex | None,
        p0: SupportsIndex | None,
        p1: SupportsIndex | None,
    ) -> bool: ...
    def update(self) -> None: ...

@disjoint_base
class Outputs(Memory):
    def logits(self, i: SupportsIndex) -> _Floats: ...
    def seq_embeddings(self, seq_id: SupportsIndex) -> _Floats: ...
    def token_embeddings(self, i: SupportsIndex) -> _Floats: ...

@disjoint_base
class Context(Outputs):
    tokens_evaluated: int
    def decode_batch(
        self,
        token: _Ints,
        pos: _Ints,
        n_seq_id: _Ints,
        seq_id: _Ints,
        logits: npt.NDArray[np.int8],
    ) -> None: ...
    def decode_tokens(self, tokens: _Ints, seq_id: SupportsIndex) -> None: ...
    def encode(self, token: _Ints, pos: _Ints, n_seq_id: _Ints, seq_id: _Ints) -> None: ...

@disjoint_base
class Sampler:
    def __new__(cls, params: dict[str, Any], model: Model | None) -> Self: ...
    def accept(self, token: SupportsIndex, model: Model) -> None: ...
    def reset(self) -> None: ...
    def sample(self, ctx: Context, i: SupportsIndex) -> int: ...
