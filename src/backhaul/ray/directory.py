"""The directory of a cluster: a small named Ray actor that tells a new worker how to join. It knows neither torch nor
Backhaul, so that it starts at once: what it holds are bytes to it.
"""

from __future__ import annotations

from typing import Any


def directory_class() -> type:
    """The class of the actor. Ray sends a local class by value, so the actor's process imports nothing of Backhaul.

    Ray restarts the actor with the arguments that it was made with. The first member is the driver, which lives as long
    as the cluster does, so they are enough to join.
    """

    class Directory:
        """Used by one thread."""

        def __init__(self, settings: bytes, driver: str, record: bytes) -> None:
            self._settings = settings
            self._records = {driver: record}  # the driver's is the first for good: it is the leader

        def entry(self) -> tuple[bytes, list[bytes]]:
            """The settings of the cluster, with its secret, and the records of all members."""
            return self._settings, list(self._records.values())

        def put(self, name: str, record: bytes) -> bool:
            """A worker has joined. Returns whether it takes the place of one of the same name."""
            again = name in self._records
            self._records[name] = record
            return again

    return Directory


def actor_name(cluster: str) -> str:
    """The name of the directory of a cluster, in Ray's namespace of the program that started it.

    >>> actor_name("ours")
    'backhaul:ours'
    """
    return f"backhaul:{cluster}"


def find_directory(ray: Any, cluster: str, namespace: str | None) -> Any:
    """The directory of a cluster. Raises ``ValueError`` if there is none."""
    try:
        return ray.get_actor(actor_name(cluster), namespace=namespace)
    except ValueError as error:
        raise ValueError(
            f"Ray has no Backhaul cluster '{cluster}' in namespace "
            f"{namespace or ray.get_runtime_context().namespace!r}; pass the name and the namespace of RayCluster"
        ) from error
