"""Training rows: fresh stories as token ids, with the weight of each token in the loss."""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray
from story import Storyteller
from tokenizer import Tokenizer

ANSWER_WEIGHT = 5.0
"""How much more than other tokens the words count that only memory can supply."""
CROPPED = 0.2
"""Share of long rows that begin in the middle of a story, as a sliding window does."""


def row(
    tokenizer: Tokenizer, seed: str, length: int, quizzes: float
) -> tuple[list[int], list[bool]]:
    """Make one row of token ids and answer marks: stories one after the other, cut at a length."""
    rng = random.Random(seed)
    ids: list[int] = []
    answers: list[bool] = []
    crop = length >= 512 and rng.random() < CROPPED
    while len(ids) < (2 * length if crop else length):
        n_tokens = 2 * length if crop else int(length * rng.uniform(0.7, 1.2))
        teller = Storyteller(rng, n_tokens)
        passage = teller.quiz() if rng.random() < quizzes else teller.tell()
        ids += [tokenizer.bos, *(tokenizer.piece_ids(p)[0] for p in passage.pieces), tokenizer.eos]
        answers += [False, *passage.answers, False]
    start = rng.randrange(length // 2, length) if crop else 0
    return ids[start : start + length], answers[start : start + length]


def batch(
    tokenizer: Tokenizer, seed: str, n_rows: int, length: int, quizzes: float = 0.0
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Make rows of `length` + 1 tokens: inputs are all but the last, targets all but the first.

    `quizzes` is the share of texts that are dense lessons in memory and no stories.
    """
    rows = [row(tokenizer, f"{seed}/{i}", length + 1, quizzes) for i in range(n_rows)]
    ids, answers = zip(*rows, strict=True)
    return np.array(ids, dtype=np.int64), np.array(answers, dtype=np.bool_)
