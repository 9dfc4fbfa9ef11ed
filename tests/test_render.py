"""Promises of the faces: every figure shown once, unknown never as zero, no text of a user's can break them."""

from __future__ import annotations

import dataclasses
import io

import pytest

from compile_profiler.candidates_table import MAX_IN_MARKDOWN, MAX_IN_TABLE, candidates_markdown
from compile_profiler.records import (
    Compiles,
    Drift,
    EndToEnd,
    Environment,
    Event,
    Memory,
    Report,
    Speedup,
    Time,
    Verdict,
)
from compile_profiler.render import (
    MAX_EVENTS_IN_MARKDOWN,
    MAX_EVENTS_IN_TABLE,
    PLAIN_WIDTH,
    events_markdown,
    print_table,
    verdict_markdown,
)
from compile_profiler.results import CandidateResult, SearchReport, Switch
from compile_profiler.wording import MAX_TEXT, UNKNOWN, place, seconds, size

GRAPH = Event(step=0, epoch=0, stage="train", kind="graph", function="training_step", seconds=17.25)
BREAK = Event(
    step=3,
    epoch=0,
    stage="validate",
    kind="graph_break",
    function="forward",
    file="/home/user/project/models/gpt.py",
    line=41,
    owner="user",
    cause="data_dependent",
    detail="branch on a tensor",
    hint="use torch.where",
    count=1200,
)
FULL = Report(
    verdict=Verdict(
        decision="compiled",
        reason="gain",
        message="At least 1.25x faster.",
        step=1230,
        config={"target": "step", "backend": "inductor", "mode": None},
    ),
    speedup=Speedup(median=1.321, low=1.25, high=1.4, num_pairs=9, num_void=3, void={"compiled in it": 2, "late": 1}),
    end_to_end=EndToEnd(
        speedup=1.1, low=1.05, high=1.15, method="windows", step_s=0.0206, compute_share=0.4, input_bound=True
    ),
    time=Time(
        eager_s=0.0225,
        compiled_s=0.0172,
        compile_s=17.3,
        probe_s=0.9,
        saved_s=-4.2,
        break_even_step=3400,
        last_step=3000,
        overhead_pct=1.3,
    ),
    compiles=Compiles(graphs=4, recompiles=1, graph_breaks=2, eager_frames=5, limit_hits=1, events=(GRAPH, BREAK)),
    drift=Drift(
        loss_rel=1.2e-7,
        grad_rel=3.4e-6,
        grad_cosine=0.9999991,
        worst_parameter="head.weight",
        noise_floor=5.6e-8,
        rng="matched",
        tolerance=1e-4,
        within_tolerance=True,
        eager_finite=True,
        compiled_finite=False,
        reference={"eager": 1e-8},
    ),
    memory=Memory(eager_peak_bytes=3 * 2**29, compiled_peak_bytes=800 * 2**20),
    environment=Environment(
        torch="2.13.0",
        lightning="2.6.6",
        device="cpu",
        precision="32-true",
        strategy="SingleDeviceStrategy",
        world_size=1,
        tf32=True,
        deterministic=True,
    ),
)

# What a reader of the full report must find; each stands for one figure of it.
FIGURES = (
    """
compiled: gain | At least 1.25x faster. | step 1,230 | inductor | target=step | 1.32x | 1.25x to 1.40x | 9 pairs
3 void (2 compiled in it, 1 late) | 1.10x | 1.05x to 1.15x | by windows | 20.6 ms a step
input-bound: compiling gives 1.32x on 40% of the step | 17.2 ms | eager 22.5 ms | 17.3 s | 900 ms
1.3 % of training time | -4.20 s | paid back at step 3,400, after this run's last, 3,000
1 recompile | 2 graph breaks | 5 eager frames | 1 limit hit | 1.2e-07 | within tolerance (1.0e-04)
random numbers matched | compiled not finite | eager 1.0e-08 from float64 | 3.4e-06 | noise floor 5.6e-08
cosine 0.999999 | worst head.weight | 800 MiB | eager 1.50 GiB | cpu | torch 2.13.0 | lightning 2.6.6 | 32-true
SingleDeviceStrategy | world size 1 | tf32 | deterministic
""".strip()
    .replace("\n", " | ")
    .split(" | ")
)

WINNER = CandidateResult(
    name="step/reduce-overhead",
    target="step",
    mode="reduce-overhead",
    status="chosen",
    why="the best so far, by estimate",
    step=120,
    compile_s=31.5,
    speedup=2.491,
    speedup_low=2.4,
    speedup_high=2.6,
    num_pairs=11,
    num_void=2,
    end_to_end=1.903,
    end_to_end_low=1.85,
    end_to_end_high=1.95,
    end_to_end_method="windows",
    peak_bytes=3 * 2**30,
    loss_rel=1e-7,
    grad_rel=2.5e-6,
)
LOSER = CandidateResult(name="step/default", target="step", status="dropped", why="slower than another", step=12)
SKIPPED = tuple(
    CandidateResult(name=f"{target}/max-autotune", target=target, status="skipped", why="autotuning takes minutes")
    for target in ("step", "forward", "blocks")
)
SEARCH = SearchReport(
    active=WINNER.name,
    settled=True,
    spent_s=48.25,
    budget_s=360.0,
    run_s=3600.0,
    run_is_assumed=True,
    candidates=(LOSER, *SKIPPED, WINNER),
    switches=(Switch(step=12, name="eager"), Switch(step=240, name=WINNER.name)),
)
SEARCHED = dataclasses.replace(FULL, search=SEARCH)

# What a reader must find of that search, on the screen and in TensorBoard.
OF_THE_SEARCH = (
    """
2 of 5 tried | training on step/reduce-overhead since step 240 | took 48.2 s | budget 6.00 min of an assumed run of
step/reduce-overhead | chosen | 2.49x | 2.40x to 2.60x | 11 pairs, 2 void | 1.90x | 1.85x to 1.95x | by windows
31.5 s | 3.00 GiB | 2.5e-06 | the best so far | by estimate | step/default | dropped | slower than another
step/max-autotune and 2 more | skipped | autotuning takes minutes
""".strip()
    .replace("\n", " | ")
    .split(" | ")
)

HOSTILE = "[red]a|b</td><script>alert(1)</script>\n\n# `x` __init__ \\ [/] \x1b[31m \udcff {} %s"


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of whoever runs the tests does not decide what is a terminal."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


def printed(report: Report) -> str:
    """What a log file gets."""
    file = io.StringIO()
    print_table(report, file)
    return file.getvalue()


def unwrapped(text: str) -> str:
    """``text`` without the line breaks and padding of its columns."""
    return " ".join(text.split())


def hostile(report: Report) -> Report:
    """Every text that comes from a user's program, replaced by one that tries to break the page."""
    event = dataclasses.replace(BREAK, file=HOSTILE, function=HOSTILE, detail=HOSTILE, hint=HOSTILE)
    return dataclasses.replace(
        report,
        verdict=dataclasses.replace(report.verdict, message=HOSTILE, config={HOSTILE: HOSTILE, "backend": HOSTILE * 9}),
        speedup=Speedup(void={HOSTILE: 1}),
        compiles=Compiles(events=(event,)),
        drift=Drift(worst_parameter=HOSTILE),
        environment=Environment(device=HOSTILE, strategy=HOSTILE),
        search=hostile_search(),
    )


def hostile_search() -> SearchReport:
    """A search of submodules with hostile names, whose errors are hostile too."""
    names = [f"{HOSTILE}/{n}" for n in range(2)]
    out = CandidateResult(
        name=names[0], target=HOSTILE, status="dropped", why=HOSTILE * 9, step=1, end_to_end_method=HOSTILE
    )
    left = CandidateResult(name=names[1], target=HOSTILE, status="skipped", why=HOSTILE)
    return SearchReport(active=names[0], candidates=(out, left), switches=(Switch(step=1, name=names[0]),))


@pytest.mark.parametrize("figure", FIGURES)
def test_table_shows_every_figure(figure: str) -> None:
    """The printed table holds each figure, rounded, with its unit."""
    assert figure in unwrapped(printed(FULL))


@pytest.mark.parametrize("figure", FIGURES)
def test_card_shows_every_figure(figure: str) -> None:
    """The card of the Text tab holds the same figures as the table."""
    assert figure in verdict_markdown(FULL).replace("\\", "")


@pytest.mark.parametrize("figure", OF_THE_SEARCH)
def test_table_of_candidates_shows_every_figure(figure: str) -> None:
    """What a search has found is printed below the table, with interval, pairs, method and reason."""
    words = figure.split()
    shown = unwrapped(printed(SEARCHED))

    assert figure in shown or all(word in shown.split() for word in words)  # a column breaks between words
    assert figure in candidates_markdown(SEARCH)


def test_table_of_candidates_is_compact() -> None:
    """It keeps the stated width, and so few lines that the table above it is still on the screen."""
    lines = printed(SEARCHED).splitlines()[len(printed(FULL).splitlines()) :]

    assert max(len(line) for line in lines) <= PLAIN_WIDTH
    assert len(lines) <= 20


def test_table_of_candidates_begins_with_the_winner() -> None:
    """Whatever the order of the report, whose places the curve in TensorBoard names."""
    rows = [line.split(" | ")[:2] for line in candidates_markdown(SEARCH).splitlines()[4:]]

    assert rows == [["| 5", WINNER.name], ["| 1", LOSER.name], ["| 2", "step/max-autotune and 2 more"]]


def test_candidates_that_nothing_is_known_of_are_dashes() -> None:
    """A search that has only begun shows no zero in place of a figure, and one without candidates no table."""
    begun = SearchReport(candidates=(CandidateResult(name="step/default", target="step"),))
    row = candidates_markdown(begun).splitlines()[-1]

    assert row == f"| 1 | step/default | untried |{f' {UNKNOWN} |' * 5} not looked at yet |"
    assert "0 of 0 tried" in printed(Report(search=SearchReport()))
    assert "Candidates" not in printed(Report(search=SearchReport()))


def test_candidates_are_cut_at_the_stated_number() -> None:
    """A user may name hundreds; the reader is told where the others are."""
    many = tuple(
        CandidateResult(name=f"step/{n}", target="step", status="skipped", why=f"reason {n}")
        for n in range(MAX_IN_MARKDOWN + 1)
    )
    found = SearchReport(candidates=many)

    assert candidates_markdown(found).count("skipped") == MAX_IN_MARKDOWN
    assert candidates_markdown(found).endswith("\n\n1 more row in compile_profile.json")
    assert printed(Report(search=found)).count("skipped") == MAX_IN_TABLE
    assert f"{MAX_IN_MARKDOWN + 1 - MAX_IN_TABLE} more rows in" in unwrapped(printed(Report(search=found)))


def test_table_is_compact() -> None:
    """Where the output is no terminal, lines keep the stated width, hold no colour codes, and are few."""
    lines = printed(FULL).splitlines()

    assert max(len(line) for line in lines) <= PLAIN_WIDTH
    assert len(lines) <= 25
    assert "\x1b" not in "".join(lines)


def test_table_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a file the table is printed where print() prints."""
    print_table(FULL)

    assert capsys.readouterr().out == printed(FULL)


def test_terminal_gets_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the decision is coloured."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")

    assert "\x1b[32mcompiled: gain" in printed(FULL)


@pytest.mark.parametrize("show", [printed, verdict_markdown])
def test_unknown_is_never_zero(show) -> None:
    """An empty report shows dashes; its only zeros are counts of what was counted."""
    text = show(Report())

    assert text.count(UNKNOWN) >= 12
    assert "0 recompiles, 0 graph breaks" in text
    assert "0 pairs, 0 void" in text
    assert not any(f"0{unit}" in text for unit in ("x", " s", " ms", " MiB", " %"))


def test_known_zero_is_shown() -> None:
    """A drift of exactly zero is a finding, not a gap."""
    report = Report(drift=Drift(loss_rel=0.0), time=Time(saved_s=0.0))

    assert "| loss drift | 0 |" in verdict_markdown(report)
    assert "| net saved | 0.00 s |" in verdict_markdown(report)


def test_drift_beyond_tolerance_says_so() -> None:
    """The reader is told on which side of the tolerance the drift lies, and when nobody can say."""
    beyond = Drift(within_tolerance=False, tolerance=1e-4, eager_finite=False)

    assert "beyond tolerance (1.0e-04), eager not finite" in printed(Report(drift=beyond))
    assert "not judged, random numbers unmatched" in printed(Report(drift=Drift(rng="unmatched")))


def test_hostile_text_is_printed_literally() -> None:
    """Rich markup, line breaks and terminal codes in names are shown or dropped, never obeyed."""
    lines = printed(hostile(FULL)).splitlines()

    assert any("[red]a|b</td><script>" in line for line in lines)
    assert any(
        "speedup of a step   1.10x" in line and "1.05x to 1.15x" in line for line in lines
    )  # nothing squeezed out
    assert max(len(line) for line in lines) <= PLAIN_WIDTH
    assert "\x1b" not in "".join(lines)


def test_hostile_text_survives_an_old_encoding() -> None:
    """A log file that cannot hold a dash or a name gets a question mark, and the run goes on."""
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_table(dataclasses.replace(hostile(FULL), environment=Environment(device="計算機")), file)
    file.seek(0)

    assert "???" in file.read()


def candidates_of(report: Report) -> str:
    """The text on the search of a report."""
    assert report.search is not None
    return candidates_markdown(report.search)


@pytest.mark.filterwarnings("ignore:html5lib's sanitizer is deprecated:DeprecationWarning")  # TensorBoard's own copy
@pytest.mark.parametrize("show", [verdict_markdown, events_markdown, candidates_of])
def test_hostile_text_is_only_text_in_tensorboard(show) -> None:
    """TensorBoard's own renderer makes one table, no cell more or less, no emphasis and no script of it."""
    from tensorboard.plugin_util import markdown_to_safe_html

    page = markdown_to_safe_html(show(hostile(FULL)))
    calm = dataclasses.replace(SEARCH, candidates=(LOSER, SKIPPED[0]))
    plain = markdown_to_safe_html(show(dataclasses.replace(FULL, compiles=Compiles(events=(BREAK,)), search=calm)))

    assert {tag: page.count(tag) for tag in ("<table>", "<tr>", "<td>")} == {
        tag: plain.count(tag) for tag in ("<table>", "<tr>", "<td>")
    }
    assert not any(tag in page for tag in ("<script", "<strong>", "<em>", "<code>", "<h1>"))
    assert "[red]a|b&lt;/td&gt;&lt;script&gt;" in page


def test_events_show_what_can_be_acted_on_first() -> None:
    """The break stands before the graph that was compiled earlier, with place, owner, cause, hint."""
    rows = events_markdown(FULL).splitlines()[2:]

    assert rows == [
        f"| graph\\_break | models/gpt.py:41 | forward | user | data\\_dependent | 1,200 | {UNKNOWN} "
        "| validate, step 3 | branch on a tensor; use torch.where |",
        f"| graph | {UNKNOWN} | training\\_step | {UNKNOWN} | {UNKNOWN} | 1 | 17.2 s | train, step 0 | {UNKNOWN} |",
    ]
    assert "models/gpt.py:41, forward, data_dependent, use torch.where" in unwrapped(printed(FULL))


def test_events_are_cut_at_the_stated_number() -> None:
    """A long list is cut, and the reader is told how much is left and where it is."""
    report = Report(compiles=Compiles(events=(BREAK,) * (MAX_EVENTS_IN_MARKDOWN + 1)))
    text = events_markdown(report)

    assert text.count("graph\\_break") == MAX_EVENTS_IN_MARKDOWN
    assert text.endswith("\n\n1 more place in `compile_profile.json`.")
    assert printed(report).count("graph_break ") == MAX_EVENTS_IN_TABLE
    assert f"{MAX_EVENTS_IN_MARKDOWN + 1 - MAX_EVENTS_IN_TABLE} more places in compile_profile.json" in printed(report)


def test_long_text_is_cut() -> None:
    """One cell never takes the page, and shows that it was cut."""
    report = Report(verdict=Verdict(message="x" * 5000))

    assert "x" * (MAX_TEXT - 3) + "...\n" in verdict_markdown(report)
    assert printed(report).count("x") < MAX_TEXT


@pytest.mark.parametrize(
    ("file", "line", "expected"),
    [
        ("model.py", 3, "model.py:3"),
        ("/a/b/c/model.py", None, "c/model.py"),
        (r"C:\a\b\model.py", 3, "b/model.py:3"),
        ("<string>", 1, "<string>:1"),
    ],
)
def test_places_are_short(file: str, line: int | None, expected: str) -> None:
    """A place is the file, its folder and the line, whatever the system wrote between them."""
    assert place(file, line) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(3e-7, "0.00 s"), (5e-5, "50.0 us"), (0.25, "250 ms"), (59.0, "59.0 s"), (-90.0, "-1.50 min"), (36e5, "1,000 h")],
)
def test_seconds_choose_their_unit(value: float, expected: str) -> None:
    """Durations from a launch to a long run are read without counting digits."""
    assert seconds(value) == expected


def test_sizes_choose_their_unit() -> None:
    """Memory is shown in MiB below one GiB and in GiB from there on."""
    assert (size(2**30 - 1), size(2**30)) == ("1,024 MiB", "1.00 GiB")
