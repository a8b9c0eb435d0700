"""Evaluate long contexts and endless generation: ``python models/training/evaluate_long.py``."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
from consistency import Verdict, judge
from evaluate import DEFAULT_MODEL, N_CTX, Reader
from story import tell

from pykvcache import LlamaModel

PARTS = ((1, 256), (256, 512), (512, 768), (768, 1000))
WINDOW, LENGTH, TEMPERATURE = 500, 2500, 0.6


def perplexity_by_part(reader: Reader, n_stories: int) -> None:
    """Print perplexity by how far into a story a word stands."""
    nats: list[list[float]] = [[] for _ in PARTS]
    recalled: list[list[float]] = [[] for _ in PARTS]
    for number in range(n_stories):
        story = tell(f"held-out long {number}", N_CTX)
        ids = reader.tokenizer.encode(story.text)[: PARTS[-1][1] + 1]
        reader.ctx.clear_kv_cache()
        surprise = reader.read_scored(ids)
        is_answer = np.array(story.answers)
        for part, (start, end) in enumerate(PARTS):
            nats[part] += surprise[start:end].tolist()
            recalled[part] += surprise[start:end][is_answer[start:end]].tolist()
    print("| tokens before | perplexity | of recalled words |")
    print("|---|---:|---:|")
    for (start, end), words, answers in zip(PARTS, nats, recalled, strict=True):
        shares = f"{math.exp(np.mean(words)):.2f} | {math.exp(np.mean(answers)):.2f}"
        print(f"| {start} to {end} | {shares} |")


def slide(reader: Reader, n_runs: int) -> None:
    """Generate several windows' length of text and print how it holds up."""
    verdict = Verdict()
    for number in range(n_runs):
        rng = np.random.default_rng(number)
        reader.start("Once upon a time")
        ids: list[int] = []
        while len(ids) < LENGTH:
            token = reader.draw(rng)
            if reader.n_past >= WINDOW:
                half = WINDOW // 2
                reader.remove(1, 1 + half)
                reader.ctx.kv_cache_seq_add(0, 1 + half, None, -half)
            if token == reader.tokenizer.eos:  # the story is over, so the next one begins
                token = reader.tokenizer.bos
            else:
                ids.append(token)
            reader.read([token])
        verdict += judge("Once upon a time" + reader.tokenizer.decode(ids))
    true, claims = verdict.backed, verdict.claims
    shares = f"{verdict.grammatical / verdict.sentences:.1%} | {true / claims:.1%}"
    print("\n| shifted context | sentences | grammatical | true to its story |")
    print("|---|---:|---:|---:|")
    name = f"{n_runs} texts of {LENGTH} tokens through {WINDOW}"
    print(f"| {name} | {verdict.sentences} | {shares} |")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    args = parser.parse_args()
    reader = Reader(LlamaModel(args.model), TEMPERATURE)
    perplexity_by_part(reader, 25)
    slide(reader, 4)


if __name__ == "__main__":
    main()
