"""The report in a real browser: what the page shows after clicks and keys."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from backhaul._monitoring.step_graph import last_step, to_page
from backhaul.profiler.model import Slice, Timeline, Track, WorkerRow
from tests.page_checks import problems
from tests.profiler.conftest import Open
from tests.profiler.sample import HOSTILE, big, sample

if TYPE_CHECKING:
    from playwright.sync_api import Page


EXAMPLES = Path(__file__).parents[2] / "examples"


def click_slice(page: Page, number: int) -> None:
    """Click a slice where it is drawn."""
    place = page.evaluate("id => backhaul.pixelOf(id)", number)
    assert place is not None, "the slice is not visible"
    page.mouse.click(place["x"], place["y"])


def is_visible(page: Page, number: int) -> bool:
    return page.evaluate("id => backhaul.pixelOf(id)", number) is not None


def visible(page: Page) -> tuple[float, float]:
    found: dict[str, Any] = page.evaluate("backhaul.visible()")
    return found["start"], found["end"]


def screenshot(page: Page) -> str:
    """An image of the tracks."""
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    found: str = page.evaluate("document.getElementById('canvas').toDataURL()")
    return found


def test_the_example_of_make_run(open_report: Open, tmp_path: Path) -> None:
    """With real workers and messages: a selected call shows what the other process did for it."""
    command = [sys.executable, "train_transformer.py", "--steps", "2", "--profile", str(tmp_path)]
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "rpc_sync#RemoteModule.forward(driver -> head)" in done.stdout
    assert (tmp_path / "trace.json").stat().st_size
    page = open_report(tmp_path / "report.html")
    assert page.locator("h1").inner_text() == "Three steps of a transformer"
    row = page.get_by_test_id("call-row").filter(has_text="forward(driver -> body-1)").first
    row.click()
    near, far = page.get_by_test_id("near"), page.get_by_test_id("far")
    assert "On driver" in near.inner_text()
    assert "On body-1" in far.inner_text()
    page.get_by_test_id("show-far").click()
    call = page.evaluate("backhaul.selected().call")
    served = page.evaluate("id => backhaul.timeline.calls.find(each => each.id === id).far", call)
    click_slice(page, served)
    assert page.evaluate("backhaul.selected()") == {"call": call, "slice": served}


class TestSelecting:
    def test_a_click_on_a_call_shows_its_remote_half(self, open_report: Open) -> None:
        timeline = sample()
        call = timeline.calls[0]
        page = open_report(timeline)
        click_slice(page, call.near)
        assert page.get_by_test_id("selected").inner_text() == call.function
        near, far = page.get_by_test_id("near"), page.get_by_test_id("far")
        assert "On trainer" in near.inner_text()
        assert "On stage1" in far.inner_text()
        assert f"{(call.ran - call.decoded) / 1e6:.2f} ms" in far.inner_text()
        assert page.evaluate("backhaul.selected()") == {"call": call.id, "slice": call.near}

    def test_a_click_on_the_remote_half_selects_the_call_too(self, open_report: Open) -> None:
        timeline = sample()
        call = timeline.calls[0]
        page = open_report(timeline)
        page.evaluate("document.getElementById('tracks').scrollTop = 150")
        click_slice(page, call.far)
        assert page.evaluate("backhaul.selected()") == {"call": call.id, "slice": call.far}
        assert page.get_by_test_id("near").is_visible()

    def test_the_button_shows_the_remote_half(self, open_report: Open) -> None:
        timeline = sample()
        call = next(call for call in timeline.calls if call.callee == 2 and call.parent < 0)
        page = open_report(timeline)
        click_slice(page, call.near)
        assert not is_visible(page, call.far)
        page.get_by_test_id("show-far").click()
        assert is_visible(page, call.far)
        start, end = visible(page)
        far = timeline.slices[call.far]
        assert start <= far.start <= far.end <= end
        page.get_by_test_id("show-near").click()
        assert is_visible(page, call.near)

    def test_a_row_of_the_table_selects_its_call(self, open_report: Open) -> None:
        timeline = sample()
        page = open_report(timeline)
        row = page.get_by_test_id("call-row").nth(3)
        row.click()
        assert page.evaluate("backhaul.selected().call") == int(row.get_attribute("data-id"))
        assert "marked" in row.get_attribute("class")
        assert page.get_by_test_id("far").is_visible()

    def test_the_tables_work_by_keyboard(self, open_report: Open) -> None:
        page = open_report(sample())
        page.get_by_test_id("call-row").nth(1).get_by_role("button").focus()
        page.keyboard.press("Enter")
        assert page.evaluate("backhaul.selected().call") == 1
        page.keyboard.press("Escape")
        assert page.evaluate("backhaul.selected().call") == -1

    def test_from_a_call_to_its_parent_and_back(self, open_report: Open) -> None:
        timeline = sample()
        inner = next(call for call in timeline.calls if call.parent >= 0)
        page = open_report(timeline)
        page.evaluate("id => backhaul.select(id)", inner.id)
        page.get_by_test_id("parent").click()
        assert page.evaluate("backhaul.selected().call") == inner.parent
        page.get_by_test_id("child").first.click()
        assert page.evaluate("backhaul.selected().call") == inner.id

    def test_a_failed_call_shows_the_exception(self, open_report: Open) -> None:
        timeline = sample()
        page = open_report(timeline)
        page.evaluate("id => backhaul.select(id)", next(call.id for call in timeline.calls if call.failed))
        assert page.get_by_test_id("failed").inner_text() == "Failed: ValueError"

    def test_a_call_to_a_missing_worker_shows_why_it_is_missing(self, open_report: Open) -> None:
        timeline = sample()
        page = open_report(timeline)
        page.evaluate("id => backhaul.select(id)", next(call.id for call in timeline.calls if call.callee == 3))
        assert "it did not answer within 5 s" in page.get_by_test_id("far").inner_text()
        assert page.get_by_test_id("show-far").is_disabled()

    def test_a_slice_without_a_call_has_details(self, open_report: Open) -> None:
        timeline = sample()
        one = next(row for row in timeline.slices if row.kind == "pass")
        page = open_report(timeline)
        before = screenshot(page)
        click_slice(page, one.id)
        assert page.get_by_test_id("selected").inner_text() == one.name
        assert "a backward pass" in page.get_by_test_id("details").inner_text()
        assert "3, 197 kB" in page.get_by_test_id("details").inner_text()
        assert screenshot(page) != before  # the gradients of the pass are highlighted

    def test_a_click_on_an_empty_place_clears_the_selection(self, open_report: Open) -> None:
        timeline = sample()
        page = open_report(timeline)
        click_slice(page, timeline.calls[0].near)
        place = page.evaluate("id => backhaul.pixelOf(id)", timeline.calls[0].near)
        frame = page.get_by_test_id("tracks").bounding_box()
        assert frame is not None
        page.mouse.click(frame["x"] + 171, place["y"])
        assert page.evaluate("backhaul.selected()") == {"call": -1, "slice": -1}


class TestMoving:
    def test_the_wheel_zooms_at_the_mouse(self, open_report: Open) -> None:
        timeline = sample()
        near = timeline.calls[0].near
        page = open_report(timeline)
        before, place = visible(page), page.evaluate("id => backhaul.pixelOf(id)", near)
        page.mouse.move(place["x"], place["y"])
        page.mouse.wheel(0, -300)
        page.wait_for_function("end => backhaul.visible().end < end", arg=before[1])
        after = page.evaluate("id => backhaul.pixelOf(id)", near)
        assert after["width"] > place["width"]
        assert after["x"] == pytest.approx(place["x"], abs=2)

    def test_keys_zoom_and_move(self, open_report: Open) -> None:
        page = open_report(sample())
        everything = visible(page)
        page.get_by_test_id("tracks").focus()
        for key in "www":
            page.keyboard.press(key)
        start, end = visible(page)
        assert everything[0] < start < end < everything[1]
        page.keyboard.press("d")
        assert visible(page)[0] > start
        page.keyboard.press("ArrowLeft")
        assert visible(page)[0] == pytest.approx(start)
        page.keyboard.press("s")
        assert visible(page)[1] - visible(page)[0] > end - start
        page.get_by_test_id("fit").click()
        assert visible(page) == pytest.approx(everything)

    def test_dragging_moves_and_selects_nothing(self, open_report: Open) -> None:
        timeline = sample()
        page = open_report(timeline)
        page.evaluate("id => backhaul.select(id)", 0)
        page.keyboard.press("Escape")
        start = visible(page)[0]
        place = page.evaluate("id => backhaul.pixelOf(id)", timeline.calls[0].near)
        page.mouse.move(place["x"], place["y"])
        page.mouse.down()
        page.mouse.move(place["x"] - 200, place["y"], steps=4)
        page.mouse.up()
        assert visible(page)[0] > start
        assert page.evaluate("backhaul.selected().call") == -1

    def test_a_tooltip_names_the_slice_under_the_mouse(self, open_report: Open) -> None:
        timeline = sample()
        call = timeline.calls[0]
        page = open_report(timeline)
        place = page.evaluate("id => backhaul.pixelOf(id)", call.near)
        page.mouse.move(place["x"], place["y"])
        assert call.name in page.get_by_test_id("tooltip").inner_text()
        page.mouse.move(5, 5)
        assert page.get_by_test_id("tooltip").is_hidden()

    def test_a_collapsed_worker_expands_when_its_slice_is_shown(self, open_report: Open) -> None:
        timeline = sample()
        call = timeline.calls[0]
        page = open_report(timeline)
        button = page.get_by_role("button", name="stage1", exact=True)
        button.click()
        assert button.get_attribute("aria-expanded") == "false"
        click_slice(page, call.near)
        page.get_by_test_id("show-far").click()
        assert button.get_attribute("aria-expanded") == "true"


class TestFinding:
    def test_search_counts_and_jumps(self, open_report: Open) -> None:
        timeline = sample()
        found = sorted((row for row in timeline.slices if "checkpoint.put" in row.name), key=lambda r: (r.start, r.id))
        page = open_report(timeline)
        page.keyboard.press("/")
        page.keyboard.type("CHECKPOINT.put")
        assert page.get_by_test_id("search-count").inner_text() == f"1 of {len(found)}"
        assert is_visible(page, found[0].id)
        page.keyboard.press("Enter")
        page.get_by_test_id("search-next").click()
        assert page.get_by_test_id("search-count").inner_text() == f"3 of {len(found)}"
        assert is_visible(page, found[2].id)
        page.get_by_test_id("search").fill("there is no such name")
        assert page.get_by_test_id("search-count").inner_text() == "none"

    def test_a_name_filters_the_calls(self, open_report: Open) -> None:
        timeline = sample()
        page = open_report(timeline)
        before = screenshot(page)
        row = page.get_by_test_id("name-row").first
        name = row.get_attribute("data-id")
        row.click()
        count = sum(call.name == name for call in timeline.calls)
        assert page.get_by_test_id("call-row").count() == count < len(timeline.calls)
        assert screenshot(page) != before
        page.get_by_test_id("filter").click()
        assert page.get_by_test_id("call-row").count() == len(timeline.calls)
        assert screenshot(page) == before

    def test_the_names_can_be_sorted(self, open_report: Open) -> None:
        page = open_report(sample())
        names = page.get_by_test_id("names")
        names.get_by_role("button", name="Name").click()
        rows = [row.get_attribute("data-id") for row in page.get_by_test_id("name-row").all()]
        assert rows == sorted(rows)
        assert names.get_by_role("columnheader").first.get_attribute("aria-sort") == "ascending"


class TestShowing:
    def test_what_the_step_waited_for(self, open_report: Open) -> None:
        timeline = sample()
        totals: dict[tuple[str, int], int] = {}
        for one in timeline.path:
            totals[one.kind, one.worker] = totals.get((one.kind, one.worker), 0) + one.end - one.start
        (kind, worker), most = max(totals.items(), key=lambda item: item[1])
        page = open_report(timeline)
        rows = page.get_by_test_id("waited-row")
        assert rows.count() == len(totals)
        assert f"{kind} on {timeline.workers[worker].name}" in rows.first.inner_text()
        assert f"{round(100 * most / timeline.end)}%" in rows.first.inner_text()

    def test_the_strip_of_the_path_is_aligned_with_the_time(self, open_report: Open) -> None:
        timeline = sample()
        one = next(segment for segment in timeline.path if segment.kind == "compute" and segment.worker == 1)
        page = open_report(timeline)
        strip = page.get_by_test_id("overview").bounding_box()
        assert strip is not None
        start, end = visible(page)
        x = strip["x"] + ((one.start + one.end) / 2 - start) / (end - start) * strip["width"]
        page.mouse.move(x, strip["y"] + strip["height"] - 17)
        assert "compute on stage1" in page.get_by_test_id("tooltip").inner_text()
        page.mouse.click(x, strip["y"] + strip["height"] - 17)
        assert page.evaluate("backhaul.selected()") == {"call": one.call, "slice": one.slice}

    def test_arrow_keys_go_along_the_path(self, open_report: Open) -> None:
        timeline = sample()
        known = {row.id for row in timeline.slices}
        path = [one.slice for one in timeline.path if one.slice in known]
        steps = [one for one, before in zip(path, [-1, *path], strict=False) if one != before]
        page = open_report(timeline)
        page.get_by_test_id("overview").focus()
        walked = []
        for key in ("ArrowRight",) * 6 + ("ArrowLeft",) * 2:
            page.keyboard.press(key)
            walked.append(page.evaluate("backhaul.selected().slice"))
        assert walked == [*steps[:6], steps[4], steps[3]]
        assert is_visible(page, steps[3])

    def test_arrows_can_be_turned_off(self, open_report: Open) -> None:
        page = open_report(sample())
        with_arrows = screenshot(page)
        page.get_by_test_id("arrows").click()
        assert page.get_by_test_id("arrows").get_attribute("aria-pressed") == "false"
        without = screenshot(page)
        assert without != with_arrows
        page.get_by_test_id("arrows").click()
        assert screenshot(page) == with_arrows

    def test_a_kind_can_be_hidden(self, open_report: Open) -> None:
        page = open_report(sample())
        before = screenshot(page)
        page.get_by_test_id("kind-op").click()
        assert screenshot(page) != before

    def test_workers_with_their_clocks_and_the_missing_one_with_its_reason(self, open_report: Open) -> None:
        page = open_report(sample())
        workers = page.get_by_test_id("worker")
        assert [row.get_attribute("data-worker") for row in workers.all()] == ["trainer", "stage1", "stage2", "logger"]
        assert "pid 977" in workers.nth(2).inner_text()
        assert "clock +3.41 ms ± 41 µs" in workers.nth(2).inner_text()
        assert "it did not answer within 5 s" in page.get_by_test_id("missing").inner_text()

    def test_the_head_shows_totals(self, open_report: Open) -> None:
        timeline = sample()
        page = open_report(timeline, title="Step 3")
        assert page.get_by_test_id("title").inner_text() == page.title() == "Step 3"
        assert f"{len(timeline.calls)} (1 failed)" in page.get_by_test_id("facts").inner_text()
        assert "4 (1 missing)" in page.get_by_test_id("facts").inner_text()

    def test_the_dark_theme_differs(self, open_report: Open) -> None:
        assert screenshot(open_report(sample())) != screenshot(open_report(sample(), scheme="dark"))


class TestOddProfiles:
    def test_hostile_names_are_shown_and_not_run(self, open_report: Open) -> None:
        timeline = sample(hostile=HOSTILE)
        page = open_report(timeline, title=HOSTILE)
        click_slice(page, timeline.calls[0].near)
        place = page.evaluate("id => backhaul.pixelOf(id)", timeline.calls[0].near)
        page.mouse.move(place["x"] + 1, place["y"])
        for shown in ("selected", "tooltip", "calls", "names", "waited"):
            assert "<img src=x onerror=" in page.get_by_test_id(shown).inner_text()
        assert page.locator("img").count() == 0
        assert page.evaluate("window.hacked") is None

    def test_an_empty_profile(self, open_report: Open) -> None:
        page = open_report(Timeline(owner=0, end=0))
        assert "There are no calls" in page.get_by_test_id("details").inner_text()
        assert "No calls were made" in page.get_by_test_id("names").inner_text()

    def test_one_worker_without_calls(self, open_report: Open) -> None:
        timeline = Timeline(
            owner=0,
            end=2_000_000,
            workers=[WorkerRow(0, "alone")],
            tracks=[Track(0, 0, "MainThread")],
            slices=[Slice(0, 0, "op", "aten::mm", 1_000, 900_000)],
        )
        page = open_report(timeline)
        click_slice(page, 0)
        assert page.get_by_test_id("selected").inner_text() == "aten::mm"

    def test_slices_that_overlap_do_not_hide_each_other(self, open_report: Open) -> None:
        timeline = Timeline(owner=0, end=100, workers=[WorkerRow(0, "w")], tracks=[Track(0, 0, "calls", lane=True)])
        timeline.slices = [Slice(0, 0, "call", "a", 0, 60), Slice(1, 0, "call", "b", 30, 100)]
        page = open_report(timeline)
        for number, name in enumerate("ab"):
            click_slice(page, number)
            assert page.get_by_test_id("selected").inner_text() == name

    def test_an_inner_slice_is_below_an_outer_one_with_the_same_times(self, open_report: Open) -> None:
        timeline = Timeline(owner=0, end=100, workers=[WorkerRow(0, "w")], tracks=[Track(0, 0, "MainThread")])
        timeline.slices = [Slice(0, 0, "op", "inner", 0, 60, parent=1), Slice(1, 0, "op", "outer", 0, 60)]
        page = open_report(timeline)
        inner, outer = (page.evaluate("id => backhaul.pixelOf(id)", number) for number in (0, 1))
        assert inner["y"] > outer["y"]

    def test_a_thin_slice_can_be_found_in_a_big_profile(self, open_report: Open) -> None:
        timeline = big()
        page = open_report(timeline)
        assert "arrows" in page.get_by_test_id("arrows-note").inner_text()
        page.evaluate("id => backhaul.select(id)", 1_500)
        call = timeline.calls[1_500]
        assert is_visible(page, call.near)
        assert page.evaluate("id => backhaul.pixelOf(id)", call.far)["width"] > 50
        assert page.get_by_test_id("call-row").count() == 200


class TestAccess:
    """What is wrong for people who use a keyboard, a screen reader or a phone: nothing."""

    def test_a_profile(self, open_report: Open) -> None:
        page = open_report(sample())
        page.evaluate("id => backhaul.select(id)", 0)
        page.get_by_test_id("name-row").first.click()
        assert problems(page) == []

    def test_an_empty_profile(self, open_report: Open) -> None:
        assert problems(open_report(Timeline(owner=0, end=0))) == []

    def test_the_graph_of_a_step(self, open_report: Open, tmp_path: Path) -> None:
        graph = last_step(sample())
        assert graph is not None
        written = tmp_path / "graph.html"
        written.write_text(to_page(graph), encoding="utf-8")
        page = open_report(written)
        assert problems(page) == []
        assert page.locator("tbody tr").count() == len(graph.nodes) - 1
