"""Compute devices: those of this build, and those on RPC servers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

from pykvcache._arguments import as_float
from pykvcache._native import lib
from pykvcache.enums import DeviceKind
from pykvcache.errors import ArgumentError, shown

__all__ = ["Device", "devices"]

_KINDS: tuple[DeviceKind, ...] = get_args(DeviceKind)
#: Kinds of devices that take layers.
_TAKES_LAYERS = ("gpu", "integrated-gpu")


@dataclass(frozen=True)
class Device:
    """A compute device of ggml.

    Attributes
    ----------
    name
        Name for `LlamaModel`: ``"CPU"``, ``"CUDA0"``, ``"Vulkan1"``.
    kind
        ``"cpu"``, ``"gpu"``, ``"integrated-gpu"``, ``"accelerator"`` (shares the CPU's memory) or
        ``"meta"``. Layers go to GPUs, including integrated ones.
    backend
        Its ggml backend: ``"CPU"``, ``"CUDA"``, ``"Vulkan"``, ``"RPC"``.
    description
        The manufacturer's name.
    memory_free, memory_total
        Bytes when `devices` was called; 0 if unknown.
    """

    name: str
    kind: DeviceKind
    backend: str
    description: str
    memory_free: int
    memory_total: int


def devices() -> tuple[Device, ...]:
    """Return the devices that this build finds on this machine (``ggml_backend_dev_get``).

    Returns
    -------
    tuple of Device
        In ggml's order; only the CPU in a build without a GPU backend.

    Raises
    ------
    InternalError
        A backend failed.
    """
    return tuple(
        Device(name, _KINDS[kind], backend, description, free, total)
        for name, kind, backend, description, free, total in lib.device_facts()
    )


def takes_layers() -> bool:
    """Return whether any device takes layers."""
    return any(_KINDS[kind] in _TAKES_LAYERS for _, kind, *_ in lib.device_facts())


def default_layers() -> int:
    """Return applications' default `n_gpu_layers`: -1 (all) if a device takes layers, else 0."""
    return -1 if takes_layers() else 0


def chosen(names: object, *, is_remote: bool = False) -> list[bytes] | None:
    """Return the names of a model's local devices as bytes.

    ``None`` leaves the choice to llama.cpp, which would name those of RPC servers, too.
    """
    facts = lib.device_facts()
    if names is None:
        if not is_remote:
            return None
        return [
            name.encode()
            for name, kind, backend, *_ in facts
            if _KINDS[kind] in _TAKES_LAYERS and backend != "RPC"
        ]
    kinds = {name: _KINDS[kind] for name, kind, *_ in facts}
    able = [name for name, kind in kinds.items() if kind in _TAKES_LAYERS]
    found = _different(names, "devices", "names")
    for name in found:
        if name not in able:
            why = "a device that takes no layers" if name in kinds else "no device of this build"
            hint = f"it must be one of {', '.join(able)}" if able else "leave it out"
            raise ArgumentError(
                f"devices names {shown(name)}, {why}: {hint}", "devices", name, tuple(able)
            )
    return [name.encode() for name in found]


def _different(names: object, what: str, of: str) -> list[str]:
    """Return different texts as a list, at most as many as llama.cpp takes devices."""
    if isinstance(names, (str, bytes)) or not isinstance(names, Iterable):
        raise TypeError(f"{what} must be a sequence of {of}, not {type(names).__name__}")
    found: list[str] = []
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{what} must hold {of}, not {type(name).__name__}: {shown(name)}")
        if name in found:
            raise ArgumentError(f"{what} names {shown(name)} twice", what, name)
        found.append(name)
    if len(found) > (most := lib.max_devices()):
        raise ArgumentError(
            f"{what} has {len(found)} names: llama.cpp takes at most {most} devices",
            what,
            len(found),
            most,
        )
    return found


_ENDPOINT = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9.])?:([0-9]{1,5})")


def endpoints(names: object) -> list[str]:
    """Return the addresses of RPC servers, checked."""
    if names is None:
        return []
    found = _different(names, "rpc", "'host:port'")
    for name in found:
        match = _ENDPOINT.fullmatch(name)
        if match is None or not 1 <= int(match[2]) <= 65535:
            raise ArgumentError(
                f"rpc names {shown(name)}: it must be 'host:port', a name or an IPv4 address and "
                "a port of 1 to 65535",
                "rpc",
                name,
            )
    return found


def shares(split: Sequence[float] | None, n_devices: int) -> list[float] | None:
    """Return the share of each device, scaled so that the largest is 1."""
    if split is None:
        return None
    if isinstance(split, (str, bytes)) or not isinstance(split, Iterable):
        raise TypeError(f"tensor_split must be a sequence of numbers, not {type(split).__name__}")
    values = [as_float(value, "tensor_split", 0.0, 1e30) for value in split]
    if not n_devices:
        raise ArgumentError(
            "tensor_split needs devices: one share for each device named there", "devices"
        )
    if len(values) != n_devices:
        raise ArgumentError(
            f"tensor_split has {len(values)} shares for {n_devices} devices",
            "tensor_split",
            len(values),
            n_devices,
        )
    largest = max(values)
    if largest <= 0 or not math.isfinite(1 / largest):
        raise ArgumentError(
            f"tensor_split is {values!r}: at least one share must be above 0",
            "tensor_split",
            values,
        )
    return [value / largest for value in values]
