"""Grammars: the text follows them, or an error says why it cannot."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext, suppress
from typing import Any

import pytest

from binding.conftest import Child
from binding.kit import words
from pykvcache import Sampler
from pykvcache.errors import DecodeError, GrammarError, UnsupportedOperation
from support.sanitizer import SANITIZED

DIGITS = "root ::= [0-9]+"


def text_of(model: Any, tokens: Any) -> str:
    return b"".join(model.token_to_piece(t) for t in tokens).decode()


def sampled(ctx: Any, grammar: str, n: int, **options: Any) -> str:
    sampler = Sampler(**({"temperature": 0} | options), grammar=grammar, model=ctx.model)
    return text_of(ctx.model, ctx.generate(words(5), n, sampler))


@pytest.mark.parametrize("name", ["llama", "llama_bpe", "qwen2vl", "mamba"])
@pytest.mark.parametrize("options", [{}, {"temperature": 5.0, "seed": 3, "top_k": 0}])
def test_the_text_follows_the_grammar(make_context: Any, name: str, options: Any) -> None:
    assert re.fullmatch(r"[0-9]{10}", sampled(make_context(name), DIGITS, 10, **options))


def test_alternatives_repetitions_and_rules(make_context: Any) -> None:
    ctx = make_context("llama")
    grammar = 'root ::= "[" item ("," item){2} "]"\nitem ::= "a" | "b" [0-9] # comment\n'
    for seed in range(5):
        ctx.clear_kv_cache()
        text = sampled(ctx, grammar, 40, temperature=10.0, seed=seed, top_k=0, top_p=1.0)
        assert re.fullmatch(r"\[(a|b[0-9])(,(a|b[0-9])){2}\]", text)


def test_json_comes_out_whole(make_context: Any) -> None:
    grammar = r"""
        root   ::= object
        object ::= "{" pair ("," pair)? "}"
        pair   ::= "\"" [a-z] "\":" value
        value  ::= [0-9] | "true" | "null" | "\"" [a-z]? "\""
    """
    ctx = make_context("llama")
    text = sampled(ctx, grammar, 60, temperature=3.0, seed=2)
    assert isinstance(json.loads(text), dict)


def test_a_finished_grammar_ends_the_text_or_says_so(make_context: Any) -> None:
    assert sampled(make_context("llama"), 'root ::= "ab"', 10) == "ab"
    # Without an end token, all tokens are excluded.
    ctx = make_context("llama_bpe")
    sampler = Sampler(temperature=0, grammar='root ::= "ab"', model=ctx.model)
    tokens = list(ctx.generate(words(5), 10, sampler))
    assert text_of(ctx.model, tokens) == "ab"


def test_another_first_rule_can_be_named(make_context: Any) -> None:
    ctx = make_context("llama")
    grammar = 'root ::= "x"\nother ::= [a-c]+'
    sampler = Sampler(temperature=0, grammar=grammar, grammar_root="other", model=ctx.model)
    assert re.fullmatch("[a-c]{5}", text_of(ctx.model, ctx.generate(words(5), 5, sampler)))


def test_reset_begins_the_grammar_again(make_context: Any) -> None:
    ctx = make_context("llama")
    sampler = Sampler(temperature=0, grammar='root ::= "a" [0-9]{2,9}', model=ctx.model)
    for _ in range(2):
        first = text_of(ctx.model, ctx.generate(words(5), 3, sampler))
        assert re.fullmatch("a[0-9]{2}", first)
        sampler.reset()


@pytest.mark.parametrize(
    "grammar",
    [
        "root",
        "root ::= [0-9",
        'root ::= "a',
        "root ::= (",
        "root ::= missing",
        "other ::= [0-9]",
        "root ::= root",
        'root ::= root "a"',
        "root ::= [a]{99999999999999999999}",
        "root ::= [a]{1000000}",
        "\ud800",
        "::=",
        "root ::= \\x",
        "root ::= [\\xZZ]",
    ],
)
def test_a_broken_grammar_is_a_value_error(model: Any, grammar: str) -> None:
    with pytest.raises(ValueError, match=r"grammar|utf-8"):
        Sampler(grammar=grammar, model=model("llama"))


@pytest.mark.parametrize("root", ["", "missing", "ro", "root "])
def test_the_first_rule_must_be_there(model: Any, root: str) -> None:
    with pytest.raises(ValueError, match="grammar"):
        Sampler(grammar=DIGITS, grammar_root=root, model=model("llama"))


def test_a_grammar_needs_a_model_with_a_vocabulary(model: Any) -> None:
    with pytest.raises(ValueError, match="model="):
        Sampler(grammar=DIGITS)
    with pytest.raises(UnsupportedOperation):
        Sampler(grammar=DIGITS, model=model("llama_none"))
    for wrong in ("model", 5, object()):
        with pytest.raises(TypeError):
            Sampler(grammar=DIGITS, model=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("n", "is_fine"), [(20, True), (50, False), (2000, False)])
def test_nested_repetitions_of_what_may_be_empty_are_bounded(
    model: Any, n: int, is_fine: bool
) -> None:
    """llama.cpp tries every way to skip them: for n = 50 a token takes minutes."""
    grammar = f'root ::= x{{0,{n}}}\nx ::= y{{0,{n}}}\ny ::= "a"?'
    with nullcontext() if is_fine else pytest.raises(GrammarError, match="may be empty"):
        Sampler(grammar=grammar, model=model("llama"))


@pytest.mark.parametrize("grammar", [5, b"root ::= [0-9]", True, ["a"], "root ::= [0-9]\0"])
def test_a_grammar_is_text_without_nul(model: Any, grammar: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="grammar"):
        Sampler(grammar=grammar, model=model("llama"))
    with pytest.raises((TypeError, ValueError), match="grammar_root"):
        Sampler(grammar=DIGITS, grammar_root=grammar, model=model("llama"))


def test_a_grammar_belongs_to_one_vocabulary(make_context: Any, model: Any) -> None:
    # Both have 320 tokens, which stand for different texts.
    for other in ("llama_test", "qwen2vl"):
        ctx = make_context(other)
        ctx.decode(words(5))
        sampler = Sampler(grammar=DIGITS, model=model("llama"))
        with pytest.raises(ValueError, match="another model"):
            sampler.sample(ctx)


TOO_DEEP = {
    "nested": lambda n: "root ::= " + "(" * n + "[a]" + ")" * n,
    "open": lambda n: "root ::= " + "(" * n,
    "chained": lambda n: "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(n)),
    "reversed": lambda n: f"root ::= [a]{{{n},2}}",
}

IN_A_CHILD = """
import sys
from pykvcache import LlamaModel, Sampler
try:
    import resource
    if sys.argv[2] == "limited":
        resource.setrlimit(resource.RLIMIT_AS, (2 ** 33, 2 ** 33))
except ImportError:
    pass
model = LlamaModel(sys.argv[1])
try:
    Sampler(grammar=sys.stdin.read(), model=model)
except ValueError as error:
    assert "grammar" in str(error)
    print("refused")
"""


@pytest.mark.hazard("N14")
@pytest.mark.parametrize("kind", TOO_DEEP)
@pytest.mark.parametrize("n", [5, 200_000])
def test_no_grammar_ends_the_process(forked: Child, model: Any, kind: str, n: int) -> None:
    # AddressSanitizer takes terabytes of addresses for itself.
    limited = "free" if SANITIZED else "limited"
    done = forked(IN_A_CHILD, model("llama").path, limited, stdin=TOO_DEEP[kind](n), timeout=20)
    assert done.returncode == 0, done.stderr[-500:]
    if n > 5 or kind in ("open", "chained", "reversed"):
        assert done.stdout == "refused\n"


def test_an_empty_grammar_means_no_grammar(model: Any) -> None:
    for grammar in ("", " \n", "# nothing"):
        with pytest.raises(ValueError, match="grammar"):
            Sampler(grammar=grammar, model=model("llama"))


def test_a_token_that_the_grammar_forbids_is_refused(make_context: Any) -> None:
    ctx = make_context("llama")
    ctx.decode(words(5))
    sampler = Sampler(temperature=0, grammar=DIGITS, model=ctx.model)
    first = sampler.sample(ctx)
    with suppress(DecodeError, ValueError):
        sampler.accept(ctx.model.tokenize("the", add_special=False)[-1], ctx.model)
    assert text_of(ctx.model, [first, sampler.sample(ctx)]).isdigit()
