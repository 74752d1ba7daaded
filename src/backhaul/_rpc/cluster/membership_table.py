"""Who is a member, as one worker knows it, and who may become one. Pure: no I/O, no threads, no clock.

Every worker that joins a running cluster is *enrolled* by its leader, the member with the lowest id, which gives it an
id and an *epoch*, larger than all before. Of two records with the same name or id that of the later epoch counts; the
other worker is gone for good. Those that met at the start have epoch 0.
"""

from __future__ import annotations

import collections
from collections.abc import Container, Iterable
from dataclasses import dataclass

import msgspec

from backhaul._rpc.cluster.departure import seal_of
from backhaul._types import MAX_WORKERS, WorkerId, WorkerInfo, check_name
from backhaul._wire.messages import Departure, prepare
from backhaul._wire.value_count import Bounds

_REMEMBERED = 1024  # workers that are gone
_PROVEN = 512  # of them, those of whom it can be proven that they have left
_AHEAD = 1024  # newcomers that a worker may have missed when another shows it its own epoch
_LAST = 1 << 53  # of all epochs: nobody comes near it by joining
_LONGEST = 64  # characters of an incarnation
_LEFT = "has left the cluster"


class WorkerRecord(msgspec.Struct, frozen=True):
    """What a worker tells the others about itself when they meet."""

    id: int
    name: str
    incarnation: str
    host: str  # equal: the same host
    addresses: tuple[str, ...]
    main: str  # equal and not empty: the same program
    limit: int  # the largest frame it accepts
    beat: float = 0.0  # seconds within which it says something on every channel; 0: it may be silent
    epoch: int = 0  # when it joined: the larger, the later
    trusting: bool = True  # whether it takes pickles
    devices: tuple[str, ...] = ()  # its CUDA devices, by index: equal ones are the same piece of hardware
    maps: dict[str, dict[str, str] | str] = {}  # where its tensors arrive, see ``cuda.placement``
    bounds: Bounds | None = None  # what it takes in one message, beside ``limit``; None: anything
    seal: str = ""  # by which it can prove that it has left, see ``departure``

    @property
    def info(self) -> WorkerInfo:
        """Name and id."""
        return WorkerInfo(self.name, WorkerId(self.id))

    def has_left(self, proof: str) -> bool:
        """Whether ``proof`` is the secret that this worker tells when it leaves, and that nobody else knows before."""
        return bool(self.seal) and seal_of(proof) == self.seal

    def follows(self, other: WorkerRecord) -> bool:
        """Whether this one takes the other's place, where only one of them can be."""
        if self.epoch == other.epoch:  # enrolled by two who both thought to be the leader
            return self.epoch > 0 and self.incarnation > other.incarnation
        return self.epoch > other.epoch


class Standing(msgspec.Struct, array_like=True, frozen=True):
    """Whom a worker knows, by their incarnations: those who are members, those of whom it was only told that they have
    left, and those who have left with the proof of it. Some of the last it may never have known.
    """

    members: tuple[str, ...]
    left: tuple[str, ...]
    proven: tuple[Departure, ...] = ()


prepare(WorkerRecord)
prepare(Standing)


def choose(record: WorkerRecord, host: str) -> str | None:
    """Where to reach a worker from that host, if anywhere."""
    return next((a for a in record.addresses if record.host == host or a.startswith("tcp:")), None)


@dataclass(frozen=True, slots=True)
class Admit:
    """The record is a member's from now on, in place of these."""

    instead_of: tuple[WorkerRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """The record is not to be accepted."""

    reason: str


class MembershipTable:
    """The members.

    Example:
        >>> def record(id, name, incarnation, epoch=0):
        ...     return WorkerRecord(id, name, incarnation, "here", (), "", 0, epoch=epoch)
        >>> roster = Roster(record(0, "a", "1"))
        >>> roster.admit(record(1, "b", "2")), roster.admit(record(1, "b", "3"))
        (Admit(instead_of=()), Refuse(reason="there is a worker 'b' (id 1) already"))
        >>> roster.enrol("b", -1)
        (1, 1)
        >>> roster.admit(record(1, "b", "3", epoch=1)).instead_of[0].incarnation
        '2'
    """

    def __init__(self, own: WorkerRecord) -> None:
        self._own = own
        self._members: dict[int, WorkerRecord] = {own.id: own}
        self._by_name = {own.name: own}
        self._lives = {own.incarnation: own}
        self._gone: collections.OrderedDict[str, tuple[str, str]] = collections.OrderedDict()  # -> name, why
        self._proven: collections.OrderedDict[str, Departure] = collections.OrderedDict()  # they have left
        self._vouchers: dict[str, str] = {}  # member -> the leader that has let it in, both by their incarnations
        self.epoch = own.epoch  # the latest of all that were ever members

    def rivals(self, name: str, number: int) -> list[WorkerRecord]:
        """The members that have that name or that id."""
        found = {member.id: member for member in (self._members.get(number), self._by_name.get(name)) if member}
        return list(found.values())

    def flaw_in(self, record: WorkerRecord, *, heard: bool = True) -> str:
        """What no record can be like. ``heard``: the leader has told of it, so its epoch may be any."""
        try:
            check_name(record.name)
        except ValueError as error:
            return str(error)
        if not 0 <= record.id < MAX_WORKERS:
            return f"{record.id} is not the id of a worker"
        if not 0 < len(record.incarnation) <= _LONGEST or len(record.seal) > _LONGEST:
            return "that is not an incarnation"
        if not 0 <= record.epoch <= (_LAST if heard else min(self.epoch + _AHEAD, _LAST)):
            return f"epoch {record.epoch} is too far from the last known, {self.epoch}"
        return ""

    def admit(self, record: WorkerRecord, *, heard: bool = True, decided: bool = False) -> Admit | Refusal | None:
        """A worker has shown its record. None: it is known. ``heard``: see ``flaw_in``. ``decided``: it counts,
        whatever the epochs are.
        """
        if flaw := self.flaw_in(record, heard=heard):
            return Refusal(flaw)
        if record.incarnation in self._gone:
            return Refusal(f"worker '{record.name}' {self._gone[record.incarnation][1]}")
        if (known := self._lives.get(record.incarnation)) is not None:
            if known.info == record.info:
                return None
            return Refusal(f"worker '{known.name}' (id {known.id}) is of that incarnation")
        rivals = self.rivals(record.name, record.id)
        for rival in rivals:
            if rival is self._own or not (decided or record.follows(rival)):
                return Refusal(f"there is a worker '{rival.name}' (id {rival.id}) already")
        for rival in rivals:
            same = rival.name == record.name
            self.dismiss(rival, "was restarted" if same else f"has lost its place to worker '{record.name}'")
        self._members[record.id] = self._by_name[record.name] = self._lives[record.incarnation] = record
        self.epoch = max(self.epoch, record.epoch)
        return Admit(tuple(rivals))

    @property
    def standing(self) -> Standing:
        """Whom this worker knows."""
        left = (life for life, (_, why) in self._gone.items() if why == _LEFT and life not in self._proven)
        return Standing(tuple(self._lives), tuple(left), tuple(self._proven.values()))

    @property
    def predecessors(self) -> tuple[Departure, ...]:
        """Those who have left and had the name or the id that this worker has now."""
        own = self._own
        return tuple(left for left in self._proven.values() if left.id == own.id or left.name == own.name)

    def dismiss(self, record: WorkerRecord, why: str = _LEFT, *, proof: str = "") -> bool:
        """A member is gone for good; whether it was one. ``proof``: that it has left, for others."""
        if self._members.get(record.id) is not record:
            return False
        del self._members[record.id], self._by_name[record.name], self._lives[record.incarnation]
        self._vouchers.pop(record.incarnation, None)
        self._gone[record.incarnation] = record.name, why
        while len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)
        if record.has_left(proof):
            self._proven[record.incarnation] = Departure(record.incarnation, record.id, record.name, proof)
            while len(self._proven) > _PROVEN:
                self._proven.popitem(last=False)
        return True

    def departed(self, incarnation: str, proof: str) -> WorkerRecord | None:
        """The member that a proof is of: it has left, whoever says so."""
        record = self._lives.get(incarnation)
        return record if record is not None and record is not self._own and record.has_left(proof) else None

    def keep(self, departures: Iterable[Departure]) -> None:
        """Remember workers that had left before this one came, for members that were cut off then. These proofs cannot
        be checked here, so none takes the place of another.
        """
        for left in departures:
            short = max(map(len, (left.incarnation, left.name, left.proof))) <= 2 * _LONGEST
            if short and left.incarnation not in self._lives and len(self._proven) < _PROVEN:
                self._proven.setdefault(left.incarnation, left)

    def vouch(self, incarnation: str, leader: str) -> None:
        """A leader has let a member in."""
        if incarnation in self._lives:
            self._vouchers[incarnation] = leader

    def yields(self, rival: WorkerRecord, leader: str) -> bool:
        """Whether a member that can be reached makes way for another on the word of a leader. Not if a leader with a
        lower id has let it in, unless that one is gone for good: it may be cut off, and decides when it comes back. If
        members followed whichever leader they see just now, each of two newcomers could be dropped by some of them.
        """
        senior, junior = self._lives.get(self._vouchers.get(rival.incarnation, "")), self._lives.get(leader)
        return senior is None or (junior is not None and junior.id <= senior.id)

    def alive(self, incarnation: str) -> WorkerRecord | None:
        """The member of that incarnation."""
        return self._lives.get(incarnation)

    def fate_of(self, name: str) -> str | None:
        """Why there is no worker of that name any more, if there was one."""
        return next((why for known, why in reversed(self._gone.values()) if known == name), None)

    def fate_in(self, incarnation: str) -> tuple[str, str] | None:
        """The name of a worker that is gone for good, and why it is; None: it is not known to be."""
        return self._gone.get(incarnation)

    def enrol(self, name: str, wanted: int, taken: Container[int] = ()) -> tuple[int, int] | None:
        """Id (-1: any that is not taken) and epoch for a newcomer, which takes the place of whoever has its name. None:
        no id is free.
        """
        if wanted < 0:
            former = [member.id for member in self._members.values() if member.name == name]
            free = (number for number in range(MAX_WORKERS) if number not in self._members and number not in taken)
            wanted = former[0] if former else next(free, -1)
        if not 0 <= wanted < MAX_WORKERS:
            return None
        self.epoch += 1
        return wanted, self.epoch
