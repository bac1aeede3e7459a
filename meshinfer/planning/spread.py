"""How much memory makes a model need all of several equal nodes: each a stage, and none to spare."""

from __future__ import annotations

from collections.abc import Sequence

from meshinfer.errors import InputError
from meshinfer.planning.cost import stage_bytes
from meshinfer.planning.specs import Demand, ModelSpec


def memory_for_all(model: ModelSpec, demand: Demand, nodes: int) -> int:
    """Bytes for weights and KV cache with which `nodes` equal nodes hold a model, and one fewer do not.

    It is in the middle between both limits. Raises InputError where there is no such number.
    """
    sizes = [stage_bytes(model, index, index + 1, demand) for index in range(len(model.shards))]
    enough = _least(sizes, nodes)
    too_much = _least(sizes, nodes - 1) if nodes > 1 else 2 * enough
    if enough == too_much:
        most = max((n for n in range(2, nodes) if _least(sizes, n) < _least(sizes, n - 1)), default=1)
        raise InputError(f"{model.name} cannot be spread over {nodes} nodes with all needed: over {most} at most")
    return (enough + too_much) // 2


def _least(sizes: Sequence[int], parts: int) -> int:
    """The smallest bound with which so many consecutive parts hold everything."""
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if _parts(sizes, middle) <= parts:
            high = middle
        else:
            low = middle + 1
    return low


def _parts(sizes: Sequence[int], bound: int) -> int:
    """How many consecutive parts of at most `bound` there have to be."""
    parts, filled = 1, 0
    for size in sizes:
        if filled + size > bound:
            parts, filled = parts + 1, 0
        filled += size
    return parts
