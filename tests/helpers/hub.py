"""A model hub on the loopback interface, for the hub's own client to ask.

It answers what `huggingface_hub` asks of the real one: the commit of a branch, the
files of a commit, and each file, large ones by way of another address as the real one
does. A gated model wants the token `TOKEN`.
"""

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

COMMIT = "c" * 40
TOKEN = "hf_secret"
_LARGE = 50_000  # bytes; larger files lie elsewhere


class Hub(http.server.ThreadingHTTPServer):
    """Serves `models`, folders by id; those in `gated` to bearers of the token."""

    daemon_threads = True

    def __init__(self, models: dict[str, Path], gated: set[str]):
        super().__init__(("127.0.0.1", 0), _Answer)
        self.models, self.gated = models, gated
        self.sent: list[str] = []  # Files whose bytes were asked for.
        self.cut: set[str] = set()  # Of these, only the first half is sent.

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def serve(models: dict[str, Path], gated: set[str] = frozenset()) -> Iterator[Hub]:
    """A hub that answers until the block is left."""
    hub = Hub(models, gated)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


class _Answer(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self._answer(with_body=True)

    def log_message(self, *args):
        """Says nothing."""

    def _answer(self, with_body: bool) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[0] == "elsewhere":  # elsewhere/OWNER/NAME/FILE
            self._file("/".join(parts[1:3]), parts[3], with_body, moved=True)
            return
        name = "/".join(parts[2:4] if parts[:2] == ["api", "models"] else parts[:2])
        folder = self.server.models.get(name)
        if folder is None:
            self._refuse(404, "RepoNotFound")
        elif name in self.server.gated and self._token() != f"Bearer {TOKEN}":
            self._refuse(401, "GatedRepo")
        elif parts[4:5] == ["revision"]:
            self._json({"id": name, "sha": COMMIT, "siblings": []})
        elif parts[4:5] == ["tree"]:
            self._json([_entry(folder, path) for path in sorted(folder.rglob("*.*"))])
        elif parts[2] == "resolve":
            self._file(name, "/".join(parts[4:]), with_body, moved=False)
        else:
            self._refuse(404, "EntryNotFound")

    def _token(self) -> str | None:
        return self.headers.get("Authorization")

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, name: str, file: str, with_body: bool, moved: bool) -> None:
        body = (self.server.models[name] / file).read_bytes()
        tag = hashlib.sha256(body).hexdigest()
        if len(body) > _LARGE and not moved:
            self.send_response(302)
            to = f"{self.server.address}/elsewhere/{name}/{file}"
            self.send_header("Location", to)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("X-Linked-Size", str(len(body)))
            self.send_header("X-Linked-Etag", f'"{tag}"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        start = int((self.headers.get("Range") or "bytes=0-")[6:].split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{tag}"')
        self.send_header("Content-Length", str(len(body) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-/{len(body)}")
        self.end_headers()
        if with_body:
            self.server.sent.append(file)
            end = len(body) // 2 if file in self.server.cut else len(body)
            self.wfile.write(body[start:end])


def _entry(folder: Path, path: Path) -> dict:
    body = path.read_bytes()
    entry = {
        "type": "file",
        "path": path.relative_to(folder).as_posix(),
        "oid": hashlib.sha1(body).hexdigest(),
        "size": len(body),
    }
    if len(body) > _LARGE:
        oid = hashlib.sha256(body).hexdigest()
        entry["lfs"] = {"oid": oid, "size": len(body), "pointerSize": 130}
    return entry
