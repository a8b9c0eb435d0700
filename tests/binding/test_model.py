"""Loading a model, its facts and lifetime, and architectures that are refused with the reason."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from binding.kit import words
from devices.rpc_kit import has_rpc
from pykvcache import KvCacheError, LlamaContext, LlamaModel, devices
from pykvcache._devices import takes_layers
from pykvcache._native import lib
from pykvcache.enums import LoadMode, RopeType
from pykvcache.errors import ContextCreateError, ModelLoadError, UnsupportedOperation
from pykvcache.introspection import BufferBytes
from support import vocab
from support.blueprint import Sizes
from support.children import child
from support.models import EXACT, MODELS, make_model, with_keys, write_gguf
from support.odd_models import cogvlm, gpt2

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
    with pytest.raises(TypeError):
        metadata["a"] = "b"
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
    for name in ("bos", "eos", "eot", "nl", "pad", "sep", "mask", "decoder_start"):
        assert getattr(none, f"token_{name}") is None
    assert (none.add_bos, none.add_eos) == (False, False)


@pytest.mark.hazard("D32", "C21")
def test_vocab_only_tokenizes_and_gives_no_context(model: Any, model_folder: Path) -> None:
    with LlamaModel(make_model("llama", model_folder), vocab_only=True) as words:
        assert words.vocab_only is True
        assert words.n_vocab == 320
        assert words.tokenize("Hello").tolist() == model("llama").tokenize("Hello").tolist()
        assert words.token_eos == 2
        with pytest.raises(ContextCreateError, match="vocab_only"):
            LlamaContext(words)


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


def test_any_path_loads_and_is_kept(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Somewhere:
        def __fspath__(self) -> str:
            return str(path)

    for one in (path, str(path), Somewhere()):
        with LlamaModel(one) as model:
            assert model.n_vocab == 320
            assert model.path == str(path)
    odd = tmp_path / "mödel 漢字 'q' %s.gguf"
    odd.write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    with LlamaModel(odd.name) as model:
        assert model.path == odd.name


def test_a_missing_file_names_itself_and_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "missing.gguf"
    with pytest.raises(ModelLoadError, match=r"missing\.gguf") as error:
        LlamaModel(path)
    assert isinstance(error.value, OSError)
    assert isinstance(error.value, KvCacheError)
    assert error.value.errno == 2
    assert error.value.filename == str(path)


@pytest.mark.hazard("C16", "C17")
def test_what_is_no_path_of_a_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, "", "a\0b.gguf", str(tmp_path / "x.gguf") + "\0"):
        with pytest.raises(ModelLoadError):
            LlamaModel(path)
    for wrong in (None, 5, True, []):
        with pytest.raises(TypeError, match="path must be"):
            LlamaModel(wrong)  # type: ignore[arg-type]


@pytest.mark.hazard("N16")
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    fifo = tmp_path / "pipe.gguf"
    os.mkfifo(fifo)
    code = (
        "import sys, pykvcache\n"
        "try: pykvcache.LlamaModel(sys.argv[1])\n"
        "except pykvcache.errors.ModelLoadError: print('refused')"
    )
    done = child(code, fifo, timeout=20)
    assert done.stdout == "refused\n", done.stderr


@pytest.mark.hazard("C17")
@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"GGUF" + b"\0" * 20, b"GGUF" + b"\xff" * 400, b"PK\3\4" * 99]
)
def test_files_that_are_not_gguf_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"broken\.gguf"):
        LlamaModel(path)


def test_progress_rises_from_zero_to_one(path: Path) -> None:
    seen: list[float] = []
    LlamaModel(path, progress=seen.append).close()
    assert seen[0] == 0.0
    assert seen[-1] == 1.0
    assert seen == sorted(seen)
    assert all(type(f) is float for f in seen)


@pytest.mark.parametrize("at", [0, 1, 5])
def test_false_from_progress_cancels_the_load(path: Path, at: int) -> None:
    seen: list[float] = []

    def go_on(fraction: float) -> bool:
        seen.append(fraction)
        return len(seen) <= at

    with pytest.raises(ModelLoadError, match="cancel"):
        LlamaModel(path, progress=go_on)
    assert len(seen) == at + 1


@pytest.mark.hazard("N20")
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, StopIteration])
def test_exceptions_of_progress_are_raised(path: Path, error: type[BaseException]) -> None:
    mine = error("from the callback")

    def fail(fraction: float) -> None:
        raise mine

    with pytest.raises(error) as caught:
        LlamaModel(path, progress=fail)
    assert caught.value is mine
    LlamaModel(path).close()


@pytest.mark.parametrize("mode", ["auto", "NONE", "mmap", LoadMode.DIRECT_IO, 1])
def test_every_way_of_reading_gives_the_same_model(path: Path, mode: Any) -> None:
    with LlamaModel(path, load_mode=mode, check_tensors=True) as model:
        assert model.n_params == 102_720


@pytest.mark.not_on_a_device(reason="there it has an effect")
@pytest.mark.skipif(takes_layers(), reason="there it has an effect")
@pytest.mark.parametrize("layers", [-1, 1, 99])
def test_layers_for_a_gpu_that_is_not_there_warn(path: Path, layers: int) -> None:
    with pytest.warns(UserWarning, match=f"n_gpu_layers={layers} has no effect") as found:
        LlamaModel(path, n_gpu_layers=layers).close()
    assert [warning.filename for warning in found] == [__file__]
    LlamaModel(path, n_gpu_layers=0).close()
    LlamaModel(path, n_gpu_layers=layers, devices=[]).close()  # the CPU was asked for


FLAGS = ["vocab_only", "check_tensors", "use_extra_bufts"]
RPC = ["127.0.0.1:1"]
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"load_mode": "fast"}, ValueError, "load_mode"),
    ({"load_mode": 99}, ValueError, "load_mode"),
    ({"split_mode": ""}, ValueError, "split_mode"),
    ({"n_gpu_layers": 1.5}, TypeError, "n_gpu_layers"),
    ({"n_gpu_layers": 2**31}, ValueError, "n_gpu_layers"),
    ({"main_gpu": -1}, ValueError, "main_gpu"),
    ({"main_gpu": 2**40}, ValueError, "main_gpu"),
    *(({flag: value}, TypeError, flag) for flag in FLAGS for value in (1, None, "no")),
    *(({"progress": value}, TypeError, "progress must be callable") for value in (1, "x", True)),
    ({"devices": ["CPU"]}, ValueError, "devices names 'CPU', a device that takes no layers"),
    ({"devices": ["CUDA9"]}, ValueError, "devices names 'CUDA9', no device of this build"),
    ({"devices": "CPU"}, TypeError, "devices must be a sequence of names, not str"),
    ({"devices": [0]}, TypeError, "devices must hold names, not int: 0"),
    ({"tensor_split": [1.0]}, ValueError, "tensor_split needs devices"),
    ({"tensor_split": [1.0], "devices": []}, ValueError, "tensor_split needs devices"),
    ({"tensor_split": "1,1"}, TypeError, "tensor_split must be a sequence of numbers"),
    ({"tensor_split": [-1.0]}, ValueError, "tensor_split is -1.0"),
    ({"tensor_split": [float("nan")]}, ValueError, "tensor_split is nan"),
    ({"tensor_split": ["half"]}, TypeError, "tensor_split must be a number, not str"),
    ({"rpc": "127.0.0.1:5000"}, TypeError, "rpc"),
    ({"rpc": [5000]}, TypeError, "rpc"),
    *(
        ({"rpc": [address]}, ValueError, "rpc")
        for address in (
            *("127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:50x", ":5000"),
            *("a#2:5000", "a:5000\x00", "h" * 300 + ":1"),
        )
    ),
    ({"rpc": ["a:1", "a:1"]}, ValueError, "rpc"),
    ({"rpc": [f"a:{port}" for port in range(1, 18)]}, ValueError, "rpc"),
    *(
        ({"rpc": RPC, "rpc_timeout": value}, ValueError, "rpc_timeout")
        for value in (0, -1, float("nan"), float("inf"))
    ),
    *(({"rpc": RPC, "rpc_timeout": value}, TypeError, "rpc_timeout") for value in ("1", None)),
    ({"rpc": RPC, "split_mode": "row"}, ValueError, "split_mode"),
]


@pytest.mark.hazard("C20", "N76")
@pytest.mark.parametrize(("options", "error", "said"), REFUSED)
def test_a_wrong_option_is_refused_by_name(
    path: Path, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        LlamaModel(path, **options)


def able() -> list[str]:
    """Devices that take layers; servers may have joined since the tests were collected."""
    return [d.name for d in devices() if d.kind in ("gpu", "integrated-gpu")]


def test_the_cpu_is_a_device_with_the_memory_of_the_machine() -> None:
    (cpu,) = [d for d in devices() if d.kind == "cpu"]
    assert (cpu.name, cpu.backend) == ("CPU", "CPU")
    assert cpu.description
    assert 0 <= cpu.memory_free <= cpu.memory_total
    assert cpu.memory_total > 2**27
    assert len({d.name for d in devices()}) == len(devices())


def test_no_devices_are_the_cpu_alone(path: Path) -> None:
    cpu = {"devices": [], "rpc": [], "n_gpu_layers": 99}
    with LlamaModel(path) as usual, LlamaModel(path, **cpu) as model:
        assert model.devices == ()
        logits = []
        for one in (usual, model):
            with LlamaContext(one, n_ctx=64, n_threads=1, **EXACT) as ctx:
                ctx.decode(np.arange(5, 20))
                logits.append(ctx.logits())
        np.testing.assert_allclose(*logits, atol=1e-4 if able() else 0)
        with LlamaContext(model, n_ctx=64, n_threads=1) as ctx:
            info = ctx.memory_info
            assert info.buffer_types == ("CPU",)
            assert ctx.memory_breakdown()["CPU"].context == info.bytes_total
    assert usual.devices == tuple(able())


def test_shares_that_hold_too_much_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from pykvcache import _devices

    two = [b"A", b"B"]
    assert _devices.shares([1, 3.0], len(two)) == [1 / 3, 1.0]
    assert _devices.shares([0, 1e30], len(two)) == [0.0, 1.0]
    for wrong in ([0.0, 0.0], [5e-324, 0.0]):
        with pytest.raises(ValueError, match="at least one share must be above 0"):
            _devices.shares(wrong, len(two))
    for wrong in ([1.0], [1.0] * 3):
        with pytest.raises(ValueError, match="shares for 2 devices"):
            _devices.shares(wrong, len(two))
    # The compiled layer does not write beyond its own array either.
    facts = [(f"G{i}", 1, "X", "", 0, 0) for i in range(20)]
    monkeypatch.setattr(_devices.lib, "device_facts", lambda: facts)
    assert _devices.chosen(["G0", "G1"]) == [b"G0", b"G1"]
    with pytest.raises(ValueError, match="'G1' twice"):
        _devices.chosen(["G1", "G1"])
    with pytest.raises(ValueError, match="20 names"):
        _devices.chosen([name for name, *_ in facts])
    with pytest.raises(ValueError, match="one of G0, G1"):
        _devices.chosen(["CPU"])


@pytest.mark.skipif(has_rpc(), reason="this build has RPC")
def test_a_build_without_rpc_says_what_to_do(path: Path) -> None:
    with pytest.raises(UnsupportedOperation, match="GGML_RPC=ON") as raised:
        LlamaModel(path, rpc=["127.0.0.1:1"])
    assert raised.value.subject == "build"


def test_a_graph_that_gives_logits_of_all_tokens_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cogvlm.gguf"
    write_gguf(path, cogvlm(Sizes(n_head_kv=4), len(vocab.spm())), vocab.spm(), 0)
    with LlamaModel(path) as model, pytest.raises(ContextCreateError, match="logits of all tokens"):
        LlamaContext(model, n_ctx=64)


@pytest.mark.hazard("N190")
def test_a_learned_position_is_not_shifted(tmp_path: Path) -> None:
    path = tmp_path / "gpt2.gguf"
    write_gguf(path, gpt2(Sizes(), len(vocab.spm())), vocab.spm(), 0)
    with LlamaModel(path) as model, LlamaContext(model, n_ctx=64, n_seq_max=1) as ctx:
        ctx.decode(list(range(5, 25)))
        assert not ctx.kv_cache_can_shift()
        with pytest.raises(UnsupportedOperation, match="learned table"):
            ctx.kv_cache_seq_add(0, None, None, 5)
        with pytest.raises(UnsupportedOperation, match="learned table"):
            ctx.remove(0, 4, 8)
        assert ctx.kv_cache_seq_pos_max(0) == 19
        ctx.clear_kv_cache_seq(0, 10, None)
        ctx.decode([7])


@pytest.mark.hazard("N245")
@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("llama", True),
        ("gemma3", True),
        ("llama_bpe", True),
        ("mamba", False),
        ("jamba", False),
        ("lfm2", False),
        ("deepseek32", False),
    ],
)
def test_amx_is_for_models_that_multiply_single_matrices(
    name: str, wanted: bool, model_folder: Path
) -> None:
    """Recurrent layers multiply one matrix per sequence, MLA one per head."""
    path = make_model(name, model_folder)
    assert lib.multiplies_single_matrices(bytes(path)) == wanted
