"""Facts and lifetime of a loaded model, and what a context says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from binding.kit import with_keys, words
from pykvcache import LlamaContext, LlamaModel
from pykvcache.enums import RopeType
from pykvcache.errors import ClosedError, ContextCreateError, UnsupportedOperation
from pykvcache.introspection import BufferBytes
from support.models import MODELS, make_model

LLAMA_METADATA = {
    "general.architecture": "llama",
    "llama.context_length": "512",
    "llama.embedding_length": "64",
    "llama.block_count": "2",
    "llama.attention.head_count": "4",
    "llama.attention.head_count_kv": "2",
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.eos_token_id": "2",
    "tokenizer.ggml.add_bos_token": "true",
}


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_those_the_file_was_written_with(model: Any, name: str) -> None:
    info, one = MODELS[name], model(name)
    assert one.n_vocab == info.n_vocab
    assert one.n_ctx_train == info.sizes.n_ctx_train
    assert one.n_embd == info.sizes.n_embd
    assert one.n_layer == info.sizes.n_layer
    assert one.n_swa == info.n_swa
    assert one.is_recurrent == (info.memory == "recurrent")
    assert one.is_hybrid == (info.memory.startswith("hybrid") or info.arch == "deepseek4")
    assert one.has_encoder == info.has_encoder
    assert one.vocab_only is False
    assert one.is_closed is False


def test_heads_and_rope_of_each_kind(model: Any) -> None:
    assert (model("llama").n_head, model("llama").n_head_kv) == (4, 2)
    assert (model("jamba").n_head, model("jamba").n_head_kv) == (4, 2)
    assert model("bert").n_head_kv == 4
    assert model("mamba").n_head_kv == 0
    assert model("llama").rope_type is RopeType.NORM
    assert model("gemma3").rope_type is RopeType.NEOX
    assert model("qwen2vl").rope_type is RopeType.MROPE
    assert model("mamba").rope_type is RopeType.NONE
    assert model("t5").rope_type is RopeType.NONE


def test_size_and_parameters_match_the_file(model: Any, model_folder: Path) -> None:
    for name in ("llama", "mamba", "bert", "t5"):
        tensors = gguf.GGUFReader(make_model(name, model_folder)).tensors
        one = model(name)
        assert one.n_params == sum(int(t.n_elements) for t in tensors)
        assert one.size == sum(int(t.n_bytes) for t in tensors)
        assert isinstance(one.size, int)
        assert one.description.startswith(name)


def test_metadata_is_the_scalar_metadata_as_text(
    model: Any, model_folder: Path, tmp_path: Path
) -> None:
    metadata = model("llama").metadata
    assert LLAMA_METADATA.items() <= dict(metadata).items()
    assert len(metadata) == len(list(metadata))
    path = with_keys(
        make_model("llama", model_folder), tmp_path / "m.gguf", {"general.name": "字\n😀" * 9000}
    )
    with LlamaModel(path) as one:
        assert one.metadata["general.name"] == "字\n😀" * 9000
    assert all(isinstance(k, str) and isinstance(v, str) for k, v in metadata.items())


def test_special_tokens_are_numbers_or_none(model: Any) -> None:
    llama, bert, t5, none = (model(n) for n in ("llama", "bert", "t5", "llama_none"))
    assert (llama.token_bos, llama.token_eos, llama.token_nl) == (1, 2, 13)
    assert (llama.token_eot, llama.token_pad, llama.token_mask) == (None, None, None)
    assert (llama.add_bos, llama.add_eos) == (True, False)
    assert (bert.token_bos, bert.token_sep, bert.token_mask, bert.token_pad) == (2, 3, 4, 0)
    assert [t for t in range(llama.n_vocab) if llama.is_eog(t)] == [2]
    assert t5.token_decoder_start == 0
    assert llama.token_decoder_start is None
    names = [n for n in dir(none) if n.startswith("token_") and n != "token_to_piece"]
    assert len(names) == 8
    assert {getattr(none, n) for n in names} == {None}
    assert (none.add_bos, none.add_eos) == (False, False)


def test_properties_and_metadata_cannot_be_set(model: Any) -> None:
    one = model("llama")
    with pytest.raises(TypeError):
        one.metadata["a"] = "b"
    public = [n for n in dir(type(one)) if isinstance(getattr(type(one), n), property)]
    assert len(public) > 25
    for attribute in public:
        with pytest.raises(AttributeError):
            setattr(one, attribute, 1)


@pytest.mark.hazard("D32", "C21")
def test_vocab_only_tokenizes_and_gives_no_context(model: Any, model_folder: Path) -> None:
    with LlamaModel(make_model("llama", model_folder), vocab_only=True) as words:
        assert words.vocab_only is True
        assert words.n_vocab == 320
        assert words.tokenize("Hello").tolist() == model("llama").tokenize("Hello").tolist()
        assert words.token_eos == 2
        with pytest.raises(ContextCreateError, match="vocab_only"):
            LlamaContext(words)


def test_a_closed_model_refuses_work_and_keeps_its_facts(model_folder: Path) -> None:
    with LlamaModel(make_model("llama", model_folder)) as one:
        assert repr(one) == f"<LlamaModel {one.path!r}: {one.description}>"
    one.close()
    assert one.is_closed
    assert repr(one).endswith("(closed)>")
    assert one.n_vocab == 320
    for use in (
        lambda: one.tokenize("a"),
        lambda: one.detokenize([1]),
        lambda: one.token_to_piece(1),
        lambda: one.is_eog(1),
        lambda: one.token_bos,
        lambda: one.add_bos,
        lambda: LlamaContext(one),
        lambda: one.apply_chat_template([], template="{{ bos_token }}"),
    ):
        with pytest.raises(ClosedError):
            use()


@pytest.mark.hazard("V7")
def test_without_a_vocabulary_text_is_refused(model: Any) -> None:
    none = model("llama_none")
    assert none.n_vocab == 320
    for use in (
        lambda: none.tokenize("a"),
        lambda: none.tokenize(""),
        lambda: none.detokenize([1, 2]),
        lambda: none.token_to_piece(1),
    ):
        with pytest.raises(UnsupportedOperation, match="vocabulary"):
            use()


# What a context says of itself --------------------------------------------------------


VIEW = pytest.mark.not_on_a_device(reason="the CPU cannot look into its memory")


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba"])
@pytest.mark.parametrize("copy", [True, pytest.param(False, marks=VIEW)])
def test_reprs_of_results_fit_a_line(make_context: Any, name: str, copy: bool) -> None:
    ctx = make_context(name)
    ctx.decode(words(20))
    arrays = ctx.kv(0, copy=copy)
    shown: list[Any] = [ctx, ctx.model, ctx.cells(), arrays, *arrays.layers, arrays.window]
    shown += [arrays.recurrent, *(arrays.recurrent.layers if arrays.recurrent else ())]
    shown += [ctx.sequences(), ctx.kv(1)]
    for one in shown:
        assert "\n" not in repr(one)
        assert len(repr(one)) < 160 + len(ctx.model.path), one
    if name == "llama":
        view = "" if copy else " view"
        n_layer, heads = ctx.model.n_layer, ctx.model.n_head_kv
        size = arrays.layers[0].keys.shape[2]
        assert repr(arrays) == (
            f"<SequenceKV: 20 tokens at 0..19, {n_layer} layers, K 20x{heads}x{size} float32{view}>"
        )
        assert repr(ctx.cells()) == "<CellTable: 20 cells of 1 sequences>"
        assert repr(ctx.kv(1)).startswith("<SequenceKV: 0 tokens, ")


@pytest.mark.parametrize("name", ["llama", "jamba", "bert"])
def test_sums_are_those_of_the_memory_and_the_weights(make_context: Any, name: str) -> None:
    ctx = make_context(name)
    found = ctx.memory_breakdown()
    assert all(isinstance(one, BufferBytes) for one in found.values())
    assert sum(one.context for one in found.values()) == ctx.memory_info.bytes_total
    # Buffers are padded, and contain more than the model's weights.
    assert sum(one.model for one in found.values()) >= ctx.model.size
    assert sum(one.compute for one in found.values()) > 0
    places = ("CPU", *ctx.model.devices)
    assert all(any(place in buffer for place in places) for buffer in found)


def test_more_cells_take_more_context_and_the_same_model(make_context: Any) -> None:
    small, large = (make_context("llama", n_ctx=n).memory_breakdown() for n in (256, 1024))
    assert small.keys() == large.keys()
    assert [one.model for one in small.values()] == [one.model for one in large.values()]
    cells = [sum(one.context for one in found.values()) for found in (small, large)]
    assert cells[1] == 4 * cells[0]
