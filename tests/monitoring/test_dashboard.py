"""The server of the dashboard, and its page in Chromium, over real workers."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

import backhaul as bh
from tests.monitoring.clusters import SECONDS, RunningCluster, running, until
from tests.page_checks import problems

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

ROOT = Path(__file__).parents[2]
SAMPLE = re.compile(r'([a-z_]+)\{((?:[a-z]+="(?:[^"\\]|\\.)*",?)*)\} ([0-9.e+-]+)')


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    folder = tmp_path_factory.mktemp("dashboard") / "files"
    with running(folder, options=bh.Options(dashboard="127.0.0.1:0")) as made:
        yield made


def get(
    cluster: RunningCluster, path: str, *, token: str | None = "", host: str | None = None, method: str = "GET"
) -> tuple[int, http.client.HTTPMessage, str]:
    """Ask the server, as a program does. ``token``: None: none; empty: the right one."""
    url = urlsplit(cluster.dashboard)
    headers = {} if host is None else {"Host": host}
    if token is not None:
        headers["Authorization"] = f"Bearer {token or url.fragment.partition('=')[2]}"
    assert url.hostname is not None
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=SECONDS)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


class TestWhoMaySeeIt:
    @pytest.mark.parametrize("path", ["/api/status", "/metrics"])
    @pytest.mark.parametrize("token", [None, "wrong", "the-token-of-these-test", "the-token-of-these-testsX", "\xe9"])
    def test_data_needs_the_token(self, cluster: RunningCluster, path: str, token: str | None) -> None:
        status, _, body = get(cluster, path, token=token)
        assert status == 401
        assert "worker" not in body

    @pytest.mark.parametrize(
        "host", ["evil.example", "evil.example:80", "localhost.evil.example", "", "127.0.0.1.evil"]
    )
    def test_names_that_are_not_of_this_host(self, cluster: RunningCluster, host: str) -> None:
        assert get(cluster, "/api/status", host=host)[0] == 403
        assert get(cluster, "/", host=host)[0] == 403

    @pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:80"])
    def test_names_of_this_host(self, cluster: RunningCluster, host: str) -> None:
        assert get(cluster, "/api/status", host=host)[0] == 200

    def test_no_other_origin_may_read(self, cluster: RunningCluster) -> None:
        for path in ("/", "/api/status", "/metrics"):
            headers = get(cluster, path)[1]
            assert "Access-Control-Allow-Origin" not in headers
            assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
            assert headers["Cache-Control"] == "no-store"

    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
    def test_it_can_only_be_read(self, cluster: RunningCluster, method: str) -> None:
        assert get(cluster, "/api/status", method=method)[0] == 501

    def test_the_page_has_no_data(self, cluster: RunningCluster) -> None:
        status, _, page = get(cluster, "/", token=None)
        assert status == 200
        assert not [name for name in (*cluster.processes, "the-token-of-these-tests") if name in page]
        assert get(cluster, "/nothing")[0] == 404


class TestMetrics:
    def test_they_have_the_format_of_prometheus(self, cluster: RunningCluster) -> None:
        until(lambda: "backhaul_function_calls_total{" in get(cluster, "/metrics")[2])
        status, headers, text = get(cluster, "/metrics")
        assert status == 200
        assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
        known: dict[str, str] = {}
        for line in text.splitlines():
            if line.startswith("# TYPE"):
                _, _, name, kind = line.split()
                assert name not in known
                assert (kind == "counter") == name.endswith("_total")
                known[name] = kind
            elif not line.startswith("# HELP"):
                found = SAMPLE.fullmatch(line)
                assert found is not None, line
                assert found[1] in known
        assert 'backhaul_worker_up{worker="worker1",host="' in text

    def test_counters_grow(self, cluster: RunningCluster) -> None:
        def served() -> float:
            text = get(cluster, "/metrics")[2]
            return float(re.findall(r'backhaul_calls_served_total\{worker="worker1",[^}]*\} (\S+)', text)[0])

        before = served()
        until(lambda: served() > before)

    def test_the_grafana_dashboard_uses_metrics_that_exist(self, cluster: RunningCluster) -> None:
        text = get(cluster, "/metrics")[2]
        known = set(re.findall(r"# TYPE (\S+)", text))
        grafana = json.loads((ROOT / "examples" / "grafana" / "backhaul.json").read_text())
        queries = [target["expr"] for panel in grafana["panels"] for target in panel.get("targets", ())]
        used = {name for query in queries for name in re.findall(r"backhaul_\w+", query)}
        assert len(queries) >= 8
        assert used <= known, used - known


@pytest.fixture
def page(browser: Browser, cluster: RunningCluster) -> Iterator[Page]:
    """The dashboard. Checks at the end that the page had no error and asked no other server."""
    yield from open_page(browser, cluster)


def open_page(browser: Browser, cluster: RunningCluster) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    problems: list[str] = []
    try:
        made = context.new_page()
        made.set_default_timeout(SECONDS * 1000)
        origin = cluster.dashboard.partition("#")[0]
        made.on("console", lambda message: problems.append(f"console: {message.text}"))
        made.on("pageerror", lambda error: problems.append(f"error: {error}"))
        made.on("request", lambda asked: asked.url.startswith(origin) or problems.append(f"requested {asked.url}"))
        made.goto(cluster.dashboard)
        made.get_by_test_id("worker").first.wait_for()
        yield made
    finally:
        context.close()
    assert problems == []


class TestPage:
    def test_it_shows_what_the_workers_do(self, page: Page, cluster: RunningCluster) -> None:
        workers = page.get_by_test_id("worker")
        assert [each.get_attribute("data-name") for each in workers.all()] == list(cluster.processes)
        page.locator('[data-testid="functions"] td', has_text="scale").first.wait_for()
        page.locator('[data-testid="steps"] figcaption', has_text="worker0: last step").wait_for()
        page.locator('[data-testid="channels"] td', has_text="worker2").first.wait_for()
        page.get_by_test_id("summary").get_by_text("✓ 3 up", exact=True).wait_for()
        assert page.get_by_test_id("summary").locator("li").count() == 1
        page.get_by_test_id("live").filter(has_text=re.compile("live$")).wait_for()

    def test_the_token_leaves_the_address_bar(self, page: Page) -> None:
        assert "token" not in page.url
        page.reload()
        page.get_by_test_id("worker").first.wait_for()

    def test_a_click_opens_the_details_of_a_worker(self, page: Page, cluster: RunningCluster) -> None:
        page.locator('[data-name="worker1"]').click()
        details = page.get_by_test_id("details")
        assert "worker1" in details.get_by_role("heading", level=2).inner_text()
        assert str(cluster.pid("worker1")) in details.inner_text()
        page.get_by_test_id("close").click()
        assert details.is_hidden()

    def test_it_works_by_keyboard(self, page: Page) -> None:
        page.locator('[data-name="worker2"]').focus()
        page.keyboard.press("Enter")
        assert page.get_by_test_id("details").is_visible()
        assert page.evaluate("document.activeElement.id") == "details-title"
        page.keyboard.press("Escape")
        assert page.get_by_test_id("details").is_hidden()
        assert page.evaluate("document.activeElement.dataset.name") == "worker2"

    def test_pause(self, page: Page) -> None:
        page.get_by_test_id("pause").click()
        assert page.get_by_test_id("pause").get_attribute("aria-pressed") == "true"
        assert page.get_by_test_id("live").inner_text().endswith("paused")

    def test_an_answer_that_was_on_its_way_does_not_end_the_pause(self, page: Page) -> None:
        held: list[Route] = []

        def hold_one(route: Route) -> None:
            route.continue_() if held else held.append(route)

        page.route("**/api/status", hold_one)
        with page.expect_request("**/api/status"):
            pass
        before = page.evaluate("status.time")
        page.get_by_test_id("pause").click()
        held[0].continue_()
        page.wait_for_function("before => status.time !== before", arg=before)  # it was shown
        assert page.get_by_test_id("live").inner_text().endswith("paused")

    def test_it_is_accessible(self, page: Page) -> None:
        """With the details of a worker too; also on a phone, in both themes and by keyboard."""
        page.locator('[data-testid="steps"] svg').first.wait_for()
        page.locator('[data-testid="functions"] td').first.wait_for()
        page.locator('[data-name="worker1"]').click()
        page.get_by_test_id("pause").click()
        assert problems(page) == []


class TestLosses:
    """Last, because the worker that is killed does not come back."""

    def test_a_killed_worker_turns_red(self, page: Page, cluster: RunningCluster) -> None:
        card = page.locator('[data-name="worker2"]')
        good = card.evaluate("each => getComputedStyle(each).borderTopColor")
        os.kill(cluster.pid("worker2"), signal.SIGKILL)
        page.locator('[data-name="worker2"][data-state="lost"]').wait_for()
        assert "lost" in card.inner_text()
        red = card.evaluate("each => getComputedStyle(each).borderTopColor")
        assert red == page.evaluate("getComputedStyle(document.querySelector('.state[data-state=lost]')).color") != good
        page.locator('[data-testid="doubts"] tr', has_text="worker0").locator("td", has_text="worker2").wait_for()
        assert "worker2 is lost" in page.get_by_test_id("news").inner_text()
        assert "1 lost" in page.get_by_test_id("summary").inner_text()
        page.get_by_test_id("pause").click()
        assert problems(page) == []
