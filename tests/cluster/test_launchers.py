"""``init`` and ``serve`` under real launchers: torchrun with restarts and with nodes that come and go, MPI, Slurm."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backhaul._rpc.cluster.environment import expand_hosts

from .remote_functions import PATIENCE

PROGRAM = Path(__file__).parent / "programs" / "launched.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
OTHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "BACKHAUL_SECRET")


def environment() -> dict[str, str]:
    """No variables of the launcher that runs these tests."""
    found = {key: value for key, value in os.environ.items() if key not in OTHERS}
    return {key: value for key, value in found.items() if not key.startswith(("SLURM", "OMPI", "PMI"))} | {
        "OMP_NUM_THREADS": "1"
    }


def met(folder: Path) -> list[list[str]]:
    """The names of all workers, each time that they have met."""
    return [json.loads(line) for line in (folder / "met").read_text().splitlines()]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_torchrun_restarts_workers_that_die_before_and_after_init(tmp_path: Path) -> None:
    """The store of the first attempt serves all of them."""
    options = ["--nproc-per-node", "2", "--max-restarts", "2", "--standalone"]
    command = [*TORCHRUN, *options, str(PROGRAM), str(tmp_path), "restarts"]
    ended = subprocess.run(command, timeout=PATIENCE, env=environment(), check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert met(tmp_path) == [["worker0", "worker1"]]


@pytest.mark.timeout(240)
def test_nodes_of_torchrun_come_and_go(tmp_path: Path) -> None:
    """Two nodes, then three, then two, which finish the work."""
    conf = "last_call_timeout=1,keep_alive_interval=1,timeout=90,join_timeout=90"
    options = ["--nnodes", "2:3", "--nproc-per-node", "1", "--max-restarts", "9", "--rdzv-backend", "c10d"]
    options += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "job", "--rdzv-conf", conf]
    command = [*TORCHRUN, *options, "--local-addr", "127.0.0.1", str(PROGRAM), str(tmp_path), "elastic"]
    logs, nodes = [tmp_path / f"node{number}" for number in range(3)], list[subprocess.Popen[bytes]]()
    # With one store for all of its rounds, torch's own agents wait for each other when a node comes.
    environ = environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    (tmp_path / "met").touch()

    def start() -> None:
        with open(logs[len(nodes)], "wb") as log:
            nodes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environ))

    def until(size: int) -> None:
        """The next line of the file says that so many workers have met."""
        for _ in range(int(PATIENCE * 15)):
            found = met(tmp_path)
            if found and len(found[-1]) == size:
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                nodes[0].wait(0.1)
        raise AssertionError("\n".join(log.read_text() for log in logs if log.exists()))

    try:
        start()
        start()
        until(2)
        start()
        until(3)
        (tmp_path / "finish").touch()
        nodes[2].terminate()
        codes = [node.wait(PATIENCE) for node in nodes[:2]]
        assert codes == [0, 0], "\n".join(log.read_text() for log in logs)
        # A node that is slow misses a round: then two meet more than once before the three do.
        assert [size for size, _ in itertools.groupby(map(len, met(tmp_path)))] == [2, 3, 2]
    finally:
        for node in nodes:
            node.terminate()
        for node in nodes:
            try:
                node.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                node.kill()
                node.wait()


@pytest.mark.parametrize(
    ("name", "options"),
    [("mpirun.openmpi", ["--allow-run-as-root", "--oversubscribe"]), ("mpiexec.hydra", [])],
)
def test_mpi(name: str, options: list[str], tmp_path: Path) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed; `make launchers` installs it")
    command = [name, *options, "-n", "2", sys.executable, str(PROGRAM), str(tmp_path), "meet"]
    subprocess.run(command, timeout=PATIENCE, env=environment(), check=True)
    assert met(tmp_path) == [["worker0", "worker1"]]


SLURM = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 SocketsPerBoard=4 CoresPerSocket=1 ThreadsPerCore=1 RealMemory=100
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment for the commands of a Slurm cluster of one node."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "srun") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip("Slurm needs root, munged, slurmctld and slurmd; `make launchers` installs them")
    host, folder = socket.gethostname().partition(".")[0], tmp_path / "slurm"
    folder.mkdir(mode=0o755)
    (folder / "spool").mkdir()
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    (folder / "slurm.conf").write_text(SLURM.format(host=host, folder=folder, ports=(free_port(), free_port())))
    environ = environment() | {"SLURM_CONF": str(folder / "slurm.conf")}
    files = [f"--{kind}-file={folder}/{name}" for kind, name in (("key", "key"), ("pid", "pid"), ("seed", "seed"))]
    munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(open(folder / "log", "wb"))
        for command in ([*munged, f"--log-file={folder}/munged.log"], ["slurmctld", "-D", "-c"], ["slurmd", "-D"]):
            process = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=log, env=environ))
            stack.callback(process.terminate)
        for _ in range(1000):
            asked = subprocess.run(
                ["sinfo", "-h", "-o", "%T"], capture_output=True, text=True, env=environ, check=False
            )
            if asked.stdout.strip() == "idle":
                break
        else:
            pytest.skip(f"Slurm does not start here: {(folder / 'log').read_text()}")
        yield environ


@pytest.mark.timeout(240)
def test_slurm(slurm: dict[str, str], tmp_path: Path) -> None:
    command = ["srun", "-n", "2", sys.executable, str(PROGRAM), str(tmp_path), "meet"]
    subprocess.run(command, timeout=PATIENCE, env=slurm, check=True)
    assert met(tmp_path) == [["worker0", "worker1"]]
    for nodes in ("a", "a[1-3]", "gpu[08-10,12],login", "r[1-2]n[01-03]", "x[9-11]"):
        command = ["scontrol", "show", "hostnames", nodes]
        asked = subprocess.run(command, timeout=PATIENCE, env=slurm, check=True, capture_output=True, text=True)
        assert list(expand_hosts(nodes)) == asked.stdout.split()
