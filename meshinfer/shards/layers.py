"""Where a decoder's graph can be cut, found from the graph alone.

The *hidden path* is everything whose value depends on the token ids. Walking it in topological
order, the tensors produced so far and still needed are the ones a cut at this point would have to
carry. Between two layers exactly one is left: the residual stream. A layer starts at the last such
point before its attention (or before it touches state, in layers that have other state); the head
starts after the last residual addition. No model family is named anywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from meshinfer.errors import CutError
from meshinfer.shards.graph import Graph, Tensor

MAX_BOUNDARY_TENSORS = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """The cut of one graph: `boundaries[i]` are the tensors between shard i and shard i + 1."""

    boundaries: tuple[tuple[Tensor, ...], ...]
    shard_of: dict[int, int]
    """Shard of every op that belongs to exactly one: the hidden path, state reads and state writes."""

    @property
    def shards(self) -> int:
        """Embedding + layers + head."""
        return len(self.boundaries) + 1


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A point of the walk: after op `position`, these tensors are still needed."""

    position: int
    live: tuple[Tensor, ...]


def find_layout(graph: Graph) -> Layout:
    """Cut a decoder into embedding, layers and head. Raises CutError where it has no such shape."""
    hidden = _hidden_path(graph)
    (result,) = _one(graph.find("Result"), "output")
    spine = hidden & graph.ancestors([result])
    if result not in spine:
        raise CutError("not a language model: its output does not depend on input_ids")
    state = graph.dependents(graph.find("ReadValue"))
    markers = {
        position
        for position in spine
        if graph.ops[position].type == "ScaledDotProductAttention"
        or any(source in state and source not in hidden for source, _ in graph.value_inputs(position))
    }
    if not markers:
        raise CutError("this model keeps no state (KV cache): export it with past (text-generation-with-past)")
    candidates = list(_walk(graph, spine))
    cuts = _choose(graph, spine, markers, candidates)
    return Layout(tuple(cut.live for cut in cuts), _assign(graph, hidden, spine, state, cuts))


def _one(found: list[int], what: str) -> list[int]:
    if len(found) != 1:
        raise CutError(f"not a language model of the expected shape: {len(found)} {what}s instead of 1")
    return found


def _hidden_path(graph: Graph) -> set[int]:
    ids = [p for p in graph.find("Parameter") if graph.ops[p].name == "input_ids"]
    if not ids:
        raise CutError("not a language model: no input called input_ids")
    return graph.dependents(ids) - set(ids)


def _walk(graph: Graph, spine: set[int]) -> Iterator[_Candidate]:
    """Every point of the spine where few enough tensors are live."""
    order = sorted(spine)
    uses: Counter[Tensor] = Counter()
    for position in order:
        uses.update(tensor for tensor in graph.value_inputs(position) if tensor[0] in spine)
    live: dict[Tensor, int] = {}
    for position in order:
        for tensor in graph.value_inputs(position):
            if tensor in live:
                live[tensor] -= 1
                if not live[tensor]:
                    del live[tensor]
        for port in range(len(graph.ops[position].ranks)):
            if uses[(position, port)]:
                live[(position, port)] = uses[(position, port)]
        if 0 < len(live) <= MAX_BOUNDARY_TENSORS:
            yield _Candidate(position, tuple(live))


def _choose(graph: Graph, spine: set[int], markers: set[int], candidates: list[_Candidate]) -> list[_Candidate]:
    single = [c for c in candidates if len(c.live) == 1]
    cuts: list[_Candidate] = []
    previous = -1
    for marker in sorted(markers):
        between = [c for c in single if previous <= c.position < marker]
        if between:
            cuts.append(between[-1])
        elif previous < 0:
            raise CutError("cannot find where the embedding ends: no single tensor leads into the first layer")
        previous = marker
    after = [c for c in single if c.position > max(markers) and graph.rank(c.live[0]) == graph.rank(cuts[0].live[0])]
    return [*_split_shared(graph, markers, candidates, cuts), _head_cut(graph, spine, after)]


def _split_shared(
    graph: Graph, markers: set[int], candidates: list[_Candidate], cuts: list[_Candidate]
) -> list[_Candidate]:
    """Cut between attentions that share tensors across layers, with as few tensors as that takes."""
    attention = sorted(p for p in markers if graph.ops[p].type == "ScaledDotProductAttention")
    starts = sorted(cut.position for cut in cuts)
    extra = []
    for first, second in zip(attention, attention[1:], strict=False):
        if any(first <= start < second for start in starts):
            continue
        between = [c for c in candidates if first <= c.position < second and graph.ops[c.position].type == "Add"]
        if between:
            least = min(len(c.live) for c in between)
            extra.append([c for c in between if len(c.live) == least][-1])
    return sorted(cuts + extra, key=lambda cut: cut.position)


def _head_cut(graph: Graph, spine: set[int], after: list[_Candidate]) -> _Candidate:
    """The last residual addition before the logits; in post-norm models, the last tensor before their product."""
    projection = max((p for p in graph.find("MatMul") if p in spine), default=-1)
    before_logits = [c for c in after if c.position < projection]
    if not before_logits:
        raise CutError("cannot find where the head starts: no single tensor leads from the last layer to the logits")
    additions = [p for p in spine if p < projection and _adds_two_hidden(graph, spine, p)]
    residual = [c for c in before_logits if c.position >= max(additions, default=projection)]
    return residual[0] if residual else before_logits[-1]


def _adds_two_hidden(graph: Graph, spine: set[int], position: int) -> bool:
    op = graph.ops[position]
    return op.type == "Add" and all(source in spine for source, _ in op.inputs)


def _assign(graph: Graph, hidden: set[int], spine: set[int], state: set[int], cuts: list[_Candidate]) -> dict[int, int]:
    shard_of: dict[int, int] = {}
    shard = 0
    for position in sorted(spine):
        shard_of[position] = shard
        while shard < len(cuts) and cuts[shard].position <= position:
            shard += 1
    crossing = [set(cut.live) for cut in cuts]
    for position in sorted(hidden - spine):  # what is only written to state
        shards = [
            shard_of[t[0]] + (shard_of[t[0]] < len(crossing) and t in crossing[shard_of[t[0]]])
            for t in graph.value_inputs(position)
            if t[0] in shard_of
        ]
        shard_of[position] = max(shards, default=0)
    readers: dict[int, int] = {}
    for position in range(len(graph.ops) - 1, -1, -1):  # state reads belong where their value is used
        owner = shard_of.get(position, readers.get(position))
        if owner is None:
            continue
        for source, _ in graph.value_inputs(position):
            if source in state and source not in hidden:
                readers[source] = min(owner, readers.get(source, owner))
    shard_of.update(readers)
    return shard_of
