"""generate, info, tokenize, state and bench, as a user runs them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.adapters import write_adapter
from support.models import make_model

pytest.importorskip("pykvcache._native.lib", reason="not built", exc_type=ImportError)
pytest.importorskip("click", reason="pip install '.[cli]'")

from pykvcache import LlamaContext, LlamaModel, LlamaSequence, Sampler, embedded_model_path
from pykvcache._devices import takes_layers
from pykvcache.cli import main
from pykvcache.cli.info import context_bytes
from pykvcache.context import open_context

Capture = pytest.CaptureFixture[str]


def out_of(capsys: Capture, *args: str) -> str:
    assert main(args) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def alone(prompt: str, n: int, sampler: Sampler) -> str:
    with LlamaModel(embedded_model_path()) as model, LlamaContext(model, n_ctx=512) as ctx:
        return "".join(LlamaSequence(ctx, prompt).stream(n, sampler))


def test_generate_writes_what_a_sequence_generates(capsys: Capture) -> None:
    said = out_of(capsys, "generate", "Once upon a time", "-n", "20", "-t", "0")
    assert said == alone("Once upon a time", 20, Sampler(temperature=0)) + "\n"


def test_generate_as_json_with_a_stop_and_samples(capsys: Capture) -> None:
    said = out_of(capsys, "generate", "Tom has a", "-n", "60", "-t", "0", "--stop", ".", "--json")
    found = json.loads(said)
    assert found["finish"] == "stop"
    assert "." not in found["text"]
    assert found["n_tokens"] <= 60
    args = ("generate", "One day", "--samples", "3", "--seed", "5", "-n", "12", "--json")
    lines = out_of(capsys, *args).splitlines()
    assert len({json.loads(line)["text"] for line in lines}) > 1
    assert out_of(capsys, *args).splitlines() == lines
    assert len(lines) == 3


def test_generate_reads_files_with_a_prompt_and_a_grammar(tmp_path: Path, capsys: Capture) -> None:
    prompt, grammar = tmp_path / "prompt", str(tmp_path / "yes.gbnf")
    prompt.write_text("Is it?")
    Path(grammar).write_text('root ::= "yes" | "no"\n')
    args = ("-n", "9", "-t", "0", "--grammar", grammar)
    said = out_of(capsys, "generate", "--file", str(prompt), *args)
    assert said.strip() in ("yes", "no")
    assert said == out_of(capsys, "generate", "Is it?", *args)
    assert main(["generate", "text", "--file", str(prompt)]) == 2
    assert main(["generate", "text", "--system", "be brief"]) == 2


def test_generate_follows_a_schema(tmp_path: Path, capsys: Capture) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    (tmp_path / "a.json").write_text(json.dumps(schema))
    for given in (json.dumps(schema), str(tmp_path / "a.json")):
        said = out_of(capsys, "generate", "It is", "-n", "40", "-t", "0", "--json-schema", given)
        assert json.loads(said)["a"] in (True, False)
    assert main(["generate", "It is", "--json-schema", '{"multipleOf": 2}']) == 1
    assert main(["generate", "It is", "--json-schema", "{}", "--grammar", "x"]) == 2


def test_generate_writes_log_probabilities(capsys: Capture) -> None:
    for samples in ("1", "2"):
        args = ("-n", "4", "-t", "0", "--json", "--logprobs", "2", "--samples", samples)
        for line in out_of(capsys, "generate", "Once upon a time", *args).splitlines():
            found = json.loads(line)
            assert "".join(one["text"] for one in found["logprobs"]) == found["text"]
            assert [len(one["top"]) for one in found["logprobs"]] == [2] * 4
    assert main(["generate", "Once", "--logprobs", "2"]) == 2


def test_generate_keeps_prefixes_for_later_commands(tmp_path: Path, capsys: Capture) -> None:
    prompt = "Once upon a time there was a king. " * 12
    first = out_of(capsys, "generate", prompt, "-n", "6", "-t", "0", "--cache", str(tmp_path / "b"))
    assert list((tmp_path / "b").rglob("*"))
    assert first == out_of(
        capsys, "generate", prompt, "-n", "6", "-t", "0", "--cache", str(tmp_path / "b")
    )
    assert first == out_of(capsys, "generate", prompt, "-n", "6", "-t", "0")


@pytest.mark.not_on_a_device(reason="layers on servers take no adapters")
def test_generate_computes_with_adapters(
    tmp_path: Path, model_folder: Path, capsys: Capture
) -> None:
    model = make_model("llama", model_folder)
    adapter = write_adapter(tmp_path / "one.gguf", "llama")
    words = ["generate", "-m", str(model), "-n", "8", "--temperature", "0", "A story"]

    def run(*options: str) -> str:
        assert main([*words, *options]) == 0
        return capsys.readouterr().out

    plain = run()
    assert run("--lora-scaled", f"{adapter}:0") == plain
    assert run("--lora", str(adapter)) == run("--lora-scaled", f"{adapter}:1.0") != plain
    assert main([*words, "--lora-scaled", str(adapter)]) == 2
    assert "is not FILE:SCALE" in capsys.readouterr().err
    assert main([*words, "--lora-scaled", f"{adapter}x:0.5"]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert main([*words, "--lora", str(model)]) == 1
    assert "adapter" in capsys.readouterr().err


def test_generate_takes_a_template(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }} and{% endfor %}")
    args = ("-n", "6", "-t", "0", "--swa-window")
    said = out_of(
        capsys, "generate", "Lucy", "--chat", "--chat-template", str(tmp_path / "own.jinja"), *args
    )
    with LlamaModel(embedded_model_path()) as model, LlamaContext(model, n_ctx=512) as ctx:
        tokens = model.tokenize("Lucy and", add_special=False)
        right = "".join(LlamaSequence(ctx, tokens).stream(6))
    assert said.strip() == right.strip()
    assert main(["generate", "Lucy", "--template", str(tmp_path / "own.jinja")]) == 2


def test_embed_writes_a_row_per_text(tmp_path: Path, capsys: Capture) -> None:
    rows = [json.loads(line) for line in out_of(capsys, "embed", "a kite", "a mill").splitlines()]
    assert [round(float(np.linalg.norm(row)), 4) for row in rows] == [1, 1]
    (tmp_path / "texts").write_text("a kite\na mill\n")
    found = out_of(capsys, "embed", "--lines", "--file", str(tmp_path / "texts"))
    assert np.allclose([json.loads(line) for line in found.splitlines()], rows, atol=1e-3)
    assert main(["embed", "a", "--file", "b"]) == 2


def test_shells_can_complete(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert "_PYKVCACHE_COMPLETE" in out_of(capsys, "completion", shell)
    assert main(["completion", "tcsh"]) == 2
    monkeypatch.setenv("_PYKVCACHE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "pykvcache gen")
    monkeypatch.setenv("COMP_CWORD", "1")
    with pytest.raises(SystemExit):
        main([])
    assert "generate" in capsys.readouterr().out


def test_tokenize_and_back(capsys: Capture) -> None:
    ids = out_of(capsys, "tokenize", "Once upon a time", "--ids").split()
    with LlamaModel(embedded_model_path(), vocab_only=True) as model:
        assert list(map(int, ids)) == model.tokenize("Once upon a time").tolist()
    assert out_of(capsys, "tokenize", "Once upon a time", "--count") == f"{len(ids)}\n"
    pairs = json.loads(out_of(capsys, "tokenize", "Once upon a time", "--json"))
    assert [str(pair["id"]) for pair in pairs] == ids
    assert "Once upon a time" in out_of(capsys, "tokenize", "--decode", " ".join(ids))
    assert main(["tokenize", "--decode", "one two"]) == 2
    assert "'one'" in capsys.readouterr().err


@pytest.mark.not_on_a_device(reason="info counts the buffers of the CPU")
@pytest.mark.parametrize("name", ["gemma3", "mamba", "jamba", "glm5_next", "bert"])
def test_info_says_what_the_context_says(name: str, model_folder: Path, capsys: Capture) -> None:
    path = str(make_model(name, model_folder))
    facts = json.loads(out_of(capsys, "info", path, "--n-ctx", "512", "--json"))
    with (
        LlamaModel(path) as model,
        open_context(model, n_ctx=512, embeddings=not model.has_decoder) as ctx,
    ):
        memory = ctx.memory_info
        assert facts["memory"] == ctx.memory_kind
        if ctx.memory_kind != "none":
            assert facts["can_shift"] == memory.can_shift
            assert facts["can_rewind"] == memory.can_remove_partial
            assert facts["bytes_per_token"] == memory.bytes_per_token
            assert facts["cache_bytes"] == memory.bytes_total
            computed = sum(one.compute for one in ctx.memory_breakdown().values())
            assert facts["compute_bytes"] == computed
    table = out_of(capsys, "info", "-m", path)
    assert re.search(rf"^architecture +{facts['architecture']}$", table, re.M)


@pytest.mark.parametrize("swa_full", [True, False])
@pytest.mark.parametrize("name", ["gemma3", "jamba", "glm5_next"])
def test_context_bytes_equal_those_of_a_real_context(
    name: str, swa_full: bool, model_folder: Path
) -> None:
    options: dict[str, Any] = {"n_seq_max": 3, "type_k": "bf16", "swa_full": swa_full}
    if name == "glm5_next":  # stores both in one type
        options["type_v"] = "bf16"
    with LlamaModel(make_model(name, model_folder)) as model:
        for n_ctx in (64, 700, 9000):
            with open_context(model, n_ctx=n_ctx, **options) as ctx:
                real = ctx.memory_info.bytes_total
            assert context_bytes(model, n_ctx, **options).cache == real


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A sequence of the embedded model in a file."""
    with LlamaModel(embedded_model_path()) as model, LlamaContext(model, n_ctx=512) as ctx:
        story = LlamaSequence(ctx, "Lucy has a red kite. Lucy lives by the river.")
        story.evaluate()
        story.save(tmp_path / "story.kv", {"by": "me"})
    return tmp_path / "story.kv"


def test_state_info_and_verify(saved: Path, capsys: Capture) -> None:
    facts = json.loads(out_of(capsys, "state", "info", str(saved), "--json"))
    assert facts["kind"] == "sequence"
    assert facts["metadata"]["metadata"] == {"by": "me"}
    assert re.search(
        rf"^tokens +{facts['tokens']}$", out_of(capsys, "state", "info", str(saved)), re.M
    )
    assert "intact" in out_of(capsys, "state", "verify", str(saved), "--restore")
    data = bytearray(saved.read_bytes())
    data[-100] ^= 1
    saved.write_bytes(data)
    assert main(["state", "verify", str(saved)]) == 1


@pytest.mark.parametrize("command", [["info"], ["verify"], ["cut", "-n", "1"], ["convert"]])
def test_a_file_that_is_not_a_state_is_named(
    command: list[str], tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "text.txt").write_text("not a state")
    out = [str(tmp_path / "out.kv")] if command[0] in ("cut", "convert") else []
    assert main(["state", command[0], str(tmp_path / "text.txt"), *out, *command[1:]]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"pykvcache: {tmp_path / 'text.txt'}: ")
    assert said.count("\n") == 1
    assert not (tmp_path / "out.kv").exists()


def test_state_cut_is_a_prefix(saved: Path, capsys: Capture) -> None:
    cut = saved.with_name("cut.kv")
    out_of(capsys, "state", "cut", str(saved), str(cut), "-n", "6")
    with LlamaModel(embedded_model_path()) as model, LlamaContext(model, n_ctx=512) as ctx:
        tokens = model.tokenize("Lucy has a red kite. Lucy lives by the river.")[:6]
        back = LlamaSequence.load(ctx, cut)
        assert np.array_equal(back.tokens, tokens)
        evaluated = ctx.tokens_evaluated
        logits = back.logits()
        assert ctx.tokens_evaluated - evaluated <= 1
        assert np.allclose(logits, LlamaSequence(ctx, tokens).logits(), atol=0.05)
    assert main(["state", "cut", str(saved), str(cut), "-n", "9999"]) == 2
    assert "9999" in capsys.readouterr().err


def test_state_to_llama_and_back(saved: Path, capsys: Capture) -> None:
    other, back = saved.with_name("story.bin"), saved.with_name("back.kv")
    out_of(capsys, "state", "convert", str(saved), str(other), "--to", "llama.cpp")
    assert "of llama.cpp" in out_of(capsys, "state", "info", str(other))
    assert "no checksum" in out_of(capsys, "state", "verify", str(other))
    out_of(capsys, "state", "convert", str(other), str(back))
    with LlamaModel(embedded_model_path()) as model, LlamaContext(model, n_ctx=512) as ctx:
        first, second = LlamaSequence.load(ctx, saved), LlamaSequence.load(ctx, back)
        assert np.array_equal(first.tokens, second.tokens)
        assert np.array_equal(first.logits(), second.logits())


def test_state_in_other_types(saved: Path, capsys: Capture) -> None:
    small = saved.with_name("small.kv")
    out_of(capsys, "state", "convert", str(saved), str(small), "--type-k", "q8_0")
    facts = json.loads(out_of(capsys, "state", "info", str(small), "--json"))
    assert facts["types"] == "k q8_0, v f16"
    assert facts["metadata"]["metadata"] == {"by": "me"}
    assert main(["state", "convert", str(saved), str(saved)]) == 2


def test_bench_reports_every_measurement(capsys: Capture) -> None:
    found = json.loads(out_of(capsys, "bench", "-n", "64", "--repeat", "1", "--json"))
    names = ("evaluate", "fork", "take_out", "put_back", "load", "generate_32", "generate_8x32")
    assert all(found[name] > 0 for name in names)
    assert "times faster" in out_of(capsys, "bench", "-n", "64", "--repeat", "1")


@pytest.mark.parametrize("text", ["7 --5", "7 " + "9" * 5000, "x"])
def test_an_invalid_token_id_is_named(text: str, capsys: Capture) -> None:
    assert main(["tokenize", "--decode", "--", text]) == 2
    said = capsys.readouterr().err
    assert "is not a token id" in said
    assert len(said) < 500


def test_an_argument_with_invalid_utf8_is_read_like_piped_input(capsys: Capture) -> None:
    assert out_of(capsys, "tokenize", "--ids", os.fsdecode(b"a\xffb")) == out_of(
        capsys, "tokenize", "--ids", "a\ufffdb"
    )


@pytest.mark.parametrize("n", ["33", "256"])
def test_info_of_many_sequences(n: str, capsys: Capture) -> None:
    assert "cache" in out_of(capsys, "info", "--n-seq-max", n, "--n-ctx", "32768")


def test_a_small_cache_is_rounded_up_as_the_help_says(capsys: Capture) -> None:
    assert out_of(capsys, "generate", "One", "-n", "2", "-t", "0", "--n-ctx", "3")
    assert out_of(capsys, "generate", "One", "-n", "1", "--samples", "64", "--n-ctx", "32")


@pytest.mark.filterwarnings("default")
@pytest.mark.not_on_a_device(reason="there it has an effect")
@pytest.mark.skipif(takes_layers(), reason="a GPU takes the layers")
def test_a_warning_is_one_line(capsys: Capture) -> None:
    assert main(["generate", "-ngl", "1", "-n", "1", "One"]) == 0
    error = capsys.readouterr().err
    assert error.startswith("pykvcache: n_gpu_layers=1 has no effect")
    assert error.count("\n") == 1
