"""What is drawn and written of a recorded cluster."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import backhaul as bh
from backhaul._monitoring import runtime_files
from backhaul._monitoring.step_graph import last_step, to_page, to_svg
from backhaul.profiler.model import Timeline
from tests.command.processes import run_command
from tests.monitoring.clusters import RunningCluster, running, scale, until


def outer(x: torch.Tensor) -> torch.Tensor:
    return bh.rpc_sync("worker2", scale, args=(x,))


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    """Two steps: a call of worker 1 that calls worker 2."""
    with bh.cluster(3), bh.profile(ops=False) as prof:
        for _ in range(2):
            bh.rpc_sync("worker1", outer, args=(torch.ones(64, requires_grad=True),)).sum().backward()
    return prof.timeline


def test_the_graph_has_the_calls_and_the_gradients_of_one_step(timeline: Timeline) -> None:
    graph = last_step(timeline)
    assert graph is not None
    assert graph.workers == [(0, "worker0"), (1, "worker1"), (2, "worker2")]
    edges = {
        (edge.kind, graph.nodes[edge.source].worker, graph.nodes[edge.target].worker, graph.nodes[edge.target].label)
        for edge in graph.edges
    }
    assert {edge for edge in edges if edge[0] == "request"} == {
        ("request", 0, 1, "outer"),
        ("request", 1, 2, "scale"),
    }
    gradients = {edge[1:3] for edge in edges if edge[0] == "gradient"}
    assert gradients == {(0, 1), (1, 2), (2, 1), (1, 0)}
    assert sum(node.kind == "call" for node in graph.nodes) == 2


def test_there_is_no_graph_without_a_pass() -> None:
    assert last_step(Timeline(owner=0, end=1)) is None


def test_the_picture_is_valid_and_escapes_names(timeline: Timeline) -> None:
    graph = last_step(timeline)
    assert graph is not None
    hostile = graph._replace(
        workers=[(number, f"<script>{name}&") for number, name in graph.workers],
        nodes=[node._replace(label="<b>&\"'") for node in graph.nodes],
    )
    picture = ET.fromstring(to_svg(hostile))
    assert len([each for each in picture.iter() if each.tag.endswith("}rect")]) == len(graph.nodes) + 1
    assert "<script" not in to_page(hostile)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningCluster, Path]]:
    folder = tmp_path_factory.mktemp("recording") / "files"
    with running(folder) as made:
        yield made, folder


@pytest.mark.parametrize("subcommand", ["trace", "graph"])
def test_the_commands(cluster: tuple[RunningCluster, Path], tmp_path: Path, subcommand: str) -> None:
    environ = {runtime_files.FOLDER_VARIABLE: str(cluster[1])}
    options = ("--no-ops",) if subcommand == "trace" else ()

    def record() -> str:
        """The file, if the cluster has made a whole step in that time."""
        done = run_command(subcommand, "--json", "--seconds", "0.4", *options, cwd=tmp_path, environ=environ)
        if done.returncode == 1 and "no backward pass ended" in done.stderr:
            return ""
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["workers"] == list(cluster[0].processes)
        text = (tmp_path / report["file"]).read_text()
        return text if "scale" in text else ""

    text = until(record)
    if subcommand == "trace":
        events = json.loads(text)["traceEvents"]
        assert {event["args"]["name"].split()[0] for event in events if event["name"] == "process_name"} >= {"worker0"}
        assert any("scale" in event["name"] for event in events)
    else:
        assert "scale" in "".join(ET.fromstring(text).itertext())


TRAINING = """
import sys
import torch
import backhaul as bh

w = torch.ones(4, requires_grad=True)

def inner(x):
    return x * w

def outer(x):
    return bh.rpc_sync("worker2", inner, args=(x,)) * w

if bh.init().info.id == 0:
    print(*sys.argv[1:])
    while True:  # until the command has what it wants
        bh.rpc_sync("worker1", outer, args=(torch.ones(4, requires_grad=True),)).sum().backward()
bh.serve()
"""

WITH_OWN_WORKERS = """
import torch
import backhaul as bh

def double(x):
    return 2 * x

with bh.cluster(2):
    bh.rpc_sync("worker1", double, args=(torch.ones(2, requires_grad=True),)).sum().backward()
"""


class TestGraphOfAScript:
    def test_a_step_of_a_script_that_would_never_end(self, tmp_path: Path) -> None:
        """The second step: exactly its two calls, and its gradients on the way back through all workers."""
        (tmp_path / "train.py").write_text(TRAINING)
        arguments = ("train.py", "-n", "3", "--step", "2", "-o", "graph.html", "--json", "--lr", "1")
        done = run_command("graph", *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["file"] == "graph.html"
        assert done.stderr.splitlines() == ["worker0 | --lr 1"]
        page = (tmp_path / "graph.html").read_text()
        rows = ET.fromstring(page[page.index("<tbody>") : page.index("</table>")])
        found = [[cell.text or "" for cell in row] for row in rows]
        assert [(what, on, why.partition(",")[0]) for what, on, why, _ in found if what != "backward"] == [
            ("outer", "worker1", "step on worker0"),
            ("inner", "worker2", "outer on worker1"),
        ]
        assert {on for what, on, *_ in found if what == "backward"} == {"worker0", "worker1", "worker2"}

    def test_a_script_that_starts_its_workers_itself(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(WITH_OWN_WORKERS)
        done = run_command("graph", "train.py", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "double" in "".join(ET.parse(tmp_path / "graph.svg").getroot().itertext())

    @pytest.mark.parametrize(
        ("script", "status", "said"),
        [("print('done')", 1, "no backward pass"), ("raise LookupError('no data')", 1, "LookupError: no data")],
    )
    def test_a_script_without_a_pass(self, tmp_path: Path, script: str, status: int, said: str) -> None:
        (tmp_path / "train.py").write_text(script)
        done = run_command("graph", "train.py", "-n", "2", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (status, "")
        assert said in done.stderr
        assert not (tmp_path / "graph.svg").exists()

    @pytest.mark.parametrize("arguments", [("-n", "2"), ("train.py", "--seconds", "3"), ("train.py", "--step", "0")])
    def test_options_that_do_not_fit(self, tmp_path: Path, arguments: tuple[str, ...]) -> None:
        assert run_command("graph", *arguments, cwd=tmp_path).returncode == 2
