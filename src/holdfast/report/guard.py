"""What stands before the board: who may ask, under which name, and what a browser may do with the answers."""

import hashlib
import http.cookies
import ipaddress
import re
import secrets
import urllib.parse

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
