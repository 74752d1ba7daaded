"""The workflows of GitHub Actions: what they run exists here, actions are pinned, and permissions are few."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.matrix import PAIRS

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*"))
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}|\./\.github/workflows/(?P<file>[\w.-]+)")
INTERPRETED = re.compile(r"\$\{\{(?! matrix\.)")


def load(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def steps_of(workflow: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job.get("steps", [])


def test_there_are_workflows_for_tests_documentation_and_releases() -> None:
    assert {"tests.yml", "docs.yml", "release.yml"} <= {path.name for path in WORKFLOWS}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow(path: Path) -> None:
    workflow = load(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert "secrets." not in path.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert any(True for _ in steps_of(workflow))
    for name, job in workflow["jobs"].items():
        assert "uses" in job or {"runs-on", "timeout-minutes"} <= set(job), name
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= set(workflow["jobs"])
    for used in [each["uses"] for each in (*workflow["jobs"].values(), *steps_of(workflow)) if "uses" in each]:
        pinned = PINNED.fullmatch(used)
        assert pinned, f"{used}: name the commit"
        assert pinned["file"] is None or (path.parent / pinned["file"]).exists()
    for command in [step["run"] for step in steps_of(workflow) if "run" in step]:
        assert not INTERPRETED.search(command), f"{command}: pass values in variables, which a shell does not interpret"
        made = re.match(r"(?:sudo )?make ((?:[a-z-]+ ?)+)", command)
        assert made or command.startswith(("python -m pip install -c constraints.txt ", "python -m twine ", "gh "))
        if made:
            assert set(made[1].split()) <= targets, command


def test_the_versions_are_those_of_the_matrix() -> None:
    versions = load(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["versions"]
    assert versions["strategy"]["matrix"]["pair"] == [str(pair) for pair in PAIRS]
    setup = next(step for step in versions["steps"] if step.get("uses", "").startswith("actions/setup-python"))
    assert set(setup["with"]["python-version"].split()) == {pair.python for pair in PAIRS}


def test_only_the_upload_may_write() -> None:
    release = load(ROOT / ".github" / "workflows" / "release.yml")
    allowed = {name: job["permissions"] for name, job in release["jobs"].items() if "permissions" in job}
    assert allowed == {"publish": {"contents": "write", "id-token": "write"}}
    assert release["jobs"]["publish"]["environment"] == "release"
    assert release["jobs"]["publish"]["needs"] == "build"
    assert release["jobs"]["build"]["needs"] == "tests"
