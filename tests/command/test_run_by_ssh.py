"""``backhaul run --hosts`` from one host to two others (network namespaces), each with an sshd of its own."""

from __future__ import annotations

import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from ..cluster.hosts import Host, make_hosts
from .processes import COMMAND, SECONDS
from .test_run import STUBBORN, write

SERVER = """\
Port 22
HostKey {folder}/{name}.key
AuthorizedKeysFile {folder}/user.key.pub
AuthenticationMethods publickey
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
"""
CLIENT = """\
BatchMode yes
IdentitiesOnly yes
IdentityFile {folder}/user.key
UserKnownHostsFile {folder}/known_hosts
StrictHostKeyChecking yes
ConnectTimeout 30
"""
# sshd wants an empty folder that only root can write; this one only its host sees.
START = 'mount -t tmpfs tmpfs /run && mkdir -m 755 /run/sshd && exec "$@"'


@dataclass
class Login:
    """The host on which the command runs, the hosts that it reaches, and how it reaches them."""

    here: Host
    others: list[Host]
    ssh: str
    folder: Path

    @property
    def options(self) -> list[str]:
        return ["--hosts", ",".join(host.name for host in self.others), "--ssh", self.ssh]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return self.here.start(*COMMAND, "run", *arguments, cwd=self.folder, **pipes)

    def run(self, *arguments: str) -> tuple[int, list[str], str]:
        """Run the command to its end. Returns its status, the lines of its output, and its errors."""
        process = self.start(*arguments)
        out, errors = process.communicate(timeout=SECONDS)
        return process.returncode, sorted(out.splitlines()), errors


@pytest.fixture(scope="module")
def login(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Login]:
    sshd, keygen = shutil.which("sshd", path="/usr/sbin:/usr/bin:/sbin"), shutil.which("ssh-keygen")
    if sshd is None or keygen is None or shutil.which("ssh") is None:
        pytest.skip("there is no OpenSSH; `make networks` installs it where it can")
    folder = tmp_path_factory.mktemp("ssh")
    with make_hosts(3, folder) as hosts:
        here, *others = hosts
        for name in ("user", *(host.name for host in others)):
            subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", folder / f"{name}.key"], check=True)
        (folder / "known_hosts").write_text(
            "".join(f"{host.name} {(folder / f'{host.name}.key.pub').read_text()}" for host in others)
        )
        (folder / "client").write_text(CLIENT.format(folder=folder))
        for host in others:
            (folder / f"{host.name}.sshd").write_text(SERVER.format(folder=folder, name=host.name))
            host.start("sh", "-c", START, "sh", sshd, "-D", "-e", "-f", folder / f"{host.name}.sshd")
        ssh = shlex.join(["ssh", "-F", str(folder / "client")])
        for host in others:
            until_it_answers(here, ssh, host)
        yield Login(here, others, ssh, folder)


def until_it_answers(here: Host, ssh: str, host: Host) -> None:
    deadline = time.monotonic() + SECONDS
    while (done := here.run(*shlex.split(ssh), host.name, "true")).returncode:
        assert "refused" in done.stderr, done.stderr  # it has not begun to listen
        assert time.monotonic() < deadline, "sshd does not answer"


def test_a_step_over_two_hosts(login: Login) -> None:
    """With no address and no secret given. Lines have the names of their workers, and the arguments arrive whole."""
    script = write(
        login.folder,
        "step.py",
        "import socket, sys\nimport torch\nimport backhaul as bh\n"
        "def triple(x):\n    print('serves on', socket.gethostname())\n    return 3 * x\n"
        "me = bh.init()\n"
        "if me.info.id == 0:\n    x = torch.ones(2, requires_grad=True)\n"
        "    bh.rpc_sync('table', triple, args=(x,)).sum().backward()\n"
        "    print(socket.gethostname(), sys.argv[1:], x.grad.tolist())\n    bh.shutdown()\n"
        "else:\n    bh.serve()\n",
    )
    status, lines, errors = login.run(*login.options, "--names", "trainer,table", script, "a b", "$HOME")
    assert status == 0, errors
    assert lines == ["table   | serves on host3", "trainer | host2 ['a b', '$HOME'] [3.0, 3.0]"]


def test_the_first_failure_is_shown_whole(login: Login) -> None:
    script = write(
        login.folder,
        "fail.py",
        "import os, time\nif os.environ['RANK'] == '0':\n    time.sleep(1000)\n"
        "try:\n    {}['key']\nexcept KeyError as error:\n    raise LookupError('the data are gone') from error\n",
    )
    status, _, errors = login.run(*login.options, script)
    assert status == 1
    assert "worker1 failed" in errors
    shown = errors[errors.index("worker1 failed") :].splitlines()
    printed = [line.partition("| ")[2] for line in errors.splitlines() if line.startswith("worker1 | ")]
    assert shown[1:-1] == printed
    assert {"KeyError: 'key'", "LookupError: the data are gone"} <= set(printed)


def start_stubborn(login: Login) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """Workers that ignore signals, each with a child; and these four processes."""
    process = login.start(*login.options, write(login.folder, "stubborn.py", STUBBORN))
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(2)]
    processes = [psutil.Process(int(pid)) for line in said for pid in line.partition("|")[2].split()]
    assert len(processes) == 4
    return process, processes


def test_ctrl_c_ends_the_processes_of_all_hosts(login: Login) -> None:
    process, processes = start_stubborn(login)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signal.SIGINT
    assert "SIGINT: all workers were ended" in errors
    assert psutil.wait_procs(processes, timeout=SECONDS)[1] == []


def test_a_host_that_is_cut_off_is_named_and_ends_its_workers_later(login: Login) -> None:
    """The command does not wait for it. Its sshd hears of the end of the connection when the cable is back."""
    process, processes = start_stubborn(login)
    login.others[1].cut()
    try:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
    finally:
        login.others[1].heal()
    assert process.returncode == 128 + signal.SIGINT
    assert "host3 did not answer" in errors
    assert "host2 did not answer" not in errors
    assert psutil.wait_procs(processes, timeout=SECONDS)[1] == []


def test_a_host_that_refuses_is_named(login: Login) -> None:
    ssh = f"{login.ssh} -o PubkeyAuthentication=no"
    status, _, errors = login.run("--hosts", "host2", "--ssh", ssh, write(login.folder, "script.py", "print(1)"))
    assert status == 255
    assert "host2: " in errors
    assert "Permission denied (publickey)" in errors
