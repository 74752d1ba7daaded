"""Where a process is in its job, from the environment variables of its launcher."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul._rpc.cluster.environment import JobPlace, expand_hosts, find_place

MASTER = {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "7000"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_STEP_NUM_TASKS": "{size}",
    "SLURM_PROCID": "{rank}",
    "SLURM_LOCALID": "{local}",
}
# By source, the variables of a process, and where its ranks meet unless MASTER_ADDR and MASTER_PORT say so.
LAUNCHERS: dict[str, tuple[dict[str, str], str | None, int | None]] = {
    "torchrun (RANK)": ({"RANK": "{rank}", "WORLD_SIZE": "{size}", "LOCAL_RANK": "{local}"}, None, None),
    "Open MPI (OMPI_COMM_WORLD_RANK)": (
        {
            "OMPI_COMM_WORLD_RANK": "{rank}",
            "OMPI_COMM_WORLD_SIZE": "{size}",
            "OMPI_COMM_WORLD_LOCAL_RANK": "{local}",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "{size}",
            "PMIX_NAMESPACE": "80216065",
        },
        "127.0.0.1",
        13_640,
    ),
    "MPI (PMI_RANK)": (
        {"PMI_RANK": "{rank}", "PMI_SIZE": "{size}", "MPI_LOCALRANKID": "{local}", "MPI_LOCALNRANKS": "{size}"},
        "127.0.0.1",
        10_123,  # from the parent process
    ),
    "Slurm (SLURM_PROCID)": (SLURM, "gpu08", 10_000 + 77 * 16 + 2),
    "Kubernetes (JOB_COMPLETION_INDEX)": (
        {"JOB_COMPLETION_INDEX": "{rank}", "WORLD_SIZE": "{size}"},
        None,
        29_500,
    ),
}


def find(environ: dict[str, str], *args: Any) -> JobPlace:
    return find_place(environ, *args, parent=123)


def environ_of(launcher: str, rank: int, size: int, local: int = 0) -> dict[str, str]:
    return {key: value.format(rank=rank, size=size, local=local) for key, value in LAUNCHERS[launcher][0].items()}


@given(st.sampled_from(sorted(LAUNCHERS)), st.integers(0, 9), st.integers(1, 9), st.data())
def test_every_launcher(launcher: str, rank: int, more: int, data: st.DataObject) -> None:
    size = rank + more
    local = 0 if "Kubernetes" in launcher else data.draw(st.integers(0, rank))
    address, port = LAUNCHERS[launcher][1:]
    environ = environ_of(launcher, rank, size, local)
    assert find(environ) == JobPlace(rank, size, local, address, port, launcher)
    assert find({**environ, **MASTER}) == JobPlace(rank, size, local, "10.0.0.9", 7000, launcher)
    # An argument counts more, and so do both.
    assert find({**environ, **MASTER}, rank, size + 1) == JobPlace(rank, size + 1, None, "10.0.0.9", 7000, "arguments")
    assert find(environ, 0) == JobPlace(0, size, local, address, port, launcher)
    # Whatever the outer launcher says, torchrun started this process.
    inner = environ_of("torchrun (RANK)", 1, 3)
    assert find({**environ, **inner}).source == "torchrun (RANK)"


@given(st.sampled_from([name for name in sorted(LAUNCHERS) if "Kubernetes" not in name]), st.integers(1, 4), st.data())
def test_environments_that_are_contradictory_or_half_set(launcher: str, size: int, data: st.DataObject) -> None:
    environ = environ_of(launcher, 0, size)
    rank_name, size_name = (next(k for k in environ if environ_of(launcher, 7, 8)[k] == v) for v in "78")
    with pytest.raises(ValueError, match="contradicts itself"):
        find({**environ, rank_name: str(data.draw(st.integers(size) | st.integers(max_value=-1)))})
    with pytest.raises(ValueError, match=rank_name):
        find({**environ, rank_name: "first"})
    if launcher == "torchrun (RANK)":
        return
    with pytest.raises(ValueError, match="WORLD_SIZE"):
        find({**environ, "WORLD_SIZE": str(size + 1)})
    assert find({**environ, "WORLD_SIZE": str(size)}).size == size
    if launcher != "Slurm (SLURM_PROCID)":
        with pytest.raises(ValueError, match=f"sets {size_name} and not {rank_name}"):
            find({key: value for key, value in environ.items() if key != rank_name})
    with pytest.raises(ValueError, match=f"sets {rank_name} and not"):
        find({key: value for key, value in environ.items() if key != size_name})


def test_nothing_says_where() -> None:
    assert find({}) == JobPlace()
    assert find({"WORLD_SIZE": "3", "MASTER_ADDR": ""}) == JobPlace(size=3, source="WORLD_SIZE")
    assert find({"JOB_COMPLETION_INDEX": "1"}).size is None
    batch_script = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NODELIST": "a,b"}
    assert find(batch_script) == JobPlace()
    for port in ("0", "65536", "-1", "http"):
        with pytest.raises(ValueError, match="MASTER_PORT"):
            find({"MASTER_PORT": port})


def test_ranks_of_several_hosts_without_a_host_list_need_an_address() -> None:
    environ = environ_of("Open MPI (OMPI_COMM_WORLD_RANK)", 1, 4) | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert (find(environ).address, find(environ).port) == (None, None)
    assert find({**environ, "SLURM_NODELIST": "a[1-2]", "SLURM_JOB_ID": "1"}).address == "a1"


def test_a_step_on_one_node_meets_on_loopback() -> None:
    environ = environ_of("Slurm (SLURM_PROCID)", 1, 4) | {"SLURM_STEP_NODELIST": "gpu08"}
    assert find(environ).method == f"tcp://127.0.0.1:{10_000 + 77 * 16 + 2}"


def test_a_job_set_of_several_jobs() -> None:
    environ = {**environ_of("Kubernetes (JOB_COMPLETION_INDEX)", 1, 6), "BACKHAUL_JOB_INDEX": "2"}
    with pytest.raises(ValueError, match="BACKHAUL_PODS_PER_JOB"):
        find(environ)
    assert find({**environ, "BACKHAUL_PODS_PER_JOB": "2"}).rank == 5
    with pytest.raises(ValueError, match="contradicts itself"):
        find({**environ, "BACKHAUL_PODS_PER_JOB": "1"})
    with pytest.raises(ValueError, match="contradicts itself"):
        find({**environ, "BACKHAUL_PODS_PER_JOB": "2", "WORLD_SIZE": "5"})


@pytest.mark.parametrize(("address", "method"), [("::1", "tcp://[::1]:7"), ("host", "tcp://host:7")])
def test_where_the_workers_meet(address: str, method: str) -> None:
    assert find({"MASTER_ADDR": address, "MASTER_PORT": "7"}).method == method


# Node lists of Slurm.

names = st.text("abz", min_size=1, max_size=3)


@st.composite
def node_lists(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A node list, and its hosts."""
    written, hosts = [], []
    for _ in range(draw(st.integers(1, 3))):
        part, found = draw(names), [""]
        found = [part]
        for _ in range(draw(st.integers(0, 2))):
            width, ranges, numbers = draw(st.integers(1, 3)), [], list[int]()
            for _ in range(draw(st.integers(1, 2))):
                first, count = draw(st.integers(0, 8)), draw(st.integers(1, 3))
                ranges.append(f"{first:0{width}}" + (f"-{first + count - 1:0{width}}" if count > 1 else ""))
                numbers += range(first, first + count)
            end = draw(st.just("") | names)
            part += f"[{','.join(ranges)}]{end}"
            found = [f"{head}{number:0{width}}{end}" for head in found for number in numbers]
        written.append(part)
        hosts += found
    return ",".join(written), hosts


@given(node_lists())
def test_node_lists(drawn: tuple[str, list[str]]) -> None:
    text, hosts = drawn
    assert list(expand_hosts(text)) == hosts


def test_a_long_node_list_is_not_expanded_as_a_whole() -> None:
    assert next(expand_hosts("a[0-999999999]b[0-999999999]")) == "a0b0"
    for wrong in ("a[x]", "a[1-b]", "a[]"):
        with pytest.raises(ValueError, match="node list"):
            list(expand_hosts(wrong))
