"""Random requests to the tree without a model: every account, every rule, every policy."""

from __future__ import annotations

import random

import pytest

from prefix.model_free import ALL, PLAIN, WINDOW, Model, check_tree, prompts, token_bytes
from pykvcache.prefix.policies import POLICIES
from support.examples import examples, some


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kinds", ALL.values(), ids=ALL)
def test_random_requests_keep_every_account_right(kinds, policy):
    for seed in range(2):
        rng = random.Random(seed)
        most_open = rng.choice([0, 3])
        size = rng.choice([1, 4, 8])
        model = Model(
            kinds,
            size,
            rng.choice([0, 300, 2000, 8000, 10**6]),
            policy,
            overhead=rng.choice([0, 40]),
            cells=rng.choice([10**9, 14, 30]),
            root=rng.choice([None, lambda name: name.encode().ljust(32, b"-")]),
        )
        tree, open_, earlier = model.tree, [], []
        for prompt, answer in prompts(rng, examples(40)):
            if earlier and rng.random() < 0.4:  # again, or its beginning
                prompt = rng.choice(earlier)
                prompt = prompt[: rng.choice([len(prompt), rng.randint(1, len(prompt))])]
            earlier.append(prompt)
            space = rng.choice(["", "", "b"])
            begun, hold = model.begin(prompt, space)
            open_.append((prompt, answer, begun, hold, space))
            check_tree(tree, [one[3] for one in open_ if one[3]])
            while len(open_) > rng.randint(0, most_open):
                prompt, answer, begun, hold, space = open_.pop(rng.randrange(len(open_)))
                model.give(prompt, answer, begun, space, rng.choice([0, 0, 1]))
                check_tree(tree, [one for one in [hold, *(one[3] for one in open_)] if one])
                if hold:
                    tree.release(hold, is_use=rng.random() < 0.7)
                    tree.fit()
                check_tree(tree, [one[3] for one in open_ if one[3]])
            if rng.random() < 0.05:
                tree.forget(token_bytes(prompt), space)
            if rng.random() < 0.02:
                tree.clear(rng.choice([None, "b"]))
                for at, one in enumerate(open_):
                    if one[3] and one[3].node.parent is None:
                        open_[at] = (*one[:3], None, one[4])
            check_tree(tree, [one[3] for one in open_ if one[3]])


@pytest.mark.parametrize("answer", [0, 5])
@pytest.mark.parametrize("kinds", ALL.values(), ids=ALL)
def test_a_repeated_prompt_counts_as_a_use_of_its_last_block(kinds, answer):
    for size in (4, 64):
        model = Model(kinds, size, 10**6)
        for _ in range(4):
            model.ask([*range(1, 39)], [*range(100, 100 + answer)])
        path = model.tree.match(token_bytes([*range(1, 38)])).nodes()
        assert [node.attention.uses for node in path] == [3] * len(path)
        assert not kinds.window or path[-1].window.uses


@pytest.mark.parametrize("policy", some(POLICIES, "hit-density", "s3fifo", "slru"))
@pytest.mark.parametrize("kinds", ALL.values(), ids=ALL)
def test_lower_priorities_leave_first(kinds, policy):
    rng = random.Random(7)
    model = Model(kinds, 4, 2500, policy)
    tree, choose, n_evicted = model.tree, model.tree.policy.victim, 0

    def victim():
        nonlocal n_evicted
        one = choose()
        components = (one for node in tree.nodes() for one in node.components())
        ranked = [one.priority for one in components if one.is_evictable and not one.is_speculative]
        assert min(ranked, default=None) == (one and one.priority)
        n_evicted += one is not None
        return one

    tree.policy.victim = victim
    for prompt, answer in prompts(rng, 100):
        priority = rng.choice([-1, 0, 0, 1])
        begun, hold = model.begin(prompt, priority=priority)
        model.give(prompt, answer, begun, priority=priority)
        if hold is not None:
            tree.release(hold)
            tree.fit()
    assert n_evicted > 20


def test_a_window_that_loses_its_middle_leaves_as_a_whole():
    model, text = Model(WINDOW, 4, 10**6, cells=14), [*range(1, 25)]
    model.ask(text)
    tree = model.tree
    end = tree.match(token_bytes(text)).node
    for at in (16, 12):
        tree._boundary(tree._node_of(end, at), at)
    middle = tree._node_of(end, 16)
    assert [node.window is not None for node in end.path()[:3]] == [True] * 3
    tree._remove(middle.window, len(middle.window.sizes))
    check_tree(tree)
    assert not list(tree.nodes()), "no prompt can resume"


def test_windows_that_only_a_forgotten_prompt_needed_leave_with_it():
    """Those that it shares with a prompt whose own window begins later, too."""
    model, text = Model(WINDOW, 4, 10**6, cells=14), [*range(1, 25)]
    model.ask(text)
    tree = model.tree
    end = tree.match(token_bytes(text)).node
    tree._boundary(end, 20)
    model.ask([*text[:16], *range(100, 115)])
    shared = tree._node_of(end, 16)
    assert shared.window is not None
    tree.forget(token_bytes(text))
    assert shared.children
    assert shared.window is None
    check_tree(tree)


def test_a_prompt_that_goes_on_uses_the_last_block_without_a_split():
    model, text = Model(PLAIN, 4, 10**6), [*range(1, 34)]
    model.ask(text)
    model.ask([*text, 40])
    node = model.tree.match(token_bytes(text)).node
    assert (node.start, node.end, node.attention.uses) == (0, 33, 1)


def test_overhead_counts_towards_the_budget():
    for kinds in ALL.values():
        model = Model(kinds, 4, 10**6, overhead=40)
        for end in (20, 30):
            model.ask([*range(1, 20), *range(end, 50)])
        check_tree(model.tree)
        assert model.tree.n_bytes > sum(
            one.n_bytes + 40 for node in model.tree.nodes() for one in node.components()
        )
