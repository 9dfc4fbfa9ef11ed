"""The page of a run: all of it inside one file, nothing in it obeyed."""

import base64
import dataclasses
import html.parser
import json

import lightning.pytorch as pl
import pytest
from click.testing import CliRunner

from compile_profiler import CompileProfiler, Report
from compile_profiler.cli import main
from compile_profiler.page import page
from compile_profiler.pictures import bars, picture, timeline
from compile_profiler.records import Compiles, Drift, Environment, Event, Verdict
from compile_profiler.results import CandidateResult, SearchReport, Switch
from compile_profiler.scalars import CHARTS
from runs import Regression, train

HOSTILE = (
    "</td><script>alert(1)</script>\" onerror='alert(2)' {{ 7 * 7 }} {% raw %} ![x](http://x.test/y.png) &lt; \x1b"
)
SHOWN = HOSTILE.replace("\x1b", "").strip()
CURVES = {tag: tuple((step, float(step)) for step in range(9)) for chart in CHARTS for tag in chart.tags}


class Elements(html.parser.HTMLParser):
    """What a browser would make of a page: its elements with their attributes, and its text."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.texts = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data.strip())

    def named(self, *tags):
        return [attributes for tag, attributes in self.elements if tag in tags]


def hostile():
    """A report in which every text of a user's tries to break the page."""
    event = Event(step=0, epoch=0, stage="train", kind="graph_break", function=HOSTILE, file=HOSTILE, detail=HOSTILE)
    return Report(
        verdict=Verdict(message=HOSTILE, config={"backend": HOSTILE, HOSTILE: HOSTILE}),
        compiles=Compiles(graph_breaks=1, events=(event,)),
        drift=Drift(worst_parameter=HOSTILE, noise_floor=0.0),
        environment=Environment(device=HOSTILE, strategy=HOSTILE),
        search=search_of(HOSTILE),
    )


def search_of(text):
    """A search in which every name and every reason is this text."""
    measured = CandidateResult(
        name=text, target=text, status="chosen", why=text, step=3, end_to_end=1.5, end_to_end_method=text
    )
    return SearchReport(
        active=text,
        candidates=(measured, CandidateResult(name=f"{text}/b", target=text, status="skipped", why=text)),
        switches=(Switch(step=1, name="eager"), Switch(step=9, name=text)),
    )


def tame(report):
    """The same report with harmless texts."""
    (event,) = report.compiles.events
    return dataclasses.replace(
        report,
        verdict=Verdict(message="a", config={"backend": "a", "b": "c"}),
        compiles=Compiles(graph_breaks=1, events=(dataclasses.replace(event, function="a", file="a", detail="a"),)),
        drift=Drift(worst_parameter="a", noise_floor=0.0),
        environment=Environment(device="a", strategy="a"),
        search=search_of("a"),
    )


def test_hostile_text_adds_no_element_and_is_shown_as_it_is():
    attacked = Elements(page(hostile(), CURVES, name=HOSTILE))
    calm = Elements(page(tame(hostile()), CURVES, name="a"))

    assert [(tag, sorted(attributes)) for tag, attributes in attacked.elements] == [
        (tag, sorted(attributes)) for tag, attributes in calm.elements
    ]
    assert attacked.texts.count(SHOWN) >= 5  # name, message, backend, function, device
    assert f"undecided: {SHOWN}" in attacked.texts  # the title


def test_nothing_is_executed_and_no_request_leaves():
    """No script, no handler, no address but inline pictures, and the browser is told to enforce it."""
    read = Elements(page(hostile(), CURVES, name=HOSTILE))
    addresses = [
        value
        for _, attributes in read.elements
        for name, value in attributes.items()
        if name in ("src", "href", "srcset")
    ]

    assert not read.named("script", "link", "iframe", "object", "embed", "form", "base")
    assert not [name for _, attributes in read.elements for name in attributes if name.startswith("on")]
    assert len(addresses) == len(CHARTS) + 2  # of a search: its bars, what training ran on
    assert all(address.startswith("data:image/svg+xml;base64,") for address in addresses)
    assert {"http-equiv": "Content-Security-Policy"}.items() <= read.named("meta")[1].items()
    assert read.named("meta")[1]["content"].startswith("default-src 'none';")


def test_the_page_of_a_real_run_has_its_figures_and_every_chart(tmp_path):
    logger = pl.loggers.TensorBoardLogger(tmp_path)
    profiler = CompileProfiler(backend="eager", fallback=False, verbose=False)
    train(Regression, [profiler], logger=logger, max_steps=60)
    out = tmp_path / "page.html"
    written = CliRunner().invoke(main, ["html", str(tmp_path), "-o", str(out)])
    read = Elements(out.read_text(encoding="utf-8"))

    assert (written.exit_code, written.output) == (0, f"Written: {out}\n")
    assert f"{profiler.report.speedup.median:.2f}x" in read.texts
    assert [image["alt"] for image in read.named("img")] == [f"{chart.title}, by training step" for chart in CHARTS]


def test_the_page_of_a_search_has_every_candidate_its_bars_and_what_training_ran_on(search_on_disk, tmp_path):
    out = tmp_path / "page.html"
    written = CliRunner().invoke(main, ["html", str(search_on_disk.events), "-o", str(out)])
    read = Elements(out.read_text(encoding="utf-8"))
    search = search_on_disk.report.search
    titles = [image["alt"] for image in read.named("img")]
    (failed,) = (one for one in search.candidates if one.status == "dropped")

    assert written.exit_code == 0
    assert titles[:2] == ["speedup of a step, by candidate", "what training ran on"]
    assert {one.name for one in search.candidates} <= set(read.texts)
    assert f"Training ran on eager from step {search.switches[0].step}, forward/default from step" in " ".join(
        read.texts
    )
    assert "<script>alert(1)</script> [red]a|b" in failed.why
    assert any("<script>alert(1)</script> [red]a|b" in text for text in read.texts)
    assert not read.named("script")


def svg_of(address):
    """The picture itself."""
    return base64.b64decode(address.removeprefix("data:image/svg+xml;base64,")).decode()


NAMES = ["step/default", "$\\frac{$/default", "計算機/default", "a" * 500, "</svg><script>alert(1)</script>"]


def test_bars_and_timeline_take_any_name_and_are_the_same_each_time():
    """A dollar sign is no formula, a name in another script no warning, a long one no picture of text alone."""
    candidates = [
        CandidateResult(name=name, target="step", end_to_end=n / 2, end_to_end_low=n / 3, end_to_end_high=n)
        for n, name in enumerate(NAMES, start=1)
    ]
    found = SearchReport(switches=tuple(Switch(step=9 * n, name=name) for n, name in enumerate(NAMES)))
    for draw in (lambda: bars(candidates), lambda: timeline(found, last_step=60)):
        assert draw() == draw()
        assert "<script" not in svg_of(draw())
    assert bars(candidates) != bars(candidates[:4])
    assert timeline(found, last_step=60) != timeline(found, last_step=90)


def test_nothing_is_drawn_of_what_nothing_is_known_of():
    assert bars([CandidateResult(name="a", target="step", speedup=2.0)]) is None
    assert timeline(SearchReport(), last_step=9) is None
    assert not Elements(page(Report(search=SearchReport()), {}, name="a")).named("img")


def test_a_hostile_folder_name_is_only_a_name(tmp_path):
    folder = tmp_path / "<script>alert('1')"
    folder.mkdir()
    (folder / "compile_profile.json").write_text(json.dumps(Report().to_dict()))
    out = tmp_path / "page.html"
    CliRunner().invoke(main, ["html", str(folder), "-o", str(out)])
    read = Elements(out.read_text(encoding="utf-8"))

    assert not read.named("script")
    assert str(folder / "compile_profile.json") in read.texts


def test_without_curves_the_page_says_so():
    text = page(Report(), {}, name="a")

    assert not Elements(text).named("img")
    assert "no curves are known" in text


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.title)
def test_a_picture_is_svg_the_same_each_time_and_without_links(chart):
    drawn = picture(chart, CURVES, decided_at=4)
    svg = svg_of(drawn)

    assert drawn == picture(chart, CURVES, decided_at=4)
    assert drawn != picture(chart, CURVES)
    assert "<svg" in svg
    assert "<script" not in svg


def test_a_band_that_begins_after_its_curve_is_drawn():
    """Below six pairs a speedup has no interval yet."""
    speedup = CHARTS[0]
    middle, low, high = speedup.tags
    curves = {middle: CURVES[middle], low: CURVES[low][5:], high: CURVES[high][6:]}

    assert speedup.band
    assert picture(speedup, curves) != picture(speedup, {middle: CURVES[middle]})
