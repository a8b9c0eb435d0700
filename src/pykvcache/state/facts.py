"""Model and settings that a state must share with the context that restores it."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pykvcache._arguments import check_kind
from pykvcache._native import lib
from pykvcache.errors import StateDamaged, StateLayoutMismatch, StateModelMismatch
from pykvcache.state.layout import need_equal

__all__ = ["Fingerprint", "fingerprint_of"]

# Stored next to the rotation: both determine how layers compute the cells.
_INDEX = "index"
_HOW: Mapping[float | None, str] = {0.0: "without", 1.0: "with"}
_UNSAID = "with or without (not recorded)"


@dataclass(frozen=True)
class Fingerprint:
    """The model and the settings under which K and V were computed.

    Attributes
    ----------
    model
        `LlamaModel.fingerprint`: SHA-256 of the file's metadata, tensor table and samples.
    architecture
        ``general.architecture`` of the model.
    memory
        Kind of memory, as `MemoryInfo.kind`.
    n_layer, n_head_kv, n_embd
        Number of layers, K/V heads and embedding dimensions of the model.
    n_swa
        Window in tokens, 0 without one.
    causal
        Whether attention is causal.
    rope
        Rotation of the first layer with RoPE: base, scale and the like. Also ``index`` if the
        model can use indexed attention: 1 if the context uses it, 0 otherwise.
    rope_digest
        SHA-256 of the rotations of all layers; docs/state-format.md defines it.
    adapters
        Digests and scales of the adapters in use.
    model_name
        ``general.name`` of the model, its first 100 characters; empty if unknown. For display
        only, not compared.
    """

    model: str
    architecture: str
    memory: str
    n_layer: int
    n_head_kv: int
    n_embd: int
    n_swa: int
    causal: bool
    rope: Mapping[str, float] = field(hash=False)
    rope_digest: str
    adapters: tuple[str, ...] = ()
    model_name: str = field(default="", compare=False)

    def to_json(self) -> str:
        """Return the JSON text for a file; the model's name is stored separately."""
        compared = {name: value for name, value in vars(self).items() if name != "model_name"}
        return json.dumps(compared | {"rope": dict(self.rope)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Fingerprint:
        """Parse the output of `to_json`."""
        try:
            data = json.loads(text)
            adapters = tuple(data.pop("adapters"))
            if (
                {name: type(value) for name, value in data.items()} != _TYPES
                or not all(type(x) is str for x in adapters)
                or not all(type(x) in (int, float) for x in data["rope"].values())
            ):
                raise TypeError
            return cls(**data, adapters=adapters)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise StateDamaged("the state's fingerprint is invalid", what="fingerprint") from None

    def check(self, here: Fingerprint) -> None:
        """Raise unless a state with this fingerprint is valid in a context with `here`."""
        check_kind(here, Fingerprint, "here")
        if self.model != here.model:
            held, known = self._called(), here._called()
            message = (
                f"the state belongs to another model, {held}; this one is {known}: load that "
                "model, or evaluate the text with this one"
            )
            raise StateModelMismatch(message, "model", self.model, here.model)
        for what in ("memory", "causal"):
            need_equal(what, getattr(self, what), getattr(here, what))
        if self.adapters != here.adapters:
            message = (
                f"the state was computed with {_named(self.adapters)}, and this context computes "
                f"with {_named(here.adapters)}: use the same ones (set_adapters, --lora), or "
                "evaluate the text again"
            )
            raise StateLayoutMismatch(message, "adapters", self.adapters, here.adapters)
        if self.rope.get(_INDEX) != here.rope.get(_INDEX):
            held, known = (_HOW.get(one.rope.get(_INDEX), _UNSAID) for one in (self, here))
            message = (
                f"the state was computed {held} the index of this model's attention, but this "
                f"context computes {known} it (kv_unified, n_seq_max, flash_attn): use a context "
                "with the same settings, or evaluate the text again"
            )
            raise StateLayoutMismatch(
                message, "index", self.rope.get(_INDEX), here.rope.get(_INDEX)
            )
        if self.rope_digest != here.rope_digest:
            differ = [
                f"{name} is {self.rope.get(name)} in the state, but {here.rope.get(name)} here"
                for name in sorted({*self.rope, *here.rope})
                if self.rope.get(name) != here.rope.get(name)
            ]
            message = (
                "this context rotates keys differently (rope_freq_base, rope_freq_scale, yarn_*): "
                # The digest covers all layers and the factors, `rope` only one layer.
                + (", ".join(differ) or "the frequency factors or another layer differ")
            )
            raise StateLayoutMismatch(message, "rope", self.rope, here.rope)

    def _called(self) -> str:
        """Describe the model by name and fingerprint: other weights may have the same name."""
        name = f"{self.model_name!r} " if self.model_name else "one without a name "
        return (
            f"{name}({self.architecture[:40]}, {self.n_layer} layers, fingerprint "
            f"{self.model[:16]}...)"
        )


def _named(adapters: tuple[str, ...]) -> str:
    """Return adapters as text for messages, with shortened digests."""
    parts = ([*name[:200].split(":", 2), "", ""] for name in adapters)
    shown = (f"{kind} {digest[:16]} ({scale})" for kind, digest, scale, *_ in parts)
    return f"the adapters {', '.join(shown)}" if adapters else "no adapters"


#: Of the fields in a file, save the adapters.
_TYPES = {
    **dict.fromkeys(("model", "architecture", "memory", "rope_digest"), str),
    **dict.fromkeys(("n_layer", "n_head_kv", "n_embd", "n_swa"), int),
    "causal": bool,
    "rope": dict,
}


def fingerprint_of(native: lib.Context, model: str) -> Fingerprint:
    """Return a context's fingerprint without adapters; ``model`` is its model's fingerprint."""
    m = native.model
    digest = hashlib.sha256()
    first: dict[str, float] = {}
    for layer in range(m.n_layer):
        facts = native.rope_settings(layer)
        digest.update(_rotation(facts))
        if facts is not None and not first and facts["type"] >= 0:
            first = {k: float(v) for k, v in facts.items() if k != "freq_factors"}
    if native.index_use is not None:  # recorded either way: older versions recorded neither
        digest.update(b"index" if native.index_use else b"no index")
        first[_INDEX] = float(native.index_use)
    return Fingerprint(
        model=model,
        architecture=m.metadata.get("general.architecture", ""),
        memory=native.memory_kind,
        n_layer=m.n_layer,
        n_head_kv=m.n_head_kv,
        n_embd=m.n_embd,
        n_swa=m.n_swa,
        causal=native.causal,
        rope=first,
        rope_digest=digest.hexdigest(),
        model_name=m.metadata.get("general.name", "")[:100],
    )


def _rotation(facts: Mapping[str, Any] | None) -> bytes:
    """Serialize a layer's rotation, as far as settings of a context can change it."""
    if facts is None:
        return b"\0"  # the layer stores no keys
    if facts["known"] and facts["type"] < 0:
        return b"\1"
    # Only YaRN's mixture of two rotations uses these.
    mixed = facts["ext_factor"] != 0
    n_ctx_orig, fast, slow = (
        facts[name] if mixed else 0 for name in ("n_ctx_orig", "beta_fast", "beta_slow")
    )
    factors = np.asarray(facts["freq_factors"], "<f4")
    return (
        struct.pack(
            "<B3i6fI",
            2,
            facts["type"],
            facts["n_rot"],
            n_ctx_orig,
            *(facts[name] for name in ("freq_base", "freq_scale", "attn_factor", "ext_factor")),
            fast,
            slow,
            len(factors),
        )
        + factors.tobytes()
    )
