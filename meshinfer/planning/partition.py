"""The best ring for a model: which nodes, in which order, with which shards.

For a bound on the slowest stage, dynamic programming over the shards finds the ring of least latency. The
lower the bound, the higher that latency, so the bound where both weigh the same is the best for so
many users: a bisection finds it. Which nodes in which order is part of the programme for as many nodes as
an office has (`EXACT_NODES`); for more, several orders are tried, in each of which any node may be left out, and all
orders of the fastest and of the largest few.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshinfer.planning.cost import (
    Prediction,
    Seconds,
    StagePlan,
    closing_seconds,
    hop_seconds,
    predict,
    range_seconds,
)
from meshinfer.planning.specs import Demand, ModelSpec, Network, NodeSpec

EXACT_NODES = 5
_REWARD_S = 1e3
"""Taken from the latency of rings that have the wanted node, so that they win."""
TAILS, HEADS, ABLEST = 3, 2, 4
"""Where there are too many nodes to try all: orders by how many tails, by how many heads, and so many nodes in all."""

Choice = list[tuple[int, int, int]]
"""A ring: (node, start, stop) of each stage."""


@dataclass(frozen=True, slots=True)
class Ring:
    """Stages in order, and how fast they are together."""

    stages: tuple[StagePlan, ...]
    prediction: Prediction


def best_ring(model: ModelSpec, nodes: Sequence[NodeSpec], network: Network, demand: Demand) -> Ring | None:
    """The ring with the most tokens/s for `demand.sequences` users, the shorter of equals; None where none fits."""
    return _best_of(_Problem(model, nodes, network, demand))


def best_ring_with(
    model: ModelSpec, nodes: Sequence[NodeSpec], network: Network, demand: Demand, wanted: NodeSpec
) -> Ring | None:
    """The best ring of those that have a stage on `wanted`, which is one of `nodes`."""
    return _best_of(_Problem(model, nodes, network, demand, wanted))


def _best_of(problem: _Problem) -> Ring | None:
    rings = [ring for ring in problem.candidates() if ring is not None]
    return min(rings, key=problem.rank, default=None)


class _Problem:
    """Everything that does not depend on the ring, in arrays."""

    def __init__(
        self,
        model: ModelSpec,
        nodes: Sequence[NodeSpec],
        network: Network,
        demand: Demand,
        wanted: NodeSpec | None = None,
    ) -> None:
        self.model, self.network, self.demand = model, network, demand
        self.nodes = sorted(nodes, key=lambda node: node.id)  # so that every node of a mesh plans alike
        self._wanted = None if wanted is None else self.nodes.index(wanted)
        self.seconds = [range_seconds(model, node, demand) for node in self.nodes]
        ids = [node.id for node in self.nodes]
        times = np.unique(self.seconds) if self.seconds else np.zeros(0)
        self._bounds = times[np.isfinite(times)]
        self.hops = np.array([[hop_seconds(model, network, a, b) if a != b else 0.0 for b in ids] for a in ids])
        self.closing = np.array([[closing_seconds(network, a, b) for b in ids] for a in ids])

    def extend(self, entered: Seconds, node: int, bound: float) -> tuple[Seconds, Backwards]:
        """Append a stage: the least latency to the end of every shard, and the shard where that stage starts."""
        seconds = self.seconds[node]
        totals = entered[:, None] + np.where(seconds <= bound, seconds, np.inf)
        starts = totals.argmin(axis=0)
        reward = _REWARD_S if node == self._wanted else 0.0
        return totals[starts, np.arange(totals.shape[1])] - reward, starts

    @property
    def ends(self) -> int:
        """Places where a stage may end, the start of the model among them."""
        return len(self.model.shards) + 1

    def rank(self, ring: Ring) -> tuple[float, int, tuple[StagePlan, ...]]:
        """The lower the better."""
        return -ring.prediction.tokens_per_s(self.demand.sequences), len(ring.stages), ring.stages

    def candidates(self) -> Iterator[Ring | None]:
        everyone = [node for node in range(len(self.nodes)) if np.isfinite(self.seconds[node]).any()]
        for node in everyone:
            if np.isfinite(self.seconds[node][0, -1]):
                yield self._ring([(node, 0, self.ends - 1)])
        if len(everyone) <= EXACT_NODES:
            yield from self._in_any_order(everyone)
            return
        fastest = sorted(everyone, key=lambda node: (self.nodes[node].layer_s, self.nodes[node].id))
        largest = sorted(everyone, key=lambda node: (-self.nodes[node].memory_bytes, self.nodes[node].id))
        for order in self._orders(fastest, largest):
            yield self._best(order, _in_order)
        for ablest in dict.fromkeys((tuple(fastest[:ABLEST]), tuple(largest[:ABLEST]))):
            yield from self._in_any_order(list(ablest))

    def _in_any_order(self, nodes: list[int]) -> Iterator[Ring | None]:
        for head in nodes:
            yield self._best([head, *(node for node in nodes if node != head)], _in_any_order)

    def _orders(self, fastest: list[int], largest: list[int]) -> Iterator[list[int]]:
        """By speed, then each of the ablest as the tail, which has the head of the model; by the nearest neighbour."""
        yield largest
        yield largest[::-1]
        for tail in dict.fromkeys([*fastest[:TAILS], *largest[:TAILS]]):
            yield [node for node in fastest if node != tail] + [tail]
        for head in fastest[:HEADS]:
            order, left = [head], set(fastest) - {head}
            while left:
                order.append(min(left, key=lambda node: (self.hops[order[-1], node], self.nodes[node].id)))
                left.remove(order[-1])
            yield order

    def _best(self, order: list[int], search: Search) -> Ring | None:
        """The best ring of the nodes in `order`, by bisection of the bound on the slowest stage."""
        bounds = self._bounds
        found: dict[int, Ring | None] = {}

        def ring(index: int) -> Ring | None:
            if index not in found:
                found[index] = self._ring(search(self, order, float(bounds[index])))
            return found[index]

        def slowest_weighs_more(index: int) -> bool:
            """Whether users wait for the slowest stage rather than for the way round."""
            there = ring(index)
            return there is not None and there.prediction.latency_s <= self.demand.sequences * bounds[index]

        turn = bisect_left(range(len(bounds)), True, key=slowest_weighs_more)
        rings = [ring(index) for index in {turn - 1, min(turn, len(bounds) - 1)} if index >= 0]
        return min((found_ring for found_ring in rings if found_ring is not None), key=self.rank, default=None)

    def _ring(self, choice: Choice | None) -> Ring | None:
        if choice is None:
            return None
        stages = tuple(StagePlan(self.nodes[node].id, start, stop) for node, start, stop in choice)
        ring = Ring(stages, predict(self.model, self.nodes, self.network, stages))
        return ring if self._wanted is None or any(node == self._wanted for node, _, _ in choice) else None


Search = Callable[[_Problem, list[int], float], Choice | None]
Backwards = npt.NDArray[np.int64]


def _start(problem: _Problem) -> tuple[Seconds, Backwards]:
    """Before the first stage: nothing is done, and no stage came before."""
    reached = np.full(problem.ends, np.inf)
    reached[0] = 0.0
    return reached, np.full(problem.ends, -1)


def _over_links(problem: _Problem, lasts: Sequence[int], reached: Seconds, node: int) -> tuple[Seconds, Backwards]:
    """The least latency with which a hidden state comes to `node` from any of `lasts`, and from which.

    `reached`: [lasts, ends] s, when a stage of each ends where.
    """
    arrived = reached + problem.hops[list(lasts), node][:, None]
    rows = arrived.argmin(axis=0)
    return arrived[rows, np.arange(arrived.shape[1])], rows


def _in_order(problem: _Problem, order: list[int], bound: float) -> Choice | None:
    """The least latency of nodes in this order, each of which may be left out; the closing link is not counted."""
    reached = np.empty((len(order), problem.ends))
    starts: list[Backwards] = []
    before: list[Backwards] = []
    for position, node in enumerate(order):
        entered, previous = _start(problem)
        if position:
            arrived, rows = _over_links(problem, order[:position], reached[:position], node)
            entered[1:], previous[1:] = arrived[1:], rows[1:]
        reached[position], began = problem.extend(entered, node, bound)
        starts.append(began)
        before.append(previous)
    end = problem.ends - 1
    last = int(reached[:, end].argmin())
    if not np.isfinite(reached[last, end]):
        return None
    choice: Choice = []
    while last >= 0:
        start = int(starts[last][end])
        choice.append((order[last], start, end))
        end, last = start, int(before[last][start])
    return choice[::-1]


def _in_any_order(problem: _Problem, order: list[int], bound: float) -> Choice | None:
    """The least latency of any of the nodes in any order, but the first one of `order` is the head of the ring."""
    entered, nothing = _start(problem)
    reached: dict[tuple[int, int], tuple[Seconds, Backwards, Backwards]] = {
        (1, 0): (*problem.extend(entered, order[0], bound), nothing)
    }
    for members in range(3, 1 << len(order), 2):  # a set of places in `order` as bits; the head is in all of them
        for last in range(1, len(order)):
            without = members & ~(1 << last)
            previous = [place for place in range(len(order)) if (without, place) in reached]
            if without == members or not previous:
                continue
            latencies = np.stack([reached[without, place][0] for place in previous])
            arrived, rows = _over_links(problem, [order[place] for place in previous], latencies, order[last])
            reached[members, last] = (*problem.extend(arrived, order[last], bound), np.array(previous)[rows])
    end = problem.ends - 1
    totals = {key: values[0][end] + problem.closing[order[key[1]], order[0]] for key, values in reached.items()}
    members, last = min(totals, key=lambda key: (totals[key], key))
    if not np.isfinite(totals[members, last]):
        return None
    choice: Choice = []
    while last >= 0:
        _, starts, before = reached[members, last]
        start = int(starts[end])
        choice.append((order[last], start, end))
        members, last, end = members & ~(1 << last), int(before[start]), start
    return choice[::-1]
