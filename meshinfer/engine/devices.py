"""The one place that asks OpenVINO about devices, and puts its answers and complaints into words.

Only CPUs have been run: what is said here about GPUs and NPUs follows OpenVINO's documentation.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import psutil

from meshinfer.errors import DeviceError, telling_line
from meshinfer.types import Precision

if TYPE_CHECKING:
    import openvino as ov

DeviceKind = Literal["CPU", "GPU", "NPU"]

KINDS: tuple[DeviceKind, ...] = get_args(DeviceKind)
KV_BLOCK_TOKENS: dict[DeviceKind, int] = {"CPU": 32, "GPU": 16, "NPU": 1}
"""Tokens in one block of the paged KV cache; fixed by each OpenVINO plugin (the NPU has no such cache)."""

_EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}


@dataclass(frozen=True, slots=True)
class Device:
    """A device that OpenVINO can compile for. Memory of CPUs and integrated GPUs is the machine's."""

    name: str
    full_name: str
    kind: DeviceKind
    integrated: bool
    total_memory_bytes: int
    free_memory_bytes: int
    capabilities: tuple[str, ...]
    kv_block_tokens: int
    paged: bool
    """Whether paged attention runs on it."""


@dataclass(frozen=True, slots=True)
class Absence:
    """A kind of device that was not found: why, and what a person can do about it."""

    kind: DeviceKind
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason} ({self.remedy})"


@functools.cache
def core() -> ov.Core:
    """The process's one OpenVINO core. Raises DeviceError where OpenVINO itself does not load."""
    try:
        import openvino
    except (ImportError, OSError) as error:
        remedy = "install the Visual C++ redistributable" if os.name == "nt" else "install meshinfer again"
        raise DeviceError(f"OpenVINO does not load: {telling_line(error)} ({remedy})") from error
    return openvino.Core()


def probe() -> list[Device]:
    """Every device found, the CPU first. A device that answers with an error is left out (see `absent`)."""
    return [device for name in core().available_devices if (device := _device(name)) is not None]


def absent() -> list[Absence]:
    """Every kind of device that was not found, with the reason."""
    found = {device.kind for device in probe()}
    return [_absence(kind, _complaint(kind)) for kind in KINDS if kind not in found]


def resolve(name: str) -> Device:
    """The device called `name` in any case; "auto" is the one expected to be fastest, "gpu" the first GPU.

    Raises DeviceError saying what there is, and why the one asked for is missing.
    """
    devices = probe()
    wanted = name.strip().upper()
    if wanted == "AUTO" and devices:
        return max(devices, key=_rank)
    for device in devices:
        if wanted in (device.name, device.kind, f"{device.name}.0"):
            return device
    have = ", ".join(f"{device.name} ({device.full_name})" for device in devices) or "none"
    why = next((f"; {absence}" for absence in absent() if absence.kind == wanted.split(".")[0]), "")
    raise DeviceError(f"no device '{name}' here{why}; found: {have}")


def compile_properties(
    device: str, precision: Precision, threads: int | None = None, cache_dir: Path | None = None
) -> dict[str, Any]:
    """What to compile a stage with: properties that `device` knows, and no others.

    exact: f32 inference, f32 KV cache, no dynamic quantization. Raises DeviceError where the device cannot be exact.
    """
    supported = _supported(device.upper())
    kind = device.split(".")[0].upper()
    wanted: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY"}
    if kind == "CPU":
        # On by default, it pins the threads of every process of a machine to the same cores.
        wanted["ENABLE_CPU_PINNING"] = False
    elif cache_dir is not None:
        wanted["CACHE_DIR"] = str(cache_dir)
    if threads is not None:
        wanted["INFERENCE_NUM_THREADS"] = threads
    if precision == "exact":
        if "INFERENCE_PRECISION_HINT" not in supported:
            raise DeviceError(f"{device} cannot compute in f32: exact mode needs another device")
        wanted |= _EXACT
    return {key: value for key, value in wanted.items() if key in supported}


@contextmanager
def converting(device: str, doing: str) -> Iterator[None]:
    """Turn what OpenVINO raises while `doing` something on `device` into DeviceError."""
    try:
        yield
    except RecursionError:
        raise
    except MemoryError as error:
        raise DeviceError(f"{device}: {doing} failed: not enough memory") from error
    except RuntimeError as error:
        why = "not enough memory" if "bad_alloc" in str(error) else telling_line(error)
        raise DeviceError(f"{device}: {doing} failed: {why}") from error


def _rank(device: Device) -> tuple[bool, int]:
    """Paged attention first; then a GPU of its own, an integrated one, the CPU."""
    return device.paged, {"GPU": 2 - device.integrated, "CPU": 0, "NPU": -1}[device.kind]


def _device(name: str) -> Device | None:
    kind = next((kind for kind in KINDS if name.split(".")[0] == kind), None)
    if kind is None:
        return None
    try:
        full_name = str(core().get_property(name, "FULL_DEVICE_NAME")).strip()
        capabilities = tuple(core().get_property(name, "OPTIMIZATION_CAPABILITIES"))
    except RuntimeError:
        return None
    integrated = kind != "GPU" or "INTEGRATED" in str(_ask(name, "DEVICE_TYPE", "INTEGRATED")).upper()
    total, free = _memory(name, integrated)
    return Device(
        name=name,
        full_name=full_name,
        kind=kind,
        integrated=integrated,
        total_memory_bytes=total,
        free_memory_bytes=free,
        capabilities=capabilities,
        kv_block_tokens=KV_BLOCK_TOKENS[kind],
        paged=kind != "NPU",
    )


def _memory(name: str, integrated: bool) -> tuple[int, int]:
    """Total and free bytes. Of a GPU's own memory OpenVINO knows only what this process has taken."""
    system = psutil.virtual_memory()
    if integrated:
        return system.total, system.available
    total = int(_ask(name, "GPU_DEVICE_TOTAL_MEM_SIZE", 0))
    taken = _ask(name, "GPU_MEMORY_STATISTICS", {})
    return total, max(total - sum(size for where, size in taken.items() if "device" in where), 0)


def _ask(name: str, key: str, default: Any) -> Any:
    try:
        return core().get_property(name, key)
    except RuntimeError:
        return default


@functools.cache
def _supported(device: str) -> frozenset[str]:
    try:
        return frozenset(core().get_property(device, "SUPPORTED_PROPERTIES"))
    except RuntimeError as error:
        kind = next((kind for kind in KINDS if device.split(".")[0].upper() == kind), None)
        why = str(_absence(kind, telling_line(error))) if kind else f"no device '{device}'"
        raise DeviceError(why) from error


def _complaint(kind: DeviceKind) -> str:
    """What OpenVINO says when asked about a kind of device it does not list; empty where it says nothing."""
    try:
        core().get_property(kind, "AVAILABLE_DEVICES")
        core().get_property(kind, "FULL_DEVICE_NAME")
    except RuntimeError as error:
        return telling_line(error)
    return ""


def _absence(kind: DeviceKind, complaint: str) -> Absence:
    """Put OpenVINO's complaint about a missing device into words. Pure but for the name of the system."""
    windows = os.name == "nt"
    driver = f"install the Intel {'graphics' if kind == 'GPU' else 'NPU'} driver"
    if kind == "GPU" and "OpenCL" in complaint:
        remedy = driver if windows else "install intel-opencl-icd"
        return Absence(kind, "no OpenCL runtime", f"{remedy}, if this machine has an Intel GPU")
    if kind == "GPU":
        remedy = driver if windows else "see that /dev/dri exists and that you are in its group (render)"
        return Absence(kind, "the OpenCL runtime lists no Intel GPU", f"{remedy}, if this machine has one")
    if kind == "NPU":
        remedy = driver if windows else f"{driver} (it makes /dev/accel/accel0)"
        return Absence(kind, "no NPU driver answers", f"{remedy}, if this machine has an NPU")
    return Absence(kind, complaint or "OpenVINO lists none", "install meshinfer again")
