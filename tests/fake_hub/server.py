"""The HTTP side: routes, redirects to signed addresses, ranges, tokens, paging and faults."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from fake_hub import uploads
from fake_hub.faults import Fault, Faults
from fake_hub.repository import Repository, sha256

API = re.compile(r"^/api/(datasets|models)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?$")
RESOLVE = re.compile(r"^/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)$")
CDN = re.compile(r"^/cdn/(.+)$")
RANGE = re.compile(r"^bytes=(\d*)-(\d*)$")
Headers = list[tuple[str, str]]
# The top-level domain that RFC 6761 reserves for names without an address.
NOWHERE = "cdn.invalid"


def _ignore(_: str) -> None:
    """Ignore a request: the default of `on_request`."""


@dataclass(frozen=True)
class Request:
    """One line of the hub's log."""

    method: str
    host: str
    path: str
    range: str | None
    authorization: str | None
    user_agent: str
    status: int
    fault: str | None


class FakeHub:
    """Serves the repositories below `root` on 127.0.0.1; large files redirect to the host name `localhost`.

    `token`: every request but those to signed addresses must carry it. `page_size`: tree entries a page.
    `latency`: seconds before every answer begins. `on_request` is called with every path before its answer.
    """

    def __init__(
        self, root: Path, *, token: str | None = None, page_size: int = 1000, port: int = 0, latency: float = 0
    ) -> None:
        self.root, self.token, self.page_size, self.latency = Path(root), token, page_size, latency
        self.faults, self.requests = Faults(), list[Request]()
        self.uploads = uploads.Uploads(self.root)
        # Whether the token's owner has not yet accepted the conditions of the data sets.
        self.gated = False
        self.on_request: Callable[[str], None] = _ignore
        self.closing = threading.Event()
        self._signature, self._kept = 0, set[str]()
        handler = type("BoundHandler", (_Handler,), {"hub": self})
        self._server = _Server(("127.0.0.1", port), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, cache: Path) -> dict[str, str]:
        """Return the environment variables that point a Hub client here and its cache at `cache`."""
        token = {"HF_TOKEN": self.token} if self.token else {}
        return {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", **token}

    def keep_commit(self, name: str) -> None:
        """Keep the data set's current commit known when its files change; it then serves the new files."""
        self._kept.add(Repository(self.root, "datasets", name).commit())

    def find(self, repository: Repository, revision: str) -> tuple[str, Repository] | None:
        """Return the commit that a revision stands for, and its files; None if it is unknown."""
        newest = repository.commit()
        if revision in ("main", newest):
            return newest, repository
        return (revision, repository) if revision in self._kept else self.uploads.find(repository, revision)

    def expire_signatures(self) -> None:
        """Make every signed address given out so far answer 403."""
        self._signature += 1

    def signature(self, path: str) -> str:
        return hashlib.sha256(f"{self._signature}{path}".encode()).hexdigest()[:16]

    def __enter__(self) -> FakeHub:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that went away, or were killed."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version, server_version = "HTTP/1.1", "fake-hub"
    # Without a write buffer and TCP_NODELAY each answer waits 40 ms for a delayed acknowledgement.
    wbufsize, disable_nagle_algorithm = 1 << 16, True

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing: the log is `hub.requests`."""

    def handle_request(self) -> None:
        self.status, self.injected = 0, self.hub.faults.take(unquote(urlsplit(self.path).path))
        try:
            body = self.read_body()
            self.hub.on_request(self.path)
            if self.hub.latency:
                self.hub.closing.wait(self.hub.latency)
            if body is not None:
                self.route(body)
            self.wfile.flush()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            header = self.headers.get
            fault = self.injected.kind if self.injected else None
            client = (header("Range"), header("Authorization"), header("User-Agent") or "")
            host = header("Host") or ""
            self.hub.requests.append(Request(self.command, host, self.path, *client, self.status, fault))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request

    def read_body(self) -> bytes | None:
        """Return the body of the request; None if the injected fault cuts an upload."""
        size = int(self.headers.get("Content-Length") or 0)
        if self.command != "PUT" or self.injected is None or self.injected.kind not in ("reset", "stall"):
            return self.rfile.read(size)
        self.rfile.read(size // 2)
        self.hub.on_request(self.path)
        self.leave(self.injected.kind)
        return None

    def route(self, body: bytes) -> None:
        url = urlsplit(self.path)
        path, query = unquote(url.path), parse_qs(url.query)
        fault = self.injected
        if fault and fault.kind in ("500", "502", "503"):
            return self.refuse(int(fault.kind), "Injected", "injected server error")
        if fault and fault.kind in ("429", "rate_limit"):
            return self.limit_rate(fault)
        if fault and fault.kind in ("401", "403", "409"):
            return self.refuse(int(fault.kind), "Injected", "injected refusal")
        if self.command == "PUT":
            return self.store(query, path, body)
        if match := CDN.match(path):
            return self.serve_signed(match, query, path)
        if uploads.is_upload(path):
            return self.serve_upload(path, body)
        authorization = self.headers.get("Authorization")
        if self.hub.token and authorization and authorization != f"Bearer {self.hub.token}":
            return self.refuse(401, None, "Invalid credentials in Authorization header")
        if self.hub.token and not authorization:
            return self.refuse(401, "GatedRepo", "Access to this dataset is restricted")
        if match := API.match(path):
            return self.serve_api(match, query, body)
        if match := RESOLVE.match(path):
            return self.serve_resolve(match)
        return self.refuse(404, "NotFound", f"no such page: {path}")

    def serve_upload(self, path: str, body: bytes) -> None:
        authorization = self.headers.get("Authorization") or ""
        if not authorization or (self.hub.token and authorization != f"Bearer {self.hub.token}"):
            message = (
                "Invalid credentials in Authorization header" if authorization else "Invalid username or password."
            )
            return self.send(uploads.refusal(401, message))
        return self.send(uploads.answer(self.hub.uploads, self.command, path, body, self.signed))

    def store(self, query: dict[str, list[str]], path: str, body: bytes) -> None:
        if query.get("Signature") != [self.hub.signature(path)]:
            return self.answer(403, b"<Error><Code>AccessDenied</Code></Error>", [])
        return self.send(uploads.store(self.hub.uploads, path, body))

    def send(self, answer: uploads.Answer) -> None:
        self.answer_json(answer.body, answer.status, answer.headers)

    def signed(self, path: str, host: str = "localhost") -> str:
        """Return the signed address of a path, which needs no token."""
        return f"http://{host}:{self.hub.port}{quote(path)}?Signature={self.hub.signature(path)}"

    def serve_api(self, match: re.Match[str], query: dict[str, list[str]], body: bytes) -> None:
        kind, name, what, revision, rest = match.groups()
        repository = Repository(self.hub.root, kind, name)
        if not repository.exists():
            return self.refuse(404 if self.hub.token else 401, "RepoNotFound", "Repository not found")
        resolved = self.hub.find(repository, revision or "main")
        if resolved is None:
            return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        commit, repository = resolved
        if what == "tree":
            return self.serve_tree(repository, (rest or "").strip("/"), query)
        if what == "paths-info":
            json_body = "json" in (self.headers.get("Content-Type") or "")
            paths = json.loads(body).get("paths", []) if json_body else parse_qs(body.decode()).get("paths", [])
            existing_paths = [path for path in paths if path and (repository.folder / path).exists()]
            return self.answer_json([repository.entry(path) for path in existing_paths])
        private = name in self.hub.uploads.private
        return self.answer_json(repository.describe(commit, gated=self.hub.token is not None, private=private))

    def serve_tree(self, repository: Repository, folder: str, query: dict[str, list[str]]) -> None:
        if folder and not (repository.folder / folder).is_dir():
            return self.refuse(404, "EntryNotFound", "no such folder")
        entries = repository.tree(folder, query.get("recursive", ["false"])[0].lower() in ("true", "1"))
        start = int(query.get("cursor", ["0"])[0])
        page, headers = entries[start : start + self.hub.page_size], Headers()
        if start + len(page) < len(entries):
            keep = "".join(f"{key}={quote(values[0])}&" for key, values in query.items() if key != "cursor")
            address = f"{self.hub.endpoint}{urlsplit(self.path).path}?{keep}cursor={start + len(page)}"
            headers = [("Link", f'<{address}>; rel="next"')]
        return self.answer_json(page, headers=headers)

    def serve_resolve(self, match: re.Match[str]) -> None:
        kind, name, revision, file = match[1] or "models", match[2], match[3], match[4]
        repository = Repository(self.hub.root, kind, name)
        resolved = self.hub.find(repository, revision) if repository.exists() else None
        if resolved is None:
            return self.refuse(404, "RevisionNotFound", "Invalid rev id")
        commit, repository = resolved
        path = repository.folder / file
        if not path.is_file():
            error_headers = [("X-Error-Code", "EntryNotFound"), ("X-Repo-Commit", commit)]
            return self.answer_json({"error": "Entry not found"}, 404, error_headers)
        if self.hub.gated:
            return self.refuse(403, "GatedRepo", "Access to this dataset is restricted: accept its conditions")
        headers = [("X-Repo-Commit", commit), ("Accept-Ranges", "bytes")]
        if not repository.is_large(file):
            return self.serve_file(path, headers)
        unresolved = self.injected is not None and self.injected.kind == "unresolved"
        relative_path = path.relative_to(self.hub.root).as_posix()
        location = self.signed(f"/cdn/{relative_path}", NOWHERE if unresolved else "localhost")
        link_headers = [("X-Linked-Size", str(path.stat().st_size)), ("X-Linked-ETag", f'"{sha256(path)}"')]
        return self.answer(302, b"Found", [*headers, *link_headers, ("Location", location)])

    def serve_signed(self, match: re.Match[str], query: dict[str, list[str]], path: str) -> None:
        expired = self.injected is not None and self.injected.kind == "expired"
        if expired or query.get("Signature", [""])[0] != self.hub.signature(path):
            return self.answer(403, b"<Error><Code>AccessDenied</Code></Error>", [])
        return self.serve_file(self.hub.root / match[1], [("Accept-Ranges", "bytes")])

    def serve_file(self, path: Path, headers: Headers) -> None:
        size, kind = path.stat().st_size, self.injected.kind if self.injected else None
        headers = [*headers, ("ETag", f'"{sha256(path)}"')]
        first, last, status = 0, size - 1, 200
        byte_range = RANGE.match(self.headers.get("Range") or "")
        if byte_range and kind != "no_range":
            first = int(byte_range[1]) if byte_range[1] else max(0, size - int(byte_range[2]))
            last = min(int(byte_range[2]), size - 1) if byte_range[1] and byte_range[2] else size - 1
            if first > last:
                return self.answer(416, b"", [("Content-Range", f"bytes */{size}")])
            shift = 7 if kind == "wrong_content_range" else 0
            if kind == "short_file":
                last = (first + last) // 2
                size = last + 1
            status, headers = 206, [*headers, ("Content-Range", f"bytes {first + shift}-{last}/{size}")]
        with path.open("rb") as file:
            file.seek(first)
            data = file.read(last - first + 1)
        if kind == "corrupt":
            wrong = bytearray(data)
            for place in range(len(data) // 14, len(data) * 6 // 7, max(len(data) // 7, 1)):
                wrong[place] ^= 0xFF
            data = bytes(wrong)
        return self.answer(status, data, headers, "application/octet-stream")

    def limit_rate(self, fault: Fault) -> None:
        headers = [("Retry-After", str(fault.retry_after))]
        if fault.kind == "rate_limit":
            policy = ("RateLimit-Policy", '"fixed window";"resolvers";q=3000;w=300')
            headers = [("RateLimit", f'"resolvers";r=0;t={fault.retry_after}'), policy]
        self.answer_json({"error": "rate limited"}, 429, headers)

    def refuse(self, status: int, code: str | None, message: str) -> None:
        codes = [("X-Error-Code", code)] if code else []
        self.answer_json({"error": message}, status, [*codes, ("X-Error-Message", message)])

    def answer_json(self, value: object, status: int = 200, headers: Headers | None = None) -> None:
        self.answer(status, json.dumps(value).encode(), headers or [], "application/json; charset=utf-8")

    def answer(self, status: int, body: bytes, headers: Headers, content: str = "text/plain") -> None:
        """Send `body`, or half of it and then what the injected fault asks for."""
        kind = self.injected.kind if self.injected else None
        self.status = status
        self.send_response(status)
        for header in [*headers, ("Content-Type", content), ("Content-Length", str(len(body)))]:
            self.send_header(*header)
        self.end_headers()
        if self.command == "HEAD":
            return
        if kind not in ("truncate", "reset", "stall"):
            self.wfile.write(body)
            return
        self.wfile.write(body[: len(body) // 2])
        self.wfile.flush()
        self.leave(kind)

    def leave(self, kind: str) -> None:
        """Stop in the middle of a transfer, as the injected fault asks for."""
        self.close_connection = True
        if kind == "stall":
            self.connection.settimeout(60)
            while self.connection.recv(1 << 16):  # the rest of an upload
                pass
        if kind == "reset":
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            os.close(self.connection.detach())
