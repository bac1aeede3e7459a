"""A decoder written op by op, as an exporter might: its attention, its state and its head can be varied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

HIDDEN, HEADS = 32, 2
VOCABULARY = 96


@dataclass
class Decoder:
    """`shared[i] = j`: layer i attends to the keys and values of layer j and keeps none, or its own copies of them.

    `beam_idx`: state is read through a gather. `per_layer`: every layer adds an input of its own from the ids.
    """

    layers: int = 2
    hidden: int = HIDDEN
    shared: Mapping[int, int] = field(default_factory=dict)
    own_copies: bool = False
    beam_idx: bool = False
    per_layer: bool = False

    def build(self) -> ov.Model:
        self._random = np.random.default_rng(0)
        self._new: list[tuple[Any, Any]] = []
        self._kept: list[tuple[Any, Any]] = []
        self._sinks: list[ov.Node] = []
        ids, mask, positions = (self._input(name) for name in ("input_ids", "attention_mask", "position_ids"))
        beam_idx = self._input("beam_idx", rank=1, kind=ov.Type.i32) if self.beam_idx else None
        self._ids, self._beam_idx = ids, beam_idx
        self._mask = self._causal(ids, mask)
        table = self._weights(VOCABULARY, self.hidden)
        extra = (
            ops.gather(self._weights(VOCABULARY, self.hidden * self.layers), ids, _i64(0)) if self.per_layer else None
        )
        hidden = ops.gather(table, ids, _i64(0))
        hidden = ops.add(hidden, ops.gather(self._weights(256, self.hidden), positions, _i64(0)))
        for layer in range(self.layers):
            hidden = self._layer(layer, hidden, extra)
        logits = ops.matmul(_norm(hidden), table, False, True)
        result = ops.result(logits)
        result.output(0).set_names({"logits"})
        inputs = [ids, mask, positions] + ([beam_idx] if beam_idx is not None else [])
        return ov.Model([result], self._sinks, inputs, "decoder")

    def _input(self, name: str, rank: int = 2, kind: ov.Type = ov.Type.i64) -> ov.Node:
        node = ops.parameter(ov.PartialShape([-1] * rank), kind, name)
        node.output(0).set_names({name})
        return node

    def _weights(self, rows: int, columns: int) -> ov.Node:
        return ops.constant(self._random.normal(0, 0.2, (rows, columns)).astype(np.float32))

    def _causal(self, ids: ov.Node, mask: ov.Node) -> ov.Node:
        """[1, 1, sequence, past + sequence] f32: 0 where a position may look, very negative elsewhere."""
        total, count = (ops.gather(ops.shape_of(node), _i64(1), _i64(0)) for node in (mask, ids))
        slots = ops.range(_i64(0), total, _i64(1), "i64")
        queries = ops.add(ops.range(_i64(0), count, _i64(1), "i64"), ops.subtract(total, count))
        seen = ops.less_equal(ops.unsqueeze(slots, _i64(0)), ops.unsqueeze(queries, _i64(1)))
        bias = ops.select(seen, ops.constant(np.float32(0)), ops.constant(np.float32(-65504)))
        return ops.unsqueeze(bias, _i64([0, 1]))

    def _layer(self, layer: int, hidden: ov.Node, extra: ov.Node | None) -> ov.Node:
        normed = _norm(hidden)
        query = self._heads(normed)
        new = self._new[self.shared[layer]] if layer in self.shared else (self._heads(normed), self._heads(normed))
        self._new.append(new)
        if layer in self.shared and not self.own_copies:
            keys, values = self._kept[self.shared[layer]]
        else:
            keys, values = self._remember(f"key.{layer}", new[0]), self._remember(f"value.{layer}", new[1])
        self._kept.append((keys, values))
        mixed = ops.scaled_dot_product_attention(query, keys, values, self._mask)
        rows = ops.reshape(ops.transpose(mixed, _i64([0, 2, 1, 3])), _i64([0, 0, self.hidden]), True)
        hidden = ops.add(hidden, ops.matmul(rows, self._weights(self.hidden, self.hidden), False, False))
        if extra is not None:
            own = ops.gather(ops.reshape(extra, _i64([0, 0, self.layers, self.hidden]), True), _i64(layer), _i64(2))
            hidden = ops.add(hidden, own)
        wide = ops.relu(ops.matmul(_norm(hidden), self._weights(self.hidden, 2 * self.hidden), False, False))
        return ops.add(hidden, ops.matmul(wide, self._weights(2 * self.hidden, self.hidden), False, False))

    def _heads(self, normed: ov.Node) -> ov.Node:
        rows = ops.matmul(normed, self._weights(self.hidden, self.hidden), False, False)
        return ops.transpose(ops.reshape(rows, _i64([0, 0, HEADS, self.hidden // HEADS]), True), _i64([0, 2, 1, 3]))

    def _remember(self, name: str, new: ov.Node) -> ov.Node:
        batch = ops.gather(ops.shape_of(self._ids), _i64([0]), _i64(0))
        empty = ops.broadcast(
            ops.constant(np.float32(0)), ops.concat([batch, _i64([HEADS, 0, self.hidden // HEADS])], 0)
        )
        past = ops.read_value(empty, name, ov.Type.f32, ov.PartialShape([-1, HEADS, -1, self.hidden // HEADS]))
        if self._beam_idx is not None:
            past = ops.gather(past, self._beam_idx, _i64(0))
        whole = ops.concat([past, new], 2)
        self._sinks.append(ops.assign(whole, name))
        return whole


def _i64(value: int | list[int]) -> ov.Node:
    return ops.constant(np.array(value, np.int64))


def _norm(hidden: ov.Node) -> ov.Node:
    return ops.mvn(hidden, _i64([-1]), True, 1e-5, "INSIDE_SQRT")
