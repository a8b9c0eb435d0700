"""Evaluate the model through pykvcache, each figure also with a damaged cache.

``python models/training/evaluate.py`` prints the tables that stand in models/README.md. All
chance is seeded, and the seeds are not among those of training.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from consistency import Verdict, judge
from exam import Case, recall_case
from numpy.typing import NDArray
from story import Passage, tell
from tokenizer import Tokenizer

from pykvcache import LlamaBatch, LlamaContext, LlamaModel

DEFAULT_MODEL = Path(__file__).resolve().parent.parent / "stories.gguf"
N_CTX = 1024
DISTANCES = (50, 200, 400)
TEMPERATURE = 0.8

Damage = Callable[["Reader"], None]


class Reader:
    """A context whose sequence 0 reads one text at a time."""

    def __init__(self, model: LlamaModel, temperature: float = TEMPERATURE) -> None:
        self.temperature = temperature
        # One thread: so small a model gains nothing from two, and sums come out the same.
        self.ctx = LlamaContext(model, n_ctx=N_CTX, n_threads=1, n_threads_batch=1)
        self.tokenizer = Tokenizer()

    @property
    def n_past(self) -> int:
        """The position after the last token that was read."""
        return int(self.ctx.kv_cache_seq_pos_max(0)) + 1

    def start(self, text: str) -> None:
        """Forget everything and read a text from its beginning."""
        self.ctx.clear_kv_cache()
        self.read(self.tokenizer.encode(text))

    def read(self, ids: list[int]) -> None:
        """Read on."""
        self.ctx.decode(np.array(ids, dtype=np.int32), seq_id=0)

    def read_scored(self, ids: list[int]) -> NDArray[np.float64]:
        """Read on and return how surprising each token but the first was, in nats."""
        batch = LlamaBatch(len(ids))
        for offset, token in enumerate(ids):
            batch.add(token, self.n_past + offset, [0], logits=True)
        self.ctx.decode(batch)
        logits = np.array([self.ctx.logits(i) for i in range(len(ids) - 1)], dtype=np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        log_total = np.log(np.exp(logits).sum(axis=1))
        return log_total - logits[np.arange(len(ids) - 1), ids[1:]]

    def greedy(self, n_tokens: int) -> list[int]:
        """Return the likeliest next tokens."""
        ids: list[int] = []
        while len(ids) < n_tokens:
            ids.append(int(np.argmax(self.ctx.logits(-1))))
            self.read(ids[-1:])
        return ids

    def sample(self, n_tokens: int, rng: np.random.Generator) -> list[int]:
        """Draw a continuation by chance; it ends where the story ends."""
        ids: list[int] = []
        while len(ids) < n_tokens:
            ids.append(self.draw(rng))
            if ids[-1] == self.tokenizer.eos:
                return ids[:-1]
            self.read(ids[-1:])
        return ids

    def draw(self, rng: np.random.Generator) -> int:
        """Draw the next token by chance, without reading it."""
        logits = self.ctx.logits(-1).astype(np.float64) / self.temperature
        chances = np.exp(logits - logits.max())
        return int(rng.choice(len(chances), p=chances / chances.sum()))

    def remove(self, start: int, end: int) -> None:
        """Take the cells of these positions out of the cache."""
        if not self.ctx.clear_kv_cache_seq(0, start, end):
            raise RuntimeError(f"cells {start} to {end} could not be removed")


def no_damage(reader: Reader) -> None:
    """Leave the cache as it is."""


def every_other_cell(reader: Reader) -> None:
    """Remove every second cell; the last one stays, so that positions go on."""
    for position in range(reader.n_past - 2, 0, -2):
        reader.remove(position, position + 1)


def older_half(reader: Reader) -> None:
    """Remove the first half of the cells, `<s>` among them."""
    reader.remove(0, reader.n_past // 2)


def span_of(case: Case, reader: Reader, *, is_fact: bool) -> Damage:
    """Remove the statement that a case asks for, or as many tokens somewhere else."""
    start, end = (at + 1 for at in case.fact_span)  # <s> comes first
    if not is_fact:
        size, n_past = end - start, len(reader.tokenizer.encode(case.story))
        free = [at for at in range(1, n_past - size) if at + size <= start or at >= end]
        start = random.Random(case.story).choice(free)
        end = start + size
    return lambda reader: reader.remove(start, end)


def recall(reader: Reader, cases: list[Case], damage: Callable[[Case], Damage]) -> float:
    """Return the share of cases whose whole answer is the likeliest one."""
    right = 0
    for case in cases:
        reader.start(case.story)
        damage(case)(reader)
        reader.read(reader.tokenizer.encode(case.question, add_bos=False))
        wanted = reader.tokenizer.encode(case.answer, add_bos=False)
        right += reader.greedy(len(wanted)) == wanted
    return right / len(cases)


def perplexity(reader: Reader, stories: list[Passage], damage: Damage) -> tuple[float, float]:
    """Return the perplexity of second halves of stories: of all tokens, of recalled ones."""
    surprise: list[float] = []
    recalled: list[float] = []
    for story in stories:
        half = len(story.pieces) // 2
        reader.start("".join(story.pieces[:half]))
        damage(reader)
        ids = reader.tokenizer.encode("".join(story.pieces[half:]), add_bos=False)
        nats = reader.read_scored(ids)
        surprise += nats.tolist()
        recalled += nats[np.array(story.answers[half + 1 :])].tolist()
    return math.exp(sum(surprise) / len(surprise)), math.exp(sum(recalled) / len(recalled))


def write(reader: Reader, prompts: list[str], n_tokens: int, damage: Damage) -> Verdict:
    """Continue prompts by chance and judge what was written."""
    verdict = Verdict()
    for number, prompt in enumerate(prompts):
        reader.start(prompt)
        # The last token is read again behind the damage: its logits must come from the cache.
        last = reader.tokenizer.encode(prompt)[-1]
        reader.remove(reader.n_past - 1, reader.n_past)
        damage(reader)
        reader.read([last])
        text = reader.tokenizer.decode(reader.sample(n_tokens, np.random.default_rng(number)))
        finished = max(text.rfind(end) for end in (". ", ".\n", '" ', '"\n')) + 1
        verdict += judge(text[:finished], prompt)
    return verdict


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--cases", type=int, default=200, help="questions per distance")
    parser.add_argument("--stories", type=int, default=50, help="held-out stories, and prompts")
    parser.add_argument("--temperature", type=float, default=TEMPERATURE)
    args = parser.parse_args()
    started = time.monotonic()
    model = LlamaModel(args.model)
    reader = Reader(model, args.temperature)

    print("| recall at a distance of | " + " | ".join(f"{d} tokens" for d in DISTANCES) + " |")
    print("|---|" + "---:|" * len(DISTANCES))
    cases = {d: [recall_case(f"held-out {i}", d) for i in range(args.cases)] for d in DISTANCES}
    damages: dict[str, Callable[[Case], Damage]] = {
        "cache intact": lambda case: no_damage,
        "the fact's cells removed": lambda case: span_of(case, reader, is_fact=True),
        "as many other cells removed": lambda case: span_of(case, reader, is_fact=False),
        "every second cell removed": lambda case: every_other_cell,
    }
    for name, damage in damages.items():
        shares = (f"{recall(reader, cases[d], damage):.1%}" for d in DISTANCES)
        print(f"| {name} | " + " | ".join(shares) + " |", flush=True)

    print("\n| held-out stories | perplexity | of recalled words |")
    print("|---|---:|---:|")
    stories = [tell(f"held-out {i}", 400) for i in range(args.stories)]
    states: dict[str, Damage] = {
        "cache intact": no_damage,
        "older half removed": older_half,
        "every second cell removed": every_other_cell,
    }
    for name, spoil in states.items():
        all_words, recalled = perplexity(reader, stories, spoil)
        print(f"| {name} | {all_words:.2f} | {recalled:.2f} |", flush=True)

    print(f"\n| text sampled at {args.temperature} | sentences | grammatical | true to its story |")
    print("|---|---:|---:|---:|")
    # The first paragraphs of a story, as far as they fit into 200 tokens.
    prompts = ["".join(story.pieces[:200]).rpartition("\n")[0] + "\n" for story in stories]
    for name, spoil in states.items():
        v = write(reader, prompts, 200, spoil)
        shares = f"{v.grammatical / v.sentences:.1%} | {v.backed / v.claims:.1%}"
        print(f"| {name} | {v.sentences} | {shares} |", flush=True)
    print(f"\nEvaluated in {time.monotonic() - started:.0f} s.")


if __name__ == "__main__":
    main()
