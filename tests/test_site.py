"""The documentation site: built strict, opened page by page at two widths, no dead link, search finds names."""

import functools
import html
import importlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import MISSING
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from holdfast.config import plain, schema
from report.test_browser import browser as browser
from report.test_browser import errors, look
from test_specification import PAGES, SPEC, declared

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.extra]
WIDTHS = {1280: "light", 390: "dark"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    pytest.importorskip("material", reason="mkdocs-material is not installed (pip install 'holdfast[docs]')")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed (pip install 'holdfast[docs]')")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()


class Links(HTMLParser):
    """Addresses that a page leads to, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = dict(attributes)
        self.anchors |= {value for key in ("id", "name") if (value := named.get(key))}
        target = named.get("href") if tag in ("a", "link") else named.get("src")
        if target and not re.match(r"[a-z]+:", target):
            self.targets.add(target)


def pages(site: Path) -> list[Path]:
    return [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]  # its links are from the root


def test_no_link_is_dead(site: Path) -> None:
    read = {path: Links(path.read_text(encoding="utf-8")) for path in pages(site)}
    assert len(read) > 30
    dead = []
    for path, links in read.items():
        for target in links.targets:
            place, _, anchor = unquote(target).partition("#")
            found = (path.parent / place.partition("?")[0]).resolve() if place else path
            found = found / "index.html" if found.is_dir() else found
            named = anchor and found in read and anchor not in read[found].anchors and not anchor.startswith("__")
            if not found.exists() or named:
                dead.append(f"{path.relative_to(site)}: {target}")
    assert not dead, "\n".join(dead)


def test_every_page_opens_wide_and_narrow(browser: Any, site: Path, address: str) -> None:
    wrong = []
    for width, scheme in WIDTHS.items():
        for path in pages(site):
            look(browser, address + str(path.relative_to(site)).removesuffix("index.html"), width, scheme)
            said = errors(browser)
            wide = browser.execute_script("return document.documentElement.scrollWidth")
            if said or wide > width or not browser.find_elements("css selector", "article h1"):
                wrong.append(f"{path.relative_to(site)} at {width}: {wide} wide, {said}")
    assert not wrong, "\n".join(wrong)


def test_search_finds_a_class(browser: Any, address: str) -> None:
    look(browser, address)
    field = browser.find_element("css selector", "input.md-search__input")
    browser.execute_script("arguments[0].focus()", field)
    field.send_keys("FadeConfig")
    deadline = time.monotonic() + 60
    found: list[str] = []
    while not found and time.monotonic() < deadline:
        time.sleep(0.2)
        links = browser.find_elements("css selector", ".md-search-result__link")
        found = [href for link in links if "api/abcd" in (href := link.get_attribute("href") or "")]
    assert found
    assert errors(browser) == []


def test_api_pages_list_every_field_with_path_and_default(site: Path) -> None:
    listed: dict[str, int] = {}
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        text = (site / "api" / page.stem.removesuffix("index") / "index.html").read_text(encoding="utf-8")
        for module, name in re.findall(r"<!-- fields: ([\w.]+)\.(\w+) -->", page.read_text(encoding="utf-8")):
            section = text[text.index(f'id="{module}.{name}"') :]
            table = section[: section.index("</table>")]
            rows = [re.sub(r"<[^>]+>", "|", cells) for cells in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)]
            entries = schema(getattr(importlib.import_module(module), name))
            for path, entry in entries.items():
                (row,) = [row for row in rows if f"|{path}|" in row]
                default = (
                    "required" if entry.default is MISSING else json.dumps(plain(entry.default), ensure_ascii=False)
                )
                assert default in html.unescape(row), f"{page.name}: {name}: {path}"
            listed[name] = len(entries)
    assert listed["ABCDKLConfig"] > 20
    assert len(listed) > 10


@pytest.mark.parametrize("page", PAGES)
def test_api_pages_show_the_methods_of_the_specification(site: Path, page: str) -> None:
    if not SPEC.is_dir():
        pytest.skip(f"{SPEC} is not there")
    anchors = Links((site / "api" / page / "index.html").read_text(encoding="utf-8")).anchors
    for name, lines in declared(page).items():
        (place,) = [each for each in anchors if each.endswith(f".{name}")]
        methods = [re.split(r"[(:]", line)[0] for line in lines[1:] if not line.startswith("Bases: ")]
        assert {f"{place}.{method}" for method in methods} <= anchors


def test_every_command_has_its_heading(site: Path) -> None:
    from holdfast.cli.app import COMMANDS

    text = (site / "commands" / "index.html").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f'id="holdfast-{name}"' not in text] == []
