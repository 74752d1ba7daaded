"""``backhaul run``: real processes, also on hosts that a stand-in for ssh leads to."""

from __future__ import annotations

import shlex
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from ..cluster.hosts import make_hosts
from .processes import COMMAND, SECONDS, run_command

pytestmark = pytest.mark.timeout(240)

# Prints what it got; no torch, so that it is fast.
ECHO = "import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['LOCAL_RANK'], *sys.argv[1:])"

SSH = """#!/bin/sh
# Instead of a connection: a shell here, with little of the environment, as sshd would start it.
echo "$1" >> "$HOSTS"
exec env -i HOST_NAME="$1" PATH="$PATH" HOME="$HOME" sh -c "$2"
"""


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return name


@pytest.fixture
def ssh(tmp_path: Path) -> str:
    script = tmp_path / "ssh"
    script.write_text(SSH.replace("$HOSTS", str(tmp_path / "connections")))
    script.chmod(0o700)
    return str(script)


def test_each_worker_gets_its_place_and_the_arguments(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", ECHO)
    done = run_command("run", script, "--epochs", "3", "-n", "2", "--", "-n", "7", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "worker0 | 0 2 0 --epochs 3 -n 7",
        "worker1 | 1 2 1 --epochs 3 -n 7",
    ]
    assert done.stderr == ""


def test_lines_stay_whole(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "script.py",
        "import os, sys\nfor n in range(300):\n"
        "    for part in (os.environ['RANK'], ' ', 'x' * 200, ' ', str(n)): print(part, end='', flush=True)\n"
        "    print()\n    print('bar 1\\rbar 2', file=sys.stderr)\nprint('no line break', end='')\n",
    )
    done = run_command("run", "-n", "3", script, cwd=tmp_path)
    expected = [f"worker{rank} | {rank} {'x' * 200} {n}" for rank in range(3) for n in range(300)]
    expected += [f"worker{rank} | no line break" for rank in range(3)]
    assert sorted(done.stdout.splitlines()) == sorted(expected)
    assert Counter(done.stderr.splitlines()) == {f"worker{rank} | bar 2": 300 for rank in range(3)}


def test_the_first_failure_is_shown_whole(tmp_path: Path) -> None:
    """One worker fails. The other one waits for it, and so fails because of it."""
    script = write(
        tmp_path,
        "script.py",
        "import time\nimport backhaul as bh\nme = bh.init()\n"
        "if me.name == 'trainer':\n    bh.rpc_sync('table', time.sleep, args=(1000,))\n"
        "if me.name == 'table':\n    raise LookupError('the data are gone')\n",
    )
    done = run_command("run", "--names", "trainer,table", script, cwd=tmp_path)
    assert done.returncode == 1
    assert "table failed" in done.stderr, done.stderr
    shown = done.stderr[done.stderr.index("table failed") :].splitlines()
    assert shown[1] == "Traceback (most recent call last):"
    assert "LookupError: the data are gone" in shown
    assert [line for line in shown if "PeerLostError" in line] == []


@pytest.mark.parametrize(
    ("ending", "status", "said"),
    [
        ("sys.exit(7)", 7, "ended with exit status 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL, "was killed by SIGKILL"),
    ],
)
def test_the_exit_status_is_that_of_the_first_failure(tmp_path: Path, ending: str, status: int, said: str) -> None:
    script = write(
        tmp_path,
        "script.py",
        f"import os, signal, sys, time\nif os.environ['RANK'] == '1':\n    print('at the end')\n    {ending}\n"
        "time.sleep(1000)\n",
    )
    done = run_command("run", "-n", "2", script, cwd=tmp_path)
    assert done.returncode == status
    assert f"worker1 failed: it {said}" in done.stderr
    assert "at the end" in done.stderr


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print(os.getpid(), child.pid)
time.sleep(1000)
"""


def start_stubborn(folder: Path, *options: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """Two workers that ignore signals, each with a child; and all processes that the command has started."""
    script = write(folder, "script.py", STUBBORN)
    process = subprocess.Popen(
        [*COMMAND, "run", "-n", "2", *options, script],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(2)]
    processes = [psutil.Process(int(pid)) for line in said for pid in line.partition("|")[2].split()]
    known = {each.pid for each in processes}
    processes += [each for each in psutil.Process(process.pid).children(recursive=True) if each.pid not in known]
    assert len(processes) >= 5  # with the process that runs the host
    return process, processes


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_processes(tmp_path: Path, number: signal.Signals) -> None:
    process, processes = start_stubborn(tmp_path)
    process.send_signal(number)
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + number
    assert f"{number.name}: all workers were ended" in errors
    assert psutil.wait_procs(processes, timeout=SECONDS)[1] == []


def test_no_process_outlives_a_command_that_is_killed(tmp_path: Path) -> None:
    process, processes = start_stubborn(tmp_path)
    process.kill()
    process.communicate(timeout=SECONDS)
    assert psutil.wait_procs(processes, timeout=SECONDS)[1] == []


def test_hosts_are_reached_by_ssh(tmp_path: Path, ssh: str) -> None:
    """The workers of a host share one connection. No secret is in an argument."""
    script = write(tmp_path, "script.py", ECHO + "; print(os.environ['HOST_NAME'], os.environ.get('COLOR'))")
    (tmp_path / "hosts").write_text("one:2  # the larger one\ntwo\n")
    done = run_command(
        "run", "--hosts", "hosts", "--ssh", ssh, "--env", "COLOR=red", script, cwd=tmp_path, environ={"LC_ALL": "C"}
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "worker0 | 0 3 0",
        "worker0 | one red",
        "worker1 | 1 3 1",
        "worker1 | one red",
        "worker2 | 2 3 0",
        "worker2 | two red",
    ]
    assert sorted((tmp_path / "connections").read_text().splitlines()) == ["one", "two"]


def test_workers_on_hosts_meet_and_encrypt(tmp_path: Path) -> None:
    """Two network namespaces. Nobody has set a secret or an address: the command makes the one, and finds the other."""
    script = write(
        tmp_path,
        "script.py",
        "import socket\nimport backhaul as bh\nfrom backhaul._rpc.node import Node\nme = bh.init()\n"
        "if me.info.id == 0:\n"
        "    print(bh.rpc_sync('worker1', socket.gethostname))\n"
        "    print(type(me.part(Node).peers.find('worker1').channel).__name__)\n    bh.shutdown()\n"
        "else:\n    bh.serve()\n",
    )
    with make_hosts(2, tmp_path) as hosts:
        cases = [f'{host.address}) exec {shlex.join(host.command("sh", "-c"))} "$2" ;;' for host in hosts]
        ssh = write(tmp_path, "ssh", "\n".join(["#!/bin/sh", 'case "$1" in', *cases, "esac"]))
        (tmp_path / ssh).chmod(0o700)
        addresses = ",".join(host.address for host in hosts)
        done = run_command("run", "--hosts", addresses, "--ssh", str(tmp_path / ssh), script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["worker0 | host2", "worker0 | TlsChannel"]


def test_ctrl_c_ends_processes_of_other_hosts(tmp_path: Path, ssh: str) -> None:
    process, processes = start_stubborn(tmp_path, "--hosts", "one,two", "--ssh", ssh)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signal.SIGINT
    assert psutil.wait_procs(processes, timeout=SECONDS)[1] == []


def test_a_host_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", ECHO)
    ssh = shlex.join([sys.executable, "-c", "import sys; sys.exit('no route to ' + sys.argv[1])"])
    done = run_command("run", "--hosts", "one", "--ssh", ssh, script, cwd=tmp_path)
    assert done.returncode == 255
    assert "one: no route to one" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("script.py",),
        ("-n", "0", "script.py"),
        ("-n", "two", "script.py"),
        ("-n", "2", "."),
        ("-n", "2", "script.py", "--master-port", "99999"),
        ("-n", "2", "nonsense.py"),
        ("-n", "2"),
        ("-n", "2", "script.py", "-n", "3"),
        ("-n", "3", "--names", "a,b", "script.py"),
        ("--names", "a,a", "script.py"),
        ("--names", "a b", "script.py"),
        ("-n", "1", "--hosts", "a,b", "script.py"),
        ("-n", "3", "--hosts", "a:1,b:1", "script.py"),
        ("--hosts", "a,a", "script.py"),
        ("--hosts", "localhost,b", "script.py"),
    ],
)
def test_misuse_is_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    write(tmp_path, "script.py", "print('started')")
    done = run_command("run", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "script.py", "print('started')")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run_command("run", "script.py", "-n", "1", "--master-port", port, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--master-port {port}" in done.stderr
    assert run_command("run", "script.py", "-n", "1", "--master-port", port, cwd=tmp_path).returncode == 0
