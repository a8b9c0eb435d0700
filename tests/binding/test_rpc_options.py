"""Addresses of RPC servers, and builds without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from devices.rpc_kit import has_rpc
from pykvcache import LlamaModel
from pykvcache.errors import UnsupportedOperation
from support.models import make_model


@pytest.fixture
def llama(model_folder: Path) -> Path:
    return make_model("llama", model_folder)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("127.0.0.1:5000", TypeError),
        (b"127.0.0.1:5000", TypeError),
        (5000, TypeError),
        ([5000], TypeError),
        ([b"a:1"], TypeError),
        (["127.0.0.1"], ValueError),
        (["127.0.0.1:"], ValueError),
        (["127.0.0.1:0"], ValueError),
        (["127.0.0.1:65536"], ValueError),
        (["127.0.0.1:-1"], ValueError),
        (["127.0.0.1:50x"], ValueError),
        (["::1:5000"], ValueError),
        ([":5000"], ValueError),
        (["a b:5000"], ValueError),
        (["a#2:5000"], ValueError),
        (["a:5000\x00"], ValueError),
        (["a:5000\n"], ValueError),
        (["h" * 300 + ":1"], ValueError),
        (["a:1", "a:1"], ValueError),
        ([f"a:{port}" for port in range(1, 18)], ValueError),
    ],
)
def test_invalid_addresses_are_refused(llama: Path, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="rpc"):
        LlamaModel(llama, rpc=value)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "1", None])
def test_a_time_limit_is_seconds(llama: Path, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="rpc_timeout"):
        LlamaModel(llama, rpc=["127.0.0.1:1"], rpc_timeout=value)


def test_servers_take_whole_layers(llama: Path) -> None:
    with pytest.raises(ValueError, match="split_mode"):
        LlamaModel(llama, rpc=["127.0.0.1:1"], split_mode="row")


@pytest.mark.skipif(has_rpc(), reason="this build has RPC")
def test_a_build_without_rpc_says_what_to_do(llama: Path) -> None:
    with pytest.raises(UnsupportedOperation, match="GGML_RPC=ON") as raised:
        LlamaModel(llama, rpc=["127.0.0.1:1"])
    assert raised.value.subject == "build"


def test_no_servers_are_this_machine(llama: Path) -> None:
    with LlamaModel(llama, rpc=[]) as model:
        assert model.n_layer
