"""Messages share a connection and arrive whole, the urgent ones first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshinfer.links.health import PROBE_BYTES, PROBE_EVERY_S, Health
from meshinfer.links.lanes import PIECE_BYTES, Inbox, Lane, Outbox
from meshinfer.wire.frames import FrameError

frames = st.tuples(st.sampled_from(Lane), st.sampled_from([0, 1, 100, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES]))


def lane_of(lane: Lane, size: int) -> Lane:
    return Lane.STEPS if lane is Lane.SMALL and size > PIECE_BYTES else lane


@given(st.lists(frames | st.none(), max_size=30), st.data())
@settings(max_examples=60)
def test_whatever_is_put_and_taken_in_between_arrives_whole_and_in_order(
    story: list[tuple[Lane, int] | None], data: st.DataObject
) -> None:
    outbox, inbox = Outbox(), Inbox()
    sent: dict[Lane, list[bytes]] = {lane: [] for lane in Lane}
    got: list[bytes] = []

    def take() -> bool:
        piece = outbox.take()
        if piece is None:
            return False
        assert len(piece) <= PIECE_BYTES + 1
        if (frame := inbox.put(piece)) is not None:
            got.append(frame)
        return True

    for number, happening in enumerate(story):
        if happening is None:
            take()
            continue
        lane, size = happening
        frame = bytes([number]) * size
        outbox.put(frame, lane)
        sent[lane_of(lane, size)].append(frame)
    while take():
        pass
    assert outbox.queued_bytes == 0 and outbox.take() is None
    assert sorted(got) == sorted(frame for lane in Lane for frame in sent[lane])
    for lane in Lane:
        assert [frame for frame in got if frame and frame in sent[lane]] == [frame for frame in sent[lane] if frame]


def test_what_is_urgent_waits_for_one_piece_at_most() -> None:
    outbox = Outbox()
    outbox.put(b"b" * 10 * PIECE_BYTES, Lane.BULK)
    outbox.put(b"s" * 3 * PIECE_BYTES, Lane.STEPS)
    assert outbox.take() == bytes([Lane.STEPS]) + b"s" * PIECE_BYTES
    outbox.put(b"small")
    assert outbox.take() == bytes([0x80 | Lane.SMALL]) + b"small"
    order = []
    while (piece := outbox.take()) is not None:
        order.append(piece[0])
    assert order == [Lane.STEPS, Lane.STEPS | 0x80, *[Lane.BULK] * 9, Lane.BULK | 0x80]


def test_an_endless_frame_is_cut_off_in_any_lane() -> None:
    for lane in Lane:
        inbox = Inbox(max_bytes=3 * PIECE_BYTES)
        for _ in range(3):
            inbox.put(bytes([lane]) + bytes(PIECE_BYTES))
        with pytest.raises(FrameError):
            inbox.put(bytes([lane]) + b"x")


@given(st.lists(st.binary(max_size=20), max_size=20))
def test_garbage_is_refused_or_taken_for_bytes(pieces: list[bytes]) -> None:
    inbox = Inbox(max_bytes=100)
    for piece in pieces:
        try:
            inbox.put(piece)
        except FrameError:
            return


@pytest.mark.parametrize("piece", [b"", b"\x83abc", b"\xff", b"\x80" + bytes(PIECE_BYTES + 1), b"\x02", b"\x00a"])
def test_pieces_that_cannot_be(piece: bytes) -> None:
    """Among them unfinished ones that are not full: enough of those would fill the memory."""
    with pytest.raises(FrameError):
        Inbox().put(piece)


def test_the_round_trip_is_that_of_most_echoes() -> None:
    health = Health()
    assert health.rtt_s == 0.0 and health.goodput_bytes_s == 0.0
    for number, rtt in enumerate([0.002, 0.003, 0.5, 0.002]):
        health.echoed(health.stamp(float(number)), number + rtt)
    assert health.rtt_s == pytest.approx(0.0025)


def test_a_probe_tells_the_goodput_beyond_the_round_trip() -> None:
    health = Health()
    for number in range(3):
        health.echoed(health.stamp(float(number)), number + 0.01)
    stamp = health.stamp(10.0, PROBE_BYTES)
    health.echoed(stamp, 10.11)
    assert health.goodput_bytes_s == pytest.approx(PROBE_BYTES / 0.1)
    health.echoed(stamp, 99.0)  # a second time
    health.echoed(12345, 99.0)  # never sent
    assert health.goodput_bytes_s == pytest.approx(PROBE_BYTES / 0.1) and health.rtt_s == pytest.approx(0.01)


def test_probes_come_early_and_then_seldom() -> None:
    health = Health()
    assert not health.wants_probe(0.0)
    for number in range(2):
        health.echoed(health.stamp(float(number)), number + 0.01)
    for at in (3.0, 4.0):
        assert health.wants_probe(at)
        health.probed_at = at
        health.echoed(health.stamp(at, PROBE_BYTES), at + 0.1)
    assert not health.wants_probe(5.0) and health.wants_probe(4.0 + PROBE_EVERY_S)


def test_an_echo_that_never_comes_takes_no_memory() -> None:
    health = Health()
    for number in range(10_000):
        health.stamp(float(number), PROBE_BYTES if number % 7 == 0 else 0)
    assert len(health._sent) < 100


def test_a_peer_that_swallows_probes_is_not_probed_with_every_heartbeat() -> None:
    health = Health()
    for number in range(2):
        health.echoed(health.stamp(float(number)), number + 0.01)
    probes = 0
    for tick in range(100):
        now = 10 + tick * 0.4
        if health.wants_probe(now):
            health.probed_at = now
            health.stamp(now, PROBE_BYTES)
            probes += 1
    assert probes <= 10
