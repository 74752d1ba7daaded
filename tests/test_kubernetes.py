"""The manifests in ``examples/kubernetes``: valid, and each pod finds its rank and the first pod."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from backhaul._rpc.cluster.environment import find_place

FOLDER = Path(__file__).parent.parent / "examples" / "kubernetes"
yaml: Any = pytest.importorskip("yaml")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))


def validate(document: dict[str, Any]) -> None:
    """Check against the schema of Kubernetes. Every field must be in it."""
    schemas = pytest.importorskip("kubernetes_validate", reason="the schema of Kubernetes is not installed")
    schemas.validate(document, schemas.latest_version(), strict=True)


def variables(template: dict[str, Any], labels: dict[str, str]) -> dict[str, str]:
    """The environment of a pod with these labels, as the manifest says."""
    (container,) = template["spec"]["containers"]
    found = {}
    for variable in container["env"]:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            (label,) = re.findall(r"^metadata\.labels\['(.*)'\]$", source["fieldRef"]["fieldPath"])
            found[variable["name"]] = labels[label]
        elif "secretKeyRef" not in source:
            found[variable["name"]] = variable["value"]
    return found


def test_an_indexed_job() -> None:
    service, job = documents("indexed-job")
    validate(service)
    validate(job)
    spec, name = job["spec"], job["metadata"]["name"]
    assert spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"]  # all must run at the same time
    assert service["spec"]["selector"] == {"job-name": name}
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    given = variables(spec["template"], {})
    places = [find_place({**given, "JOB_COMPLETION_INDEX": str(n)}) for n in range(spec["completions"])]
    assert [(place.rank, place.size) for place in places] == [(rank, 4) for rank in range(4)]
    assert {place.method for place in places} == {f"tcp://{name}-0.{service['metadata']['name']}:29500"}


def test_a_job_set() -> None:
    (job_set,) = documents("jobset")
    name, (jobs,) = job_set["metadata"]["name"], job_set["spec"]["replicatedJobs"]
    assert job_set["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, **jobs["template"]})
    spec = jobs["template"]["spec"]
    assert (spec["completionMode"], spec["parallelism"]) == ("Indexed", spec["completions"])
    places = []
    for job in range(jobs["replicas"]):
        given = variables(spec["template"], {"jobset.sigs.k8s.io/job-index": str(job)})
        places += [find_place({**given, "JOB_COMPLETION_INDEX": str(n)}) for n in range(spec["completions"])]
    assert [(place.rank, place.size) for place in places] == [(rank, 4) for rank in range(4)]
    assert {place.method for place in places} == {f"tcp://{name}-{jobs['name']}-0-0.{name}:29500"}


def test_a_pytorch_job() -> None:
    (job,) = documents("pytorchjob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert replicas["Master"]["replicas"] == 1
    for each in replicas.values():
        pod = {**each["template"]["spec"], "restartPolicy": each["restartPolicy"]}
        validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "train"}, "spec": pod})
        assert [container["name"] for container in each["template"]["spec"]["containers"]] == ["pytorch"]
    assert variables(replicas["Worker"]["template"], {}) == {}  # the operator sets them
