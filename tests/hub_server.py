"""A stand-in for the Hugging Face hub on the loopback address: repositories, preupload, LFS, commits."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any


class Hub:
    """Keeps what is pushed. Use it as a context manager.

    Args:
        token: what a request must carry to be let in.
    """

    def __init__(self, token: str) -> None:
        self.token = token
        self.repositories: dict[str, dict[str, Any]] = {}
        self.files: dict[str, dict[str, bytes]] = {}  # repository -> path -> content
        self.blobs: dict[str, bytes] = {}  # of LFS, by SHA-256
        self.commits: list[str] = []
        self.validated: list[str] = []  # model cards
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def create(self, wanted: Any) -> tuple[int, Any]:
        """POST /api/repos/create."""
        name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        known = name in self.repositories
        self.repositories.setdefault(name, wanted)
        self.files.setdefault(name, {})
        return (409 if known else 200), {"url": f"{self.address}/{name}", "name": name}

    def preupload(self, wanted: Any) -> tuple[int, Any]:
        """POST /api/models/NAME/preupload/main: weights go by LFS, the rest stands in the commit."""
        modes = [
            {"path": each["path"], "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular"}
            for each in wanted["files"]
        ]
        return 200, {"files": [{**mode, "shouldIgnore": False, "oid": None} for mode in modes]}

    def batch(self, wanted: Any) -> tuple[int, Any]:
        """POST /NAME.git/info/lfs/objects/batch."""
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.address}/blobs/{each['oid']}", "header": {}}}}
            for each in wanted["objects"]
        ]
        return 200, {"transfer": "basic", "objects": objects}

    def commit(self, name: str, lines: list[Any]) -> tuple[int, Any]:
        """POST /api/models/NAME/commit/main, one JSON object a line."""
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.commits.append(value["summary"])
            elif line["key"] == "file":
                self.files[name][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[name][value["path"]] = self.blobs[value["oid"]]
        address = f"{self.address}/{name}/commit/0123"
        return 200, {"commitUrl": address, "commitOid": "0" * 40, "hookOutput": "", "success": True}


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def answer(self, code: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data

        def handle_request(self) -> None:
            path, data = self.path.partition("?")[0], self.body()
            if path.startswith("/blobs/"):
                hub.blobs[path.removeprefix("/blobs/")] = data
                self.answer(200, {})
            elif self.headers.get("Authorization") != f"Bearer {hub.token}":
                self.answer(401, {"error": "Invalid credentials"})
            elif path == "/api/repos/create":
                self.answer(*hub.create(json.loads(data)))
            elif path.endswith("/preupload/main"):
                self.answer(*hub.preupload(json.loads(data)))
            elif path.endswith("/info/lfs/objects/batch"):
                self.answer(*hub.batch(json.loads(data)))
            elif path.endswith("/commit/main"):
                name = path.removeprefix("/api/models/").removesuffix("/commit/main")
                self.answer(*hub.commit(name, [json.loads(line) for line in data.splitlines() if line]))
            elif path == "/api/validate-yaml":
                hub.validated.append(json.loads(data)["content"])
                self.answer(200, {"errors": [], "warnings": []})
            elif path == "/api/whoami-v2":
                self.answer(200, {"name": "me", "type": "user", "orgs": []})
            else:
                self.answer(404, {"error": f"{self.command} {path}: not spoken here"})

        do_GET = do_POST = do_PUT = do_HEAD = handle_request  # noqa: N815  # the names that http.server calls

    return Handler
