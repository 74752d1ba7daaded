"""The page of a profile: one file that loads nothing, in which no name acts as markup."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from backhaul.profiler.model import KINDS, Slice, Timeline, WorkerRow
from backhaul.profiler.report import render
from tests.profiler.sample import HOSTILE, big, sample

VOID = {"meta", "input", "br", "img", "link"}
TIMELINES = {
    "sample": sample(),
    "hostile": sample(hostile=HOSTILE),
    "empty": Timeline(owner=0, end=0),
    "one worker": Timeline(owner=0, end=1_000, workers=[WorkerRow(0, "alone")]),
}


class Page(HTMLParser):
    """The elements, attributes and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}  # by id, or by tag
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        tag, attributes = self.elements[-1] if self.elements else ("", {})
        key = attributes.get("id") or tag
        self.texts[key] = self.texts.get(key, "") + data


@pytest.fixture(params=TIMELINES)
def timeline(request: pytest.FixtureRequest) -> Timeline:
    return TIMELINES[request.param]


def test_it_is_well_formed(timeline: Timeline) -> None:
    page = Page(render(timeline))
    assert page.open == []
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_it_loads_nothing(timeline: Timeline) -> None:
    text = render(timeline)
    page = Page(text)
    assert not {"link", "img", "iframe", "object", "embed", "base"} & {tag for tag, _ in page.elements}
    assert not [attributes for _, attributes in page.elements if {"src", "href", "srcset"} & attributes.keys()]
    assert not re.search(r"https?://|@import|url\(|import\(|fetch\(", text)


def test_its_policy_allows_its_own_script_only() -> None:
    page = Page(render(sample()))
    policy = next(a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert policy.count("'sha256-") == 2
    assert not [a for _, a in page.elements if "style" in a or any(name.startswith("on") for name in a)]


def test_the_data_is_the_timeline(timeline: Timeline) -> None:
    texts = Page(render(timeline)).texts
    assert msgspec.json.decode(texts["timeline-data"], type=Timeline) == timeline
    assert json.loads(texts["kinds-data"]) == KINDS


def test_names_do_not_act_as_markup() -> None:
    plain, hostile = Page(render(sample(), title="t")), Page(render(sample(hostile=HOSTILE), title=HOSTILE))
    assert [tag for tag, _ in plain.elements] == [tag for tag, _ in hostile.elements]
    assert hostile.texts["title"].rstrip() == HOSTILE
    assert not set("<>&\u2028\u2029") & set(hostile.texts["timeline-data"])


def test_arguments_may_have_any_type() -> None:
    timeline = sample()
    timeline.slices[0] = Slice(0, 0, "op", "x", 0, 1, args={"device": object, "nan": float("nan"), "shape": (2, 3)})
    embedded = json.loads(Page(render(timeline)).texts["timeline-data"])
    assert embedded["slices"][0]["args"] == {"device": "<class 'object'>", "nan": None, "shape": [2, 3]}


def test_the_timeline_is_not_changed() -> None:
    timeline = sample()
    render(timeline)
    assert timeline == sample()


def test_every_kind_has_a_color_in_both_themes() -> None:
    style = Page(render(sample())).texts["style"]
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    for kind in [*KINDS, "compute", "wire", "idle", "request", "reply", "gradient"]:
        assert re.search(rf"--kind-{kind}: #[0-9a-f]{{6}};", light)
    assert set(re.findall(r"--[\w-]+(?=:)", dark.split("}")[0])) <= set(re.findall(r"--[\w-]+(?=:)", light))


def test_the_files_of_the_page_are_package_data() -> None:
    """A file that is not package data is missing when the package is installed."""
    root = Path(__file__).parent.parent.parent
    assert '"profiler/page/*"' in (root / "pyproject.toml").read_text()


class TestSample:
    def test_it_is_the_same_every_time(self) -> None:
        assert sample() == sample()

    def test_it_has_the_invariants_of_a_timeline(self) -> None:
        timeline = sample()
        assert [row.id for row in timeline.slices] == list(range(len(timeline.slices)))
        assert all(one.end == other.start for one, other in zip(timeline.path, timeline.path[1:], strict=False))
        assert (timeline.path[0].start, timeline.path[-1].end) == (0, timeline.end)
        for row in timeline.slices:
            assert 0 <= row.start <= row.end <= timeline.end
            if row.parent >= 0:
                parent = timeline.slices[row.parent]
                assert parent.track == row.track
                assert parent.start <= row.start <= row.end <= parent.end
        for call in timeline.calls:
            on_callee = [call.arrived, call.begun, call.decoded, call.ran, call.replied]
            assert on_callee == sorted(on_callee)
            assert call.start <= call.sent <= call.received <= call.done

    def test_it_contains_everything_that_a_timeline_can(self) -> None:
        timeline = sample()
        assert {row.kind for row in timeline.slices} == set(KINDS)
        assert {arrow.kind for arrow in timeline.arrows} == {"request", "reply", "gradient"}
        assert {segment.kind for segment in timeline.path} == {"compute", "encode", "decode", "queue", "wire", "idle"}
        assert any(call.failed for call in timeline.calls)
        assert any(call.parent >= 0 for call in timeline.calls)
        assert any(worker.missing for worker in timeline.workers)
        assert 30 <= len(timeline.calls) <= 50

    def test_the_size_of_the_big_sample(self) -> None:
        assert len(big().slices) >= 50_000
