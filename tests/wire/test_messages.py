"""Every message arrives as it was sent, and no bytes do harm."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any, get_args

import cbor2
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshinfer.membership.events import Address, Peer
from meshinfer.planning.cost import StagePlan
from meshinfer.planning.plan import Choice, Plan, Pool, RingPlan
from meshinfer.types import NodeId, Sha256
from meshinfer.wire.codec import CODECS, TensorHeader
from meshinfer.wire.frames import FrameError, pack, unpack
from meshinfer.wire.messages import (
    AnyMessage,
    Commit,
    LinkReport,
    RingStep,
    Spent,
    Want,
    WireEntry,
    WireSampling,
)

KINDS: tuple[Any, ...] = get_args(AnyMessage)

counts = st.integers(0, 1 << 53)
words = st.integers(0, (1 << 63) - 1)
seconds = st.floats(0, 1e8)
floats = st.floats(allow_nan=False)
short = st.text(st.characters(exclude_categories=["Cs"]), max_size=100)
digests = st.text("0123456789abcdef", min_size=64, max_size=64).map(Sha256)
nodes = short.map(NodeId)
numbers = st.lists(st.integers(0, 1 << 31), max_size=4).map(tuple)
peers = st.builds(
    Peer, nodes, short, words, st.lists(st.builds(Address, short, st.integers(0, 65535)), max_size=3).map(tuple)
)
choices = st.builds(
    Choice,
    short,
    digests,
    st.sampled_from(["exact", "fast"]),
    st.integers(1, 1 << 20),
    st.integers(1, 64),
    counts,
    nodes,
)
rings = st.builds(
    RingPlan, st.lists(st.builds(StagePlan, nodes, counts, counts), min_size=1, max_size=3).map(tuple), seconds, seconds
)
plans = st.builds(
    Plan,
    counts,
    nodes,
    choices,
    st.sampled_from(["paged", "stateful"]),
    st.sampled_from(CODECS),
    st.lists(rings, min_size=1, max_size=2).map(tuple),
    st.dictionaries(nodes, short, max_size=3),
)
samplings = st.builds(WireSampling, floats, counts, floats, st.integers(0, (1 << 64) - 1))
entries = st.builds(WireEntry, counts, counts, counts, numbers, numbers, st.none() | samplings)
headers = st.builds(TensorHeader, st.sampled_from(CODECS), counts, counts, counts)

BY_FIELD: dict[str, st.SearchStrategy[Any]] = {
    "peer": peers,
    "peers": st.lists(peers, max_size=3).map(tuple),
    "versions": st.dictionaries(short, short, max_size=3),
    "codecs": st.lists(short, max_size=3).map(tuple),
    "clock_s": floats,
    "stamp": words,
    "padding": st.binary(max_size=200),
    "layer_s": seconds,
    "head_s": seconds,
    "probe_bytes_s": seconds,
    "shards": numbers,
    "eos": numbers,
    "links": st.lists(st.builds(LinkReport, nodes, seconds, seconds), max_size=3).map(tuple),
    "models": st.lists(st.tuples(short, short), max_size=3).map(tuple),
    "choice": choices,
    "plan": plans,
    "pool": st.builds(Pool, counts, st.integers(1, 1 << 20)),
    "size": st.integers(1, 1 << 20),
    "sha256": digests,
    "text": st.binary(max_size=200),
    "busy": st.booleans(),
    "stage": st.booleans(),
    "retry": st.booleans(),
    "sampling": st.none() | samplings,
    "entries": st.lists(entries, max_size=3).map(tuple),
    "released": numbers,
    "tensors": st.lists(headers, max_size=2).map(tuple),
    "spent": st.lists(st.builds(Spent, seconds, seconds, seconds), max_size=2).map(tuple),
}
COUNTED = {
    "protocol",
    "memory_bytes",
    "threads",
    "epoch",
    "serving",
    "ready",
    "done",
    "total",
    "fetched_bytes",
    "running",
}
COUNTED |= {"number", "offset", "position", "seen", "max_tokens", "step"}
WORDED = {"mesh", "name", "device", "device_name", "phase", "reason", "finish"}


def strategy(kind: Any) -> st.SearchStrategy[Any]:
    """Any message of one kind; fails for a field that nobody has told it of."""
    fields: dict[str, st.SearchStrategy[Any]] = {}
    for field in msgspec.structs.fields(kind):
        if field.name == "fingerprint":
            fields[field.name] = digests
        elif field.name == "tokens":
            as_bytes = field.type is bytes
            pairs = st.lists(st.tuples(counts, counts), max_size=3).map(tuple)
            fields[field.name] = st.binary(max_size=40) if as_bytes else pairs if kind.__name__ == "Drawn" else numbers
        elif field.name in COUNTED:
            fields[field.name] = counts
        elif field.name in WORDED:
            fields[field.name] = short
        else:
            fields[field.name] = BY_FIELD[field.name]
    return st.builds(kind, **fields)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data(), payload=st.binary(max_size=50))
@settings(max_examples=20)
def test_every_message_arrives_as_it_was_sent(kind: Any, data: st.DataObject, payload: bytes) -> None:
    message = data.draw(strategy(kind))
    got, rest = unpack(pack(message, [payload]), AnyMessage)
    assert got == message and type(got) is kind and bytes(rest) == payload


def test_every_message_has_a_tag_of_its_own() -> None:
    tags = [kind.__struct_config__.tag for kind in KINDS]
    assert len(set(tags)) == len(tags)


@given(st.binary(max_size=300))
@settings(max_examples=300)
def test_random_bytes_are_no_frame_or_a_message(data: bytes) -> None:
    with contextlib.suppress(FrameError):
        unpack(data, AnyMessage)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
names = st.sampled_from(sorted({field.name for kind in KINDS for field in msgspec.structs.fields(kind)}))


@given(st.sampled_from(KINDS), st.dictionaries(names, values, max_size=6))
@settings(max_examples=300)
def test_headers_with_other_values_are_refused_or_understood(kind: Any, fields: dict[str, Any]) -> None:
    header = cbor2.dumps({"type": kind.__struct_config__.tag, **fields})
    with contextlib.suppress(FrameError):
        unpack(len(header).to_bytes(4, "little") + header, AnyMessage)


@given(st.sampled_from(KINDS), st.data())
@settings(max_examples=150)
def test_damaged_frames_are_refused_or_understood(kind: Any, data: st.DataObject) -> None:
    frame = bytearray(pack(data.draw(strategy(kind))))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FrameError):
        unpack(bytes(frame), AnyMessage)


@pytest.mark.parametrize(
    "header",
    [
        b"\xd8\x1c\x81\xd8\x1d\x00",  # a list that holds itself
        b"\x9f" * 5000,  # lists in lists in lists
        b"\xc1\xfb\x7f\xf0\x00\x00\x00\x00\x00\x00",  # the infinite time
        b"\xc0\x63abc",  # a date that is none
        b"\xd8\x23\x61(",  # a regular expression that is none
        b"\xd8\x25\x41\x00",  # a UUID of one byte
        b"\xd9\x01\x04\x43abc",  # an IP address of three bytes
        b"\xd8\x24\x61\x00",  # mail
        b"\xc4\x82\x1a\x7f\xff\xff\xff\x01",  # 10 ** 2147483647
        b"\xc5\x82\x1a\x7f\xff\xff\xff\x01",
        b"\xd8\x1e\x82\x01\x00",  # 1 / 0
        b"\xa1\xa0\x00",  # a map as a key
        b"\xa1\x80\x00",
        b"\xbb\xff\xff\xff\xff\xff\xff\xff\xff",  # a map of 2 ** 64
        b"\x9b\x7f\xff\xff\xff\xff\xff\xff\xff",
        b"\x5b\x7f\xff\xff\xff\xff\xff\xff\xff",
        b"",
    ],
)
def test_cbor_with_more_than_data_is_no_header(header: bytes) -> None:
    with pytest.raises(FrameError):
        unpack(len(header).to_bytes(4, "little") + header, AnyMessage)


def test_sizes_are_checked_before_they_are_believed() -> None:
    for wrong in (
        {"size": 0},
        {"size": (1 << 20) + 1},
        {"offset": -1},
        {"sha256": "../etc/passwd"},
        {"number": 1 << 60},
    ):
        fields = {"type": "want", "number": 1, "sha256": "0" * 64, "offset": 0, "size": 1, **wrong}
        header = cbor2.dumps(fields)
        with pytest.raises(FrameError):
            unpack(len(header).to_bytes(4, "little") + header, Want)


def test_a_plan_that_no_node_could_serve_is_no_message() -> None:
    choice = Choice("m", Sha256("0" * 64), "fast", 128, 1, 1, NodeId("a"))
    ring = RingPlan((StagePlan(NodeId("a"), 0, 3),))
    plan, pool = Plan(1, NodeId("a"), choice, "paged", "f16", (ring,)), Pool(1, 16)
    assert unpack(pack(Commit(plan=plan, pool=pool)), AnyMessage)[0].plan == plan
    wrong_plans = (
        replace(plan, rings=()),
        replace(plan, rings=(RingPlan(()),)),
        replace(plan, epoch=1 << 60),
        replace(plan, choice=replace(choice, fingerprint=Sha256("../x"))),
        replace(plan, choice=replace(choice, sequences=0)),
    )
    wrong = [Commit(plan=w, pool=pool) for w in wrong_plans] + [Commit(plan=plan, pool=Pool(1, 0))]
    for message in wrong:
        with pytest.raises(FrameError):
            unpack(pack(message), AnyMessage)


def test_fields_of_a_later_version_are_ignored() -> None:
    header = cbor2.dumps({"type": "step", "epoch": 1, "step": 2, "entries": [], "later": {"more": [1, 2]}})
    got, _ = unpack(len(header).to_bytes(4, "little") + header, AnyMessage)
    assert got == RingStep(epoch=1, step=2, entries=())
