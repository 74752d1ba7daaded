"""The public functions of RPC. Each acts on the current worker."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, TypeVarTuple, cast, overload

from torch.distributed import Store  # type: ignore[attr-defined]

from backhaul import _native
from backhaul._devices.placement import check
from backhaul._options import Options
from backhaul._rpc.call_types import LateResult, Named, Positional, Target
from backhaul._rpc.calls.retry import Attempts, Retry
from backhaul._rpc.cluster.addressing import other_host
from backhaul._rpc.cluster.environment import NAME_VARIABLE
from backhaul._rpc.cluster.membership_events import MembershipEvent, MembershipEvents
from backhaul._rpc.cluster.own_endpoint import (
    OwnEndpoint,
    check_neighbor,
    check_options,
    host_of,
    meets_other_hosts,
    secret_of,
)
from backhaul._rpc.cluster.rendezvous import StoreRendezvous, check_rank, open_store
from backhaul._rpc.futures import Future
from backhaul._rpc.node import Node, describe, start_node
from backhaul._rpc.node import join as join_cluster
from backhaul._runtime.compile_marks import graph_break
from backhaul._transport.sockets.addresses import host_identity
from backhaul._types import MAX_WORKERS, WorkerInfo, check_name
from backhaul._worker.worker import Worker, current_worker, running_workers
from backhaul.errors import RendezvousError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@graph_break
def init(
    name: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    store: Store | None = None,
    join: str | Sequence[str] | bool = False,
    options: Options | None = None,
) -> Worker:
    """Make this process a worker and wait until all workers have started.

    Arguments that are not given come from the environment of torchrun, MPI, Slurm or Kubernetes; see
    ``docs/clusters.md``. Once this returns, every worker can be called by name; connections open at the first call.

    With ``join`` the worker becomes a member of a cluster that is running already. If a worker of the same name was
    lost, the new one takes its place. Once this returns, every member knows the worker.

    Args:
        name: A name that no other worker has; ``BACKHAUL_NAME``, which ``backhaul run`` sets, or ``worker<rank>`` if
            not given.
        rank: This worker's number, 0 to ``world_size - 1``.
        world_size: How many workers there are.
        store: A ``torch.distributed.Store`` for the rendezvous, in place of ``options.init_method``.
        join: The address of any member (``get_address``), or several to try. This needs a secret
            (``Security.secret`` or ``BACKHAUL_SECRET``) and no store. ``rank`` is the id that the worker asks for;
            without ``rank`` it gets a free id. True: the store has the addresses of the members.
        options: See ``Options``.

    Raises:
        RendezvousError: Other workers did not start in time, or a name is taken, or a member cannot be reached.
        AuthenticationError: Workers on two hosts have different secrets.
        ValueError: Rank, size, name or options are invalid.

    Example:
        >>> import torch, backhaul as bh
        >>> worker = bh.init("alone", rank=0, world_size=1, store=torch.distributed.HashStore())
        >>> bh.rpc_sync("alone", torch.add, args=(torch.ones(2), 1))
        tensor([2., 2.])
        >>> bh.shutdown()
    """
    began = time.monotonic()
    options = options or Options()
    name = name if name is not None else os.environ.get(NAME_VARIABLE) or None
    if name is not None:
        check_name(name)
    if running_workers():
        names = ", ".join(worker.name for worker in running_workers())
        raise RuntimeError(f"this process is a worker already ({names}); shut it down first")
    check_options(options)
    secret = secret_of(options)
    _native.compile_later()
    if join and join is not True:
        return _join(name, -1 if rank is None else rank, [join] if isinstance(join, str) else join, secret, options)
    if store is None:
        store, rank, world_size = open_store(rank, world_size, options, alone=bool(join))
    elif rank is None or world_size is None:
        raise ValueError("with a store, init needs rank and world_size too")
    check_rank(rank, world_size)
    rendezvous = StoreRendezvous(store, rank, world_size, options.rendezvous_timeout, began=began)
    if join:
        addresses = rendezvous.addresses(host_identity())
        secret = rendezvous.find_secret(secret)
        worker = _join(name or f"worker{rank}", rank, addresses, secret, options, timeout=rendezvous.left)
        rendezvous.add_member(worker.part(Node).peers.own.record)
        worker.attach(store)
        return worker
    name = name if name is not None else f"worker{rank}"
    end = OwnEndpoint(
        name,
        rendezvous.agree_on_secret(secret),
        options,
        towards=host_of(store),
        own_secret=secret is not None,
        several_hosts=None if world_size > 1 else False,
        joiners=world_size == 1 and meets_other_hosts(store),
    )
    try:
        own = describe(name, rank, end.endpoint, options, host=host_identity())
        records = end.settle(rendezvous.exchange(end.offer(own)))
        check(records[rank], records)
    except (RendezvousError, ValueError):
        end.close()
        rendezvous.wait_for_readers()
        raise
    except BaseException:
        end.close()
        raise
    node = start_node(records[rank], records, end.endpoint, options)
    node.worker.attach(store)  # the store of rank 0 may be the server, so it must live as long as the worker
    try:
        check_neighbor(node.peers, end.endpoint, records, node.peers.connections.answer_seconds)
    except BaseException:
        node.shutdown(graceful=False, timeout=1.0)
        raise
    return node.worker


def _join(
    name: str | None,
    rank: int,
    addresses: Sequence[str],
    secret: bytes | None,
    options: Options,
    *,
    timeout: float | None = None,
) -> Worker:
    """Become a member of a running cluster."""
    if name is None:
        raise ValueError("a worker that joins needs a name")
    if secret is None:
        raise ValueError(
            "to join, the cluster's secret is needed; set BACKHAUL_SECRET, or pass "
            "Options(security=Security(secret=...))"
        )
    if not -1 <= rank < MAX_WORKERS:
        raise ValueError(f"rank must be 0 to {MAX_WORKERS - 1}, got {rank}")
    beyond = [host for host in map(other_host, addresses) if host is not None]
    end = OwnEndpoint(
        name,
        secret,
        options,
        towards=next(iter(beyond), None),
        own_secret=secret_of(options) is not None,
        several_hosts=bool(beyond),
    )
    own = describe(name, rank, end.endpoint, options, host=host_identity())
    return join_cluster(end.endpoint, own, addresses, options, timeout=timeout).worker


@graph_break
def get_address() -> str:
    """The address of the current worker, for ``init(join=...)``. A TCP address if the worker listens on TCP.

    Raises:
        ValueError: The worker has no address (``Options(listen=False)``).

    Example:
        >>> import backhaul as bh
        >>> with bh.cluster(2):
        ...     address = bh.get_address()  # pass it to bh.init("late", join=address) in another process
        >>> isinstance(address, str)
        True
    """
    worker = current_worker()
    addresses = worker.endpoint.addresses
    if not addresses:
        raise ValueError(f"worker '{worker.name}' has no address: its Options say listen=False; use another member's")
    return next((address for address in addresses if address.startswith("tcp:")), addresses[0])


@graph_break
def on_membership(callback: Callable[[MembershipEvent], None]) -> Callable[[], None]:
    """Call ``callback`` when workers join, leave or are lost, as the current worker sees it.

    The callback runs on a thread of the worker, with the worker current. It gets one event at a time. A worker hears
    later of the loss of a worker to which it has never been connected: when it calls it, or when the leader asks it to
    look, because that worker was silent for others.

    Returns:
        A function that ends the subscription.

    Example:
        >>> import backhaul as bh
        >>> with bh.cluster(["first", "second"]) as (first, second):
        ...     seen = []
        ...     stop = bh.on_membership(seen.append)
        ...     with second:
        ...         bh.leave()
        >>> seen[0].kind, seen[0].worker.name
        ('left', 'second')
    """
    return current_worker().part(MembershipEvents).subscribe(callback)


# fmt: off
@overload
def rpc_sync(to: Target, func: Callable[..., LateResult[T]], args: list[Any], kwargs: Named | None = ...,
             timeout: float | None = ..., *, retry: Retry | None = ...) -> T: ...
@overload
def rpc_sync(to: Target, func: Callable[..., T], args: list[Any], kwargs: Named | None = ...,
             timeout: float | None = ..., *, retry: Retry | None = ...) -> T: ...
@overload
def rpc_sync(to: Target, func: Callable[[*Ts], LateResult[T]], args: tuple[*Ts], kwargs: None = ...,
             timeout: float | None = ..., *, retry: Retry | None = ...) -> T: ...
@overload
def rpc_sync(to: Target, func: Callable[[*Ts], T], args: tuple[*Ts], kwargs: None = ...,
             timeout: float | None = ..., *, retry: Retry | None = ...) -> T: ...
@overload
def rpc_sync(to: Target, func: Callable[[], LateResult[T]], args: None = ..., kwargs: None = ...,
             timeout: float | None = ..., *, retry: Retry | None = ...) -> T: ...
@overload
def rpc_sync(to: Target, func: Callable[[], T], args: None = ..., kwargs: None = ...,
             timeout: float | None = ..., *, retry: Retry | None = ...) -> T: ...
@overload
def rpc_sync(to: Target, func: Callable[..., LateResult[T]], args: Positional, kwargs: Named,
             timeout: float | None = ..., *, retry: Retry | None = ...) -> T: ...
@overload
def rpc_sync(to: Target, func: Callable[..., T], args: Positional, kwargs: Named,
             timeout: float | None = ..., *, retry: Retry | None = ...) -> T: ...
@overload
def rpc_sync(to: Target, func: Callable[..., LateResult[T]], *, kwargs: Named, timeout: float | None = ...,
             retry: Retry | None = ...) -> T: ...
@overload
def rpc_sync(to: Target, func: Callable[..., T], *, kwargs: Named, timeout: float | None = ...,
             retry: Retry | None = ...) -> T: ...
@overload
def rpc_sync(to: Target, func: str, args: Positional = ..., kwargs: Named | None = ...,
             timeout: float | None = ..., *, retry: Retry | None = ...) -> Any: ...
# fmt: on


@graph_break
def rpc_sync(
    to: Target,
    func: Callable[..., Any] | str,
    args: Positional = None,
    kwargs: Named | None = None,
    timeout: float | None = None,
    *,
    retry: Retry | None = None,
) -> Any:
    """Call ``func(*args, **kwargs)`` on another worker and return its result.

    The call is part of the autograd graph, as a call of ``func`` here would be: ``backward`` goes back through it, and
    through the calls that ``func`` makes. Under ``torch.no_grad()`` it is not.

    Args:
        to: Name, id or ``WorkerInfo`` of the worker that runs ``func``; it may be the current worker.
        func: Any callable. A function that both workers can import is sent by name, any other by value. Or a name
            that the other worker has exposed, see ``expose``.
        args: Positional arguments, a tuple or a list; they are copied. For one argument: ``args=(x,)``.
        kwargs: Keyword arguments, a dict.
        timeout: Seconds to wait; 0: no limit; None: the worker's default (60). Never longer than the time that is left
            to the handler or block that makes the call, see ``time_left``.
        retry: Make the call again if the worker is lost. Only for functions that may run more than once.

    Raises:
        Exception: The exception that ``func`` raised, with its own type if that can be imported here, else
            ``RemoteError``. Its ``__cause__`` is the remote traceback.
        CallTimeoutError: There was no reply in time.
        CallCancelledError: The handler that makes the call was cancelled.
        PeerLostError: The worker cannot be reached, or was lost during the call.
        PermissionDeniedError: The other worker does not allow this one to call ``func``; see
            ``Options.security.trusted``.
        SerializationError: An argument or the result cannot be sent, or ``func`` is sent by value and keeps state in
            globals.
        UnknownWorkerError: There is no such worker.

    Example:
        >>> import torch, backhaul as bh
        >>> with bh.cluster(2):
        ...     bh.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3))
        tensor([4., 4.])
        >>> x = torch.ones(2, requires_grad=True)
        >>> with bh.cluster(2):
        ...     bh.rpc_sync("worker1", torch.mul, args=(x, 3)).sum().backward()
        ...     x.grad
        tensor([3., 3.])
    """
    client = cast(Node, current_worker().parts[Node]).client
    return (
        client.call(to, func, args, kwargs, timeout)
        if retry is None
        else Attempts(client, retry, to, func, args, kwargs, timeout).run()
    )


# fmt: off
@overload
def rpc_async(to: Target, func: Callable[..., LateResult[T]], args: list[Any], kwargs: Named | None = ...,
              timeout: float | None = ..., *, retry: Retry | None = ...) -> Future[T]: ...
@overload
def rpc_async(to: Target, func: Callable[..., T], args: list[Any], kwargs: Named | None = ...,
              timeout: float | None = ..., *, retry: Retry | None = ...) -> Future[T]: ...
@overload
def rpc_async(to: Target, func: Callable[[*Ts], LateResult[T]], args: tuple[*Ts], kwargs: None = ...,
              timeout: float | None = ..., *, retry: Retry | None = ...) -> Future[T]: ...
@overload
def rpc_async(to: Target, func: Callable[[*Ts], T], args: tuple[*Ts], kwargs: None = ...,
              timeout: float | None = ..., *, retry: Retry | None = ...) -> Future[T]: ...
@overload
def rpc_async(to: Target, func: Callable[[], LateResult[T]], args: None = ..., kwargs: None = ...,
              timeout: float | None = ..., *, retry: Retry | None = ...) -> Future[T]: ...
@overload
def rpc_async(to: Target, func: Callable[[], T], args: None = ..., kwargs: None = ...,
              timeout: float | None = ..., *, retry: Retry | None = ...) -> Future[T]: ...
@overload
def rpc_async(to: Target, func: Callable[..., LateResult[T]], args: Positional, kwargs: Named,
              timeout: float | None = ..., *, retry: Retry | None = ...) -> Future[T]: ...
@overload
def rpc_async(to: Target, func: Callable[..., T], args: Positional, kwargs: Named,
              timeout: float | None = ..., *, retry: Retry | None = ...) -> Future[T]: ...
@overload
def rpc_async(to: Target, func: Callable[..., LateResult[T]], *, kwargs: Named, timeout: float | None = ...,
              retry: Retry | None = ...) -> Future[T]: ...
@overload
def rpc_async(to: Target, func: Callable[..., T], *, kwargs: Named, timeout: float | None = ...,
              retry: Retry | None = ...) -> Future[T]: ...
@overload
def rpc_async(to: Target, func: str, args: Positional = ..., kwargs: Named | None = ...,
              timeout: float | None = ..., *, retry: Retry | None = ...) -> Future[Any]: ...
# fmt: on


@graph_break
def rpc_async(
    to: Target,
    func: Callable[..., Any] | str,
    args: Positional = None,
    kwargs: Named | None = None,
    timeout: float | None = None,
    *,
    retry: Retry | None = None,
) -> Future[Any]:
    """Start a call and return its future. Once this returns, the arguments may be changed (with ``retry``, once the
    future is done).

    Arguments and gradients as for ``rpc_sync``. If the call itself is wrong (unknown worker, an argument that cannot be
    sent), this raises. Later errors become the future's exception.

    Example:
        >>> import torch, backhaul as bh
        >>> with bh.cluster(2):
        ...     futures = [bh.rpc_async("worker1", torch.add, args=(torch.ones(1), n)) for n in range(3)]
        ...     bh.wait_all(futures)
        [tensor([1.]), tensor([2.]), tensor([3.])]
    """
    client = cast(Node, current_worker().parts[Node]).client
    if retry is not None:
        return Attempts(client, retry, to, func, args, kwargs, timeout).start()
    return client.call_async(to, func, args, kwargs, timeout)


@graph_break
def get_worker_info(name: str | None = None) -> WorkerInfo:
    """Name and id of a worker; of the current worker if no name is given.

    Raises:
        UnknownWorkerError: There is no worker of that name.

    Example:
        >>> import backhaul as bh
        >>> with bh.cluster(["first", "second"]):
        ...     bh.get_worker_info(), bh.get_worker_info("second").id
        (WorkerInfo(name='first', id=0), 1)
    """
    worker = current_worker()
    return worker.info if name is None else worker.part(Node).peers.find(name).info


@graph_break
def get_debug_info() -> dict[str, int]:
    """Counters of the current worker: its own calls that are pending, cancelled or retried; calls that it has served,
    and calls that it dropped because their callers had given up; bytes sent; its shared memory, and how many slots of
    it other workers use; connections between other workers that it relays; contexts; backward passes that it drives.

    Example:
        >>> import backhaul as bh
        >>> with bh.cluster(2), bh.context():
        ...     bh.get_debug_info()["num_autograd_contexts"]
        1
    """
    return {name: count() for name, count in current_worker().counters.items()}


@graph_break
def get_worker_infos() -> list[WorkerInfo]:
    """All workers of the cluster, by id, without those that have left or are lost.

    Example:
        >>> import backhaul as bh
        >>> with bh.cluster(3):
        ...     [info.name for info in bh.get_worker_infos()]
        ['worker0', 'worker1', 'worker2']
    """
    found = [peer.info for peer in current_worker().part(Node).peers if not peer.lost]
    return sorted(found, key=lambda info: info.id)
