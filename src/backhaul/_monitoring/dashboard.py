"""Serves the dashboard: one page, the status of the cluster as JSON, and metrics.

[Note: who may see it] The page itself has no data. Everything else needs the token, which is in the fragment of the
URL: browsers send a fragment to no server and put it into no log. The page sends the token in a header, so there is no
cookie that another site could make a browser send. Requests whose ``Host`` is a name other than this host's are
refused: a site could otherwise point its own name at this address (DNS rebinding). No answer allows other origins.
"""

from __future__ import annotations

import contextlib
import hmac
import http.server
import ipaddress
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from types import TracebackType
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec

from backhaul._monitoring import metrics
from backhaul._monitoring.cluster_view import ClusterStatus
from backhaul._monitoring.monitor import Monitor
from backhaul._runtime.runtime import Runtime
from backhaul._transport.sockets.interfaces import is_loopback_address
from backhaul.profiler.inline_page import assemble

log = logging.getLogger("backhaul")

TOKEN_VARIABLE = "BACKHAUL_DASHBOARD_TOKEN"
"""Sets the token, for programs that read metrics. Default: a new one each time."""

_MIN_TOKEN_CHARACTERS = 16
_FRESH_SECONDS = 0.5  # a status of that age is not asked for again
_REQUEST_SECONDS = 10.0  # for a client to send its request, and to read the answer
_MAX_REQUESTS = 16  # that are answered at the same time
_POLL_SECONDS = 0.1  # between checks whether the server shall end
_STYLES = (("backhaul.profiler", "theme.css"), ("backhaul._monitoring", "dashboard.css"))
_SCRIPTS = tuple(("backhaul._monitoring", name) for name in ("text.js", "charts.js", "panels.js", "dashboard.js"))
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def render() -> str:
    """The page. It has no data, and may request data from its own server only."""
    return assemble(("backhaul._monitoring", "dashboard.html"), _STYLES, _SCRIPTS, {}, connect="'self'")


class Dashboard:
    """A running server. Thread-safe.

    Args:
        open_monitor: Makes the monitor at the first request. The dashboard closes it.
        bind: Host and port; port 0: a free one.
        token: What clients have to know. Default: see ``TOKEN_VARIABLE``.

    Raises:
        ValueError: The address or the token is not valid.
        OSError: The address is in use, or not of this host.
    """

    def __init__(
        self, open_monitor: Callable[[], Monitor], bind: str = "127.0.0.1:0", token: str | None = None
    ) -> None:
        host, port = parse_bind(bind)
        self._token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24) if token is None else token
        if len(self._token) < _MIN_TOKEN_CHARACTERS or not self._token.isascii() or " " in self._token:
            raise ValueError(
                f"the token of the dashboard ({TOKEN_VARIABLE}) needs {_MIN_TOKEN_CHARACTERS} ASCII characters or "
                "more, without spaces"
            )
        self._open_monitor = open_monitor
        self._runtime = Runtime()
        self._asking = threading.Lock()  # held while the workers are asked; guards the four below
        self._monitor: Monitor | None = None
        self._status: ClusterStatus | None = None
        self._asked = 0.0
        self._closed = False
        self._server = _Server((host, port), self)
        self._names = {host, "localhost", socket.gethostname()}
        if host != "localhost" and not is_loopback_address(host):
            log.warning("the dashboard at %s:%d is not encrypted: who can read its traffic gets its token", host, port)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_address[1]}/#token={quote(self._token, safe='')}"
        """Where the page is, with the token."""
        self._thread = self._runtime.spawn(
            lambda: self._server.serve_forever(poll_interval=_POLL_SECONDS), name="backhaul-dashboard"
        )

    def __enter__(self) -> Dashboard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait(self) -> None:
        """Wait until the server ends: for a program that does nothing else."""
        while not self._runtime.join(self._thread, 1.0):
            pass

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._runtime.join(self._thread, _REQUEST_SECONDS)
        with self._asking:
            self._closed = True
            if self._monitor is not None:
                self._monitor.close()

    # What requests need.

    def allows_host(self, header: str | None) -> bool:
        """Whether a request may have this ``Host``: an address, or a name of this host; see [Note: who may see it]."""
        name = urlsplit(f"//{header or ''}").hostname or ""
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return True

    def allows_token(self, header: str | None) -> bool:
        """Whether the ``Authorization`` of a request has the token. Takes the same time for all wrong tokens."""
        return hmac.compare_digest((header or "").encode(), f"Bearer {self._token}".encode())

    def status(self) -> ClusterStatus:
        """The status of the cluster, at most half a second old."""
        with self._asking:
            if self._closed:
                raise ConnectionAbortedError("the dashboard is closed")
            if self._monitor is None:
                self._monitor = self._open_monitor()
            now = self._runtime.now()
            if self._status is None or now - self._asked >= _FRESH_SECONDS:
                self._status = self._monitor.refresh()
                self._asked = self._runtime.now()
            return self._status


class _Server(http.server.ThreadingHTTPServer):
    """Answers each request on a thread of its own, but only so many at a time."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], dashboard: Dashboard) -> None:
        self.dashboard = dashboard
        self._free = threading.BoundedSemaphore(_MAX_REQUESTS)
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Request)

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request to the dashboard failed", exc_info=True)


class _Request(http.server.BaseHTTPRequestHandler):
    """One request."""

    server: _Server
    timeout = _REQUEST_SECONDS
    server_version = "backhaul"
    sys_version = ""

    def do_GET(self) -> None:
        dashboard, path = self.server.dashboard, urlsplit(self.path).path
        if not dashboard.allows_host(self.headers.get("Host")):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "this name is not a name of this host\n")
        elif path == "/":
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", render())
        elif path == "/favicon.ico":
            self._answer(HTTPStatus.NO_CONTENT, "image/x-icon", "")
        elif path not in _ANSWERS:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is no such page\n")
        elif not dashboard.allows_token(self.headers.get("Authorization")):
            self._answer(HTTPStatus.UNAUTHORIZED, "text/plain", "the token is missing or wrong\n")
        else:
            kind, shown = _ANSWERS[path]
            self._answer(HTTPStatus.OK, kind, shown(dashboard.status()))

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **_HEADERS}.items():
            self.send_header(name, value)
        if status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("dashboard: " + format, *args)


_ANSWERS: dict[str, tuple[str, Callable[[ClusterStatus], str]]] = {
    "/api/status": ("application/json", lambda status: msgspec.json.encode(status).decode()),
    "/metrics": (metrics.CONTENT_TYPE, metrics.to_prometheus),
}


def parse_bind(bind: str) -> tuple[str, int]:
    """Host and port of an address.

    >>> parse_bind("127.0.0.1:0"), parse_bind("[::1]:8080")
    (('127.0.0.1', 0), ('::1', 8080))
    """
    host, colon, port = bind.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"the dashboard is served at host:port, such as 127.0.0.1:8080 (port 0: any), not {bind!r}")
    return host, int(port)
