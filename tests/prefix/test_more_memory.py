"""More memory is never worse: any policy, block size, and mix of components."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from prefix.model_free import ALL, WINDOW, Kinds, Model, Tokens, prompts
from pykvcache.prefix.policies import POLICIES
from support.examples import some

#: As they are in Gemma 3 270M: 3 of 18 layers see everything, 15 see 512 tokens.
GEMMA = Kinds(window=512, attention_bytes=3072, window_bytes=15360, slack=128)
MIB = 1 << 20
BUDGETS = [300, 1500, 4000, 16_000, 10**9]
USUAL = ("lru", "hit-density")
#: How programs evict that store whole prompts is not ours to improve.
OURS = [name for name in POLICIES if name not in ("llama-server", "mlx-lm")]


def question(model: Model, n_document: int, seed: int) -> int:
    """Ask a question about one document; return how many tokens are evaluated."""
    document = [random.Random(1).randrange(10**6) for _ in range(n_document)]
    rng = random.Random(seed)
    own: Tokens = [rng.randrange(10**6) for _ in range(12)]
    return model.ask(document + own, [rng.randrange(10**6) for _ in range(20)])


@pytest.mark.parametrize("policy", some(POLICIES, *USUAL))
def test_another_question_costs_no_more_with_more_memory(policy: str) -> None:
    before = [3212] * 4
    for budget in range(8 * MIB, 21 * MIB, 2 * MIB):
        model = Model(GEMMA, 64, budget, policy, overhead=800)
        took = [question(model, 3200, seed) for seed in range(4)]
        assert all(now <= then for now, then in zip(took, before, strict=True)), budget / MIB
        before = took
        if budget >= 14 * MIB:
            assert max(took[1:]) <= 0.6 * 3212
    assert max(before[1:]) <= 77


@pytest.mark.parametrize("policy", some(POLICIES, *USUAL))
@pytest.mark.parametrize("n", [1, 63, 65, 512, 817])
def test_short_documents_are_kept_as_soon_as_they_fit(n: int, policy: str) -> None:
    before = n + 12
    for part in (1, 2, 4, 8, 12, 16, 20, 24, 32, 64):
        model = Model(GEMMA, 64, n * 18432 * part // 16 + MIB, policy, overhead=800)
        question(model, n, 2)
        took = question(model, n, 3)
        assert took <= before, part
        before = took
    assert before == 12


@pytest.mark.parametrize("policy", some(POLICIES, *USUAL))
@pytest.mark.parametrize("n", [512, 700, 3200])
def test_as_many_tokens_of_a_large_document_are_kept_as_fit(n: int, policy: str) -> None:
    for end in range(64, min(512, n - 64), 64):
        budget = int(end * 18432 * 1.05) + 2 * 64 * 800
        model = Model(GEMMA, 64, budget, policy, overhead=800)
        question(model, n, 2)
        assert question(model, n, 3) <= n + 12 - end, budget


@pytest.mark.parametrize("policy", some(OURS, *USUAL))
@pytest.mark.parametrize("kinds", ALL.values(), ids=ALL)
def test_random_requests_evaluate_less_with_more_memory(kinds: Kinds, policy: str) -> None:
    """All traces together; a single one may be unlucky, by a little."""
    total = {budget: 0 for budget in BUDGETS}
    for seed in range(3):
        requests = prompts(random.Random(seed), 80, letters=8)
        before = 1 << 30
        for budget in BUDGETS:
            model = Model(kinds, (4, 16, 7)[seed], budget, policy)
            for prompt, answer in requests:
                model.ask(prompt, answer)
            assert model.evaluated <= 1.15 * before
            before = min(before, model.evaluated)
            total[budget] += model.evaluated
    amounts = list(total.values())
    for less, more in pairwise(amounts):
        assert more <= 1.02 * less


def test_windows_in_the_middle_of_prompts_leave_first() -> None:
    model = Model(WINDOW, 4, 10**6)
    model.ask(list(range(100)))
    tree = model.tree
    tree.max_bytes = tree.n_bytes - 40 * 60
    tree.fit()
    match = tree.match(b"".join(i.to_bytes(4, "little") for i in range(100)))
    assert match.n == 100, "attention cells stay"
    first, end = match.windows()[-1]
    assert first > 0
    assert end == 100, "those of the end stay"
    assert tree.resume(match, 80).n == 80
    assert tree.resume(match, 70).n == 0, "its window begins in what left"
