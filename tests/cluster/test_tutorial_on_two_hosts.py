"""The tutorial of several hosts, as its page says it: its script, its secret and its commands, on two hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .hosts import Host, hosts, wait_all  # noqa: F401 (a fixture)

PAGE = (Path(__file__).parents[2] / "docs" / "tutorials" / "several-hosts.md").read_text()


@pytest.mark.slow
def test_the_page_leads_to_a_split_model(hosts: list[Host], tmp_path: Path) -> None:  # noqa: F811
    (script,) = re.findall(r"^```python\n(# train\.py.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (secret,) = re.findall(r"^ *export BACKHAUL_SECRET=\$\((.*)\)$", PAGE, re.MULTILINE)
    commands = re.findall(r"^ *(torchrun --nnodes 2 .*?) +# on (host\d)$", PAGE, re.MULTILINE)
    assert [host for _, host in commands] == ["host1", "host2"]
    (tmp_path / "train.py").write_text(script)
    known = subprocess.run(secret, shell=True, capture_output=True, text=True, check=True).stdout.strip()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    started, logs = [], []
    for host, (command, _) in zip(hosts, commands, strict=False):
        host.hosts_file.write_text("".join(f"{each.address} {each.name}\n" for each in hosts) + "127.0.0.1 localhost\n")
        logs.append(tmp_path / f"{host.name}.log")
        with logs[-1].open("w") as log:
            started.append(
                host.start(
                    *command.split(),
                    cwd=tmp_path,
                    environment={"PATH": path, "BACKHAUL_SECRET": known},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    statuses = wait_all(started)
    output = "".join(log.read_text() for log in logs)
    assert statuses == [0, 0], output
    assert "the last layer is on worker1" in output
