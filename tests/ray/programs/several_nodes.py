"""The driver on a Ray of three nodes of this machine: prints what it has found as a line of JSON."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from training import difference, train_on_ray, train_with_retries

import backhaul as bh

calls = 0


def bump() -> int:
    """Keeps state in a global of a program that Ray's workers do not have."""
    global calls
    calls += 1
    return calls


def place(number: int) -> tuple[str, int, str, str, int]:
    """Where a worker runs, and how the others reach it."""
    print(f"line {number}")
    worker = bh.get_worker_info()
    return worker.name, worker.id, ray.get_runtime_context().get_node_id(), bh.get_address(), os.getpid()


def graph() -> torch.Tensor:
    return torch.ones(2, requires_grad=True) * 2


@ray.remote(num_cpus=0)
def visit(cluster: str, namespace: str) -> list[str]:
    """A task that takes part for a while."""
    bh.ray.join(cluster, "visitor", namespace=namespace)
    names = [info.name for info in bh.rpc_sync("worker1", bh.get_worker_infos)]
    bh.leave()
    return names


def kill_in_step(chosen: int, step: int, processes: list[int]) -> None:
    """Kill one process, once."""
    if step == chosen and processes:
        os.kill(processes.pop(), signal.SIGKILL)


def await_end(process: int) -> None:
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{process}"):
        assert time.monotonic() < deadline, f"process {process} does not end"
        time.sleep(0.01)


def share(large: torch.Tensor) -> tuple[float, int]:
    """Send a tensor until it goes through shared memory: the first times there may be none of that size yet."""
    deadline = time.monotonic() + 30
    while True:
        found = bh.rpc_sync("worker1", torch.sum, args=(large,)).item()
        shared = bh.get_debug_info()["shm_bytes"]
        if shared >= large.nbytes or time.monotonic() > deadline:
            return found, shared


def error_of(call: Any, *args: Any, **kwargs: Any) -> list[str]:
    """The types of what a call raises, and its text."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return [str(error), *(kind.__name__ for kind in type(error).__mro__)]
    return []


def main() -> None:
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        nodes.add_node(num_cpus=1)
    ray.init(address=nodes.address)
    found: dict[str, Any] = {}
    short = bh.Options(rendezvous_timeout=1.0)
    found["no room"] = error_of(bh.ray.start, 2, resources={"CPU": 64}, options=short)
    found["worker after that"] = error_of(bh.get_worker_info)
    with bh.ray.start(2, placement="STRICT_SPREAD") as cluster:
        found["driver"] = [bh.get_worker_info().name, bh.get_worker_info().id, bh.get_address()]
        found["places"] = cluster.run(place, (7,))
        found["one place"] = [each[0] for each in cluster.run(place, (8,), on=["worker2"])]
        found["refs"] = ray.get(cluster.remote(int, ("12",)))
        found["refused"] = error_of(cluster.run, bump)
        found["refused argument"] = error_of(cluster.run, int, (bump,))
        found["refused result"] = error_of(cluster.run, graph)
        found["raised"] = error_of(cluster.run, int, ("x",))
        found["nobody"] = error_of(cluster.run, int, on=["worker3"])
        large = torch.ones(1 << 20)
        found["sum"], found["shared memory"] = share(large)
        found["visitor"] = ray.get(visit.remote(cluster.name, cluster.namespace))
        processes = [found["places"][0][4]]
        result = train_on_ray(cluster, lambda step: kill_in_step(4, step, processes))
        found["steps"], found["difference"] = result["steps"], difference(result["weights"])
        found["places again"] = cluster.run(place, (9,))
        processes = [found["places again"][0][4]]
        weights = train_with_retries(lambda step: kill_in_step(4, step, processes))
        found["difference with retries"] = difference(weights)
        ray.kill(cluster.actors["worker2"])  # for good, and soon: until then it answers
        await_end(found["places again"][1][4])
        found["given up"] = error_of(cluster.wait_for, "worker2")
    cluster.shutdown()  # does nothing
    found["ended"] = cluster.driver.closed
    found["free again"] = ray.util.placement_group([{"CPU": 1}] * 2).wait(60)
    print("FOUND", json.dumps(found), flush=True)
    ray.shutdown()
    nodes.shutdown()


if __name__ == "__main__":
    main()
