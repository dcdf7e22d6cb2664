"""A board that answers on a free port, for tests that ask it over the wire."""

import http.client
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import uvicorn

from holdfast.report.board import make_board


class Served:
    """A board on a free port."""

    def __init__(self, root: Path, token: str | None = None) -> None:
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.server = uvicorn.Server(uvicorn.Config(make_board(root, token), log_level="warning"))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]}, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def ask(self, path: str, method: str = "GET", host: str | None = None) -> tuple[int, bytes]:
        """The path goes over the wire as it is, dots and percent signs included."""
        status, _, text = self.answer(path, method, host)
        return status, text

    def answer(
        self, path: str, method: str = "GET", host: str | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """The same with the headers of the answer, by their names in small letters."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", host or f"127.0.0.1:{self.port}")
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()

    def json(self, path: str) -> Any:
        return json.loads(self.ask(path)[1])

    def runs(self) -> dict[str, Any]:
        return {run["path"]: run for run in json.loads(self.ask("/api/runs")[1])}

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)
