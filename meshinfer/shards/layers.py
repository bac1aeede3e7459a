"""Where a decoder's graph can be cut, found from the graph alone.

The *hidden path* is everything whose value depends on the token ids. Walking it in topological
order, the tensors produced so far and still needed are the ones a cut at this point would have to
carry. Between two layers exactly one is left: the residual stream. A layer starts at the last such
point before its attention (or before it touches state, in layers that have other state); the head
starts after the last residual addition. Where layers share what they attend to, or all read one more
tensor, more than one is left: then the boundary is the shortest list. What only joins the past with
the present is not carried; every shard that needs it keeps that past itself. No model family is named
anywhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from meshinfer.errors import CutError
from meshinfer.shards.graph import Graph, Tensor

MAX_BOUNDARY_TENSORS = 8

_RESHAPES = frozenset({"Convert", "Reshape", "Squeeze", "Unsqueeze"})
_MOVES_DATA = _RESHAPES | {
    "Broadcast",
    "Concat",
    "Gather",
    "Slice",
    "Split",
    "StridedSlice",
    "Transpose",
    "VariadicSplit",
}
"""Ops that put values elsewhere and leave them as they are."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The cut of one graph: `boundaries[i]` are the tensors between shard i and shard i + 1."""

    boundaries: tuple[tuple[Tensor, ...], ...]
    shard_of: dict[int, int]
    """Shard of every op that belongs to exactly one: the hidden path, state reads and state writes."""
    copies: dict[int, frozenset[int]] = field(default_factory=dict)
    """Further shards that have their own copy of an op, because they attend to another layer's past."""

    def has(self, shard: int, position: int) -> bool:
        """Whether an op is a shard's own, as what depends on inputs alone always is."""
        return self.shard_of.get(position, shard) == shard or shard in self.copies.get(position, ())

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
    result = _only(graph.find("Result"), "output")
    spine = hidden & graph.ancestors([result])
    if result not in spine:
        raise CutError("not a language model: its output does not depend on input_ids")
    reads = graph.find("ReadValue")
    if not reads:
        raise CutError("this model keeps no state (KV cache): export it with past (text-generation-with-past)")
    state = graph.dependents(reads)
    markers = {
        position
        for position in spine
        if graph.ops[position].type == "ScaledDotProductAttention"
        or any(source in state and source not in hidden for source, _ in graph.value_inputs(position))
    }
    if not markers:
        raise CutError("this model's output depends on no state: its layers cannot be told apart")
    recalled = _recalled(graph)
    lookups = _lookups(graph, spine)
    candidates = list(_walk(graph, spine, recalled, lookups))
    cuts = _choose(graph, spine, markers, candidates)
    shard_of = _assign(graph, hidden, spine, state, cuts) | dict.fromkeys(lookups, 0)
    return Layout(tuple(cut.live for cut in cuts), shard_of, _copies(graph, recalled, shard_of))


def _only(found: list[int], what: str) -> int:
    if len(found) != 1:
        raise CutError(f"not a language model of the expected shape: {len(found)} {what}s instead of 1")
    return found[0]


def _hidden_path(graph: Graph) -> set[int]:
    ids = [p for p in graph.find("Parameter") if graph.ops[p].name == "input_ids"]
    if not ids:
        raise CutError("not a language model: no input called input_ids")
    return graph.dependents(ids) - set(ids)


def _recalled(graph: Graph) -> set[int]:
    """State reads, and what joins their values with new ones before they are attended to."""
    found = set(graph.find("ReadValue"))
    for position, op in enumerate(graph.ops):
        if op.type in _MOVES_DATA and any(source in found for source, _ in op.inputs):
            found.add(position)
    return found


def _lookups(graph: Graph, spine: set[int]) -> set[int]:
    """What reads the token ids themselves: it comes first, wherever its values are used."""
    ids = {p for p in graph.find("Parameter") if graph.ops[p].name == "input_ids"}
    found: set[int] = set()
    for position in sorted(spine):
        sources = {source for source, _ in graph.value_inputs(position)}
        if sources & ids and not sources & spine - found:
            found.add(position)
            if graph.ops[position].type in _RESHAPES:
                ids.add(position)
    return found


def _walk(graph: Graph, spine: set[int], recalled: set[int], lookups: set[int]) -> Iterator[_Candidate]:
    """Every point of the spine where few enough tensors are live; what is recalled is seen through."""
    needs: dict[int, dict[Tensor, None]] = {}
    for position in range(len(graph.ops)):
        needs[position] = {}
        for tensor in graph.value_inputs(position):
            if tensor[0] in recalled:
                needs[position] |= needs[tensor[0]]
            elif tensor[0] in spine:
                needs[position][tensor] = None
    order = sorted(spine - recalled, key=lambda position: (position not in lookups, position))
    first = min(spine - recalled - lookups)
    uses = Counter(tensor for position in order for tensor in needs[position])
    live: dict[Tensor, int] = {}
    for position in order:
        for tensor in needs[position]:
            live[tensor] -= 1
            if not live[tensor]:
                del live[tensor]
        for port in range(len(graph.ops[position].ranks)):
            if uses[(position, port)]:
                live[(position, port)] = uses[(position, port)]
        if position in lookups and position != order[len(lookups) - 1]:
            continue
        if 0 < len(live) <= MAX_BOUNDARY_TENSORS:
            yield _Candidate(first - 1 if position in lookups else position, tuple(sorted(live, reverse=True)))


def _choose(graph: Graph, spine: set[int], markers: set[int], candidates: list[_Candidate]) -> list[_Candidate]:
    single = [c for c in candidates if len(c.live) == 1]
    cuts: list[_Candidate] = []
    previous = -1
    for marker in sorted(markers):
        between = [c for c in single if previous <= c.position < marker]
        if between:
            cuts.append(between[-1])
        previous = marker
    cuts = _split_shared(graph, markers, candidates, cuts)
    if not cuts or cuts[0].position > min(markers):
        raise CutError("cannot find where the embedding ends: too many tensors lead into the first layer")
    after = [c for c in single if c.position > max(markers) and graph.rank(c.live[0]) == graph.rank(cuts[0].live[0])]
    return [*cuts, _head_cut(graph, spine, after)]


def _split_shared(
    graph: Graph, markers: set[int], candidates: list[_Candidate], cuts: list[_Candidate]
) -> list[_Candidate]:
    """Cut before attentions that no single tensor leads into, with as few tensors as that takes."""
    attention = sorted(p for p in markers if graph.ops[p].type == "ScaledDotProductAttention")
    starts = sorted(cut.position for cut in cuts)
    extra = []
    for first, second in zip([-1, *attention], attention, strict=False):
        if any(first <= start < second for start in starts):
            continue
        between = [c for c in candidates if first <= c.position < second]
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
    ends = [cut.position for cut in cuts]
    shard_of = {position: bisect_left(ends, position) for position in spine}
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


def _copies(graph: Graph, recalled: set[int], shard_of: dict[int, int]) -> dict[int, frozenset[int]]:
    """What a shard recalls though another one owns it, with the state reads and writes that belong to it."""
    found: dict[int, set[int]] = {}
    for position in range(len(graph.ops) - 1, -1, -1):
        readers = found.get(position, set()) if position in recalled else {shard_of.get(position, -1)} - {-1}
        for source, _ in graph.value_inputs(position):
            if source in recalled and readers:
                found.setdefault(source, set()).update(readers - {shard_of.get(source)})
    for position in graph.find("Assign"):
        sources = [source for source, _ in graph.ops[position].inputs]
        found[position] = {shard for source in sources for shard in found.get(source, ())}
    return {position: frozenset(shards) for position, shards in found.items() if shards}
