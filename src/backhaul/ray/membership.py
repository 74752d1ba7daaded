"""How a process that Ray runs becomes a worker: it asks the directory who the members are, and joins them. A worker
that Ray has restarted does the same, and takes the place of the lost one.
"""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import msgspec

from backhaul._options import Options
from backhaul._rpc.api import init
from backhaul._rpc.cluster.membership_table import WorkerRecord, choose
from backhaul._rpc.node import Node
from backhaul._transport.sockets.addresses import host_identity
from backhaul._worker.worker import Worker, current_worker
from backhaul.errors import RendezvousError
from backhaul.ray.directory import find_directory
from backhaul.ray.library import connected_ray


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterSettings:
    """What every worker of a cluster has to know before it can join.

    Attributes:
        options: The options of the workers, with the secret.
        several_hosts: Whether Ray has nodes on several hosts, so that workers must listen on TCP.
    """

    options: Options
    several_hosts: bool

    def options_at(self, node_address: str) -> Options:
        """The options of a worker on a Ray node. Workers of one host always use Unix sockets and shared memory.

        >>> ClusterSettings(Options(), several_hosts=True).options_at("10.0.0.5").bind
        '10.0.0.5'
        """
        if not self.several_hosts or self.options.transport == "unix" or self.options.bind is not None:
            return self.options
        return dataclasses.replace(self.options, bind=node_address)


def join(cluster: str, name: str, *, namespace: str | None = None) -> Worker:
    """Make this process one more worker of a cluster that ``start`` has started. For Ray tasks and actors of your own.

    Once this returns, every member knows the worker. End it with ``backhaul.leave()``, or with ``backhaul.shutdown()``,
    which waits for the end of the cluster.

    Args:
        cluster: The name of the cluster, ``RayCluster.name``.
        name: A name that no other worker has.
        namespace: The Ray namespace of the program that started the cluster; default: the current one.

    Raises:
        ValueError: There is no such cluster.
        RendezvousError: The name is taken, or no member can be reached.

    Example:
        >>> import backhaul as bh
        >>> worker = bh.ray.join("the name of a cluster", "evaluator")  # doctest: +SKIP
        >>> bh.rpc_sync("worker1", abs, args=(-1,))  # doctest: +SKIP
        1
    """
    ray = connected_ray()
    join_members(ray, find_directory(ray, cluster, namespace), name, None)
    return current_worker()


def join_members(ray: Any, directory: Any, name: str, rank: int | None) -> bool:
    """Join the members that the directory knows, under this name and with this id, and tell the directory. Returns
    whether a worker of that name had joined before.
    """
    packed, records = ray.get(directory.entry.remote())
    settings: ClusterSettings = pickle.loads(packed)
    host = host_identity()
    found = [choose(msgspec.json.decode(record, type=WorkerRecord), host) for record in records]
    addresses = [address for address in found if address is not None]
    if not addresses:
        raise RendezvousError(
            f"worker '{name}' cannot join: it is on another host than all members, and they listen only on their own. "
            "Ray has added a host since the cluster was started; start the cluster again",
            worker=name,
        )
    options = settings.options_at(ray.util.get_node_ip_address())
    worker = init(name, rank=rank, join=addresses, options=options)
    return bool(ray.get(directory.put.remote(name, record_of(worker))))


def record_of(worker: Worker) -> bytes:
    """What the directory holds of a worker."""
    return msgspec.json.encode(worker.part(Node).peers.own.record)
