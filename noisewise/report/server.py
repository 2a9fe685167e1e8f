"""The page of a run that is still going on, served to this machine alone."""

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from noisewise.report.page import fill, render
from noisewise.report.subject import read_subject
from noisewise.study.outcome import FAILURE, PLAN

HOST = "127.0.0.1"
OURS = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?")  # what the browser may have been told to ask for
WATCHED = (PLAN, FAILURE, "config.yaml", "metrics.jsonl")


class LivePage:
    """The page of a folder, made again when the files behind it have changed."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self._made = ("", "")
        self._lock = threading.Lock()

    def version(self) -> str:
        """Changes with the files that the page is made of."""
        paths = [self.target / name for name in WATCHED]
        paths += [path for name in WATCHED for path in self.target.glob(f"runs/*/{name}")]
        state = [(str(path), found.st_mtime_ns, found.st_size) for path in sorted(paths) if (found := _stat(path))]
        return sha256(repr(state).encode()).hexdigest()[:16]

    def html(self) -> str:
        """The page as of now; one that says why, where there is nothing to show yet."""
        with self._lock:
            version = self.version()
            if self._made[0] != version:
                try:
                    page = render(read_subject(self.target), live=version)
                except (ValueError, OSError) as error:  # also a file that is being written right now
                    said = f'<p class="eyebrow">noisewise, live</p><h1>Not yet</h1><p>{escape(str(error))}</p>'
                    page = fill(f"<main><header>{said}</header></main>", "noisewise", live=version)
                self._made = (version, page)
            return self._made[1]


@contextmanager
def serving(target: Path, port: int = 0) -> Iterator[tuple[ThreadingHTTPServer, str]]:
    """A server on 127.0.0.1, closed in the end; it and its address."""
    if not target.is_dir():
        raise FileNotFoundError(f"{target} is no folder: give that of a run, or the --out of noisewise compare")
    page = LivePage(target)

    class Answer(Handler):
        live = page

    try:
        server = ThreadingHTTPServer((HOST, port), Answer)
    except (OSError, OverflowError) as error:
        raise OSError(f"port {port} cannot be used ({error}): give another --port, or none for any that is free") from error
    server.daemon_threads = True
    with server:
        yield server, f"http://{HOST}:{server.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    """Two addresses, and nothing else; a page of another site that points its name to 127.0.0.1 gets no answer."""

    live: LivePage
    server_version, sys_version = "noisewise", ""

    def do_GET(self) -> None:
        if not OURS.fullmatch(self.headers.get("Host", "")):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", f"ask for this page at {HOST} or localhost")
        elif self.path == "/":
            self._send(HTTPStatus.OK, "text/html", self.live.html())
        elif self.path == "/version":
            self._send(HTTPStatus.OK, "text/plain", self.live.version())
        elif self.path == "/favicon.ico":
            self._send(HTTPStatus.NO_CONTENT, "image/x-icon", "")
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "there is only / here")

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal belongs to whoever started this."""


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
