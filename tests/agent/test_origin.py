"""An origin keeps requests alive: whatever happens to rings, every token comes once, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from meshinfer.agent.origin import MAX_TRIES, Origin, ServedModel
from meshinfer.api.service import Job, Readiness
from meshinfer.engine.sampling import Sampling
from meshinfer.errors import ContextLengthError, InputError, NotReadyError, RequestLostError, UnknownModelError
from meshinfer.planning.cost import StagePlan
from meshinfer.planning.plan import Choice, Plan, RingPlan
from meshinfer.ring.convert import tokens_of
from meshinfer.shards.manifest import Manifest
from meshinfer.text.template import ChatTemplate
from meshinfer.types import NodeId, Sha256
from meshinfer.wire.messages import Cancel, Emit, Submit

ME, HEAD, OTHER = NodeId("me"), NodeId("head"), NodeId("other")
CONTEXT = 64


class Letters:
    """A tokenizer of letters."""

    vocab_size = 1000
    eos_ids = (0,)
    special_tokens: Mapping[str, str] = {}

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return "".join(map(chr, ids))


def plan(epoch: int, head: NodeId = HEAD, model: str = "letters") -> Plan:
    ring = RingPlan((StagePlan(head, 0, 3),))
    return Plan(epoch, ME, choice(model), "paged", "f32", (ring,))


def choice(model: str = "letters") -> Choice:
    return Choice(model, Sha256(model[0] * 64), "exact", CONTEXT, 4, 1, ME)


def served() -> ServedModel:
    manifest = Manifest("letters", "", "", "f32", 100, (), (), None, {"eos_token_id": [1]}, ())
    return ServedModel(choice(), manifest, Letters(), ChatTemplate(None, {}))


class World:
    """An origin, and what it sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[NodeId, Any]] = []
        self.said: dict[int, int] = {}
        """How many tokens every submission has had."""
        self.lost = "-"
        """What does not arrive."""
        self.ready = Readiness(True, "ready", 0)
        self.origin = Origin(ME, self._post, lambda: self.ready, str)
        self.origin.model = served()
        self.origin.serve(plan(1))

    def _post(self, node: NodeId, message: Any) -> bool:
        self.sent.append((node, message))
        return True

    @property
    def submits(self) -> list[tuple[NodeId, Submit]]:
        return [(node, message) for node, message in self.sent if isinstance(message, Submit)]

    def emit(self, text: str, finish: str = "", **more: Any) -> None:
        """The head that was asked last says something."""
        asked = self.submits[-1][1]
        position = self.said.get(asked.number * 1000 + asked.epoch, 0)
        self.said[asked.number * 1000 + asked.epoch] = position + len(text)
        message = Emit(
            epoch=asked.epoch,
            number=asked.number,
            position=position,
            tokens=tuple(map(ord, text)),
            finish=finish,
            **more,
        )
        if text != self.lost:
            self.origin.received(HEAD if asked.epoch == 1 else OTHER, message)


def job(prompt: str = "abc", stop: tuple[str, ...] = (), max_tokens: int | None = 10, model: str | None = None) -> Job:
    return Job(model, None, prompt, Sampling(), max_tokens, stop)


def told(drive: Callable[[World], None], asked: Job | None = None) -> tuple[str, str | None, World]:
    """The text of an answer, why it ended, and what was sent, when a ring does what `drive` says."""
    world = World()

    async def run() -> tuple[str, str | None]:
        text, finish = "", None
        async with world.origin.answer(asked or job()) as answer:
            asyncio.get_running_loop().call_soon(drive, world)
            async for piece in answer:
                text, finish = text + piece.text, piece.finish_reason
        return text, finish

    return *asyncio.run(run()), world


def test_an_answer_is_what_the_ring_emits() -> None:
    def ring(world: World) -> None:
        world.emit("x")
        world.emit("yz", "stop")

    text, finish, world = told(ring)
    assert (text, finish) == ("xyz", "stop")
    (node, submitted) = world.submits[0]
    assert node == HEAD and tokens_of(submitted.tokens).tolist() == [97, 98, 99]
    assert submitted.max_tokens == 10 and set(submitted.eos) == {0, 1} and submitted.sampling is None
    assert not any(isinstance(message, Cancel) for _, message in world.sent) and world.origin.open_requests == 0


def test_what_is_still_to_come_is_asked_of_the_next_ring() -> None:
    def ring(world: World) -> None:
        world.emit("xy")
        first = world.submits[-1][1]
        world.origin.serve(plan(2, OTHER))
        world.origin.received(HEAD, Emit(epoch=1, number=first.number, tokens=(ord("!"),)))  # late, from the old ring
        world.emit("z", "length")

    text, finish, world = told(ring)
    assert (text, finish) == ("xyz", "length")
    node, again = world.submits[-1]
    assert node == OTHER and again.epoch == 2 and again.max_tokens == 8
    assert tokens_of(again.tokens).tolist() == [*map(ord, "abcxy")]


def test_the_ring_of_another_model_is_not_asked_for_the_rest() -> None:
    def ring(world: World) -> None:
        world.emit("xy")
        world.origin.serve(plan(2, OTHER, "digits"))

    with pytest.raises(RequestLostError, match="the mesh serves another model now: digits"):
        told(ring)


def test_tokens_that_were_lost_are_asked_for_again() -> None:
    def ring(world: World) -> None:
        world.lost = "y"
        world.emit("x")
        world.emit("y")
        world.emit("z")
        world.emit("yz", "length")

    text, finish, world = told(ring)
    assert (text, finish) == ("xyz", "length")
    first, again = (message for _, message in world.submits)
    assert again.number != first.number and tokens_of(again.tokens).tolist() == [*map(ord, "abcx")]
    assert (HEAD, Cancel(epoch=1, number=first.number)) in world.sent


def test_a_new_link_to_the_head_has_the_rest_asked_for_again() -> None:
    def ring(world: World) -> None:
        world.lost = "yz"
        world.emit("x")
        world.emit("yz", "stop")
        world.origin.head_is_back(OTHER)
        assert len(world.submits) == 1
        world.origin.head_is_back(HEAD)
        world.lost = "-"
        world.emit("yz", "stop")

    assert told(ring)[:2] == ("xyz", "stop")


def test_a_request_that_failed_is_tried_again_and_then_given_up() -> None:
    def once(world: World) -> None:
        world.emit("", "failed", reason="a hiccup", retry=True)
        asyncio.get_running_loop().call_later(0.5, lambda: world.emit("x", "stop"))

    assert told(once)[:2] == ("x", "stop")

    def always(world: World) -> None:
        if len(world.submits) <= MAX_TRIES:
            world.emit("", "failed", reason="a stage is broken", retry=True)
            asyncio.get_running_loop().call_later(0.05, always, world)

    with pytest.raises(RequestLostError, match="a stage is broken"):
        told(always)

    def never(world: World) -> None:
        world.emit("", "failed", reason="too long for the mesh")

    with pytest.raises(InputError, match="too long"):
        told(never)


def test_leaving_an_answer_cancels_it_at_the_head_that_works_on_it() -> None:
    world = World()

    async def run() -> None:
        async with world.origin.answer(job()):
            world.origin.serve(plan(2, OTHER))

    asyncio.run(run())
    number = world.submits[0][1].number
    assert world.sent[-1] == (OTHER, Cancel(epoch=2, number=number)) and world.origin.open_requests == 0


def test_stop_strings_end_an_answer_and_its_work() -> None:
    def ring(world: World) -> None:
        world.emit("one, tw")
        world.emit("o, three")

    text, finish, world = told(ring, job(stop=("two",)))
    assert (text, finish) == ("one, ", "stop")
    assert isinstance(world.sent[-1][1], Cancel)


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (job("a" * CONTEXT), ContextLengthError),
        (job(model="another"), UnknownModelError),
        (Job(None, None, (5000,), Sampling(), 1, ()), InputError),
        (Job(None, None, "", Sampling(), 1, ()), InputError),
    ],
)
def test_what_cannot_be_answered_is_refused_before_anything_is_sent(asked: Job, error: type[Exception]) -> None:
    world = World()

    async def run() -> None:
        async with world.origin.answer(asked):
            pass

    with pytest.raises(error):
        asyncio.run(run())
    assert world.sent == [] and world.origin.open_requests == 0


def test_a_request_waits_while_one_ring_takes_the_place_of_another() -> None:
    world = World()
    world.ready = Readiness(False, "planning", 2)

    def ready() -> None:
        world.ready = Readiness(True, "ready", 0)

    async def run() -> str:
        asyncio.get_running_loop().call_later(0.3, ready)
        async with world.origin.answer(job()) as answer:
            world.emit("x", "stop")
            return "".join([piece.text async for piece in answer])

    assert asyncio.run(run()) == "x"


def test_a_mesh_that_is_not_ready_says_what_it_is_doing() -> None:
    world = World()
    world.origin._plan = None
    world.ready = Readiness(False, "pc-2 is fetching 40 %", 2)

    async def run() -> None:
        async with world.origin.answer(job()):
            pass

    with pytest.raises(NotReadyError, match="pc-2 is fetching 40 %") as refused:
        asyncio.run(run())
    assert refused.value.retry_after_s == 2


def test_a_request_may_have_the_rest_of_the_context() -> None:
    def ring(world: World) -> None:
        world.emit("x", "stop")

    world = told(ring, job(max_tokens=None))[2]
    assert world.submits[0][1].max_tokens == CONTEXT - 3
