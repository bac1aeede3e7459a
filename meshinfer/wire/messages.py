"""Every message that travels over a link. Types are only ever added; `docs/wire.md` describes them.

A message is told by its tag. Times are seconds, sizes bytes.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from meshinfer.membership.events import Peer
from meshinfer.planning.plan import Choice, Plan, Pool
from meshinfer.types import Digest, NodeId
from meshinfer.wire.codec import TensorHeader

PROTOCOL = 1
"""Version of all this. Nodes of different versions do not link."""

MAX_PEERS = 1024
MAX_RANGE_BYTES = 1 << 20
Short = Annotated[str, msgspec.Meta(max_length=500)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e9)]
Rate = Annotated[float, msgspec.Meta(ge=0, lt=1e18)]
Word = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


# --- a link and its health -------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="hello"):
    """The first message in both directions. `clock_s`: what the sender's clock says, shown and never used."""

    protocol: int
    peer: Peer
    mesh: Short = ""
    versions: dict[str, str] = {}
    codecs: tuple[str, ...] = ()
    clock_s: float = 0.0


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="beat"):
    """The sender lives. Answered at once by an `Echo` of its stamp, which gives the round trip; 0 wants none."""

    stamp: Word


class Echo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="echo"):
    """The answer to a heartbeat or a probe."""

    stamp: Word


class Probe(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="probe"):
    """So many bytes that the time of their `Echo` tells the goodput of the link."""

    stamp: Word
    padding: bytes


class Peers(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="peers"):
    """Whom the sender is linked with."""

    peers: Annotated[tuple[Peer, ...], msgspec.Meta(max_length=MAX_PEERS)]


class Goodbye(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="bye"):
    """The sender leaves for good."""

    reason: Short = ""


# --- what nodes tell of themselves -----------------------------------------------------------------------------------


class LinkReport(msgspec.Struct, frozen=True, array_like=True):
    """What a node measured of its link to another one."""

    peer: NodeId
    rtt_s: Seconds
    goodput_bytes_s: Rate


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="report"):
    """A node about itself, sent when it changes. `epoch`: the greatest it has seen; `serving`: of the plan it runs.

    `layer_s` and `head_s` are measured with the chosen model, 0 where they are not yet; `probe_bytes_s` compares
    nodes that have no shard to measure with. `shards`: which it has whole.
    """

    name: Short
    memory_bytes: Count
    device: Short
    device_name: Short
    threads: Count
    probe_bytes_s: Rate
    fingerprint: str = ""
    layer_s: Seconds = 0.0
    head_s: Seconds = 0.0
    shards: tuple[int, ...] = ()
    links: tuple[LinkReport, ...] = ()
    epoch: Count = 0
    serving: Count = 0
    ready: Count = 0
    """The epoch of the ring from which this node, its head, has had a real token."""
    models: tuple[tuple[str, str], ...] = ()
    """(name, fingerprint) of the models that it has whole."""
    phase: Short = ""
    done: Count = 0
    total: Count = 0
    fetched_bytes: Count = 0
    running: Count = 0
    """Requests that entered the mesh here."""


class Chosen(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="chosen"):
    """Which model the mesh serves, as far as the sender knows."""

    choice: Choice


# --- shards ----------------------------------------------------------------------------------------------------------


class WantManifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="want-manifest"):
    """Ask for the manifest of a model."""

    fingerprint: Digest


class ManifestIs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="manifest"):
    """The manifest as JSON, or nothing where the sender has none."""

    fingerprint: Digest
    text: bytes = b""


class Want(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="want"):
    """Ask for bytes of a file of a shard set; `number` is the asker's own."""

    number: Count
    sha256: Digest
    offset: Count
    size: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANGE_BYTES)]


class Range(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="range"):
    """The bytes asked for follow the header; `reason` says why there are none."""

    number: Count
    reason: Short = ""
    busy: bool = False
    """The sender is answering somebody: ask for little at once."""


# --- negotiation -----------------------------------------------------------------------------------------------------


class Propose(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="propose"):
    """The leader asks whether a node would do its part of a plan."""

    plan: Plan


class Accept(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="accept"):
    """It would."""

    epoch: Count


class Refuse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="refuse"):
    """It would not, or could not.

    `seen`, the greatest epoch it knows, where only that is the reason: a new plan has to have a greater one.
    """

    epoch: Count
    reason: Short
    seen: Count = 0


class Prepare(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="prepare"):
    """All accepted: fetch, compile, check. Sent again until the answer comes."""

    epoch: Count


class Prepared(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="prepared"):
    """The sender's stage is ready to run, with so much KV cache."""

    epoch: Count
    pool: Pool


class Commit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="commit"):
    """The plan holds from now on. Sent to every node, and to those that come later."""

    plan: Plan
    pool: Pool


class Abandon(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="abandon"):
    """A plan that was proposed does not come; or there is none at all, for this reason."""

    epoch: Count
    reason: Short = ""


class Break(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="break"):
    """A plan that holds does not work: frames were lost, or, with `stage`, the sender's stage fails."""

    epoch: Count
    reason: Short = ""
    stage: bool = False


# --- requests and steps ----------------------------------------------------------------------------------------------


class WireSampling(msgspec.Struct, frozen=True, array_like=True):
    """How a token is chosen; see `engine.sampling`."""

    temperature: float
    top_k: Count
    top_p: float
    seed: int


class Submit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="submit"):
    """An origin asks the head for tokens after `tokens`; `number` is the origin's own for this request.

    Positions count from the start of `tokens`. What was emitted before a ring broke is part of them: `max_tokens`
    is what is still to come.
    """

    epoch: Count
    number: Count
    tokens: bytes
    """[n] i32, little-endian."""
    sampling: WireSampling | None
    max_tokens: Count
    eos: tuple[int, ...] = ()


class Emit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="emit"):
    """Tokens for the origin of a request. `finish`: "stop" or "length" with the last ones, "failed" with `reason`.

    `position`: how many tokens of this submission came before, so that an origin sees where some were lost.
    """

    epoch: Count
    number: Count
    position: Count = 0
    tokens: tuple[int, ...] = ()
    finish: str = ""
    reason: Short = ""
    retry: bool = False
    """Of a failure: whether the same request may be submitted again."""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="cancel"):
    """The origin wants no more tokens of a request."""

    epoch: Count
    number: Count


class WireEntry(msgspec.Struct, frozen=True, array_like=True):
    """See `engine.step.Entry`; `sampling` where a token is to be chosen."""

    sequence: Count
    start: Count
    count: Count
    rows: tuple[int, ...]
    blocks: tuple[int, ...]
    sampling: WireSampling | None = None


class Spent(msgspec.Struct, frozen=True, array_like=True):
    """Where a step's time went in one stage."""

    waiting_s: Seconds
    codec_s: Seconds
    inference_s: Seconds


class RingStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="step"):
    """One step's hidden states, from a stage to the next. `released`: sequences to forget."""

    epoch: Count
    step: Count
    entries: tuple[WireEntry, ...]
    released: tuple[int, ...] = ()
    tensors: tuple[TensorHeader, ...] = ()
    spent: tuple[Spent, ...] = ()


class Drawn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="drawn"):
    """What the tail chose in one step: a token for each entry that wanted one."""

    epoch: Count
    step: Count
    tokens: tuple[tuple[int, int], ...]
    """(sequence, token)."""
    spent: tuple[Spent, ...] = ()


class StepFailed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="step-failed"):
    """A stage could not run a step; the head forgets its sequences everywhere."""

    epoch: Count
    step: Count
    reason: Short


AnyMessage = (
    Hello
    | Heartbeat
    | Echo
    | Probe
    | Peers
    | Goodbye
    | Report
    | Chosen
    | WantManifest
    | ManifestIs
    | Want
    | Range
    | Propose
    | Accept
    | Refuse
    | Prepare
    | Prepared
    | Commit
    | Abandon
    | Break
    | Submit
    | Emit
    | Cancel
    | RingStep
    | Drawn
    | StepFailed
)
