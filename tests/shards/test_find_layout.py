"""Where decoders of different shapes are cut, on graphs without a single OpenVINO op."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from meshinfer.errors import CutError
from meshinfer.shards.graph import Graph, Op, Tensor
from meshinfer.shards.layers import MAX_BOUNDARY_TENSORS, Layout, find_layout


@dataclass
class Sketch:
    """Ops written down in order; `op` returns the tensor of the new one."""

    ops: list[Op] = field(default_factory=list)

    def op(self, kind: str, *inputs: Tensor, name: str = "", rank: int = 3) -> Tensor:
        self.ops.append(Op(kind, name or f"{kind}{len(self.ops)}", inputs, (rank,)))
        return len(self.ops) - 1, 0

    def parameter(self, name: str) -> Tensor:
        return self.op("Parameter", name=name, rank=2)

    def weights(self, *inputs: Tensor, name: str = "") -> Tensor:
        return self.op("MatMul", *inputs, self.op("Constant", rank=2), name=name)

    def embedding(self, ids: Tensor) -> Tensor:
        return self.op("Gather", self.op("Constant", rank=2), ids, self.op("Constant", rank=0), name="embedding")

    def norm(self, hidden: Tensor) -> Tensor:
        return self.op("Multiply", self.op("MVN", hidden), self.op("Constant", rank=1))

    def remember(self, new: Tensor, name: str) -> Tensor:
        whole = self.op("Concat", self.op("ReadValue", name=f"read {name}", rank=4), new, rank=4, name=f"join {name}")
        self.op("Assign", whole, name=f"write {name}", rank=4)
        return whole

    def attention(self, normed: Tensor, layer: int, past: tuple[Tensor, Tensor] | None = None) -> Tensor:
        keys, values = past or self.keys_values(normed, layer)
        mixed = self.op("ScaledDotProductAttention", self.weights(normed), keys, values, rank=4, name=f"attend {layer}")
        return self.weights(mixed)

    def keys_values(self, normed: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return self.remember(self.weights(normed), f"key {layer}"), self.remember(
            self.weights(normed), f"value {layer}"
        )

    def wide(self, normed: Tensor) -> Tensor:
        return self.weights(self.op("Swish", self.weights(normed)))

    def head(self, hidden: Tensor, name: str = "head norm") -> Graph:
        normed = self.op("Multiply", hidden, self.op("Constant", rank=1), name=name)
        self.op("Result", self.weights(normed, name="logits"), name="result")
        return Graph(tuple(self.ops))


def names(graph: Graph, layout: Layout) -> list[list[str]]:
    return [[graph.ops[position].name for position, _ in boundary] for boundary in layout.boundaries]


def shard(graph: Graph, layout: Layout, name: str) -> int:
    (position,) = [position for position, op in enumerate(graph.ops) if op.name == name]
    return layout.shard_of[position]


def test_a_layer_starts_at_the_residual_stream() -> None:
    sketch = Sketch()
    hidden = sketch.embedding(sketch.parameter("input_ids"))
    for layer in range(3):
        hidden = sketch.op("Add", hidden, sketch.attention(sketch.norm(hidden), layer), name=f"middle {layer}")
        hidden = sketch.op("Add", hidden, sketch.wide(sketch.norm(hidden)), name=f"end {layer}")
    graph = sketch.head(hidden)
    layout = find_layout(graph)
    assert names(graph, layout) == [["embedding"], ["end 0"], ["end 1"], ["end 2"]]
    assert layout.shards == 5
    for layer in range(3):
        for what in ("read key", "join key", "write key", "read value", "write value", "attend", "middle", "end"):
            assert shard(graph, layout, f"{what} {layer}") == layer + 1
    assert shard(graph, layout, "head norm") == shard(graph, layout, "result") == 4
    assert layout.copies == {}


def test_attention_and_feed_forward_may_be_side_by_side() -> None:
    sketch = Sketch()
    hidden = sketch.embedding(sketch.parameter("input_ids"))
    for layer in range(2):
        normed = sketch.norm(hidden)
        both = sketch.op("Add", sketch.attention(normed, layer), sketch.wide(normed))
        hidden = sketch.op("Add", both, hidden, name=f"end {layer}")
    graph = sketch.head(hidden)
    assert names(graph, find_layout(graph)) == [["embedding"], ["end 0"], ["end 1"]]


def test_with_the_norm_behind_the_addition_the_layer_ends_with_the_norm() -> None:
    sketch = Sketch()
    hidden = sketch.embedding(sketch.parameter("input_ids"))
    for layer in range(2):
        hidden = sketch.norm(sketch.op("Add", hidden, sketch.attention(hidden, layer)))
        hidden = sketch.op("Add", hidden, sketch.wide(hidden))
        hidden = sketch.op("Multiply", sketch.op("MVN", hidden), sketch.op("Constant", rank=1), name=f"norm {layer}")
    sketch.op("Result", sketch.weights(hidden, name="logits"))
    graph = Graph(tuple(sketch.ops))
    layout = find_layout(graph)
    assert names(graph, layout)[:2] == [["embedding"], ["norm 0"]]
    assert shard(graph, layout, "logits") == layout.shards - 1 == 3


def test_shared_keys_and_values_cross_as_what_is_new_of_them() -> None:
    sketch = Sketch()
    hidden = sketch.embedding(sketch.parameter("input_ids"))
    new = [sketch.weights(hidden, name=f"new {kind}") for kind in ("key", "value")]
    keys, values = (sketch.remember(tensor, kind) for tensor, kind in zip(new, ("key", "value"), strict=True))
    for layer in range(3):
        mixed = sketch.attention(sketch.norm(hidden), layer, (keys, values))
        hidden = sketch.op("Add", hidden, mixed, name=f"end {layer}")
    graph = sketch.head(hidden)
    layout = find_layout(graph)
    assert names(graph, layout) == [
        ["embedding"],
        ["end 0", "new value", "new key"],
        ["end 1", "new value", "new key"],
        ["end 2"],
    ]
    copied = {graph.ops[position].name: shards for position, shards in layout.copies.items()}
    expected = {f"{what} {kind}" for what in ("read", "join", "write") for kind in ("key", "value")}
    assert copied == dict.fromkeys(expected, frozenset({2, 3}))
    assert {shard(graph, layout, name) for name in expected} == {1}


def test_an_input_of_every_layer_crosses_beside_the_residual_stream() -> None:
    sketch = Sketch()
    ids = sketch.op("Convert", sketch.parameter("input_ids"), rank=2)
    hidden = sketch.embedding(ids)
    late = None
    for layer in range(2):
        hidden = sketch.op("Add", hidden, sketch.attention(sketch.norm(hidden), layer))
        late = late or sketch.op("Gather", sketch.op("Constant", rank=2), ids, name="table of the layers")
        hidden = sketch.op("Add", hidden, sketch.weights(late), name=f"end {layer}")
    graph = sketch.head(hidden)
    layout = find_layout(graph)
    assert names(graph, layout) == [
        ["table of the layers", "embedding"],
        ["end 0", "table of the layers"],
        ["end 1"],
    ]
    assert shard(graph, layout, "table of the layers") == 0


def test_other_state_marks_a_layer_too() -> None:
    sketch = Sketch()
    hidden = sketch.embedding(sketch.parameter("input_ids"))
    window = sketch.remember(sketch.weights(sketch.norm(hidden)), "window")
    hidden = sketch.op("Add", hidden, sketch.weights(sketch.op("GroupConvolution", window)), name="end 0")
    hidden = sketch.op("Add", hidden, sketch.attention(sketch.norm(hidden), 1), name="end 1")
    graph = sketch.head(hidden)
    layout = find_layout(graph)
    assert names(graph, layout) == [["embedding"], ["end 0"], ["end 1"]]
    assert shard(graph, layout, "read window") == shard(graph, layout, "write window") == 1


def one_layer(ids: str = "input_ids", state: bool = True) -> Sketch:
    sketch = Sketch()
    hidden = sketch.embedding(sketch.parameter(ids))
    mixed = sketch.attention(hidden, 0) if state else sketch.wide(hidden)
    hidden = sketch.op("Add", hidden, mixed)
    sketch.head(hidden)
    return sketch


def test_one_layer_is_enough() -> None:
    assert find_layout(Graph(tuple(one_layer().ops))).shards == 3


def test_without_state_there_is_nothing_to_cut() -> None:
    with pytest.raises(CutError, match="keeps no state"):
        find_layout(Graph(tuple(one_layer(state=False).ops)))


def test_without_token_ids_it_is_no_language_model() -> None:
    with pytest.raises(CutError, match="no input called input_ids"):
        find_layout(Graph(tuple(one_layer(ids="pixel_values").ops)))


def test_a_result_that_does_not_depend_on_the_ids_is_refused() -> None:
    ops = [op for op in one_layer().ops if op.type != "Result"]
    ops.append(Op("Result", "result", ((1, 0),), (3,)))
    with pytest.raises(CutError, match="does not depend on input_ids"):
        find_layout(Graph(tuple(ops)))


@pytest.mark.parametrize("results", [0, 2])
def test_more_or_fewer_results_than_one_are_refused(results: int) -> None:
    ops = one_layer().ops
    (result,) = [op for op in ops if op.type == "Result"]
    ops.remove(result)
    with pytest.raises(CutError, match=f"{results} outputs instead of 1"):
        find_layout(Graph((*ops, *[result] * results)))


def test_more_embeddings_than_a_boundary_can_carry_are_refused() -> None:
    sketch = Sketch()
    ids = sketch.parameter("input_ids")
    tables = [sketch.embedding(ids) for _ in range(MAX_BOUNDARY_TENSORS + 1)]
    hidden = sketch.attention(tables[0], 0)
    for table in tables:
        hidden = sketch.op("Add", hidden, table)
    with pytest.raises(CutError, match="too many tensors lead into the first layer"):
        find_layout(sketch.head(hidden))
