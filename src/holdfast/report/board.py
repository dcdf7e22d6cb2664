"""A page that lists all runs below a folder, live, and overlays their curves. It reads files and writes none.

`Guard` stands before it: who may ask, under which name, and what a browser may do with the answers.
"""

import hashlib
import http.cookies
import ipaddress
import json
import math
import re
import secrets
import socket
import string
import urllib.parse
from collections.abc import Callable
from html import escape
from pathlib import Path

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.errors import UserError
from holdfast.report import compare, page, shell
from holdfast.report.drawing import heat
from holdfast.report.live import statuses
from holdfast.report.records import text
from holdfast.report.run_files import is_run, open_run, readable
from holdfast.report.series import AXES, OpenCurves
from holdfast.types import Json

HOST = "127.0.0.1"
MOST_RUNS = 32  # of a view: more lines than anyone tells apart
MOST_METRICS = 24
HIDDEN = "; frame-ancestors 'none'"
# Answers that say nothing of their own, files of runs among them, may run nothing and are no page of the board.
SANDBOX = "sandbox; default-src 'none'; frame-ancestors 'none'"
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}


def make_board(root: Path, token: str | None = None) -> Starlette:
    """The application for the runs below a folder.

    Args:
        token: what is asked for where others can reach the board; None answers on the loopback address alone.
    """
    base = root.resolve(strict=True)
    pages = _Pages(base)
    routes = [
        Route("/", pages.index),
        Route("/api/runs", pages.runs),
        Route("/api/curves", pages.curves),
        Route("/api/matrix", pages.matrix),
        Route("/compare", pages.comparison),
        Route("/run/{path:path}", pages.report),
        Route("/files/{path:path}", pages.file),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Guard, token=token)])


class _Pages:
    """The answers of a board."""

    def __init__(self, base: Path) -> None:
        self._base, self._curves = base, OpenCurves()

    def index(self, _request: Request) -> Response:
        css, js = shell.part("page.css") + shell.part("board.css"), shell.part("board.js")
        return _html(board_page(self._base, css, js), shell.policy(css, js, ask=True))

    def runs(self, request: Request) -> Response:
        data = _encode([status.to_dict() for status in statuses(self._base)])
        etag = f'"{hash(data) & (2**64 - 1):x}"'
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers={"ETag": etag})
        return Response(data, media_type="application/json", headers={"ETag": etag})

    def curves(self, request: Request) -> Response:
        """The curves that a view shows, and the names of all that its runs have."""
        asked = request.query_params
        axis = asked["x"] if asked.get("x") in AXES else AXES[0]
        low, high = _float(asked.get("low"), -math.inf), _float(asked.get("high"), math.inf)
        smooth = min(max(_float(asked.get("smooth"), 0.0), 0.0), 0.999)
        names: dict[str, None] = {}
        series: dict[str, dict[str, Json]] = {metric: {} for metric in asked.getlist("metric")[:MOST_METRICS]}
        for run in asked.getlist("run")[:MOST_RUNS]:
            try:
                path = self._run(run)
            except HTTPException:
                continue  # gone since, or never there: the others are still shown
            found = self._curves.of(path)
            names |= dict.fromkeys(found.metrics())
            for metric, lines in series.items():
                line = found.window(metric, axis, low, high, smooth)
                if line is not None:
                    lines[run] = line
        return _json({"metrics": list(names), "series": series})

    def matrix(self, request: Request) -> Response:
        """The score matrices of some runs in one measure, and the measures that they have."""
        asked, found = request.query_params, []
        measures: dict[str, None] = {}
        for run in asked.getlist("run")[:MOST_RUNS]:
            try:
                path = self._run(run)
                with readable(path):
                    opened = open_run(path, curves=False)
                    measures |= dict.fromkeys(opened.matrix.measures if opened.matrix is not None else ())
                    table = heat.matrix_heat(opened, asked.get("measure") or "bits_per_byte")
            except (HTTPException, UserError, OSError) as error:
                found.append({"run": run, "problem": text(getattr(error, "detail", "") or error)})
                continue
            found.append({"run": run} | ({} if table is None else _table(table)))
        return _json({"measures": list(measures), "runs": found})

    def report(self, request: Request) -> Response:
        path = self._run(request.path_params["path"])
        return self._page(lambda: page.render(open_run(path)), path)

    def comparison(self, request: Request) -> Response:
        paths: list[str | Path] = [self._run(text) for text in request.query_params.getlist("run")]
        return self._page(lambda: compare.render(compare.compare(paths)), self._base)

    def file(self, request: Request) -> Response:
        """A file of a run, to be stored: never a page of this origin, whatever is in it."""
        path = self._inside(request.path_params["path"])
        if not path.is_file():
            raise HTTPException(404)
        headers = {"Content-Security-Policy": SANDBOX}
        return FileResponse(path, media_type="application/octet-stream", filename=text(path.name), headers=headers)

    def _page(self, render: Callable[[], str], path: Path) -> Response:
        """A page, or one that says in a sentence why there is none."""
        policy = shell.policy(shell.part("page.css"), shell.part("page.js"))
        try:
            with readable(path):
                return _html(render(), policy)
        except (UserError, OSError) as error:
            said = text(error).replace(f"{self._base}/", "")
            return _html(shell.page("Holdfast", f'<p id="problem">{escape(said)}</p>'), policy, 400)

    def _run(self, name: str) -> Path:
        path = self._inside(name)
        if not path.is_dir() or not is_run(path):
            raise HTTPException(404)
        return path

    def _inside(self, name: str) -> Path:
        """A path below the folder that is there; everything else, links out of it among it, is not found."""
        if "\0" in name:
            raise HTTPException(404)
        try:
            path = (self._base / name).resolve(strict=True)
        except (OSError, RuntimeError, ValueError):
            raise HTTPException(404) from None
        if not path.is_relative_to(self._base):
            raise HTTPException(404)
        return path


def _table(table: heat.Heat) -> Json:
    cells = [
        [{"value": cell.value, "ends": cell.ends, "shade": round(20 * cell.shade), "home": cell.home} for cell in row]
        for row in table.cells
    ]
    return {"title": table.title, "rows": list(table.rows), "columns": list(table.columns), "cells": cells}


def _float(given: str | None, default: float) -> float:
    try:
        value = float(given or "")
    except ValueError:
        return default
    return default if math.isnan(value) else value


def _encode(value: object) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _json(value: object) -> Response:
    return Response(_encode(value), media_type="application/json")


def _html(content: str, policy: str, status: int = 200) -> Response:
    return HTMLResponse(content, status, headers={"Content-Security-Policy": policy + HIDDEN})


def board_page(base: Path, css: str, js: str) -> str:
    """The one page of the board, with the runs as they are now."""
    first = _encode([status.to_dict() for status in statuses(base)]).replace("<", "\\u003c")
    filled = {"css": css, "js": js, "name": escape(text(base.name or base)), "runs": first}
    return string.Template(shell.part("board.html")).substitute(filled)


def serve(root: Path, port: int, say: Callable[[str], object] = print, host: str = HOST) -> None:
    """Serve the board until interrupted; port 0 takes a free one.

    Args:
        host: an address of this machine; one that others can reach is served with a token, which is said once.
    """
    import uvicorn

    if not root.is_dir():
        raise UserError(f"{root}: there is no such folder; expected a folder of runs, such as runs")
    with _listener(host, port) as listener:
        token = None if is_loopback(host) else secrets.token_urlsafe(24)
        name = host if host not in ("0.0.0.0", "::") else socket.gethostname()
        address = f"http://{f'[{name}]' if ':' in name else name}:{listener.getsockname()[1]}/"
        say(f"{address}{f'?token={token}' if token else ''} shows the runs below {root}; end with Ctrl-C")
        config = uvicorn.Config(make_board(root, token), log_level="warning", access_log=False)
        uvicorn.Server(config).run(sockets=[listener])


def _listener(host: str, port: int) -> socket.socket:
    try:
        [(family, kind, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(f"--host {host}: no address of this machine ({error.strerror}); expected 127.0.0.1") from None
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise UserError(
            f"--port {port} on {host}: cannot be used ({error.strerror}); choose another, or 0 for a free one"
        ) from None
    return listener


def is_loopback(host: str) -> bool:
    """Whether an address is for this machine alone.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Guard:
    """Lets a request through, or answers it.

    Args:
        token: what a browser must have shown once, in the address or as a bearer; None asks for none and answers
            under the names of the loopback address alone: a page elsewhere could make its own name point here.
    """

    def __init__(self, app: ASGIApp, token: str | None = None) -> None:
        self._app, self._token = app, token
        self._cookie = f"holdfast_{hashlib.sha256((token or '').encode()).hexdigest()[:8]}"  # boards share a host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in {"Content-Security-Policy": SANDBOX, **HEADERS}.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._refused(scope)
        await (answer or self._app)(scope, receive, with_headers)

    def _refused(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if self._token is None:
            found = re.fullmatch(r"(?:\[([^\]]*)\]|([^:]*))(?::\d+)?", headers.get("host", ""))
            known = found is not None and is_loopback(found[1] or found[2])
            return None if known else PlainTextResponse("This board answers on the loopback address alone.\n", 400)
        query = urllib.parse.parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if any(name == "token" and self._matches(value) for name, value in query):
            rest = urllib.parse.urlencode([pair for pair in query if pair[0] != "token"])
            path = "/" + urllib.parse.quote(scope["path"].lstrip("/"))
            answer = RedirectResponse(f"{path}?{rest}" if rest else path, 303)
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="lax")
            return answer
        cookies = http.cookies.SimpleCookie()
        try:
            cookies.load(headers.get("cookie", ""))
        except http.cookies.CookieError:
            cookies.clear()
        shown = cookies[self._cookie].value if self._cookie in cookies else ""
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._matches(shown) or self._matches(bearer):
            return None
        return PlainTextResponse("This board asks for the token that `holdfast board` printed as it started.\n", 401)

    def _matches(self, shown: str) -> bool:
        return secrets.compare_digest(shown.encode(), (self._token or "").encode())
