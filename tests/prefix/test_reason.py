"""What a report says of a prompt: true of the prompt and the known ones as they were then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memory.kit import Make
from pykvcache import LlamaContext, LlamaModel, LoraAdapter, PrefixCache
from pykvcache.prefix.block_hash import window_key
from pykvcache.prefix.events import BlockStored
from pykvcache.prefix.stores import FolderStore
from support.adapters import write_adapter
from support.models import EXACT, make_model

BASE = list(range(5, 45))


@pytest.fixture
def context(model_folder: Path) -> LlamaContext:
    model = LlamaModel(make_model("llama", model_folder))
    return LlamaContext(model, n_ctx=256, n_seq_max=4, n_threads=1, **EXACT)


def test_the_reason_compares_with_the_closest_sequence(context: LlamaContext) -> None:
    """What most can be taken from may agree less: here the other one is not evaluated yet."""
    with context, PrefixCache(context, block_size=4) as cache:
        evaluated = cache.sequence([*BASE[:10], *range(50, 80)])
        evaluated.evaluate()
        waiting = cache.sequence([*BASE[:20], 45, 46])
        new = cache.sequence([*BASE[:20], 47, 48])
        assert new.reuse.live == 10
        assert new.reuse.first_difference == 20
        said = "a live sequence begins with the same 20 tokens, and has evaluated 10 of them so far"
        assert new.reuse.reason.endswith(said)
        waiting.evaluate()
        newer = cache.sequence([*BASE[:20], 49])
        assert newer.reuse.live == 20
        piece = context.model.token_to_piece(45, special=True).decode()
        assert newer.reuse.reason.endswith(f"here, {piece!r} in the closest cached prompt")
        del evaluated


def test_the_reason_describes_the_prompt_at_lookup_time(context: LlamaContext) -> None:
    with context, PrefixCache(context, block_size=4) as cache:
        with cache.sequence(BASE) as first:
            first.evaluate()
        with cache.sequence([*BASE[:21], 50, 51]) as other:
            said = other.reuse
            assert said.reason.startswith("token 21, after ")
            assert other.reuse == said
        one = cache.sequence([*BASE[:21], 50, 51])
        one.truncate(3)
        one.append([60, 61, 62])
        cache.clear()
        assert one.reuse.reason == said.reason
        assert one.reuse.first_difference == 21
        evaluate(cache, BASE)
        late = cache.sequence([*BASE[:21], 50])
        context.model.close()
        assert late.reuse.reason == f"token 21: 50 here, {BASE[21]} in the closest cached prompt"


def evaluate(cache: PrefixCache, tokens: list[int], **options: Any) -> str:
    """Evaluate a prompt; return why no more of it was reused."""
    with cache.sequence(tokens, **options) as sequence:
        sequence.evaluate()
        return sequence.reuse.reason


def test_the_reason_reveals_nothing_of_another_namespace(context: LlamaContext) -> None:
    with context, PrefixCache(context, block_size=4) as cache:
        evaluate(cache, BASE, namespace="tenant")
        held = cache.sequence(BASE, namespace="third")
        held.evaluate()
        for prompt in (BASE, [*BASE[:21], 50], BASE[5:]):
            said = [evaluate(cache, prompt, namespace=f"{n}{len(prompt)}") for n in "ab"]
            assert said == ["no cached prompt starts the same way"] * 2


@pytest.mark.not_on_a_device(reason="layers on servers take no adapters")
def test_the_reason_names_other_adapters(model_folder: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "one.gguf", "llama", 1)
    with (
        LlamaModel(make_model("llama", model_folder)) as model,
        LlamaContext(model, n_ctx=256, n_seq_max=4, **EXACT) as ctx,
        PrefixCache(ctx, block_size=4) as cache,
    ):
        evaluate(cache, BASE)
        ctx.set_adapters([LoraAdapter(model, tmp_path / "one.gguf")])
        said = evaluate(cache, BASE)
        assert said == "40 tokens are cached under other adapters or control vectors"
        held = cache.sequence([*BASE, 7])
        held.evaluate()
        ctx.set_adapters([])
        said = cache.sequence([*BASE, 7]).reuse.reason
        assert "a live sequence begins with the same 41 tokens, evaluated with other" in said


@pytest.mark.parametrize(
    ("name", "options", "secret", "expected"),
    [
        ("llama", {"type_k": "f16", "type_v": "f16"}, None, "blocks of another layout: types of K"),
        ("gemma3", {}, None, "has blocks of another model"),
        ("llama", {}, "a secret of sixteen", "has blocks written without the secret"),
    ],
)
def test_the_reason_names_how_the_writer_of_a_folder_differs(
    name: str,
    options: dict[str, Any],
    secret: str | None,
    expected: str,
    make_context: Make,
    tmp_path: Path,
) -> None:
    both: dict[str, Any] = {"block_size": 4, "tiers": [tmp_path], "tier_seconds": 20}
    with PrefixCache(make_context("llama"), **both) as cache:
        evaluate(cache, BASE)
    with PrefixCache(make_context(name, **options), secret=secret, **both) as cache:
        said = evaluate(cache, BASE)
        assert expected in said, said
        assert str(tmp_path) not in said, "a server shows it to its clients"
        assert expected in evaluate(cache, [7, *BASE]), "the folder was asked once"
    with PrefixCache(make_context("llama"), **both) as cache:
        assert "blocks" not in evaluate(cache, [7, *BASE])


def test_stored_responses_are_not_blocks_of_another_model(
    make_context: Make, tmp_path: Path
) -> None:
    serve = pytest.importorskip("pykvcache.serve.responses")
    serve.Responses([tmp_path]).add(serve.Stored({"id": "resp_1"}, []), "")
    assert serve.Responses([tmp_path]).get("resp_1", "").body == {"id": "resp_1"}
    with PrefixCache(make_context("llama"), block_size=4, tiers=[tmp_path], tier_seconds=20) as one:
        assert "blocks" not in evaluate(one, BASE)


def test_the_reason_names_windows_that_a_folder_lacks(make_context: Make, tmp_path: Path) -> None:
    both: dict[str, Any] = {"block_size": 4, "tier_seconds": 20}
    with PrefixCache(make_context("gemma3"), tiers=[tmp_path], **both) as cache:
        with cache.sequence(BASE) as sequence:
            sequence.evaluate()
        stored = next(one for one in cache.events if isinstance(one, BlockStored))
        assert cache.flush(30)
    with FolderStore(tmp_path) as store:
        assert store.discard([window_key(name) for name in stored.block_hashes]) > 0
    with PrefixCache(make_context("gemma3"), tiers=[tmp_path], **both) as cache:
        assert evaluate(cache, [*BASE, 3]) == "tiers have 40 tokens, but no complete window of use"
