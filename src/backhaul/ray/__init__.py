"""Clusters of Ray actors: Ray places, starts and restarts the workers."""

from backhaul.ray.cluster import RayCluster, start
from backhaul.ray.membership import join

__all__ = ["RayCluster", "join", "start"]
