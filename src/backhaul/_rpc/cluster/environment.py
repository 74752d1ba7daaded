"""Where a process is in its job: what torchrun, MPI, Slurm and Kubernetes say in the environment. Pure: reads only the
mapping that it is given.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

RANK_VARIABLE, SIZE_VARIABLE = "RANK", "WORLD_SIZE"
ADDRESS_VARIABLE, PORT_VARIABLE = "MASTER_ADDR", "MASTER_PORT"
NAME_VARIABLE = "BACKHAUL_NAME"  # the name of the worker, which only `backhaul run` sets
JOB_INDEX_VARIABLE, JOB_PODS_VARIABLE = "BACKHAUL_JOB_INDEX", "BACKHAUL_PODS_PER_JOB"

_FIRST_PORT, _PORTS = 10_000, 20_000  # below the ports that the system gives to clients
_KUBERNETES_PORT = 29_500  # every pod has an address of its own, so that one port does for all jobs
_HERE = "127.0.0.1"  # for a job on one host, whatever the name of the host resolves to
_STEP = ("SLURM_STEP_ID", "SLURM_STEPID")


@dataclass(frozen=True, slots=True)
class JobPlace:
    """Where a process is in its job.

    Attributes:
        rank: Its number; None: unknown.
        size: How many processes the job has; None: unknown.
        local_rank: Its number among those of its host; None: unknown.
        address: The host of rank 0, which serves the store; None: unknown.
        port: The port of the store; None: unknown.
        source: What says so, for people; empty: nothing does.
    """

    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    address: str | None = None
    port: int | None = None
    source: str = ""

    @property
    def method(self) -> str | None:
        """The store's address, as a URL."""
        if self.address is None or self.port is None:
            return None
        return f"tcp://[{self.address}]:{self.port}" if ":" in self.address else f"tcp://{self.address}:{self.port}"


def find_place(
    environ: Mapping[str, str], rank: int | None = None, size: int | None = None, *, parent: int = 0
) -> JobPlace:
    """Where this process is. ``rank`` and ``size`` count more than the environment, where they are given. The innermost
    launcher counts: torchrun inside a Slurm job, for example. ``parent`` is the id of the parent process.

    Raises ``ValueError`` if the environment contradicts itself, or says only half of what it should say.

    Example:
        >>> find_place({"PMI_RANK": "1", "PMI_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7000"})
        JobPlace(rank=1, size=4, local_rank=None, address='10.0.0.1', port=7000, source='MPI (PMI_RANK)')
    """
    address, port = environ.get(ADDRESS_VARIABLE) or None, _number(environ, PORT_VARIABLE)
    if port is not None and not 0 < port < 1 << 16:
        raise ValueError(f"the environment's {PORT_VARIABLE} is not a port: {port}")
    if None not in (rank, size, address, port):
        return JobPlace(rank, size, None, address, port, "arguments")
    found = next((place for read in _SOURCES if (place := read(environ, parent)) is not None), None)
    if found is None:
        found = JobPlace(size=_number(environ, SIZE_VARIABLE), source=SIZE_VARIABLE if SIZE_VARIABLE in environ else "")
    return JobPlace(
        found.rank if rank is None else rank,
        found.size if size is None else size,
        found.local_rank,
        address or found.address,
        found.port if port is None else port,
        found.source,
    )


def _torchrun(environ: Mapping[str, str], parent: int) -> JobPlace | None:
    """Also PyTorchJob, accelerate, ``backhaul.launch``, and people who set the variables themselves."""
    if RANK_VARIABLE not in environ:
        return None
    return _place(environ, "torchrun", RANK_VARIABLE, SIZE_VARIABLE, ("LOCAL_RANK",))


def _open_mpi(environ: Mapping[str, str], parent: int) -> JobPlace | None:
    rank, size = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
    if not environ.keys() & {rank, size}:
        return None
    found = _place(environ, "Open MPI", rank, size, ("OMPI_COMM_WORLD_LOCAL_RANK",))
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or ""
    return _at(found, environ, ("OMPI_COMM_WORLD_LOCAL_SIZE",), zlib.crc32(job.encode()))


def _mpich(environ: Mapping[str, str], parent: int) -> JobPlace | None:
    """MPICH, Intel MPI, and others that speak PMI. They do not name the job, but one process of theirs starts all ranks
    of a host.
    """
    if not environ.keys() & {"PMI_RANK", "PMI_SIZE"}:
        return None
    found = _place(environ, "MPI", "PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"))
    job = _number(environ, "SLURM_JOB_ID")
    return _at(found, environ, ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"), parent if job is None else job * 16)


def _slurm(environ: Mapping[str, str], parent: int) -> JobPlace | None:
    if "SLURM_PROCID" not in environ or not environ.keys() & set(_STEP):
        return None  # the batch script has no step: only what srun starts is a task
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    found = _place(environ, "Slurm", "SLURM_PROCID", size, ("SLURM_LOCALID",))
    job, step = (_first_number(environ, names) or 0 for names in (("SLURM_JOB_ID", "SLURM_JOBID"), _STEP))
    return _at(found, environ, (), job * 16 + step)  # steps that run at the same time have ports of their own


def _at(found: JobPlace, environ: Mapping[str, str], local_size: tuple[str, ...], job: int) -> JobPlace:
    """Add where the ranks of a job meet, if its hosts are known."""
    names = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    hosts = expand_hosts(next((environ[name] for name in names if environ.get(name)), ""))
    first, second = next(hosts, None), next(hosts, None)
    one = _first_number(environ, local_size) == found.size or (first is not None and second is None)
    address, port = _HERE if one else first, _FIRST_PORT + job % _PORTS
    return dataclasses.replace(found, address=address, port=port if address else None)


def _kubernetes(environ: Mapping[str, str], parent: int) -> JobPlace | None:
    """An Indexed Job or a JobSet. Only the manifest knows how many pods there are, and the name of the first."""
    if "JOB_COMPLETION_INDEX" not in environ:
        return None
    index, size = _number(environ, "JOB_COMPLETION_INDEX"), _number(environ, SIZE_VARIABLE)
    job, pods = _number(environ, JOB_INDEX_VARIABLE), _number(environ, JOB_PODS_VARIABLE)
    if (job is None) != (pods is None):
        there, missing = (JOB_PODS_VARIABLE, JOB_INDEX_VARIABLE)[:: 1 if job is None else -1]
        raise ValueError(f"the environment sets {there} and not {missing}; a JobSet with several jobs needs both")
    if index is not None and job is not None and pods is not None:
        if index >= pods:
            raise ValueError(
                f"the environment contradicts itself: JOB_COMPLETION_INDEX={index}, but {JOB_PODS_VARIABLE}={pods}"
            )
        index += job * pods
    source = "Kubernetes (JOB_COMPLETION_INDEX)"
    if size is not None:
        _check(source, "JOB_COMPLETION_INDEX", index, SIZE_VARIABLE, size)
    return JobPlace(index, size, 0, None, _KUBERNETES_PORT, source)


_SOURCES: tuple[Callable[[Mapping[str, str], int], JobPlace | None], ...] = (
    _torchrun,
    _open_mpi,
    _mpich,
    _slurm,
    _kubernetes,
)


def _place(environ: Mapping[str, str], launcher: str, rank: str, size: str, local: tuple[str, ...]) -> JobPlace:
    """Read rank, size and local rank, and check them."""
    source = f"{launcher} ({rank})"
    number, count = _number(environ, rank), _number(environ, size)
    if number is not None and count is not None:
        _check(source, rank, number, size, count)
    if rank != RANK_VARIABLE:
        if number is None or count is None:
            there, missing = (size, rank) if number is None else (rank, size)
            raise ValueError(f"the environment sets {there} and not {missing}; start all processes with one launcher")
        whole = _number(environ, SIZE_VARIABLE)
        if whole is not None and whole != count:
            raise ValueError(
                f"the environment contradicts itself: {size}={count}, but {SIZE_VARIABLE}={whole}; set "
                f"{RANK_VARIABLE} too, or unset {SIZE_VARIABLE}"
            )
    return JobPlace(number, count, _first_number(environ, local), source=source)


def _check(source: str, rank_name: str, rank: int | None, size_name: str, size: int) -> None:
    if rank is not None and not 0 <= rank < size:
        raise ValueError(
            f"the environment of {source} contradicts itself: the rank is {rank} ({rank_name}), and the size is "
            f"{size} ({size_name})"
        )


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name)
    if value is None or (value == "" and name != RANK_VARIABLE):
        return None
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"the environment's {name} is not a number: {value!r}") from None


def _first_number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next((number for name in names if (number := _number(environ, name)) is not None), None)


def expand_hosts(nodes: str) -> Iterator[str]:
    """The hosts of a node list of Slurm, in order.

    Example:
        >>> list(expand_hosts("login,gpu[08-10,12]-a"))
        ['login', 'gpu08-a', 'gpu09-a', 'gpu10-a', 'gpu12-a']
    """
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        yield from _expand(re.split(r"\[([^\]]*)\]", part))


def _expand(pieces: list[str]) -> Iterator[str]:
    """Pieces at odd places were in brackets. Lazy: a list may be long, and its first host may be enough."""
    if len(pieces) == 1:
        yield pieces[0]
        return
    for number in _expand_ranges(pieces[1]):
        for rest in _expand(pieces[2:]):
            yield pieces[0] + number + rest


def _expand_ranges(ranges: str) -> Iterator[str]:
    for each in ranges.split(","):
        first, _, last = each.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            raise ValueError(f"the environment has a node list with a range that Slurm does not write: [{ranges}]")
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}}"
