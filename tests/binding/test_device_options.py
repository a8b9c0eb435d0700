"""Listing devices and choosing them for a model; devices/ has the tests that need a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pykvcache import Device, LlamaContext, LlamaModel, devices
from support.models import EXACT, make_model


def able() -> list[str]:
    """Devices that take layers; servers may have joined since the tests were collected."""
    return [d.name for d in devices() if d.kind in ("gpu", "integrated-gpu")]


@pytest.fixture
def llama(model_folder: Path) -> Path:
    return make_model("llama", model_folder)


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
        ({"devices": ["C\0U"]}, ValueError, "no device of this build"),
        ({"devices": ["\ud800"]}, ValueError, "no device of this build"),
        ({"devices": "CPU"}, TypeError, "devices must be a sequence of names, not str"),
        ({"devices": b"CPU"}, TypeError, "devices must be a sequence of names, not bytes"),
        ({"devices": 0}, TypeError, "devices must be a sequence"),
        ({"devices": [0]}, TypeError, "devices must hold names, not int: 0"),
        ({"devices": [b"CPU"]}, TypeError, "devices must hold names, not bytes"),
        ({"tensor_split": [1.0]}, ValueError, "tensor_split needs devices"),
        ({"tensor_split": []}, ValueError, "tensor_split needs devices"),
        ({"tensor_split": [1.0], "devices": []}, ValueError, "tensor_split needs devices"),
        ({"tensor_split": "1,1"}, TypeError, "tensor_split must be a sequence of numbers"),
        ({"tensor_split": 0.5}, TypeError, "tensor_split must be a sequence of numbers"),
        ({"tensor_split": [-1.0]}, ValueError, "tensor_split is -1.0"),
        ({"tensor_split": [float("nan")]}, ValueError, "tensor_split is nan"),
        ({"tensor_split": [float("inf")]}, ValueError, "tensor_split is inf"),
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
        with pytest.raises(ValueError, match="one share at least must be above 0"):
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


@pytest.mark.parametrize(
    ("name", "value"), [("devices", [b"nothing"]), ("tensor_split", [1.0] * 17)]
)
def test_the_compiled_layer_looks_itself(llama: Path, name: str, value: Any) -> None:
    with LlamaModel(llama) as model:
        kind = type(model.native)
    params = {
        "n_gpu_layers": 0, "load_mode": 0, "split_mode": 1, "main_gpu": 0, "vocab_only": True,
        "check_tensors": False, "use_extra_bufts": True, "devices": None, "tensor_split": None,
        "servers": (),
    }  # fmt: skip
    with pytest.raises(ValueError, match=name):
        kind(bytes(llama), params | {name: value}, None)
