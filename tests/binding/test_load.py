"""Loading a model: its file, its options, and the devices and servers it lies on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from binding.conftest import Child
from devices.rpc_kit import has_rpc
from pykvcache import Device, KvCacheError, LlamaContext, LlamaModel, devices
from pykvcache._devices import takes_layers
from pykvcache.enums import LoadMode
from pykvcache.errors import ModelLoadError, UnsupportedOperation
from support.models import EXACT, make_model


@pytest.fixture
def llama(model_folder: Path) -> Path:
    return make_model("llama", model_folder)


# Paths --------------------------------------------------------------------------------


def test_any_path_loads_and_is_kept(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Somewhere:
        def __fspath__(self) -> str:
            return str(llama)

    for path in (llama, str(llama), Somewhere()):
        with LlamaModel(path) as model:
            assert model.n_vocab == 320
            assert model.path == str(llama)
    odd = tmp_path / "mödel 漢字 'q' %s.gguf"
    odd.write_bytes(llama.read_bytes())
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


@pytest.mark.hazard("C17")
def test_a_directory_an_empty_path_and_a_nul_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, "", "a\0b.gguf", str(tmp_path / "x.gguf") + "\0"):
        with pytest.raises(ModelLoadError):
            LlamaModel(path)


@pytest.mark.hazard("C16")
def test_paths_and_callbacks_of_other_types_are_type_errors(llama: Path) -> None:
    for path in (None, 5, True, []):
        with pytest.raises(TypeError):
            LlamaModel(path)  # type: ignore[arg-type]
    for progress in (1, "x", True):
        with pytest.raises(TypeError, match="progress"):
            LlamaModel(llama, progress=progress)  # type: ignore[arg-type]


@pytest.mark.hazard("N16")
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path, child: Child) -> None:
    fifo = tmp_path / "pipe.gguf"
    os.mkfifo(fifo)
    code = (
        "import sys, pykvcache\n"
        "try: pykvcache.LlamaModel(sys.argv[1])\n"
        "except pykvcache.errors.ModelLoadError: print('refused')"
    )
    done = child(code, fifo, timeout=20)
    assert done.stdout == "refused\n", done.stderr


# Damaged files ------------------------------------------------------------------------


@pytest.mark.hazard("C17")
@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"GGUF" + b"\0" * 20, b"GGUF" + b"\xff" * 400, b"PK\3\4" * 99]
)
def test_files_that_are_not_gguf_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"broken\.gguf"):
        LlamaModel(path)


# Progress -----------------------------------------------------------------------------


def test_progress_rises_from_zero_to_one(llama: Path) -> None:
    seen: list[float] = []
    LlamaModel(llama, progress=seen.append).close()
    assert seen[0] == 0.0
    assert seen[-1] == 1.0
    assert seen == sorted(seen)
    assert all(type(f) is float for f in seen)


@pytest.mark.parametrize("at", [0, 1, 5])
def test_false_from_progress_cancels_the_load(llama: Path, at: int) -> None:
    seen: list[float] = []

    def go_on(fraction: float) -> bool:
        seen.append(fraction)
        return len(seen) <= at

    with pytest.raises(ModelLoadError, match="cancel"):
        LlamaModel(llama, progress=go_on)
    assert len(seen) == at + 1


@pytest.mark.hazard("N20")
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, StopIteration])
def test_exceptions_of_progress_are_raised(llama: Path, error: type[BaseException]) -> None:
    mine = error("from the callback")

    def fail(fraction: float) -> None:
        raise mine

    with pytest.raises(error) as caught:
        LlamaModel(llama, progress=fail)
    assert caught.value is mine
    LlamaModel(llama).close()


# Options ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "NONE", "mmap", LoadMode.DIRECT_IO, 1])
def test_every_way_of_reading_gives_the_same_model(llama: Path, mode: Any) -> None:
    with LlamaModel(llama, load_mode=mode, check_tensors=True) as model:
        assert model.n_params == 102_720


@pytest.mark.not_on_a_device(reason="there it has an effect")
@pytest.mark.skipif(takes_layers(), reason="there it has an effect")
@pytest.mark.parametrize("layers", [-1, 1, 99])
def test_layers_for_a_gpu_that_is_not_there_warn(llama: Path, layers: int) -> None:
    with pytest.warns(UserWarning, match=f"n_gpu_layers={layers} has no effect") as found:
        LlamaModel(llama, n_gpu_layers=layers).close()
    assert [warning.filename for warning in found] == [__file__]
    LlamaModel(llama, n_gpu_layers=0).close()
    LlamaModel(llama, n_gpu_layers=layers, devices=[]).close()  # the CPU was asked for


@pytest.mark.hazard("C20")
@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("load_mode", "fast", ValueError),
        ("load_mode", 99, ValueError),
        ("split_mode", "", ValueError),
        ("n_gpu_layers", 1.5, TypeError),
        ("n_gpu_layers", 2**31, ValueError),
        ("main_gpu", -1, ValueError),
        ("main_gpu", 2**40, ValueError),
    ],
)
def test_a_wrong_option_is_refused_by_name(
    llama: Path, option: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises((TypeError, error), match=option):
        LlamaModel(llama, **{option: value})


@pytest.mark.parametrize("flag", ["vocab_only", "check_tensors", "use_extra_bufts"])
def test_a_flag_is_true_or_false(llama: Path, flag: str) -> None:
    for value in (1, 0, None, "no"):
        with pytest.raises(TypeError, match=flag):
            LlamaModel(llama, **{flag: value})


# Devices ------------------------------------------------------------------------------


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
    assert cpu == Device(**{name: getattr(cpu, name) for name in Device.__dataclass_fields__})


def test_no_devices_are_the_cpu_alone(llama: Path) -> None:
    with LlamaModel(llama) as usual, LlamaModel(llama, devices=[], n_gpu_layers=99) as model:
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


@pytest.mark.hazard("N76")
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
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
    ],
)
def test_a_wrong_device_or_share_is_refused(
    llama: Path, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as raised:
        LlamaModel(llama, **options)
    assert words in str(raised.value)


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


# Servers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("127.0.0.1:5000", TypeError),
        ([5000], TypeError),
        (["127.0.0.1"], ValueError),
        (["127.0.0.1:0"], ValueError),
        (["127.0.0.1:65536"], ValueError),
        (["127.0.0.1:50x"], ValueError),
        ([":5000"], ValueError),
        (["a#2:5000"], ValueError),
        (["a:5000\x00"], ValueError),
        (["h" * 300 + ":1"], ValueError),
        (["a:1", "a:1"], ValueError),
        ([f"a:{port}" for port in range(1, 18)], ValueError),
    ],
)
def test_invalid_addresses_are_refused(llama: Path, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="rpc"):
        LlamaModel(llama, rpc=value)


def test_options_of_servers_are_checked(llama: Path) -> None:
    for value in (0, -1, float("nan"), float("inf"), "1", None):
        with pytest.raises((TypeError, ValueError), match="rpc_timeout"):
            LlamaModel(llama, rpc=["127.0.0.1:1"], rpc_timeout=value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="split_mode"):
        LlamaModel(llama, rpc=["127.0.0.1:1"], split_mode="row")
    with LlamaModel(llama, rpc=[]) as model:
        assert model.n_layer


@pytest.mark.skipif(has_rpc(), reason="this build has RPC")
def test_a_build_without_rpc_says_what_to_do(llama: Path) -> None:
    with pytest.raises(UnsupportedOperation, match="GGML_RPC=ON") as raised:
        LlamaModel(llama, rpc=["127.0.0.1:1"])
    assert raised.value.subject == "build"
