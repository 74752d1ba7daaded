"""The dashboard of a cluster on two hosts, which are network namespaces, in a Chromium on the first one."""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path

import backhaul as bh
from tests.cluster.hosts import make_hosts
from tests.monitoring.clusters import SECONDS, running
from tests.profiler.conftest import find_chromium, open_browser


def test_workers_are_grouped_by_host_and_a_killed_one_turns_red(tmp_path: Path) -> None:
    chromium = find_chromium()
    with make_hosts(2, tmp_path) as hosts:
        wrapper = tmp_path / "chromium"
        wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(hosts[0].command(chromium))} "$@"\n')
        wrapper.chmod(0o700)
        options = bh.Options(dashboard="127.0.0.1:0")
        with (
            running(tmp_path / "files", size=4, options=options, hosts=hosts) as cluster,
            open_browser(wrapper) as browser,
        ):
            page = browser.new_page(reduced_motion="reduce")
            page.set_default_timeout(SECONDS * 1000)
            page.goto(cluster.dashboard)
            page.locator(".worker[data-state=up]").nth(3).wait_for()
            groups = page.evaluate(
                """Object.fromEntries([...document.querySelectorAll(".host")].map((host) => [
                  host.querySelector("h3").textContent,
                  [...host.querySelectorAll(".worker")].map((each) => each.dataset.name)]))"""
            )
            assert groups == {"host1": ["worker0", "worker2"], "host2": ["worker1", "worker3"]}
            good = page.evaluate(BORDER, "worker3")
            os.kill(cluster.pid("worker3"), signal.SIGKILL)
            page.locator('[data-name="worker3"][data-state="lost"]').wait_for()
            alarm = page.evaluate("getComputedStyle(document.querySelector('.state[data-state=lost]')).color")
            assert page.evaluate(BORDER, "worker3") == alarm != good
            assert page.evaluate(BORDER, "worker1") == good  # on the same host


BORDER = "name => getComputedStyle(document.querySelector(`[data-name=${name}]`)).borderLeftColor"
