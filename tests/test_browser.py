"""What people see: TensorBoard and the page of a run in a real browser, on real runs, also of hostile names.

Needs Selenium, Chromium and its driver (Debian: chromium, chromium-driver). Without them these tests are skipped; with
COMPILE_PROFILER_BROWSER=required, as in .ci/run, they fail. `make pictures` puts what they see into the docs.
"""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import quote

import pytest
from click.testing import CliRunner
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image

from compile_profiler import CompileProfiler
from compile_profiler.cli import main
from compile_profiler.scalars import CHARTS, EVENTS_TAG, VERDICT_TAG
from examples import recurrent_filter
from runs import fit

ATTACK = "<img src='http://x.test/a.png' onerror='document.title=1'><script>document.title=2</script>"
FILE = ATTACK.replace("/", "\N{FULLWIDTH SOLIDUS}") + ".py"  # a file name has no slash
PARAMETER = ATTACK.replace(".", "\N{ONE DOT LEADER}")  # nor has a parameter a dot
SOURCE = f'''
import lightning.pytorch as pl
import torch

class Hostile(pl.LightningModule):
    """Every name in it that reaches a report tries to break the page."""

    def __init__(self):
        super().__init__()
        self.register_parameter({PARAMETER!r}, torch.nn.Parameter(torch.ones(8, 1)))

    def training_step(self, batch, batch_idx):
        x, y = batch
        weight, = self.parameters()
        x = x * 2
        torch._dynamo.graph_break(msg={ATTACK!r})
        return ((x @ weight - y) ** 2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
'''

REQUEST = "Network.requestWillBeSent"
HEADING = "[itemprop='name']"  # of a chart or a text in TensorBoard
FILTER_RUN = "regexInput=recurrent_filter&_smoothingWeight=0"  # in the address of a dashboard: one run, as measured

# Web components hide their elements in shadow trees: this looks into all of them.
FIND = """
const found = [];
const walk = root => {
  for (const element of root.querySelectorAll('*')) {
    if (element.matches(arguments[0])) found.push(element);
    if (element.shadowRoot) walk(element.shadowRoot);
  }
};
walk(document);
return found.map(element => arguments[1] ? element.getAttribute(arguments[1]) : element.textContent.trim());
"""


def browser_or_reason():
    """Paths of the browser and of its driver, or why there are none."""
    try:
        import selenium  # noqa: F401
    except ModuleNotFoundError:
        return None, None, "selenium is not installed"
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    browser, driver = next(filter(None, map(shutil.which, names)), None), shutil.which("chromedriver")
    missing = [name for name, path in (("Chromium", browser), ("chromedriver", driver)) if path is None]
    return browser, driver, f"no {' and no '.join(missing)} on this machine" if missing else None


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium that records every request."""
    path, driver, reason = browser_or_reason()
    if reason is not None:
        assert os.environ.get("COMPILE_PROFILER_BROWSER") != "required", f"a browser is required here, but {reason}"
        pytest.skip(reason)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = path
    options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
    # A container has little shared memory, and its root user no sandbox for a browser.
    arguments = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1200,900"]
    for argument in [*arguments, *(["--no-sandbox"] if os.geteuid() == 0 else [])]:
        options.add_argument(argument)
    chromium = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield chromium
    chromium.quit()


@pytest.fixture(scope="module")
def runs(browser, tmp_path_factory):
    """The filter of the examples, and a module with hostile names."""
    folder = tmp_path_factory.mktemp("browser") / "runs"
    for_docs = "COMPILE_PROFILER_PICTURES" in os.environ  # only then is inductor's minute well spent
    profiler = CompileProfiler(backend="inductor" if for_docs else "aot_eager", verbose=False)
    recurrent_filter.main(callbacks=[profiler], max_steps=600 if for_docs else 100, root_dir=folder)
    file = tmp_path_factory.mktemp("hostile") / FILE
    file.write_text(SOURCE)
    namespace = {"__name__": "hostile"}
    exec(compile(SOURCE, str(file), "exec"), namespace)
    profiler = CompileProfiler(backend=off_by_a_thousandth, drift="warn", fallback=False, verbose=False)
    fit(namespace["Hostile"](), [profiler], logger=TensorBoardLogger(folder, "hostile"), validate=False)
    assert profiler.report.compiles.graph_breaks > 0
    assert profiler.report.drift.worst_parameter == PARAMETER
    return folder


def off_by_a_thousandth(graph, example_inputs):
    """A backend that is wrong, so that the report names a parameter."""

    def run(*inputs):
        return tuple(out * 1.001 if out.is_floating_point() else out for out in graph.forward(*inputs))

    return run


@pytest.fixture(scope="module")
def tensorboard(runs):
    """Address of a TensorBoard on a free port of this machine's own."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", runs.name]
    command += ["--host", "127.0.0.1", "--port", "0", "--load_fast", "false"]
    log = runs.parent / "tensorboard.log"
    with log.open("w") as said:
        server = subprocess.Popen(command, cwd=runs.parent, stdout=said, stderr=said)
    try:
        for _ in range(600):
            found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
            if found or server.poll() is not None:
                break
            time.sleep(0.1)
        assert found, f"TensorBoard did not say where it is: {log.read_text()}"
        yield found[0]
    finally:
        server.terminate()
        server.wait(60)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(found[0], timeout=5)


def seen(browser, selector, attribute=None):
    """Text, or an attribute, of every element on the page that ``selector`` fits."""
    return browser.execute_script(FIND, selector, attribute)


def wait_until(browser, shown, what):
    """Wait for a page that is filled in by scripts."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 60).until(lambda _: shown(), message=f"{what} did not appear")


def open_tab(browser, address, tab):
    """One dashboard of TensorBoard, loaded anew: a changed fragment alone would keep the old page."""
    browser.get("about:blank")
    requests(browser)
    browser.get(f"{address}/?darkMode=false#{tab}")


def requests(browser):
    """Addresses that the browser has asked for since the last call, save pictures inside a page."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [message["params"]["request"]["url"] for message in messages if message["method"] == REQUEST]
    return [url for url in asked if not url.startswith("data:")]


def keep_picture(browser, name, height):
    """A small picture of the window; `make pictures` keeps it in the docs."""
    browser.set_window_size(1200, height)
    folder = Path(__file__).parents[1] / os.environ.get("COMPILE_PROFILER_PICTURES", "build/pictures")
    folder.mkdir(parents=True, exist_ok=True)
    with Image.open(io.BytesIO(browser.get_screenshot_as_png())) as picture:
        picture.quantize(128).save(folder / f"{name}.png", optimize=True)


def drawn(browser, num):
    """Whether at least ``num`` lines have been drawn."""
    return len([line for line in seen(browser, "path.line", "d") if line]) >= num


def test_scalars_draws_the_curves(browser, tensorboard):
    tags = {"compile/speedup", "compile/step_ms/eager", "compile/step_ms/compiled", "compile/drift/grad_rel"}
    only = quote(f"^({'|'.join(sorted(tags))})$")
    open_tab(browser, tensorboard, f"scalars&{FILTER_RUN}&tagFilter={only}")
    wait_until(browser, lambda: drawn(browser, 2 * len(tags)), "a page of charts")

    keep_picture(browser, "scalars", 900)
    assert tags <= set(seen(browser, HEADING))
    assert all(url.startswith(tensorboard) for url in requests(browser))


def test_custom_scalars_draws_every_chart_of_the_layout(browser, tensorboard):
    """The band too: TensorBoard shows an error in its place where its three curves have different steps."""
    open_tab(browser, tensorboard, f"custom_scalars&{FILTER_RUN}")
    browser.set_window_size(1200, 1300)
    wait_until(browser, lambda: drawn(browser, len(CHARTS)), "the charts")
    wait_until(browser, lambda: any(seen(browser, "path.area", "d")), "the band of the speedup")

    keep_picture(browser, "custom_scalars", 1300)
    assert {chart.title for chart in CHARTS} <= set(seen(browser, HEADING))
    assert not [text for text in seen(browser, "#steps-mismatch, .error-content") if text]


def test_text_shows_the_verdict_and_the_events_as_tables(browser, tensorboard):
    open_tab(browser, tensorboard, f"text&{FILTER_RUN}")
    for cell in ("speedup of a pass", "training_step"):  # of the card, of the events
        wait_until(browser, lambda cell=cell: cell in seen(browser, "td"), cell)
    headings = " ".join(seen(browser, HEADING))
    cells = seen(browser, "td")

    keep_picture(browser, "text", 1300)
    assert VERDICT_TAG in headings
    assert EVENTS_TAG in headings
    assert any(re.fullmatch(r"examples/recurrent_filter\.py:\d+", cell) for cell in cells)


def test_text_shows_hostile_names_and_obeys_none(browser, tensorboard):
    open_tab(browser, tensorboard, "text")
    wait_until(browser, lambda: any(ATTACK in cell for cell in seen(browser, "td")), "the attack")

    assert not seen(browser, "td img, td script")
    assert browser.title == "TensorBoard"
    assert all(url.startswith(tensorboard) for url in requests(browser))


def open_page(browser, runs, name, monkeypatch):
    """The page of a run, from a file, as people open it."""
    page = runs.parent / f"{name}.html"
    monkeypatch.chdir(runs.parent)  # for the path on the page
    done = CliRunner().invoke(main, ["html", f"runs/{name}", "-o", str(page)])
    assert done.exit_code == 0, done.output
    browser.get("about:blank")
    requests(browser)
    browser.get(page.as_uri())
    return page.as_uri()


def test_the_page_of_a_run_shows_its_charts_and_tables(browser, runs, monkeypatch):
    address = open_page(browser, runs, "recurrent_filter", monkeypatch)
    keep_picture(browser, "page", 1300)
    widths = browser.execute_script("return [...document.images].map(image => image.naturalWidth)")

    assert len(widths) == len(CHARTS)
    assert all(width > 0 for width in widths)  # decoded, not a broken picture
    assert "speedup of a pass" in seen(browser, "th")
    assert requests(browser) == [address]


def test_the_page_of_hostile_names_shows_them_and_asks_for_nothing(browser, runs, monkeypatch):
    address = open_page(browser, runs, "hostile", monkeypatch)
    text = browser.execute_script("return document.body.innerText")

    assert ATTACK in text  # the reason of the graph break
    assert PARAMETER in text
    assert FILE in text
    assert not seen(browser, "script, img:not([src^='data:image/svg+xml;base64,'])")
    assert browser.title.startswith("compiled: ")
    assert requests(browser) == [address]


def test_an_attack_that_is_not_escaped_would_be_found(browser, tmp_path):
    """The same text as plain HTML runs, and its request is seen."""
    page = tmp_path / "page.html"
    page.write_text(f"<title>calm</title>{ATTACK}")
    browser.get("about:blank")
    requests(browser)
    browser.get(page.as_uri())

    assert browser.title in ("1", "2")
    assert "http://x.test/a.png" in requests(browser)
