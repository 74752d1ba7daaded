"""Workers on the nodes of one Ray cluster: placed, called, restarted and ended by Ray."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from .conftest import PROGRAMS, needs, run_program

pytestmark = needs("ray")


@pytest.fixture(scope="module")
def printed(environment: dict[str, str]) -> str:
    return run_program(PROGRAMS / "several_nodes.py", environment=environment)


@pytest.fixture(scope="module")
def found(printed: str) -> dict[str, Any]:
    (line,) = re.findall(r"^FOUND (.*)$", printed, re.MULTILINE)
    return json.loads(line)  # type: ignore[no-any-return]


@pytest.mark.timeout(180)
def test_workers_are_placed_and_numbered(found: dict[str, Any]) -> None:
    assert found["driver"][:2] == ["driver", 0]
    assert [place[:2] for place in found["places"]] == [["worker1", 1], ["worker2", 2]]
    assert len({node for _, _, node, _, _ in found["places"]}) == 2
    assert found["one place"] == ["worker2"]
    assert found["refs"] == [12, 12]


def test_workers_of_one_host_share_memory_and_listen_on_no_port(found: dict[str, Any]) -> None:
    addresses = [found["driver"][2], *(address for _, _, _, address, _ in found["places"])]
    assert [address.partition(":")[0] for address in addresses] == ["unix"] * 3
    assert found["sum"] == 1 << 20
    assert found["shared memory"] >= 4 << 20


def test_lines_of_the_log_have_the_name_of_the_worker(printed: str, found: dict[str, Any]) -> None:
    for name, _, _, _, pid in found["places"]:
        assert re.search(rf"\({name} pid={pid}.*line 7", printed), printed


def test_functions_with_state_in_globals_are_refused(found: dict[str, Any]) -> None:
    for what in ("refused", "refused argument"):
        assert "SerializationError" in found[what], found[what]
        assert "'calls'" in found[what][0]


def test_results_with_a_graph_are_refused(found: dict[str, Any]) -> None:
    assert "ValueError" in found["refused result"]


def test_errors_keep_their_type(found: dict[str, Any]) -> None:
    assert "ValueError" in found["raised"]
    assert "RayTaskError" in found["raised"]
    assert "UnknownWorkerError" in found["nobody"]


def test_a_task_joins_and_leaves(found: dict[str, Any]) -> None:
    assert sorted(found["visitor"]) == ["driver", "visitor", "worker1", "worker2"]


def test_a_killed_actor_comes_back_and_the_weights_are_right(found: dict[str, Any]) -> None:
    """Checkpoints were made after steps 2 and 5; the actor was killed in step 4."""
    assert found["steps"] == [0, 1, 2, 3, 4, 3, 4, 5, 6, 7]
    assert found["difference"] < 1e-6
    before, after = found["places"], found["places again"]
    assert [place[:2] for place in after] == [place[:2] for place in before]
    assert after[0][4] != before[0][4]
    assert after[1][4] == before[1][4]


def test_a_step_that_is_made_again_waits_for_ray(found: dict[str, Any]) -> None:
    assert found["difference with retries"] < 1e-6


def test_an_actor_that_ray_gives_up_is_an_error(found: dict[str, Any]) -> None:
    assert "WorkerFailedError" in found["given up"]


def test_too_few_resources_are_an_error_that_leaves_no_worker(found: dict[str, Any]) -> None:
    assert "RendezvousError" in found["no room"]
    assert "NotInitializedError" in found["worker after that"]


def test_the_end_gives_the_resources_back(found: dict[str, Any]) -> None:
    assert found["ended"]
    assert found["free again"]
