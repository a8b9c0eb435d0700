"""How the weights are read, and which values are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pykvcache import LlamaModel
from pykvcache._devices import takes_layers
from pykvcache.enums import LoadMode, SplitMode
from support.models import make_model


@pytest.fixture
def llama(model_folder: Path) -> Path:
    return make_model("llama", model_folder)


@pytest.mark.parametrize("mode", ["auto", "NONE", "mmap", LoadMode.DIRECT_IO, 1])
def test_every_way_of_reading_gives_the_same_model(llama: Path, mode: Any) -> None:
    with LlamaModel(llama, load_mode=mode, check_tensors=True) as model:
        assert model.n_params == 102_720


@pytest.mark.not_on_a_device(reason="a device may not take all split modes")
@pytest.mark.filterwarnings("ignore:n_gpu_layers=-1 has no effect")
@pytest.mark.parametrize("split", ["none", "layer", SplitMode.ROW])
def test_split_modes_are_harmless_without_a_gpu(llama: Path, split: Any) -> None:
    with LlamaModel(llama, split_mode=split, n_gpu_layers=-1, use_extra_bufts=False) as model:
        assert model.n_layer == 2


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
        ("load_mode", None, TypeError),
        ("load_mode", True, ValueError),
        ("split_mode", "", ValueError),
        ("split_mode", -7, ValueError),
        ("split_mode", 1.0, TypeError),
        ("n_gpu_layers", 1.5, TypeError),
        ("n_gpu_layers", True, TypeError),
        ("n_gpu_layers", "all", TypeError),
        ("n_gpu_layers", 2**31, ValueError),
        ("n_gpu_layers", -(2**31) - 1, ValueError),
        ("main_gpu", -1, ValueError),
        ("main_gpu", 2**40, ValueError),
        ("main_gpu", None, TypeError),
    ],
)
def test_a_wrong_option_is_refused_by_name(
    llama: Path, option: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises((TypeError, error), match=option):
        LlamaModel(llama, **{option: value})


@pytest.mark.parametrize("flag", ["vocab_only", "check_tensors", "use_extra_bufts"])
@pytest.mark.parametrize("value", [1, 0, None, "no", 1.0, []])
def test_a_flag_is_true_or_false(llama: Path, flag: str, value: Any) -> None:
    with pytest.raises(TypeError, match=flag):
        LlamaModel(llama, **{flag: value})
