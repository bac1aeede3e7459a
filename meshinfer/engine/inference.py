"""One infer request with its inputs set by name and its outputs read without a copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from meshinfer.engine.devices import converting
from meshinfer.engine.step import Rows

Array = npt.NDArray[Any]


class Inference:
    """An infer request of a compiled model. Outputs are views, valid until the next `run`."""

    def __init__(self, compiled: ov.CompiledModel, device: str) -> None:
        self._device = device
        self.request = compiled.create_infer_request()
        self._ports = {name: port for port in compiled.inputs for name in port.get_names()}
        self._outputs = len(compiled.outputs)

    @property
    def inputs(self) -> frozenset[str]:
        """Names of the model's inputs."""
        return frozenset(self._ports)

    def run(self, values: Mapping[str, Array]) -> tuple[Rows, ...]:
        """Set those of `values` that the model has as inputs, infer, and return all outputs."""
        # The request does not keep what it reads alive: these arrays have to last until it has run.
        arrays = {name: _shareable(value) for name, value in values.items() if name in self._ports}
        with converting(self._device, "inference"):
            for name, array in arrays.items():
                self.request.set_tensor(self._ports[name], ov.Tensor(array, shared_memory=True))
            self.request.infer(share_outputs=True)
            return tuple(self.request.get_output_tensor(index).data for index in range(self._outputs))


def _shareable(value: Array) -> Array:
    """`value` as memory that OpenVINO takes: in one piece and writable; a copy where it is not."""
    return np.require(value, requirements=["C", "W"]) if value.ndim else value
