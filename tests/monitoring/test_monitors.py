"""Monitors and real workers: what they see, and that they disturb nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import backhaul as bh
from backhaul._monitoring import runtime_files
from backhaul._monitoring.cluster_view import ClusterStatus, WorkerView
from backhaul._monitoring.monitor import Monitor
from backhaul._monitoring.status import MonitoringKind, Query
from backhaul._monitoring.status_server import StatusServer
from backhaul._transport.base import Lost
from backhaul._transport.inproc import InprocEndpoint
from backhaul._wire.frames import Frame
from backhaul._wire.messages import pack
from backhaul.profiler.model import Timeline
from tests.command.processes import run_command
from tests.monitoring.clusters import SECONDS, SECRET, RunningCluster, running, until

PLAIN = bh.Options(security=bh.Security(trusted=False))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("monitoring") / "files"


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[RunningCluster]:
    with running(folder) as made:
        yield made


@pytest.fixture
def monitor(cluster: RunningCluster) -> Iterator[Monitor]:
    with cluster.monitor() as made:
        made.attach()
        yield made


def named(status: ClusterStatus, name: str) -> WorkerView:
    return next(worker for worker in status.workers if worker.name == name)


def states(status: ClusterStatus) -> dict[str, str]:
    return {worker.name: worker.state for worker in status.workers}


@contextlib.contextmanager
def inside(options: bh.Options | None = None) -> Iterator[Monitor]:
    """A monitor of two workers of this process."""
    with (
        bh.cluster(2, options=options) as (first, _),
        Monitor(InprocEndpoint(), first.endpoint.addresses, host="this process") as made,
    ):
        yield made


class TestWhatAMonitorSees:
    def test_all_workers_and_what_they_do(self, cluster: RunningCluster, monitor: Monitor) -> None:
        until(lambda: states(monitor.refresh()) == dict.fromkeys(cluster.processes, "up"))
        driver = until(
            lambda: next(
                (
                    each
                    for each in monitor.refresh().workers
                    if each.id == 0 and min(each.rates.passes, each.rates.called, each.rates.sent) > 0
                ),
                None,
            )
        )
        assert driver.status is not None
        assert driver.status.pid == cluster.pid("worker0")
        assert driver.status.passes[-1].seconds > 0
        served = until(lambda: next((each for each in monitor.refresh().workers[1:2] if each.rates.served > 0), None))
        assert served.status is not None
        scale = next(each for each in served.status.functions if each.name == "scale")
        assert 0 < scale.longest <= scale.seconds
        assert scale.calls > 0
        calls = scale.calls  # of which the last one counts as served after its reply
        until(lambda: named(monitor.refresh(), "worker1").status.served >= calls)
        assert served.status.memory > 1 << 20

    def test_a_call_that_hangs_shows(self) -> None:
        wait = bh.Future()
        with inside() as monitor:
            hanging = bh.rpc_async("worker1", wait_for, args=(), timeout=0)
            waiting.append(wait)
            found = until(lambda: named(monitor.refresh(), "worker1").status.serving)
            assert (found[0].function, found[0].worker) == ("wait_for", "worker0")
            wait.set_result(None)
            hanging.wait()

    def test_references_and_gradients(self) -> None:
        with inside() as monitor:
            held = bh.remote("worker1", torch.zeros, args=(1000,))
            held.to_here()
            owner = named(monitor.refresh(), "worker1").status
            assert owner is not None
            assert (owner.references.owned, owner.references.owned_bytes) == (1, 4000)
            with bh.context() as context:
                x = torch.ones(500, requires_grad=True)
                bh.backward(context, [bh.rpc_sync("worker1", torch.mul, args=(x, 2)).sum()])
                here = named(monitor.refresh(), "worker0").status
                assert here is not None
                assert here.graphs.contexts == 1
                assert here.graphs.gradient_bytes == 2000

    def test_a_profile_of_everything(self, cluster: RunningCluster, monitor: Monitor) -> None:
        def record() -> Timeline | None:
            """A profile in which there is a call: the cluster may make none in that time."""
            timeline = monitor.record(0.3, ops=False)
            return timeline if {call.function for call in timeline.calls} >= {"scale"} else None

        timeline = until(record)
        assert {worker.name: worker.missing for worker in timeline.workers} == dict.fromkeys(cluster.processes, "")
        functions = named(until(monitor.refresh), "worker1").status
        assert functions is not None
        assert functions.functions, "the profile has ended the count"

    def test_the_wrong_secret(self, cluster: RunningCluster) -> None:
        with cluster.monitor("another secret of that length") as made, pytest.raises(bh.errors.AuthenticationError):
            made.attach()


waiting: list[bh.Future[None]] = []


def wait_for() -> None:
    until(lambda: waiting and waiting[0].done())
    waiting.clear()


class TestThatNothingIsDisturbed:
    def test_a_monitor_is_no_member(self, cluster: RunningCluster, monitor: Monitor) -> None:
        monitor.refresh()
        assert cluster.ask("worker0", "world") == list(cluster.processes)

    def test_workers_count_only_while_they_are_watched(self) -> None:
        with bh.cluster(2) as workers:
            assert [worker.observer for worker in workers] == [None, None]
            with Monitor(InprocEndpoint(), workers[0].endpoint.addresses, host="this process", watch=0.05) as monitor:
                monitor.attach()
            until(lambda: workers[0].observer is None and workers[1].observer is None)

    def test_a_profile_and_a_monitor_at_once(self) -> None:
        with inside() as monitor:
            with bh.profile(ops=False) as prof:
                monitor.refresh()
                for _ in range(3):
                    bh.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1))
            status = named(monitor.refresh(), "worker1").status
            assert status is not None
            assert {each.name: each.calls for each in status.functions}["add"] == 3
            assert sum(call.function == "add" and call.ran > 0 for call in prof.timeline.calls) == 3

    def test_shutdown_waits_for_no_monitor(self, tmp_path: Path) -> None:
        with running(tmp_path / "files", 2) as made, made.monitor() as monitor:
            monitor.attach()
            made.pipes["worker1"].send("end")
            assert made.ask("worker0", "end") == "ended"
            assert made.answer("worker1") == "ended"
            assert list((tmp_path / "files").glob("*")) == []
            until(lambda: set(states(monitor.refresh()).values()) == {"lost"})

    def test_a_killed_monitor(self, cluster: RunningCluster, monitor: Monitor) -> None:
        command = [sys.executable, "-m", "backhaul", "top", "--address", cluster.addresses["worker0"]]
        environ = {**os.environ, "BACKHAUL_SECRET": SECRET}
        process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert process.stdout is not None
        assert process.stdout.read(1)  # it has printed its first table
        process.kill()
        process.communicate(timeout=SECONDS)
        before = named(monitor.refresh(), "worker1").status
        assert before is not None
        until(lambda: named(monitor.refresh(), "worker1").status.served > before.served)
        assert cluster.ask("worker0", "world") == list(cluster.processes)


class TestLosses:
    def test_a_stopped_worker_is_silent_and_comes_back(self, cluster: RunningCluster, monitor: Monitor) -> None:
        os.kill(cluster.pid("worker2"), signal.SIGSTOP)
        try:
            until(lambda: states(monitor.refresh())["worker2"] in ("silent", "lost"))
            assert states(monitor.refresh())["worker0"] == "up"
        finally:
            os.kill(cluster.pid("worker2"), signal.SIGCONT)
        until(lambda: states(monitor.refresh())["worker2"] == "up")

    def test_a_killed_worker_is_lost_at_once(self, tmp_path: Path) -> None:
        with running(tmp_path / "files") as made, made.monitor() as monitor:
            monitor.attach()
            until(lambda: all(state == "up" for state in states(monitor.refresh()).values()))
            os.kill(made.pid("worker2"), signal.SIGKILL)
            made.processes["worker2"].join(SECONDS)
            assert states(monitor.refresh())["worker2"] == "lost"
            assert ("worker2", "lost") in [(each.worker, each.kind) for each in monitor.refresh().events]
            until(lambda: [(each.by, each.worker) for each in monitor.refresh().doubts] == [("worker0", "worker2")])


class TestWorkersThatDoNotTrust:
    def test_they_answer_no_monitor(self) -> None:
        with inside(PLAIN) as monitor, pytest.raises(bh.PeerLostError):
            monitor.attach(timeout=1.0)

    def test_unless_they_are_told_to(self) -> None:
        with inside(bh.Options(security=bh.Security(trusted=False, monitors=True))) as monitor:
            monitor.attach()
            until(lambda: states(monitor.refresh()) == {"worker0": "up", "worker1": "up"})
            with pytest.raises(bh.BackhaulError):
                monitor.record(0.1)

    @pytest.mark.parametrize("trusted", [True, False])
    @pytest.mark.parametrize(
        "body", [b"", b"\xc1", pack(Query(float("nan"))), pack(Query(-1.0)), b"\x91" * 200, b"\x91\xa1x"]
    )
    def test_a_broken_question_closes_its_connection_alone(self, body: bytes, trusted: bool) -> None:
        options = bh.Options(security=bh.Security(trusted=trusted, monitors=True))
        with bh.cluster(1, options=options) as (worker,):
            own = InprocEndpoint()
            try:
                channel = own.connect(worker.endpoint.addresses[0], timeout=1.0)
                channel.send(Frame(MonitoringKind.QUERY, 0, body))
                event = own.poll(SECONDS)
                assert isinstance(event, Lost)
                assert event.channel is channel
                assert worker.part(StatusServer) is not None
                assert bh.rpc_sync("worker0", bh.get_worker_info, args=("worker0",)).name == "worker0"
            finally:
                own.close()

    def test_a_page_that_shows_what_they_hide_is_refused(self) -> None:
        with pytest.raises(ValueError):
            bh.Options(dashboard="127.0.0.1:0", security=bh.Security(trusted=False))


class TestFiles:
    def test_only_the_user_can_read_them(self, cluster: RunningCluster, folder: Path) -> None:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        files = sorted(folder.glob("*.json"))
        assert len(files) == len(cluster.processes)
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}

    def test_files_of_processes_that_ended_are_removed(
        self, cluster: RunningCluster, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(runtime_files.FOLDER_VARIABLE, str(folder))
        pid = cluster.pid("worker0")
        stale = runtime_files.WorkerFile("old", 7, "f" * 16, pid, runtime_files.started(pid) - 1, ("unix:@old",), "00")
        path = runtime_files.write(stale)
        assert path is not None
        (found,) = runtime_files.find()
        assert [worker.name for worker in found.workers] == list(cluster.processes)
        assert found.secret == SECRET.encode()
        assert not path.exists()

    def test_a_worker_that_starts_removes_files_of_the_dead(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tmp_path.chmod(0o700)
        monkeypatch.setenv(runtime_files.FOLDER_VARIABLE, str(tmp_path))
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait(SECONDS)
        alive = runtime_files.write(runtime_files.WorkerFile("a", 0, "a" * 16, os.getpid(), 1, (), "00"))
        dead = runtime_files.write(runtime_files.WorkerFile("b", 1, "b" * 16, ended.pid, 1, (), "00"))
        last = runtime_files.write(runtime_files.WorkerFile("c", 2, "c" * 16, os.getpid(), 1, (), "00"))
        assert dead is not None
        assert set(tmp_path.iterdir()) == {alive, last}

    def test_a_folder_that_others_may_change_is_not_used(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tmp_path.chmod(0o777)
        monkeypatch.setenv(runtime_files.FOLDER_VARIABLE, str(tmp_path))
        assert runtime_files.write(runtime_files.WorkerFile("a", 0, "b", 1, 1, (), "00")) is None
        assert runtime_files.find() == []
        assert list(tmp_path.glob("*")) == []


class TestTop:
    def test_json(self, cluster: RunningCluster, folder: Path) -> None:
        environ = {runtime_files.FOLDER_VARIABLE: str(folder)}

        def look() -> bool:
            """Whether all have answered, and the first has made a call, in the time of one look."""
            done = run_command("top", "--json", "--interval", "0.5", environ=environ)
            assert done.returncode == 0, done.stderr
            shown = json.loads(done.stdout)["workers"]
            assert [each["name"] for each in shown] == list(cluster.processes)
            return all(each["state"] == "up" for each in shown) and shown[0]["rates"]["called"] > 0

        until(look)

    def test_once(self, cluster: RunningCluster, folder: Path) -> None:
        environ = {runtime_files.FOLDER_VARIABLE: str(folder), "COLUMNS": "160"}

        def look() -> str:
            done = run_command("top", "--once", "--interval", "0.5", environ=environ)
            assert done.returncode == 0, done.stderr
            return done.stdout

        shown = until(lambda: text if "scale" in (text := look()) else "")  # a call was made in that time
        for name in (*cluster.processes, "slowest functions"):
            assert name in shown

    def test_no_cluster(self, tmp_path: Path) -> None:
        done = run_command("top", "--once", environ={runtime_files.FOLDER_VARIABLE: str(tmp_path)})
        assert done.returncode == 1
        assert "--address" in done.stderr

    def test_a_place_where_the_page_cannot_be_served(self, cluster: RunningCluster, folder: Path) -> None:
        environ = {runtime_files.FOLDER_VARIABLE: str(folder)}
        with socket.create_server(("127.0.0.1", 0)) as taken:
            done = run_command("top", "--web", "--bind", f"127.0.0.1:{taken.getsockname()[1]}", environ=environ)
        assert done.returncode == 1
        assert "--bind" in done.stderr
        assert "Traceback" not in done.stderr

    def test_an_address_without_a_port(self) -> None:
        done = run_command("top", "--once", "--address", "host", environ={"BACKHAUL_SECRET": SECRET})
        assert done.returncode == 2
        assert "HOST:PORT" in done.stderr
