"""Devices as OpenVINO on this machine has them, and its complaints in words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from meshinfer.engine import devices
from meshinfer.engine.devices import Device
from meshinfer.errors import DeviceError, telling_line

OPENCL_COMPLAINT = (
    "Exception from src/inference/src/cpp/core.cpp:268:\n"
    'Cannot load library "/x/libopenvino_intel_gpu_plugin.so": libOpenCL.so.1: cannot open shared object file: '
    "No such file or directory\n"
)


def device(name: str, integrated: bool = True) -> Device:
    kind = next(kind for kind in devices.KINDS if name.startswith(kind))
    return Device(name, f"Some {kind}", kind, integrated, 8, 4, (), devices.KV_BLOCK_TOKENS[kind], kind != "NPU")


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> object:
    """Pretend that these devices were found, and no others."""

    def found(*listed: Device) -> None:
        monkeypatch.setattr(devices, "probe", lambda: list(listed))

    return found


def test_the_cpu_is_found() -> None:
    cpu = devices.probe()[0]
    assert (cpu.name, cpu.kind, cpu.paged, cpu.kv_block_tokens) == ("CPU", "CPU", True, 32)
    assert cpu.full_name and "FP32" in cpu.capabilities
    assert 0 < cpu.free_memory_bytes <= cpu.total_memory_bytes == psutil.virtual_memory().total


def test_found_and_absent_are_all_kinds() -> None:
    found = {device.kind for device in devices.probe()}
    missing = {absence.kind for absence in devices.absent()}
    assert found | missing == set(devices.KINDS) and not found & missing


@pytest.mark.parametrize("kind", ["GPU", "NPU"])
def test_a_missing_device_is_explained_in_words(kind: str) -> None:
    absence = next((absence for absence in devices.absent() if absence.kind == kind), None)
    if absence is None:
        pytest.skip(f"this machine has a {kind}")
    text = str(absence)
    assert "install" in text or "see that" in text
    assert "Exception" not in text and ".so" not in text and ".cpp" not in text
    with pytest.raises(DeviceError, match="found: CPU") as caught:
        devices.resolve(kind.lower())
    assert text in str(caught.value)


def test_the_reason_for_a_missing_gpu_depends_on_what_openvino_said() -> None:
    complaint = telling_line(RuntimeError(OPENCL_COMPLAINT))
    assert complaint.startswith("Cannot load library")
    assert devices._absence("GPU", complaint).reason == "no OpenCL runtime"
    assert devices._absence("GPU", "").reason == "the OpenCL runtime lists no Intel GPU"
    assert devices._absence("CPU", "").reason == "OpenVINO lists none"


def test_the_remedy_on_windows_is_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "os", type("Windows", (), {"name": "nt"}))
    for kind, words in (("GPU", "install the Intel graphics driver"), ("NPU", "install the Intel NPU driver")):
        absence = devices._absence(kind, OPENCL_COMPLAINT)
        assert absence.remedy.startswith(words) and "/dev" not in absence.remedy


@pytest.mark.parametrize("name", ["cpu", "CPU", " Cpu ", "auto"])
def test_resolve_on_this_machine(name: str) -> None:
    assert devices.resolve(name).kind in ("CPU", "GPU")


@pytest.mark.parametrize("name", ["tpu", "", "cpu.7", "gpu.9"])
def test_resolve_of_what_is_not_there(name: str) -> None:
    with pytest.raises(DeviceError, match=r"found: .*CPU \("):
        devices.resolve(name)


def test_auto_takes_the_fastest(pretend) -> None:
    pretend(device("CPU"), device("NPU"))
    assert devices.resolve("auto").name == "CPU"
    pretend(device("CPU"), device("GPU"), device("NPU"))
    assert devices.resolve("AUTO").name == devices.resolve("gpu.0").name == "GPU"
    pretend(device("CPU"), device("GPU.0"), device("GPU.1", integrated=False))
    assert devices.resolve("auto").name == "GPU.1"
    assert devices.resolve("gpu").name == "GPU.0"
    assert devices.resolve("gpu.1").name == "GPU.1"


def compile_relu(properties: dict[str, object]):
    import openvino as ov
    from openvino import opset13 as ops

    parameter = ops.parameter([1, 2], np.float32)
    return devices.core().compile_model(ov.Model([ops.relu(parameter)], [parameter]), "CPU", properties)


def test_exact_is_f32_everywhere_and_openvino_takes_it() -> None:
    compiled = compile_relu(devices.compile_properties("CPU", "exact", threads=1))
    assert compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name() == "f32"
    assert compiled.get_property("KV_CACHE_PRECISION").get_type_name() == "f32"
    assert compiled.get_property("DYNAMIC_QUANTIZATION_GROUP_SIZE") == 0
    assert compiled.get_property("ENABLE_CPU_PINNING") is False
    assert compiled.get_property("INFERENCE_NUM_THREADS") == 1
    assert str(compiled.get_property("PERFORMANCE_HINT")).endswith("LATENCY")


def test_fast_is_the_devices_own_best(tmp_path: Path) -> None:
    properties = devices.compile_properties("CPU", "fast", cache_dir=tmp_path)
    assert properties == {"PERFORMANCE_HINT": "LATENCY", "ENABLE_CPU_PINNING": False}
    compile_relu(properties)


def test_properties_a_device_does_not_know_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"PERFORMANCE_HINT", "INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "CACHE_DIR", "ENABLE_CPU_PINNING"}
    monkeypatch.setattr(devices, "_supported", lambda name: frozenset(known))
    assert devices.compile_properties("GPU.0", "exact", 4, tmp_path) == {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
        "CACHE_DIR": str(tmp_path),
    }
    monkeypatch.setattr(devices, "_supported", lambda name: frozenset({"PERFORMANCE_HINT"}))
    with pytest.raises(DeviceError, match="cannot compute in f32"):
        devices.compile_properties("NPU", "exact")
    assert devices.compile_properties("NPU", "fast") == {"PERFORMANCE_HINT": "LATENCY"}


def test_properties_of_a_device_that_is_not_there() -> None:
    with pytest.raises(DeviceError, match="no device 'TPU'"):
        devices.compile_properties("tpu", "fast")


def test_openvinos_complaint_becomes_one_line() -> None:
    with pytest.raises(DeviceError) as caught, devices.converting("CPU", "compiling"):
        compile_relu({"NOT_A_PROPERTY": 1})
    assert str(caught.value) == "CPU: compiling failed: NotFound: Unsupported property NOT_A_PROPERTY by CPU plugin."
    with pytest.raises(DeviceError, match="not enough memory"), devices.converting("CPU", "compiling"):
        raise MemoryError
    with pytest.raises(RecursionError), devices.converting("CPU", "compiling"):
        raise RecursionError


def test_importing_the_module_does_not_import_openvino() -> None:
    code = "import sys, meshinfer.engine.devices; sys.exit('openvino' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ}).returncode == 0


def test_an_openvino_that_does_not_load_is_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(DeviceError, match="OpenVINO does not load"):
        devices.core.__wrapped__()
