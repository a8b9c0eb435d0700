"""The story grammar: what it generates, what its checker accepts, what its exam asks."""

import random

import pytest
from check import is_grammatical, match, split_sentences
from consistency import judge
from exam import TOLERANCE, recall_case
from story import tell
from tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer()


@pytest.mark.parametrize("seed", range(6))
def test_checker_accepts_every_generated_sentence(seed):
    text = tell(f"test {seed}", 400).text
    assert [s for s in split_sentences(text) if not is_grammatical(s)] == []


@pytest.mark.parametrize("seed", range(6))
def test_every_claim_of_a_story_is_backed_by_an_earlier_statement(seed):
    verdict = judge(tell(f"test {seed}", 600).text)
    assert verdict.claims > 5
    assert verdict.backed == verdict.claims


def test_checker_rejects_what_is_nearly_right():
    assert is_grammatical("Mara has a red kite.")
    for wrong in ("Mara has a red mill.", "Mara have a red kite.", "Mara has a red kite", ""):
        assert not is_grammatical(wrong)
    verdict = judge("Tom lives in the mill. Tom lives by the lake.")
    assert (verdict.claims, verdict.backed) == (1, 0)


def test_checker_rejects_most_shuffled_sentences():
    rng = random.Random(0)
    shuffled = []
    for sentence in split_sentences(tell("test", 800).text):
        words = sentence.split(" ")
        if len(words) > 3:
            shuffled.append(" ".join(rng.sample(words, len(words))))
    assert sum(map(is_grammatical, shuffled)) < len(shuffled) / 20


@pytest.mark.parametrize("distance", [50, 400])
@pytest.mark.parametrize("seed", range(4))
def test_exam_question_is_right_and_as_far_away_as_claimed(tokenizer, seed, distance):
    case = recall_case(f"test {seed}", distance)
    story = tokenizer.encode(case.story, add_bos=False)
    asked = tokenizer.encode(case.story + case.question, add_bos=False)
    start, end = case.fact_span

    assert abs(case.distance - distance) <= TOLERANCE
    assert len(asked) - end == case.distance
    assert asked[: len(story)] == story

    stated = match(tokenizer.decode(story[start:end]).strip())
    assert stated is not None
    assert stated[1] == case.fact.words

    verdict = judge(case.question + case.answer + case.rest, case.story)
    assert (verdict.sentences, verdict.grammatical) == (2, 2)
    assert (verdict.claims, verdict.backed) == (1, 1)
