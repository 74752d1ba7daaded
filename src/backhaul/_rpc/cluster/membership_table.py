"""The members and former members that one worker knows, and which of two records counts. Pure: no I/O, no threads, no
clock.

A leader *enrolls* every worker that joins a running cluster: it gives the worker an id and an *epoch* that is larger
than all before. Of two records with the same name or id the one with the later epoch counts; the other worker is gone
for good. The workers that started the cluster have epoch 0.
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

_MAX_GONE = 1024  # workers that are gone and remembered
_MAX_PROVEN = 512  # of these, workers with a proof that they have left
_MAX_EPOCHS_AHEAD = 1024  # joiners that a worker may have missed when another shows its own epoch
_LAST_EPOCH = 1 << 53  # joining never comes near it
_MAX_CHARACTERS = 64  # of an incarnation, and of a seal
_LEFT = "has left the cluster"


# Over the limit because it is a message: each attribute is a field on the wire.
class WorkerRecord(msgspec.Struct, frozen=True):
    """What a worker tells the others about itself."""

    id: int
    name: str
    incarnation: str
    host: str  # equal: the same host
    addresses: tuple[str, ...]
    main: str  # equal and not empty: the same program
    limit: int  # the largest frame that it accepts, in bytes
    beat: float = 0.0  # seconds within which it sends something on every channel; 0: it may be silent
    epoch: int = 0  # when it joined: the larger, the later
    trusting: bool = True  # whether it accepts pickles
    devices: tuple[str, ...] = ()  # its CUDA devices, by index: equal names are the same hardware
    maps: dict[str, dict[str, str] | str] = {}  # where its tensors arrive, see ``_devices.placement``
    bounds: Bounds | None = None  # what it accepts in one message, beside ``limit``; None: anything
    seal: str = ""  # others check by it the proof that it has left, see ``departure``
    forms: tuple[str, ...] = ()  # of compressed tensors that it reads, see ``_wire.tensors.buffer_forms``
    listens: bool = True  # whether workers of other hosts may connect to it
    key: str = ""  # of its certificate, see ``Channel.key``; only of workers that do not listen

    @property
    def info(self) -> WorkerInfo:
        """Its name and id."""
        return WorkerInfo(self.name, WorkerId(self.id))

    @property
    def seniority(self) -> tuple[bool, int]:
        """The member with the lowest is the leader: joiners have to connect to it, so it is one that listens."""
        return not self.listens, self.id

    def has_left(self, proof: str) -> bool:
        """Whether ``proof`` is the secret that this worker tells when it leaves. Nobody else knows it before."""
        return bool(self.seal) and seal_of(proof) == self.seal

    def follows(self, other: WorkerRecord) -> bool:
        """Whether this worker takes the place of the other one, where only one of them can be a member."""
        if self.epoch == other.epoch:  # two workers both believed to be the leader, and each enrolled one
            return self.epoch > 0 and self.incarnation > other.incarnation
        return self.epoch > other.epoch


class Standing(msgspec.Struct, array_like=True, frozen=True):
    """Which workers a worker knows, by incarnation.

    Attributes:
        members: The members.
        left: Workers that have left, as others said without a proof.
        proven: Workers that have left, with the proof. Some of them may have left before this worker came.
    """

    members: tuple[str, ...]
    left: tuple[str, ...]
    proven: tuple[Departure, ...] = ()


prepare(WorkerRecord)
prepare(Standing)


def choose(record: WorkerRecord, host: str) -> str | None:
    """The address at which a worker can be reached from ``host``; None if there is none."""
    return next((a for a in record.addresses if record.host == host or a.startswith("tcp:")), None)


@dataclass(frozen=True, slots=True)
class Admit:
    """The record is a member's from now on. It takes the place of these records."""

    instead_of: tuple[WorkerRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """The record is not accepted."""

    reason: str


class MembershipTable:
    """The members and former members, as one worker knows them.

    A worker's *rivals* are the members that have its name or its id.

    Example:
        >>> def record(id, name, incarnation, epoch=0):
        ...     return WorkerRecord(id, name, incarnation, "here", (), "", 0, epoch=epoch)
        >>> table = MembershipTable(record(0, "a", "1"))
        >>> table.admit(record(1, "b", "2")), table.admit(record(1, "b", "3"))
        (Admit(instead_of=()), Refusal(reason="there is a worker 'b' (id 1) already"))
        >>> table.enroll("b", -1)
        (1, 1)
        >>> table.admit(record(1, "b", "3", epoch=1)).instead_of[0].incarnation
        '2'
    """

    def __init__(self, own: WorkerRecord) -> None:
        self._own = own
        self._members: dict[int, WorkerRecord] = {own.id: own}
        self._by_name = {own.name: own}
        # All of these by incarnation.
        self._by_incarnation = {own.incarnation: own}
        self._gone: collections.OrderedDict[str, tuple[str, str]] = collections.OrderedDict()  # -> name, why
        self._proven: collections.OrderedDict[str, Departure] = collections.OrderedDict()
        self._vouchers: dict[str, str] = {}  # member -> the leader that enrolled it
        self._overruled: dict[str, str] = {}  # member -> the worker that the leader has in its place
        self.epoch = own.epoch  # the latest of all workers that ever were members

    def rivals(self, name: str, number: int) -> list[WorkerRecord]:
        """The members that have that name or that id."""
        found = {member.id: member for member in (self._members.get(number), self._by_name.get(name)) if member}
        return list(found.values())

    def flaw_in(self, record: WorkerRecord, *, heard: bool = True) -> str:
        """Why no worker can have this record; empty if one can. ``heard``: a leader announced it, so any epoch is
        accepted.
        """
        try:
            check_name(record.name)
        except ValueError as error:
            return str(error)
        if not 0 <= record.id < MAX_WORKERS:
            return f"{record.id} is not the id of a worker"
        if not 0 < len(record.incarnation) <= _MAX_CHARACTERS or len(record.seal) > _MAX_CHARACTERS:
            return "its incarnation or its seal is not valid"
        if not 0 <= record.epoch <= (_LAST_EPOCH if heard else min(self.epoch + _MAX_EPOCHS_AHEAD, _LAST_EPOCH)):
            return f"epoch {record.epoch} is too far from the last known epoch, {self.epoch}"
        return ""

    def admit(self, record: WorkerRecord, *, heard: bool = True, decided: bool = False) -> Admit | Refusal | None:
        """A worker shows its record. None: it is a member already.

        Args:
            record: The record.
            heard: A leader announced it, see ``flaw_in``.
            decided: It counts, whatever the epochs are.
        """
        if flaw := self.flaw_in(record, heard=heard):
            return Refusal(flaw)
        if record.incarnation in self._gone:
            return Refusal(f"worker '{record.name}' {self._gone[record.incarnation][1]}")
        if (known := self._by_incarnation.get(record.incarnation)) is not None:
            if known.info == record.info:
                return None
            return Refusal(f"worker '{known.name}' (id {known.id}) has that incarnation")
        rivals = self.rivals(record.name, record.id)
        for rival in rivals:
            if rival is self._own or not (decided or record.follows(rival)):
                return Refusal(f"there is a worker '{rival.name}' (id {rival.id}) already")
        for rival in rivals:
            same = rival.name == record.name
            self.dismiss(rival, "was restarted" if same else f"has lost its place to worker '{record.name}'")
        self._members[record.id] = self._by_name[record.name] = self._by_incarnation[record.incarnation] = record
        self.epoch = max(self.epoch, record.epoch)
        return Admit(tuple(rivals))

    @property
    def standing(self) -> Standing:
        """Which workers this worker knows."""
        gone = self._gone.items()
        left = (incarnation for incarnation, (_, why) in gone if why == _LEFT and incarnation not in self._proven)
        return Standing(tuple(self._by_incarnation), tuple(left), tuple(self._proven.values()))

    @property
    def predecessors(self) -> tuple[Departure, ...]:
        """Workers that have left and had the name or the id of this worker."""
        own = self._own
        return tuple(left for left in self._proven.values() if left.id == own.id or left.name == own.name)

    def dismiss(self, record: WorkerRecord, why: str = _LEFT, *, proof: str = "") -> bool:
        """A member is gone for good. False: it was no member. ``proof`` shows others that it has left."""
        if self._members.get(record.id) is not record:
            return False
        del self._members[record.id], self._by_name[record.name], self._by_incarnation[record.incarnation]
        self._vouchers.pop(record.incarnation, None)
        self._overruled.pop(record.incarnation, None)
        self._gone[record.incarnation] = record.name, why
        while len(self._gone) > _MAX_GONE:
            self._gone.popitem(last=False)
        if record.has_left(proof):
            self._proven[record.incarnation] = Departure(record.incarnation, record.id, record.name, proof)
            while len(self._proven) > _MAX_PROVEN:
                self._proven.popitem(last=False)
        return True

    def proven_gone(self, incarnation: str, proof: str) -> WorkerRecord | None:
        """The member that has left, if the proof is valid, whoever brings it."""
        record = self._by_incarnation.get(incarnation)
        return record if record is not None and record is not self._own and record.has_left(proof) else None

    def remember(self, departures: Iterable[Departure]) -> None:
        """Remember workers that left before this worker came, for members that were cut off at that time. This worker
        cannot check these proofs, so none of them replaces another.
        """
        for left in departures:
            short = max(map(len, (left.incarnation, left.name, left.proof))) <= 2 * _MAX_CHARACTERS
            if short and left.incarnation not in self._by_incarnation and len(self._proven) < _MAX_PROVEN:
                self._proven.setdefault(left.incarnation, left)

    def vouch(self, incarnation: str, leader: str) -> None:
        """A leader has enrolled a member."""
        if incarnation in self._by_incarnation:
            self._vouchers[incarnation] = leader

    def yields(self, rival: WorkerRecord, leader: str) -> bool:
        """Whether a member that can be reached gives way to another one on the word of a leader.

        It does not if a leader with a lower id enrolled it and is not gone for good: that leader may be cut off, and
        decides when it is back. If members followed whichever leader they see at the moment, each of two joiners could
        be dropped by some of them.
        """
        senior = self._by_incarnation.get(self._vouchers.get(rival.incarnation, ""))
        junior = self._by_incarnation.get(leader)
        return senior is None or (junior is not None and junior.seniority <= senior.seniority)

    def overrule(self, rival: WorkerRecord, record: WorkerRecord) -> None:
        """The leader has another worker in the place of a member."""
        if rival.incarnation in self._by_incarnation:
            self._overruled[rival.incarnation] = record.incarnation

    def overruled(self, rival: WorkerRecord, record: WorkerRecord) -> bool:
        """Whether the leader has that worker in the place of a member."""
        return self._overruled.get(rival.incarnation) == record.incarnation

    def member(self, incarnation: str) -> WorkerRecord | None:
        """The member with that incarnation."""
        return self._by_incarnation.get(incarnation)

    def why_gone(self, name: str) -> str | None:
        """Why there is no worker of that name any more; None if there never was one."""
        return next((why for known, why in reversed(self._gone.values()) if known == name), None)

    def gone(self, incarnation: str) -> tuple[str, str] | None:
        """The name of a worker that is gone for good, and why; None: this worker does not know that it is gone."""
        return self._gone.get(incarnation)

    def enroll(self, name: str, wanted: int, taken: Container[int] = ()) -> tuple[int, int] | None:
        """Choose an id and an epoch for a joiner. It takes the place of the member with its name.

        Args:
            name: The joiner's name.
            wanted: The id that it asks for; -1: any that is free.
            taken: Ids that are not free although no member has them.

        Returns:
            Id and epoch; None if no id is free or the wanted one is not valid.
        """
        if wanted < 0:
            former = [member.id for member in self._members.values() if member.name == name]
            free = (number for number in range(MAX_WORKERS) if number not in self._members and number not in taken)
            wanted = former[0] if former else next(free, -1)
        if not 0 <= wanted < MAX_WORKERS:
            return None
        self.epoch += 1
        return wanted, self.epoch
