"""Which bytes to ask of whom: several sources at once, each file from one at a time, from where it broke off.

A source that gave bytes with the wrong hash is avoided from then on. Little is asked for at once, and less of a
source that is answering somebody, so that its token frames wait for no more than that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from meshinfer.types import NodeId, Sha256

RANGE_BYTES = 256 << 10
WINDOW = 4
"""Ranges asked of one source at once."""
BUSY_RANGE_BYTES = 64 << 10
MAX_UNWRITTEN_BYTES = 32 << 20
"""Bytes that may have come and not be on the disk yet: no more are asked for where the network is faster."""
STALLED_S = 15.0
"""How long a source may take for a range."""
PATIENCE_S = 5.0
"""How long a file may be nowhere before the transfer fails: nodes say what they have when they can."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A file to fetch, of which the first `have_bytes` are here."""

    sha256: Sha256
    size_bytes: int
    have_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask a node for bytes of a file; `RangeCame`, `RangeRefused` or nothing is to follow."""

    node: NodeId
    number: int
    sha256: Sha256
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Check:
    """All bytes of a file are written: compare its hash; `checked` is to follow."""

    sha256: Sha256


@dataclass(frozen=True, slots=True)
class Restart:
    """Throw away what is there of a file."""

    sha256: Sha256


@dataclass(frozen=True, slots=True)
class Done:
    """Every file is here. `reason` says why not, where they cannot be had."""

    reason: str = ""


Instruction = Ask | Check | Restart | Done


@dataclass(slots=True)
class _File:
    """Bytes up to `written` are on the disk, up to `came` they are here, up to `asked` somebody was asked for them."""

    wanted: Wanted
    written: int
    came: int
    asked: int
    source: NodeId | None = None
    givers: set[NodeId] = field(default_factory=set)
    """Who gave bytes of it, since it was last begun; empty where some were here before."""
    resumed: bool = False
    checking: bool = False


@dataclass(slots=True)
class _Asked:
    node: NodeId
    sha256: Sha256
    offset: int
    size: int
    at: float


class Transfer:
    """One fetching of several files. Times are of the monotonic clock, in seconds."""

    def __init__(self, files: Iterable[Wanted], first_number: int = 1) -> None:
        """`first_number`: of the ranges to ask for; no other transfer of this node uses them."""
        self._files = {
            f.sha256: _File(f, f.have_bytes, f.have_bytes, f.have_bytes, resumed=f.have_bytes > 0) for f in files
        }
        self.total_bytes = sum(f.wanted.size_bytes for f in self._files.values())
        self.fetched_bytes = 0
        """Bytes that came over links, wrong ones too."""
        self.bad: dict[NodeId, str] = {}
        self._holders: dict[NodeId, Collection[Sha256] | None] = {}
        self._lacks: set[tuple[NodeId, Sha256]] = set()
        self._asked: dict[int, _Asked] = {}
        self._busy: set[NodeId] = set()
        self._number = first_number - 1
        self._nowhere_since: float | None = None
        self._finished = False

    @property
    def done_bytes(self) -> int:
        """Bytes that need not be fetched any more."""
        left = sum(f.wanted.size_bytes - f.written for f in self._files.values())
        return self.total_bytes - left

    def begin(self, now: float) -> list[Instruction]:
        """What to do first: files that are whole already only need their check."""
        return [*self._checks(), *self._go_on(now)]

    def sources(self, holders: Mapping[NodeId, Collection[Sha256] | None], now: float) -> list[Instruction]:
        """Who has which files; None: perhaps all. Nodes that are gone are not asked any more."""
        self._holders = dict(holders)
        for number, asked in list(self._asked.items()):
            if asked.node not in holders:
                del self._asked[number]
        for file in self._files.values():
            if file.source is not None and file.source not in holders:
                self._leave(file)
        return self._go_on(now)

    def came(
        self, number: int, size: int, busy: bool, now: float
    ) -> tuple[tuple[Sha256, int] | None, list[Instruction]]:
        """Bytes arrived: where they belong (file and offset), or None where nobody waits for them any more.

        Call `wrote` when they are on the disk.
        """
        asked = self._asked.pop(number, None)
        if asked is None:
            return None, []
        (self._busy.add if busy else self._busy.discard)(asked.node)
        file = self._files.get(asked.sha256)
        for other in self._asked.values():
            if other.node == asked.node:  # it is slow, perhaps, and not stalled
                other.at = now
        if file is None or file.source != asked.node or (asked.offset, asked.size) != (file.came, size):
            if file is not None and file.source == asked.node:
                self._lacks.add((asked.node, asked.sha256))
                self._leave(file)
            return None, self._go_on(now)
        self.fetched_bytes += size
        file.givers.add(asked.node)
        file.came += size
        return (asked.sha256, asked.offset), self._go_on(now)

    def refused(self, number: int, now: float) -> list[Instruction]:
        """A source does not have the bytes."""
        asked = self._asked.pop(number, None)
        if asked is not None:
            self._lacks.add((asked.node, asked.sha256))
            file = self._files.get(asked.sha256)
            if file is not None and file.source == asked.node:
                self._leave(file)
        return self._go_on(now)

    def wrote(self, sha256: Sha256, end: int, now: float) -> list[Instruction]:
        """The bytes up to `end` of a file are on the disk."""
        file = self._files.get(sha256)
        if file is not None:
            file.written = max(file.written, end)
        return [*self._checks(), *self._go_on(now)]

    def checked(self, sha256: Sha256, good: bool, now: float) -> list[Instruction]:
        """The hash of a file was compared."""
        file = self._files[sha256]
        if good:
            del self._files[sha256]
            return self._go_on(now)
        if len(file.givers) == 1 and not file.resumed:
            (giver,) = file.givers
            self.bad[giver] = f"gave wrong bytes of {sha256[:12]}"
            for other in self._files.values():
                if other.source == giver:
                    self._leave(other)
        file.written = file.came = file.asked = 0
        file.checking = file.resumed = False
        file.givers.clear()
        self._leave(file)
        return [Restart(sha256), *self._go_on(now)]

    def tick(self, now: float) -> list[Instruction]:
        """Some time passed: leave sources that do not answer."""
        for node in {asked.node for asked in self._asked.values() if now - asked.at > STALLED_S}:
            self._lacks |= {(node, sha256) for sha256 in self._files}
            for file in self._files.values():
                if file.source == node:
                    self._leave(file)
        return self._go_on(now)

    def _leave(self, file: _File) -> None:
        """Ask another source for the rest."""
        for number, asked in list(self._asked.items()):
            if asked.sha256 == file.wanted.sha256:
                del self._asked[number]
        file.source, file.asked = None, file.came

    def _checks(self) -> Iterator[Check]:
        for file in self._files.values():
            if file.written >= file.wanted.size_bytes and not file.checking:
                file.checking = True
                yield Check(file.wanted.sha256)

    def _go_on(self, now: float) -> list[Instruction]:
        if self._finished:
            return []
        if not self._files:
            self._finished = True
            return [Done()]
        if sum(file.came - file.written for file in self._files.values()) > MAX_UNWRITTEN_BYTES:
            return []  # `wrote` goes on
        done: list[Instruction] = []
        for file in self._files.values():
            if file.asked < file.wanted.size_bytes:
                if file.source is None and not self._assign(file):
                    continue
                done += self._ask(file, now)
        return done + self._fail_if_nowhere(now)

    def _fail_if_nowhere(self, now: float) -> list[Instruction]:
        """Give up where nothing goes on because a file is nowhere, and has been for a while."""
        nowhere = [f for f in self._files.values() if f.came < f.wanted.size_bytes and not self._candidates(f)]
        if not nowhere or self._asked or any(file.checking for file in self._files.values()):
            self._nowhere_since = None
            return []
        if self._nowhere_since is None:
            self._nowhere_since = now
        if now - self._nowhere_since < PATIENCE_S and not self.bad:
            return []
        self._finished = True
        return [Done(self._why(nowhere[0]))]

    def _assign(self, file: _File) -> bool:
        """Give a file to the candidate with the fewest bytes still to give."""
        load = {node: 0 for node in self._candidates(file)}
        for other in self._files.values():
            if other.source in load:
                load[other.source] += other.wanted.size_bytes - other.came
        if load:
            file.source = min(load, key=lambda node: (load[node], node))
            if file.came == 0:
                file.givers.clear()
        return bool(load)

    def _candidates(self, file: _File) -> list[NodeId]:
        sha256 = file.wanted.sha256
        return [
            node
            for node, held in self._holders.items()
            if node not in self.bad and (node, sha256) not in self._lacks and (held is None or sha256 in held)
        ]

    def _ask(self, file: _File, now: float) -> Iterator[Ask]:
        source = file.source
        assert source is not None
        busy = source in self._busy
        size = BUSY_RANGE_BYTES if busy else RANGE_BYTES
        while file.asked < file.wanted.size_bytes:
            if sum(asked.node == source for asked in self._asked.values()) >= (1 if busy else WINDOW):
                return
            self._number += 1
            count = min(size, file.wanted.size_bytes - file.asked)
            self._asked[self._number] = _Asked(source, file.wanted.sha256, file.asked, count, now)
            yield Ask(source, self._number, file.wanted.sha256, file.asked, count)
            file.asked += count

    def _why(self, file: _File) -> str:
        if self.bad:
            return f"no good source has {file.wanted.sha256[:12]}: " + ", ".join(
                f"{node[:8]} {why}" for node, why in self.bad.items()
            )
        return f"no node that is there has the file {file.wanted.sha256[:12]}"
