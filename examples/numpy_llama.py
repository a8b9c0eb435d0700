"""A llama forward pass in plain NumPy, on a GGUF file and any of three array caches.

Usage: python examples/numpy_llama.py MODEL.gguf 1 15 27 -n 20     (needs the extra gguf)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pykvcache.arrays import CausalCache, FlatKVCache, KVCache

try:
    import gguf
except ImportError:
    raise SystemExit("this example needs gguf: pip install '.[gguf]' in the clone") from None

Array = NDArray[Any]
# The interface of a cache for a forward pass: takes (layer, K, V, positions) of new tokens, K and V
# as (tokens, heads, dim); returns K and V of all tokens, and which of them each new token sees.
Exchange = Callable[[int, Array, Array, Array], tuple[Array, Array, Array]]


def on_kv_caches(caches: Sequence[KVCache]) -> Exchange:
    """Use mlx-style caches, one per layer, of ``(batch, heads, tokens, dim)``."""

    def exchange(layer: int, k: Array, v: Array, positions: Array) -> tuple[Array, Array, Array]:
        mask = caches[layer].make_mask(len(k), return_array=True)
        keys, values = caches[layer].update(k.swapaxes(0, 1)[None], v.swapaxes(0, 1)[None])
        visible = mask if isinstance(mask, np.ndarray) else np.array(True)
        return keys[0].swapaxes(0, 1), values[0].swapaxes(0, 1), visible

    return exchange


def on_causal_cache(cache: CausalCache, sequence: int = 0) -> Exchange:
    """Use one sequence of an Ollama-style cache, which builds the mask."""

    def exchange(layer: int, k: Array, v: Array, positions: Array) -> tuple[Array, Array, Array]:
        if layer == 0:
            cache.start_forward(positions, [sequence] * len(positions))
        cache.set_layer(layer)
        cache.put(k, v)
        keys, values, mask = cache.get()
        return keys, values, mask == 0

    return exchange


def on_flat_cache(cache: FlatKVCache) -> Exchange:
    """Use a flat cache, and build the mask."""

    def exchange(layer: int, k: Array, v: Array, positions: Array) -> tuple[Array, Array, Array]:
        cache.extend(layer, k.ravel(), v.ravel())
        if layer == cache.num_layers - 1:
            cache.advance()
        keys, values = (flat.reshape(-1, *k.shape[1:]) for flat in (cache.k(layer), cache.v(layer)))
        return keys, values, np.arange(len(keys)) <= positions[:, None]

    return exchange


class Llama:
    """Weights and sizes of a GGUF file; every weight becomes float32."""

    def __init__(self, path: str) -> None:
        file = gguf.GGUFReader(path)
        key = {name.removeprefix("llama."): f.contents() for name, f in file.fields.items()}
        self.weights = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in file.tensors}
        strange = {"expert_count", "rope.scaling.type"} & key.keys()
        strange |= {name for name in self.weights if name.endswith(".bias")}
        if key["general.architecture"] != "llama" or strange:
            raise ValueError(f"not a plain model of architecture llama: {strange or path}")
        self.pieces: list[str] = key.get("tokenizer.ggml.tokens", [])
        self.n_layer, self.n_head = key["block_count"], key["attention.head_count"]
        self.n_head_kv = key.get("attention.head_count_kv", self.n_head)
        self.head_dim = key.get("attention.key_length", key["embedding_length"] // self.n_head)
        self.eps = key["attention.layer_norm_rms_epsilon"]
        n_rot = key.get("rope.dimension_count", self.head_dim)
        self.freqs = key.get("rope.freq_base", 10000.0) ** (-np.arange(0, n_rot, 2) / n_rot)
        self.freqs /= self.weights.get("rope_freqs.weight", 1.0)

    def rope(self, x: Array, positions: ArrayLike) -> Array:
        """Rotate each pair of neighbours of ``(tokens, heads, dim)``; also used for shifts."""
        angles, n_rot = np.asarray(positions)[:, None, None] * self.freqs, 2 * self.freqs.size
        turned = (x[..., :n_rot:2] + 1j * x[..., 1:n_rot:2]) * np.exp(1j * angles)
        out = x.astype(np.float32)
        out[..., :n_rot:2], out[..., 1:n_rot:2] = turned.real, turned.imag
        return out

    def forward(self, tokens: ArrayLike, positions: ArrayLike, exchange: Exchange) -> Any:
        """Return the logits ``(tokens, vocabulary)`` after each of the tokens."""
        x, positions = self.weights["token_embd.weight"][np.asarray(tokens)], np.asarray(positions)
        heads = len(x), -1, self.head_dim
        for layer in range(self.n_layer):
            blk = f"blk.{layer}."
            h = self._norm(x, f"{blk}attn_norm")
            q, k, v = (self._linear(h, f"{blk}attn_{part}").reshape(heads) for part in "qkv")
            history = exchange(layer, self.rope(k, positions), v, positions)
            x += self._linear(self._attend(self.rope(q, positions), *history), f"{blk}attn_output")
            h = self._norm(x, f"{blk}ffn_norm")
            gate = self._linear(h, f"{blk}ffn_gate")
            gate *= 0.5 + 0.5 * np.tanh(gate / 2)  # SiLU without overflow
            x = x + self._linear(gate * self._linear(h, f"{blk}ffn_up"), f"{blk}ffn_down")
        output = "output" if "output.weight" in self.weights else "token_embd"
        return self._linear(self._norm(x, "output_norm"), output)

    def _attend(self, q: Array, k: Array, v: Array, visible: Array) -> Any:
        q = q.reshape(len(q), self.n_head_kv, -1, self.head_dim)
        scores = np.where(visible, np.einsum("nkgd,hkd->kgnh", q, k) / self.head_dim**0.5, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("kgnh,hkd->nkgd", weights, v).reshape(len(q), -1)

    def _norm(self, x: Array, name: str) -> Any:
        return x / np.sqrt((x * x).mean(-1)[..., None] + self.eps) * self.weights[f"{name}.weight"]

    def _linear(self, x: Array, name: str) -> Any:
        return x @ self.weights[f"{name}.weight"].T


def empty_cache(model: Llama, kind: str, capacity: int) -> Exchange:
    """Make the cache `kind` for `model`."""
    if kind == "kv":
        return on_kv_caches([KVCache() for _ in range(model.n_layer)])
    if kind == "flat":
        return on_flat_cache(FlatKVCache(model.n_layer, model.n_head_kv, model.head_dim))
    causal = CausalCache(lambda layer, key, shift: model.rope(key, shift))
    causal.init(np.float32, max_sequences=1, capacity=capacity, max_batch=capacity)
    return on_causal_cache(causal)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Continue token ids with a GGUF model, greedily.")
    parser.add_argument("model")
    parser.add_argument("tokens", type=int, nargs="+")
    parser.add_argument("-n", type=int, default=16, help="tokens to generate")
    parser.add_argument("--cache", choices=["kv", "causal", "flat"], default="kv")
    args = parser.parse_args()
    model, tokens, length = Llama(args.model), args.tokens, 0
    exchange = empty_cache(model, args.cache, len(tokens) + args.n)
    for _ in range(args.n):
        logits = model.forward(tokens, np.arange(length, length + len(tokens)), exchange)
        length, tokens = length + len(tokens), [int(logits[-1].argmax())]
        print(model.pieces[tokens[0]] if model.pieces else tokens[0], end=" ", flush=True)
    print()
