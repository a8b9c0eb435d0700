"""Read-only facts of a model: metadata of its file, and its devices."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pykvcache._native import lib
from pykvcache.enums import RopeType

__all__ = ["ModelFacts"]


class ModelFacts:
    """The read-only facts of `LlamaModel`."""

    _native: lib.Model

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices that share its layers; empty if only the CPU is used."""
        return self._native.devices

    @property
    def n_vocab(self) -> int:
        """Number of tokens in the vocabulary."""
        return self._native.n_vocab

    @property
    def n_ctx_train(self) -> int:
        """Context length that the model was trained with, in tokens."""
        return self._native.n_ctx_train

    @property
    def n_embd(self) -> int:
        """Width of the hidden state."""
        return self._native.n_embd

    @property
    def n_layer(self) -> int:
        """Number of layers."""
        return self._native.n_layer

    @property
    def n_head(self) -> int:
        """Number of query heads (of the first layer, if layers differ)."""
        return self._native.n_head

    @property
    def n_head_kv(self) -> int:
        """Number of key/value heads (of the first layer, if layers differ)."""
        return self._native.n_head_kv

    @property
    def n_swa(self) -> int:
        """Sliding window in tokens; 0 for none."""
        return self._native.n_swa

    @property
    def rope_type(self) -> RopeType:
        """Kind of rotary embedding."""
        return RopeType(self._native.rope_type)

    @property
    def is_recurrent(self) -> bool:
        """Whether the memory is a recurrent state (Mamba, RWKV)."""
        return self._native.is_recurrent

    @property
    def is_hybrid(self) -> bool:
        """Whether attention and recurrent layers are mixed (Jamba, Granite 4)."""
        return self._native.is_hybrid

    @property
    def has_encoder(self) -> bool:
        """Whether ``encode()`` must run first (T5)."""
        return self._native.has_encoder

    @property
    def has_decoder(self) -> bool:
        """Whether the model can decode."""
        return self._native.has_decoder

    @property
    def vocab_only(self) -> bool:
        """Whether only the vocabulary was loaded."""
        return self._native.vocab_only

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return self._native.size

    @property
    def n_params(self) -> int:
        """Number of parameters."""
        return self._native.n_params

    @property
    def description(self) -> str:
        """llama.cpp's short description, such as ``"llama 7B Q4_0"``."""
        return self._native.description

    @property
    def metadata(self) -> Mapping[str, str]:
        """The GGUF's scalar metadata as text (read-only)."""
        return MappingProxyType(self._native.metadata)

    @property
    def chat_template(self) -> str | None:
        """The Jinja chat template of the file, if it has one."""
        return self._native.chat_template
