"""The story grammar: what it generates, what its checker accepts, what its exam asks."""

import random

import pytest
from check import is_grammatical, match, split_sentences
from consistency import judge
from exam import TOLERANCE, recall_case
from story import MAX_AGE, Storyteller, tell
from tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer()


@pytest.mark.parametrize("seed", range(20))
def test_checker_accepts_every_generated_sentence(seed):
    text = tell(f"test {seed}", 400).text
    assert [s for s in split_sentences(text) if not is_grammatical(s)] == []


@pytest.mark.parametrize("seed", range(20))
def test_every_claim_of_a_story_is_backed_by_an_earlier_statement(seed):
    verdict = judge(tell(f"test {seed}", 600).text)
    assert verdict.claims > 5
    assert verdict.backed == verdict.claims


@pytest.mark.parametrize(
    "sentence",
    [
        "Mara has a red kite.",
        "Mara has an orange kite.",
        "Tom lives in the mill.",
        'Tom asks Anna, "Who has the red kite?"',
        '"The red kite belongs to Mara," says Anna.',
        "Once upon a time there was an old village by the sea.",
        "On the way he sings a song.",
    ],
)
def test_checker_accepts(sentence):
    assert is_grammatical(sentence)


@pytest.mark.parametrize(
    ("sentence", "why"),
    [
        ("Mara has an red kite.", "wrong article before a consonant"),
        ("Mara has a orange kite.", "wrong article before a vowel"),
        ("Mara a red kite.", "no verb"),
        ("Mara has red a kite.", "wrong word order"),
        ("Mara has a kite red.", "adjective behind its noun"),
        ("Tom lives at the mill.", "wrong preposition"),
        ("Tom lives in mill.", "no article"),
        ("Tom visits Tom in the mill.", "one person in two parts"),
        ("mara has a red kite.", "no capital"),
        ("Mara has a red kite", "no full stop"),
        ("Mara has a red  kite.", "two spaces"),
        ("Mara has a red mill.", "a place for an object"),
        ("Mara have a red kite.", "wrong form of the verb"),
        ('Tom asks Anna, "Who has the red kite."', "a question without its mark"),
        ('Tom asks Anna, "Who has the red kite?', "a quote left open"),
        ("Zelda has a red kite.", "a name that is not in the grammar"),
        ("They at the way.", "no sentence at all"),
        ("", "nothing"),
    ],
)
def test_checker_rejects(sentence, why):
    assert not is_grammatical(sentence), why


def test_checker_rejects_most_shuffled_sentences():
    rng = random.Random(0)
    shuffled = []
    for sentence in split_sentences(tell("test", 800).text):
        words = sentence.split(" ")
        if len(words) > 3:
            shuffled.append(" ".join(rng.sample(words, len(words))))
    assert sum(map(is_grammatical, shuffled)) < len(shuffled) / 20


def test_match_names_the_words_in_the_slots():
    assert match("Mara has an orange kite.") == (
        "[N] has [a.C] [C] [O].",
        {"N": "Mara", "C": "orange", "O": "kite"},
    )


def test_split_keeps_a_quoted_question_in_its_sentence():
    text = 'Tom asks, "Who is the cook?" "Anna is the cook," says Mara.\nTom is happy.'
    assert split_sentences(text) == [
        'Tom asks, "Who is the cook?"',
        '"Anna is the cook," says Mara.',
        "Tom is happy.",
    ]


def test_equal_seeds_give_equal_stories():
    assert tell("a", 300) == tell("a", 300)
    assert tell("a", 300) != tell("b", 300)


def test_a_fact_is_not_used_after_it_is_forgotten():
    teller = Storyteller(random.Random(1), 2000)
    teller.tell()
    assert len(teller.cast) > 6
    fact = teller.facts[0]
    teller.out.pieces += ["."] * MAX_AGE
    assert fact not in teller.usable()


@pytest.mark.parametrize("story", ["wrong owner", "never stated"])
def test_judge_finds_an_unbacked_claim(story):
    story_text = {"wrong owner": "Tom has a red kite. Anna has a blue boat.", "never stated": ""}[
        story
    ]
    verdict = judge(
        'Tom asks, "Who has the red kite?" "The red kite belongs to Anna," says Tom.', story_text
    )
    assert (verdict.sentences, verdict.grammatical) == (2, 2)
    assert (verdict.claims, verdict.backed) == (1, 0)


def test_judge_counts_a_contradicting_statement_as_an_unbacked_claim():
    verdict = judge("Tom lives in the mill. Tom lives by the lake.")
    assert (verdict.claims, verdict.backed) == (1, 0)


@pytest.mark.parametrize("distance", [50, 200, 400])
@pytest.mark.parametrize("seed", range(10))
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
