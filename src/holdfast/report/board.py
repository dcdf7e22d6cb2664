"""A small local page that lists all runs below a folder, live. It reads files and writes none."""

import json
import socket
import string
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from holdfast.errors import UserError
from holdfast.report import compare, page
from holdfast.report.live import statuses
from holdfast.report.run_files import is_run, open_run

HOST = "127.0.0.1"
# Pages may use their own inline style and script, ask this server, and nothing else.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'"
)
HEADERS = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}


def make_board(root: Path) -> Starlette:
    """The application for the runs below a folder."""
    base = root.resolve(strict=True)

    def inside(text: str) -> Path:
        """A path below the folder that is there; everything else, links out of it among it, is not found."""
        if "\0" in text:
            raise HTTPException(404)
        try:
            path = (base / text).resolve(strict=True)
        except (OSError, RuntimeError, ValueError):
            raise HTTPException(404) from None
        if not path.is_relative_to(base):
            raise HTTPException(404)
        return path

    def run_below(text: str) -> Path:
        path = inside(text)
        if not path.is_dir() or not is_run(path):
            raise HTTPException(404)
        return path

    def index(_request: Request) -> Response:
        return _html(board_page(base))

    def runs(_request: Request) -> Response:
        listed = [status.to_dict() for status in statuses(base)]
        return JSONResponse(listed, headers=HEADERS)

    def report(request: Request) -> Response:
        return _html(page.render(open_run(run_below(request.path_params["path"]))))

    def comparison(request: Request) -> Response:
        paths: list[str | Path] = [run_below(text) for text in request.query_params.getlist("run")]
        try:
            return _html(compare.render(compare.compare(paths)))
        except UserError as error:
            return _html(page.page("Holdfast", f"<p>{escape(str(error))}</p>"), 400)

    def file(request: Request) -> Response:
        path = inside(request.path_params["path"])
        if not path.is_file():
            raise HTTPException(404)
        return FileResponse(path, headers=HEADERS)

    routes = [
        Route("/", index),
        Route("/api/runs", runs),
        Route("/compare", comparison),
        Route("/run/{path:path}", report),
        Route("/files/{path:path}", file),
    ]
    # A page elsewhere that makes its own name point here must not read runs.
    trusted = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    return Starlette(routes=routes, middleware=[trusted])


def _html(text: str, status: int = 200) -> Response:
    return HTMLResponse(text, status, headers=HEADERS)


def board_page(base: Path) -> str:
    """The one page of the board."""
    folder = resources.files("holdfast.report")
    read: dict[str, Any] = {
        "html": folder.joinpath("board.html").read_text(encoding="utf-8"),
        "css": folder.joinpath("page.css").read_text(encoding="utf-8"),
        "js": folder.joinpath("board.js").read_text(encoding="utf-8"),
    }
    first = json.dumps([status.to_dict() for status in statuses(base)]).replace("<", "\\u003c")
    return string.Template(read["html"]).substitute(css=read["css"], js=read["js"], name=escape(str(base)), runs=first)


def serve(root: Path, port: int, say: Any = print) -> None:
    """Serve the board on the loopback address until interrupted; port 0 takes a free one."""
    import uvicorn

    if not root.is_dir():
        raise UserError(f"{root}: there is no such folder; expected a folder of runs, such as runs")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        listener.close()
        raise UserError(
            f"--port {port}: cannot be used ({error.strerror}); choose another, or 0 for a free one"
        ) from None
    with listener:
        say(f"http://{HOST}:{listener.getsockname()[1]}/ shows the runs below {root}; end with Ctrl-C")
        config = uvicorn.Config(make_board(root), log_level="warning", access_log=False)
        uvicorn.Server(config).run(sockets=[listener])
