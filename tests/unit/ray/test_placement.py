"""What workers need, in the words of bundles and of actors."""

from __future__ import annotations

import pytest

from backhaul.ray.placement import actor_options, make_group, resources_of


def test_one_cpu_by_default() -> None:
    assert resources_of(2, None) == [{"CPU": 1}, {"CPU": 1}]


def test_each_worker_has_its_own() -> None:
    given = [{"CPU": 1}, {"GPU": 1, "fast_disk": 0.5}]
    assert resources_of(2, given) == given
    assert actor_options(given[1]) == {"num_cpus": 0, "num_gpus": 1, "memory": None, "resources": {"fast_disk": 0.5}}


def test_too_few_are_refused() -> None:
    with pytest.raises(ValueError):
        resources_of(3, [{"CPU": 1}])


def test_unknown_strategies_are_refused_before_ray_is_asked() -> None:
    with pytest.raises(ValueError):
        make_group(None, [{"CPU": 1}], "EVERYWHERE", 1.0)
