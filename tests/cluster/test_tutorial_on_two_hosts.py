"""The tutorial of several hosts, typed as its page says it: what is not on the page is not done."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from .hosts import make_hosts, wait_all

PAGE = (Path(__file__).parents[2] / "docs" / "tutorials" / "several-hosts.md").read_text()


def test_the_page_leads_to_a_split_model(tmp_path: Path) -> None:
    (script,) = re.findall(r"^```python\n(# train\.py.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    commands = re.findall(
        r"^ +(\S.*?) +# on (host1|host2|both hosts)$", PAGE.partition("## Two hosts")[2], re.MULTILINE
    )
    (tmp_path / "train.py").write_text(script)
    environment: dict[str, str | None] = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "BACKHAUL_SECRET": None,
        "MASTER_ADDR": None,
    }

    with make_hosts(2, tmp_path) as (first, second):
        # Step 2: what is only looked at.
        looked = [command for command, where in commands if where == "host1" and not command.startswith("torchrun")]
        secret, checks = (
            first.run("bash", "-c", command, cwd=tmp_path, environment=environment).stdout.strip() for command in looked
        )
        (address,) = re.findall(r"other hosts reach this one at ([\d.]+)", " ".join(checks.split()))
        copied = {"the secret of host1": secret, "the address of host1": address}

        # Steps 3 and 4: one shell on each host.
        started, logs = [], []
        for host in (first, second):
            typed = [
                command for command, where in commands if where in (host.name, "both hosts") and command not in looked
            ]
            text = re.sub("|".join(copied), lambda found: copied[found[0]], "\n".join(typed))
            logs.append(tmp_path / f"{host.name}.log")
            with logs[-1].open("w") as log:
                started.append(
                    host.start(
                        *("bash", "-euc", text),
                        cwd=tmp_path,
                        environment=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        statuses = wait_all(started)
        output = "".join(log.read_text() for log in logs)
        assert statuses == [0, 0], output
        assert "the last layer is on worker1" in logs[0].read_text()
