"""Hostile names and texts of runs on every page, in a real browser."""

import contextlib
import functools
import itertools
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from benchmarks.campaign import Outcome, Try, scratch
from benchmarks.campaign.malformed import renamed

ABOUT = "scripts in every name and text of a run, on reports, comparisons and the board in Chromium: nothing is run"
SHAPES = (
    "<{tag} {event}=hit()>", '"><{tag} {event}=hit()>', "'><{tag} {event}=hit() x='", "</script><{tag} {event}=hit()>",
    "</style><{tag} {event}=hit()>", "</title><{tag} {event}=hit()>", "</textarea><{tag} {event}=hit()>",
    "--><{tag} {event}=hit()>", "]]><{tag} {event}=hit()>", '" {event}=hit() autofocus x="',
    "&lt;{tag} {event}=hit()&gt;",
    "\\u003c{tag} {event}=hit()>", "$body$js<{tag} {event}=hit()>", "<{tag}\n{event}\n=\nhit()>",
)  # fmt: skip
TAGS = (
    ("img src=x", "onerror"), ("svg", "onload"), ("script", "x"), ("details open", "ontoggle"),
    ("input autofocus", "onfocus"), ("iframe srcdoc='<script>parent.hit()</script>'", "x"),
    ("a href=javascript:hit()", "onclick"), ("style", "onload"),
)  # fmt: skip
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
)
BROUGHT = "img, iframe, object, embed, input[onfocus], script[src], [onerror], [onload], [ontoggle], a[href^='java']"


def tries(seed: int) -> Iterator[Try]:
    """Every shape with every tag; the seed has no say."""
    del seed
    for shape, (tag, event) in itertools.product(SHAPES, TAGS):
        payload = shape.replace("{tag}", tag).replace("{event}", event)
        yield Try(payload, functools.partial(_act, payload))


@functools.cache
def _browser() -> Any:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*FLAGS, f"--user-data-dir={tempfile.mkdtemp(dir=scratch())}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


@functools.cache
def _base() -> Path:
    sys.path.append(str(Path(__file__).resolve().parents[3] / "tests"))
    from fake_runs import FakeRun

    return FakeRun(scratch() / "base", stages=3, steps=8, kept=0.0).go().path


@functools.cache
def _served() -> Any:
    _base()  # tests are on the path from here on
    from served_board import Served

    (scratch() / "runs").mkdir()
    return Served(scratch() / "runs")


def _act(payload: str) -> list[Outcome]:
    from holdfast.report import write_report

    served, runs = _served(), scratch() / "runs"
    for old in runs.iterdir():
        shutil.rmtree(old)
    names = [f"one {payload.replace('/', '')}", "two"]
    for name in names:
        shutil.copytree(_base(), runs / name)
        renamed(runs / name, payload)
    address, chosen = f"http://127.0.0.1:{served.port}", "&".join(f"run={quote(name)}" for name in names)
    pages = {
        "report": write_report(runs / names[0], pictures=False).as_uri(),
        "board": f"{address}/?{chosen}&metric={quote(f'bits_per_byte/stories {payload}')}&filter={quote(payload)}",
        "run": f"{address}/run/{quote(names[0])}",
        "compare": f"{address}/compare?{chosen}",
    }
    return [_looked(name, page) for name, page in pages.items()]


def _looked(name: str, page: str) -> Outcome:
    browser = _browser()
    browser.get_log("browser")
    browser.get(page)
    for button in browser.find_elements("css selector", "summary")[:6]:
        with contextlib.suppress(Exception):
            button.click()
    script = (
        "return [window.hit === undefined, document.querySelectorAll(arguments[0]).length, document.body.innerText]"
    )
    quiet, brought, text = browser.execute_script(script, BROUGHT)
    said = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    if not quiet or brought or said:
        return Outcome(name, f"brought in: {brought} elements; {said[:1]}"[:200], held=False)
    return Outcome(name, "shown as text" if "hit()" in text else "not shown", held=True)
