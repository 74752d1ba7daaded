"""Where Ray runs the workers: what they need, and the placement group that holds it for them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from backhaul.errors import RendezvousError

Resources = Mapping[str, float]

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")

_NOTICE_SECONDS = 5.0  # after which the driver logs that it waits for resources

log = logging.getLogger("backhaul")


def resources_of(workers: int, given: Resources | Sequence[Resources] | None) -> list[dict[str, float]]:
    """What each worker needs: the same for all, or one entry for each; one CPU by default.

    >>> resources_of(2, {"CPU": 2})
    [{'CPU': 2}, {'CPU': 2}]
    """
    if given is None:
        given = {"CPU": 1}
    if isinstance(given, Mapping):
        return [dict(given) for _ in range(workers)]
    if len(given) != workers:
        raise ValueError(f"there are {workers} workers, but resources for {len(given)}; give one dict for all, or each")
    return [dict(each) for each in given]


def actor_options(resources: Resources) -> dict[str, Any]:
    """The same needs as options of a Ray actor, which has words of its own for some of them.

    >>> actor_options({"CPU": 2, "fast_disk": 1})
    {'num_cpus': 2, 'num_gpus': 0, 'memory': None, 'resources': {'fast_disk': 1}}
    """
    rest = dict(resources)
    words = {"num_cpus": rest.pop("CPU", 0), "num_gpus": rest.pop("GPU", 0), "memory": rest.pop("memory", None)}
    return {**words, "resources": rest}


def make_group(ray: Any, bundles: list[dict[str, float]], strategy: str, timeout: float) -> Any:
    """Wait for a placement group with a bundle for each worker. Raises ``RendezvousError`` if Ray does not place it."""
    if strategy not in STRATEGIES:
        raise ValueError(f"placement must be one of {', '.join(STRATEGIES)}, or a placement group; got {strategy!r}")
    group = ray.util.placement_group(bundles, strategy=strategy)
    try:
        if group.wait(min(timeout, _NOTICE_SECONDS)):
            return group
        needs = f"{strategy} of {bundles}"
        log.warning("still waiting for Ray to place %s; free now: %s", needs, ray.available_resources())
        if timeout > _NOTICE_SECONDS and group.wait(timeout - _NOTICE_SECONDS):
            return group
        raise RendezvousError(
            f"Ray has not placed the workers within {timeout:g} s (rendezvous_timeout): they need {needs}; the Ray "
            f"cluster has {ray.cluster_resources()}. Ask for less, add nodes, or end what holds the resources "
            "(`ray status` shows it)"
        )
    except BaseException:
        ray.util.remove_placement_group(group)
        raise
