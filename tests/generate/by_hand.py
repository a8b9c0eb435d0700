"""Generations made by hand, one decode after the other: what all others are compared with."""

from __future__ import annotations

import codecs
from typing import Any

import numpy as np

from memory.kit import Case, Logits
from pykvcache import LlamaContext, Sampler
from pykvcache.errors import DecodeError

GRAMMAR = 'root ::= [a-zA-Z0-9 ▁<>_|]{0,12} "\\x00"'


class ByHand:
    """A context `plain` of one sequence beside the one that is tried; `log` tells what was done."""

    def __init__(self, case: Case, ctx: LlamaContext, plain: LlamaContext, seed: Any) -> None:
        self.case, self.ctx, self.plain = case, ctx, plain
        self.rng = np.random.default_rng(seed)
        self.log: list[str] = []

    # Draws ------------------------------------------------------------------------------------

    def words(self, least: int, most: int) -> list[int]:
        n = int(self.rng.integers(least, max(least, most) + 1))
        top = 8 if self.rng.random() < 0.5 else self.case.n_vocab - 2
        found: list[int] = self.rng.integers(5, top, n).tolist()
        return found

    def settings(self) -> dict[str, Any]:
        found: dict[str, Any] = {"temperature": 0}
        if self.rng.random() < 0.7:
            found = {"temperature": 1, "top_k": 30, "seed": int(self.rng.integers(1, 9))}
        if self.rng.random() < 0.5:
            found |= {"repeat_penalty": 1.3, "presence_penalty": 0.5, "penalty_last_n": 20}
        chance = self.rng.random()
        if chance < 0.15:
            found |= {"grammar": GRAMMAR, "model": self.ctx.model}
        elif chance < 0.4:
            bias = {int(t): 4.0 for t in self.rng.integers(0, self.case.n_vocab, 3)}
            found |= {"logit_bias": bias}
        return found

    def stops(self, prompt: list[int], settings: dict[str, Any]) -> list[str | int]:
        """Return some out of what would be made: they overlap, lie in one token, or across two."""
        if not prompt or self.rng.random() < 0.5:
            return []
        made = self.alone(prompt, settings, 0, 10, [])[0]
        text = b"".join(map(self.ctx.model.token_to_piece, made)).decode("utf-8", "replace")
        found: list[str | int] = ["never there"]
        for _ in range(int(self.rng.integers(1, 4))):
            if text:
                at = int(self.rng.integers(len(text)))
                found.append(text[at : at + int(self.rng.integers(1, 5))])
        if made and self.rng.random() < 0.3:
            found.append(made[-1])
        return found

    # What it should be ------------------------------------------------------------------------

    def fresh(self, tokens: list[int]) -> Logits:
        self.plain.clear_kv_cache()
        self.plain.decode(tokens, seq_id=0)
        row: Logits = self.plain.logits()
        return row

    def sampler(self, settings: dict[str, Any], i: int = 0) -> Sampler:
        more = {"seed": settings["seed"] + i} if "seed" in settings else {}
        return Sampler(**settings | more)

    def alone(
        self, prompt: list[int], settings: dict[str, Any], i: int, limit: int, stop: Any
    ) -> tuple[list[int], str]:
        """Make a generation by hand: tokens, and how it ended."""
        sampler, made, data = self.sampler(settings, i), [], b""
        model = self.plain.model
        self.plain.clear_kv_cache()
        more, n = list(prompt), 0
        while len(made) < limit:
            if n + len(more) > self.ctx.n_ctx_seq and self.ctx.memory_kind != "recurrent":
                return made, "full"
            self.plain.decode(more, seq_id=0)
            n += len(more)
            try:
                token = sampler.sample(self.plain)
            except DecodeError:
                return made, "error"
            if model.is_eog(token):
                return made, "stop"
            made.append(token)
            more = [token]
            if token in stop:
                return made, "stop"
            data += model.token_to_piece(token)
            text = codecs.utf_8_decode(data, "replace", False)[0]
            if any(isinstance(one, str) and one in text for one in stop):
                return made, "stop"
        return made, "length"

    def check_text(self, text: str, tokens: list[int], stop: list[str | int]) -> None:
        if tokens and tokens[-1] in stop:
            tokens = tokens[:-1]
        whole = b"".join(map(self.ctx.model.token_to_piece, tokens)).decode("utf-8", "replace")
        places = [whole.find(one) for one in stop if isinstance(one, str) and one in whole]
        assert text == whole[: min(places, default=len(whole))], (text, whole, stop, self.log)
