"""The end of a context: forgets it here, and tells the workers that it reached."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from backhaul._autograd.backward.driver import PassDriver
from backhaul._autograd.backward.messenger import PassMessenger
from backhaul._autograd.container import Container
from backhaul._autograd.messages import AutogradKind, Release
from backhaul._autograd.untrusted import check_release
from backhaul._rpc.cluster.peers import Peers
from backhaul._transport.base import Channel
from backhaul._wire.frames import Frame
from backhaul._wire.messages import pack, unpack
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import Worker
from backhaul.errors import UnknownContextError

_TOGETHER_SECONDS = 0.0002  # releases that follow each other within this time are sent together


class ContextRelease:
    """Of one worker. Thread-safe.

    Args:
        worker: The worker.
        peers: The other workers.
        container: The contexts of this worker.
        drivers: The passes that this worker drives, by context and number.
        messenger: Sends frames to workers that may be gone.
    """

    def __init__(
        self,
        worker: Worker,
        peers: Peers,
        container: Container,
        drivers: Mapping[tuple[int, int], PassDriver],
        messenger: PassMessenger,
    ) -> None:
        self._worker = worker
        self._id = worker.info.id
        self._peers = peers
        self._container = container
        self._drivers = drivers
        self._messenger = messenger
        self._released_at = 0.0  # when this worker last told others of a release
        worker.on_frame(AutogradKind.RELEASE, self._on_release, check=check_release)

    def release(self, context: int, known: int = -1) -> None:
        """Forget a context here, and on every worker that it reached except ``known``, which has told this one."""
        released = self._container.pop(context)
        if released is None:
            return
        for driver in list(self._drivers.values()) if self._drivers else ():
            if driver.spec.context == context:
                message = f"context {context} was released during backward; leave its `with` block after backward"
                driver.ledger.end(UnknownContextError(message, context=context))
        told = released.end()
        told.discard(self._id)
        told.discard(known)
        if told:
            now = self._worker.runtime.now()
            soon, self._released_at = now < self._released_at + _TOGETHER_SECONDS, now
            frame = Frame(AutogradKind.RELEASE, 0, pack(Release(context)))
            for worker in told:
                self._tell(worker, frame, soon, worker in released.doubtful)

    def _tell(self, worker: int, frame: Frame, soon: bool, doubtful: bool) -> None:
        """Tell a worker that a context is over, through the channel that the context went through. A worker that has
        lost that channel since asks (it is ``doubtful``), and is told through every channel.
        """
        peer = self._peers.with_id(worker)
        if peer is None:
            return
        channel = peer.channel
        if doubtful or channel is None or not self._messenger.send_hint(worker, channel, frame, soon=soon):
            self._messenger.hint(worker, frame)

    def tell_again(self, worker: int, context: int) -> None:
        """A call of a context has ended after the context: its request may have arrived after the release."""
        self._messenger.hint(worker, Frame(AutogradKind.RELEASE, 0, pack(Release(context))))

    def _on_release(self, channel: Channel, frame: Frame) -> Task:
        peer = self._peers.of(channel)
        known = peer.record.id if peer is not None else -1
        return functools.partial(self.release, unpack(frame.body, Release).context, known)
