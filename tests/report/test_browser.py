"""Report, comparison and board in a real browser: nothing fails, nothing leaves the page, hover and legend work."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from benchmarks.campaign.malformed import renamed

from data_examples import SHARED
from fake_runs import FakeRun
from holdfast.execution.files import run_lock
from holdfast.report import compare, write_report
from holdfast.report.bisect import write_bisection
from holdfast.report.drawing.chart import number
from holdfast.report.export import in_unit
from holdfast.report.run_files import read_results
from report.test_bisect import FOUND
from served_board import Served

pytestmark = pytest.mark.slow
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (pip install selenium)")

Keys = pytest.importorskip("selenium.webdriver.common.keys", reason="selenium is not installed").Keys

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
PICTURES = ["curriculum", "loss", "forgetting", "kl", "kl_forgetting", "dip", "work"]
SIZES = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not (BROWSER and DRIVER):
        pytest.skip("chromium and chromedriver are not installed (apt install chromium chromium-driver)")
    profile = tempfile.mkdtemp()
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()
    shutil.rmtree(profile, ignore_errors=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "five"
    FakeRun(path, kept=0.2).go()
    write_report(path, pictures=False)
    return path


REAL = """
job: continual/train/abcd_kl
stages:
- {name: web, tokens: 2048, data: [{name: fineweb}]}
- {name: mnli, tokens: 1024, data: [{name: mnli, style: PACKED}], beta: 0.2, update_reference: true, overlap: 0.5}
- {name: qqp, tokens: 1024, data: [{name: qqp, style: PACKED}], beta: 0.2, overlap: 0.5}
- {name: sst2, tokens: 1024, data: [{name: sst2, style: PACKED}], beta: 0.2, overlap: 0.5}
- {name: siqa, tokens: 1024, data: [{name: siqa, style: PACKED}], beta: 0.2, overlap: 0.5}
training: {batch_size: 2, validation_steps: 4}
optimization: {kl: {estimator: forward}}
architecture: {block_size: 64, n_layers: 1, n_embd: 32, n_head: 2}
data: {max_documents: 200}
eval: {evaluations: [mnli, sst2], limit: 10, probe_interval: 2, probe_window: 2, probe_rows: 4}
logging: {report_interval: 1, validation_interval: 8}
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of five stages on real data."""
    if not (SHARED / "data").is_dir():
        pytest.skip("the shared real data is not here (HOLDFAST_SHARED names its folder)")
    folder = tmp_path_factory.mktemp("real")
    (folder / "real.yaml").write_text(REAL)
    environment = {
        **os.environ,
        "XLA_FLAGS": "",
        "HOLDFAST_DATA": str(SHARED / "data"),
        "HOLDFAST_CACHE": str(folder / "cache"),
    }
    command = [sys.executable, "-m", "holdfast", "run", "real.yaml", "--out", "runs"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / "runs" / "general" / "default" / "real"


@pytest.fixture(params=["made", "real"])
def either(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue("run" if request.param == "made" else "real")
    return path


def look(browser: Any, address: str, width: int = 1280, scheme: str = "light") -> None:
    """Open a page as a screen of that width and colour scheme would."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get_log("performance")
    browser.get_log("browser")
    browser.get(address)


def requests(browser: Any) -> list[str]:
    """Every address that was asked for since the page was opened."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


def errors(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def visible(browser: Any, selector: str) -> list[Any]:
    return [element for element in browser.find_elements("css selector", selector) if element.is_displayed()]


def point_at(browser: Any, element: Any, share: float) -> str:
    """Move the pointer over an element, so far from its left, and read the box that shows values."""
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    box = browser.execute_script(
        "const b = arguments[0].getBoundingClientRect(); return [b.x, b.y, b.width, b.height]", element
    )
    place = {"type": "mouseMoved", "x": box[0] + share * box[2], "y": box[1] + box[3] / 2}
    browser.execute_cdp_cmd("Input.dispatchMouseEvent", place)
    time.sleep(0.1)
    tip = browser.find_element("id", "tip")
    return tip.text if tip.is_displayed() else ""


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_the_report_opens_from_disk(browser: Any, either: Path, width: int, scheme: str) -> None:
    run = either
    look(browser, (run / "report.html").as_uri(), width, scheme)
    assert requests(browser) in ([(run / "report.html").as_uri()], [(run / "report.html").as_uri(), "data:,"])
    assert errors(browser) == []
    assert [f.get_attribute("data-chart") for f in visible(browser, "figure[data-chart]")] == PICTURES
    for figure in browser.find_elements("css selector", "figure[data-chart]"):
        drawn = [svg for svg in figure.find_elements("css selector", "svg.chart") if svg.is_displayed()]
        assert len(drawn) == 1
        size = drawn[0].size
        assert size["width"] > 0.75 * min(width, 900)
        assert size["height"] > 100
        assert drawn[0].find_elements("css selector", "path.line, polygon.area, circle")
    wide = browser.execute_script("return document.documentElement.scrollWidth")
    assert wide <= width, "the page itself must not scroll sideways"
    ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground.removeprefix("rgb(").rstrip(")").split(","))) < 200) == (scheme == "dark")


def test_the_numbers_in_the_page_are_those_of_the_results(browser: Any, either: Path) -> None:
    run = either
    look(browser, (run / "report.html").as_uri())
    results = read_results(run)
    script = "return [...document.querySelectorAll(arguments[0])].map(e => [e.dataset.value, e.firstChild.textContent])"
    for measure, rows in results["matrix"].items():
        homes = results["homes"]
        in_order = sorted(range(len(homes)), key=lambda j: homes[j])
        columns = [j for j in in_order if any(row[j] is not None for row in rows)]
        expected = [row[j] for row in rows for j in columns]
        found = browser.execute_script(script, f'[data-matrix="matrix_{measure}"] td[data-value]')
        assert [float(exact) if exact else None for exact, _ in found] == expected
        assert [shown for _, shown in found] == [number(value) for value in expected]
    for measure in ("accuracy", "bits_per_byte", "nll"):
        for metric, raw in results["metrics"][measure].items():
            value = in_unit(measure, metric, raw)
            [[exact, shown]] = browser.execute_script(script, f'[data-metric="{measure}/{metric}"]')
            assert (float(exact) if exact else None, shown) == (value, number(value))


@pytest.mark.parametrize("width", [1280, 390])
def test_hover_shows_values(browser: Any, run: Path, width: int) -> None:
    look(browser, (run / "report.html").as_uri(), width)
    for name in [name for name in PICTURES if name != "kl_forgetting"]:
        [svg] = visible(browser, f"#{name} svg.chart")
        text = point_at(browser, svg, 0.7)
        assert "tokens" in text, name
        assert any(sign.isdigit() for line in text.splitlines()[1:] for sign in line), name
    tip = point_at(browser, visible(browser, "#loss svg.chart")[0], 0.99)
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if '"train"' in line][-1]
    assert str(float(f"{last['loss']:.5g}")) in tip
    [dot, *_] = visible(browser, "#kl_forgetting circle[data-tip]")
    assert "KL" in point_at(browser, dot, 0.5)


def test_keys_move_the_cursor(browser: Any, run: Path) -> None:
    look(browser, (run / "report.html").as_uri())
    [svg] = visible(browser, "#loss svg.chart")
    browser.execute_script("arguments[0].focus()", svg)
    seen = set()
    for _ in range(3):
        browser.execute_script(
            "arguments[0].dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}))", svg
        )
        seen.add(browser.find_element("id", "tip").text)
    assert len(seen) == 3


def test_a_legend_entry_hides_its_line_everywhere(browser: Any, run: Path) -> None:
    look(browser, (run / "report.html").as_uri())
    [button] = visible(browser, '#forgetting [data-toggle="stories"]')
    lines = browser.find_elements("css selector", '#forgetting svg.wide g[data-line="stories"]')
    assert lines
    assert all(line.is_displayed() for line in lines)
    browser.execute_script("arguments[0].click()", button)
    assert not any(line.is_displayed() for line in lines)
    assert button.get_attribute("aria-pressed") == "false"
    assert "stories" not in point_at(browser, visible(browser, "#forgetting svg.chart")[0], 0.5)
    browser.execute_script("arguments[0].click()", button)
    assert all(line.is_displayed() for line in lines)


def test_the_comparison_opens(browser: Any, run: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        FakeRun(tmp_path / f"kept-s{seed}", seed=seed, kept=0.9).go()
    found = compare.compare([tmp_path / "kept-*", run])
    page = compare.write_page(found, tmp_path / "compare.html")
    look(browser, page.as_uri(), 390)
    assert errors(browser) == []
    assert {address for address in requests(browser) if address != "data:,"} == {page.as_uri()}
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    [dot, *_] = visible(browser, "#plane_bits_per_byte circle[data-tip]")
    assert "change of the old" in point_at(browser, dot, 0.5)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_page_of_a_bisection_opens(browser: Any, tmp_path: Path, width: int, scheme: str) -> None:
    page = tmp_path / "bisect.html"
    write_bisection(FOUND, page)
    look(browser, page.as_uri(), width, scheme)
    assert errors(browser) == []
    assert {address for address in requests(browser) if address != "data:,"} == {page.as_uri()}
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    [drawn] = visible(browser, "#curve svg.chart")
    assert drawn.find_elements("css selector", "path.line")
    assert "0.1" in point_at(browser, drawn, 0.8)
    assert [row.text for row in visible(browser, "#proof tbody th")][2] == "without the first 8 rows"
    assert len(visible(browser, "#rows .lost")) == 8


@pytest.mark.parametrize(("width", "hinted"), [(1280, False), (390, True)])
def test_wide_tables_say_that_they_scroll(browser: Any, run: Path, tmp_path: Path, width: int, hinted: bool) -> None:
    FakeRun(tmp_path / "kept", kept=0.9, lr=2e-3).go()
    page = compare.write_page(compare.compare([tmp_path / "kept", run]), tmp_path / "compare.html")
    look(browser, page.as_uri(), width)
    [box] = visible(browser, "#outcomes .scroll")
    assert until(lambda: ("wide" in (box.get_attribute("class") or "").split()) == hinted)
    hint = browser.execute_script("return getComputedStyle(arguments[0], '::before').content", box)
    assert ("sideways" in hint) == hinted
    if hinted:
        browser.execute_script("arguments[0].scrollLeft = 9999", box)
        assert until(lambda: "more" not in (box.get_attribute("class") or "").split())
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    align = "return getComputedStyle(document.querySelector(arguments[0])).textAlign"
    assert browser.execute_script(align, "#outcomes td .lost") in ("left", "start")
    assert browser.execute_script(align, "#outcomes td.number") == "right"


@pytest.mark.parametrize("width", [1280, 900])
def test_the_board_never_breaks_inside_a_name(browser: Any, tmp_path: Path, width: int) -> None:
    for name in (
        "general/quick-start/plain-seed-0",
        "general/quickstart/holdfast",
        f"general/{'long-' * 30}/plain-seed-0",
    ):
        FakeRun(tmp_path / name).go(60)
    served = Served(tmp_path)
    script = """
        const range = document.createRange();
        const lines = (node) => { range.selectNodeContents(node); return range.getClientRects().length; };
        return [...document.querySelectorAll("#runs a span:not(.long)")].map(lines);
    """
    try:
        look(browser, f"http://127.0.0.1:{served.port}/", width)
        assert browser.execute_script(script) == [1] * 8  # every folder and every name on one line
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        browser.find_element("id", "all").click()
        assert until(lambda: len(visible(browser, "#matrices table")) == 3)
        told = visible(browser, "#charts svg")[0].get_attribute("aria-label")
        assert "quick-start/plain-seed-0 " in told, "two runs of one name are told apart by their folders"
        assert ", holdfast " in told
        tops = "return [...document.querySelectorAll('#matrices figure')].map((e) => e.getBoundingClientRect().top)"
        assert len(set(browser.execute_script(tops)[:2])) == (1 if width == 1280 else 2), (
            "side by side where there is room"
        )
        assert not visible(browser, "#runs th:nth-child(7)"), "nothing runs: there is no speed to show"
        browser.get("about:blank")  # the page asks again and again, also when its board is gone
    finally:
        served.close()


def until(said: Callable[[], bool], seconds: float = 15) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if said():
            return True
        time.sleep(0.1)
    return False


def test_the_board_moves_without_reload(browser: Any, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    FakeRun(root / "one").go()
    FakeRun(root / "two", seed=1).go(70)
    live = FakeRun(root / "three", seed=2)
    release, ended = threading.Event(), threading.Event()

    def work() -> None:
        with run_lock(live.path):
            live.go(20)
            release.wait(60)
            live.go(120)
            ended.wait(60)
            live.go()

    worker = threading.Thread(target=work)
    worker.start()
    served = Served(root)
    try:
        look(browser, f"http://127.0.0.1:{served.port}/")
        browser.execute_script("window.same = true")

        def row(name: str) -> str:
            found = browser.find_elements("css selector", f'tr[data-run="{name}"]')
            return " ".join(found[0].text.split()) if found else ""

        assert until(lambda: "running" in row("three") and "20 of 200" in row("three"))
        assert "finished" in row("one")
        assert "unfinished" in row("two")
        release.set()
        assert until(lambda: "120 of 200" in row("three"))
        ended.set()
        assert until(lambda: "finished" in row("three") and "unfinished" not in row("three"))
        assert browser.execute_script("return window.same"), "the page was loaded again"
        assert errors(browser) == []
        for tick in browser.find_elements("css selector", "#runs input")[:2]:
            browser.execute_script("arguments[0].click()", tick)
        browser.execute_script("document.getElementById('compare').click()")
        assert until(lambda: "2 runs compared" in browser.find_element("css selector", "h1").text)
        assert errors(browser) == []
        browser.get(f"http://127.0.0.1:{served.port}/run/three")
        assert browser.find_element("id", "state").text == "finished"
        assert errors(browser) == []
        assert all(
            address.startswith(f"http://127.0.0.1:{served.port}/")
            for address in requests(browser)
            if address != "data:,"
        )
    finally:
        release.set()
        ended.set()
        worker.join(30)
        served.close()


PAYLOADS = (
    "<img src=x onerror=window.hit=1>",
    "\"'><svg onload=window.hit=2>",
    "</script></style></title><script>window.hit=3</script>",
    "javascript:window.hit=4",
    "${7*7}{{7*7}}$body<b onclick=window.hit=5 style=position:fixed>",
)


def nothing_was_run(browser: Any) -> None:
    assert browser.execute_script("return window.hit === undefined")
    brought = (
        "img, iframe, object, embed, script[src], [onerror], [onload], [onclick], [style]:not(#tip), a[href^='java']"
    )
    assert browser.execute_script("return document.querySelectorAll(arguments[0]).length", brought) == 0
    assert errors(browser) == []


def test_no_name_or_text_is_run(browser: Any, tmp_path: Path) -> None:
    names = []
    for index, payload in enumerate(PAYLOADS):
        names.append(f"{index} {payload.replace('/', '')}")
        renamed(FakeRun(tmp_path / names[-1], stages=3, steps=8, kept=0.0).go().path, payload)
        (tmp_path / names[-1] / "evil.html").write_text(
            f"<title>evil</title>{PAYLOADS[0]}<script>window.hit=6</script>"
        )
    served = Served(tmp_path)
    address = f"http://127.0.0.1:{served.port}"
    runs = "&".join(f"run={quote(name)}" for name in names)
    try:
        for name in names:
            look(browser, write_report(tmp_path / name, pictures=False).as_uri())
            assert PAYLOADS[names.index(name)] in browser.execute_script("return document.body.textContent")
            nothing_was_run(browser)
            look(browser, f"{address}/run/{quote(name)}")
            nothing_was_run(browser)
        tasks = "&".join(f"metric={quote(f'bits_per_byte/stories {payload}')}" for payload in PAYLOADS)
        look(browser, f"{address}/?{runs}&{tasks}&measure=accuracy&filter=&metric={quote(PAYLOADS[0])}")
        assert until(lambda: len(visible(browser, "#charts figure")) == len(PAYLOADS))
        assert until(lambda: len(visible(browser, "#matrices table")) == len(PAYLOADS))
        nothing_was_run(browser)
        look(browser, f"{address}/compare?{runs}")
        assert visible(browser, "#outcomes")
        nothing_was_run(browser)
        look(browser, f"{address}/")
        browser.get(f"{address}/files/{quote(names[0])}/evil.html")  # stored, not opened
        assert browser.title == "Holdfast board"
        browser.get("about:blank")
    finally:
        served.close()


def test_the_board_with_a_thousand_runs_and_a_live_one(browser: Any, tmp_path: Path) -> None:
    first = FakeRun(tmp_path / "runs" / "sweep" / "r000", probes=False).go()
    texts = {name: (first.path / name).read_bytes() for name in ("config.yaml", "metrics.jsonl", "results.json")}
    for number_ in range(1, 999):
        folder = first.path.with_name(f"r{number_:03}")
        folder.mkdir()
        for name, data in texts.items():
            (folder / name).write_bytes(data)
    live = FakeRun(tmp_path / "runs" / "now" / "live", seed=2, kept=0.9)
    served = Served(tmp_path / "runs")
    try:
        with run_lock(live.path):
            live.go(60)
            look(browser, f"http://127.0.0.1:{served.port}/")
            assert len(browser.find_elements("css selector", "#runs tbody tr")) == 1000
            _choose_by_keys(browser)
            ends = "return [...document.querySelectorAll('#charts svg')].map(e => e.getAttribute('aria-label'))"
            before = browser.execute_script(ends)
            live.go(100)
            assert until(lambda: browser.execute_script(ends) != before), "it follows without a reload"
            _look_closer(browser)
            link = browser.current_url
            shown = browser.execute_script("return document.querySelector('#charts path.line').getAttribute('d')")
            look(browser, link)
            path = "const p = document.querySelector('#charts path.line'); return p && p.getAttribute('d')"
            assert until(lambda: browser.execute_script(path) == shown), "the address is the view"
            assert browser.find_element("id", "smooth").get_property("value") == "0.5"
            assert until(lambda: len(visible(browser, "#matrices table")) == 2)
        for width, scheme in SIZES:
            look(browser, link, width, scheme)
            assert until(lambda: bool(visible(browser, "#charts svg path.line")))
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
            assert errors(browser) == []
        browser.get("about:blank")
    finally:
        served.close()


def _choose_by_keys(browser: Any) -> None:
    """Find and tick two runs without a pointer."""
    page = browser.find_element("css selector", "body")
    for name in ("now/live", "r123"):
        page.send_keys("/")
        field = browser.switch_to.active_element
        assert field.get_attribute("id") == "filter"
        field.clear()
        field.send_keys(name)
        assert until(lambda: len(visible(browser, "#runs tbody tr")) == 1)
        visible(browser, "#runs tbody input")[0].send_keys(" ")
        browser.find_element("css selector", ".list").send_keys("")
    assert until(lambda: len(visible(browser, "#charts path.line")) >= 3)
    assert "run=now%2Flive&run=sweep%2Fr123" in browser.current_url


def _look_closer(browser: Any) -> None:
    """Smooth, read and zoom with the keys of a focused chart."""
    script = "const e = document.getElementById('smooth'); e.value = 0.5; e.dispatchEvent(new Event('input'))"
    browser.execute_script(script)
    assert until(lambda: bool(visible(browser, "#charts path.faint")))
    svg = visible(browser, "#charts svg")[0]
    svg.send_keys(Keys.ARROW_RIGHT)
    assert "live" in browser.find_element("id", "tip").text
    assert "live" in browser.find_element("id", "said").get_property("textContent")
    svg.send_keys("+")
    assert until(lambda: "low=" in browser.current_url)
    assert visible(browser, "#charts svg")[0].get_attribute("aria-label").startswith("train/loss over tokens")
    time.sleep(1)  # the finer curve is on its way
