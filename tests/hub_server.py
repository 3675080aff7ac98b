"""A small Hub on loopback, for the real huggingface_hub, transformers and datasets clients.

It answers what those clients ask for when they read model and dataset repositories: info, tree, paths-info, refs
and files; what they ask for when they write is in tests/hub_writes.py. Status codes, headers and error codes are the
real Hub's. Point the client at it with HF_ENDPOINT before huggingface_hub is imported (tests/conftest.py does).

    server = HubServer()
    commit = server.add_model("org/name", folder, revisions={"v1": other_folder})
    server.fail("/resolve/", status=500, times=1)
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from hub_writes import Large, Refusal, Store, Writes

Files = dict[str, bytes]
DATE = "2026-01-01T00:00:00.000Z"
LIFETIME = 1800.0  # seconds; far more than a test run takes

_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info|refs)(?:/(.*))?)?")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repo:
    id: str
    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)  # name → commit
    private: bool = False
    gated: bool = False
    pull_requests: list[tuple[str, str]] = field(default_factory=list)  # title and author; the first is number 1

    def commit(self, branch: str, files: Files, parent: str = "") -> str:
        digest = hashlib.sha1(self.id.encode() + parent.encode())
        for path, content in sorted(files.items()):
            digest.update(path.encode() + b"\0" + hashlib.sha1(content).digest())
        commit = digest.hexdigest()
        self.commits[commit] = files
        self.branches[branch] = commit
        return commit

    def resolve(self, revision: str) -> str | None:
        """Branch name, full hash or unambiguous short hash → full hash."""
        if revision in self.branches:
            return self.branches[revision]
        found = [commit for commit in self.commits if len(revision) >= 7 and commit.startswith(revision)]
        return found[0] if len(found) == 1 else None

    def propose(self, title: str, author: str) -> int:
        self.pull_requests.append((title, author))
        return len(self.pull_requests)


@dataclass
class Fault:
    """What to do instead of answering, `times` times, when the path contains `path`."""

    path: str
    times: int
    status: int | None = None  # None: close the connection
    after_bytes: int = 0  # with no status: close after so many bytes of the answer's body, or of an upload's
    headers: dict[str, str] = field(default_factory=dict)
    answered: bool = False  # do what was asked for first, and only lose the answer


@dataclass
class Hold:
    """A request that waits: `reached` is set when it comes, and it goes on, or is lost, after `release` is."""

    path: str
    lost: bool
    reached: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)


class HubServer(Store):
    """Serves from construction until `close`, or for `LIFETIME` seconds."""

    def __init__(self) -> None:
        self.reset()
        self._http = self._listen(0)
        self.port: int = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._timer = threading.Timer(LIFETIME, self.close)
        self._timer.daemon = True
        self._timer.start()

    def reset(self) -> None:
        """Forget all repositories, tokens, faults and requests."""
        self.repos: dict[tuple[str, str], Repo] = {}
        self.tokens: dict[str, set[str]] = {}  # token → ids of the private and gated repos it may read
        self.faults: list[Fault] = []
        self.holds: list[Hold] = []
        self.requests: list[str] = []  # "GET /api/models/org/name", in order
        self.forget_writes()

    def close(self) -> None:
        self._timer.cancel()
        self._http.shutdown()
        self._http.server_close()

    def add_model(self, repo_id: str, content: Path | Files, **options: Any) -> str:
        """Add a model repository, or a new commit on its main branch; returns main's commit.

        `content` and the values of `revisions={"name": content}` are folders or {path: bytes}; both are copied.
        Options: revisions, private, gated.
        """
        return self._add("models", repo_id, content, **options)

    def add_dataset(self, repo_id: str, content: Path | Files, **options: Any) -> str:
        """`add_model`, for a dataset repository."""
        return self._add("datasets", repo_id, content, **options)

    def commit_of(self, repo_id: str, revision: str = "main", kind: str = "models") -> str:
        return self.repos[kind, repo_id].branches[revision]

    def allow(self, token: str, *repo_ids: str) -> None:
        """Make `token` valid, with access to these private or gated repositories."""
        self.tokens[token] = set(repo_ids)

    def fail(self, path: str, status: int, times: int = 1_000_000, answered: bool = False, **headers: str) -> None:
        """Answer requests whose path contains `path` with `status`; if `answered`, having done what they ask for."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.faults.append(Fault(path, times, status=status, headers=named, answered=answered))

    def drop(self, path: str, times: int = 1_000_000, after_bytes: int = 0, answered: bool = False) -> None:
        """Close the connection without an answer, or after `after_bytes` bytes of the body, sent or received."""
        self.faults.append(Fault(path, times, after_bytes=after_bytes, answered=answered))

    @contextmanager
    def held(self, path: str, lost: bool = False) -> Iterator[Hold]:
        """Let the next request whose path contains `path` wait to the end of the block; `lost`: it does nothing."""
        hold = Hold(path, lost)
        self.holds.append(hold)
        try:
            yield hold
        finally:
            hold.release.set()

    @contextmanager
    def unreachable(self) -> Iterator[None]:
        """Refuse connections, as a host does on which nothing listens."""
        self._http.shutdown()
        self._http.server_close()
        try:
            yield
        finally:
            self._http = self._listen(self.port)

    def _listen(self, port: int) -> ThreadingHTTPServer:
        handler = type("HubHandler", (_Handler,), {"hub": self})
        http = ThreadingHTTPServer(("127.0.0.1", port), handler)
        http.daemon_threads = True
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        return http

    def _add(
        self,
        kind: str,
        repo_id: str,
        content: Path | Files,
        revisions: dict[str, Path | Files] | None = None,
        private: bool = False,
        gated: bool = False,
    ) -> str:
        repo = self.repos.setdefault((kind, repo_id), Repo(repo_id))
        repo.private, repo.gated = private, gated
        for name, other in (revisions or {}).items():
            repo.commit(name, _read(other))
        return repo.commit("main", _read(content))


def _read(content: Path | Files) -> Files:
    if isinstance(content, dict):
        return dict(content)
    return {p.relative_to(content).as_posix(): p.read_bytes() for p in sorted(content.rglob("*")) if p.is_file()}


class _Handler(Writes, BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr: tests read it."""

    # One request: fault or route, errors in the Hub's form.

    def _answer(self) -> None:
        self.close_connection = True  # a kept connection would outlive `unreachable`
        self.body_limit: int | None = None
        self.lost_answer: Fault | None = None
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if self._is_lost(path):
            return
        fault = self._fault(path)
        self.lost_answer = fault if fault is not None and fault.answered else None
        if fault is not None and not fault.answered and self._do_instead(fault):
            return
        try:
            if not self.route_write(urlsplit(self.path).path):
                self._route(urlsplit(self.path).path)
        except Refusal as refusal:
            headers = {"X-Error-Code": refusal.code, "X-Error-Message": refusal.message}
            self._send(refusal.status, json.dumps(refusal.body).encode(), headers)

    def _is_lost(self, path: str) -> bool:
        """Wait where the test says so; whether the request is then to be forgotten."""
        hold = next((hold for hold in self.hub.holds if hold.path in path), None)
        if hold is None:
            return False
        self.hub.holds.remove(hold)
        hold.reached.set()
        hold.release.wait(120)
        return hold.lost

    def _do_instead(self, fault: Fault) -> bool:
        """Whether that is all the answer there is."""
        if fault.status is not None:
            self.read_body()
            self._send(fault.status, b"", {"X-Error-Message": "Asked for by the test", **fault.headers})
        elif fault.after_bytes and self.command not in ("PUT", "POST"):
            self.body_limit = fault.after_bytes
            return False
        else:
            self.rfile.read(min(fault.after_bytes, int(self.headers.get("Content-Length", 0))))
        return True

    def _fault(self, path: str) -> Fault | None:
        for fault in self.hub.faults:
            if fault.path in path and fault.times > 0:
                fault.times -= 1
                return fault
        return None

    def _route(self, path: str) -> None:
        if match := _API.fullmatch(path):
            kind, repo_id, verb, rest = match.groups()
            repo = self._repo(kind, unquote(repo_id))
            revision, _, inner = (rest or "main").partition("/")
            if verb == "refs":
                self._send_json(_refs(repo))
                return
            commit = self._commit_of(repo, unquote(revision))
            if verb == "tree":
                recursive = parse_qs(urlsplit(self.path).query).get("recursive", [""])[0].lower() in ("true", "1")
                self._send_json(_tree(repo.commits[commit], unquote(inner), recursive))
            elif verb == "paths-info":
                self._send_json(_paths_info(repo.commits[commit], self._posted_paths()))
            else:
                self._send_json(_info(repo, commit))
        elif match := _FILE.fullmatch(path):
            dataset, repo_id, revision, file = match.groups()
            repo = self._repo("datasets" if dataset else "models", unquote(repo_id))
            self._send_file(repo, self._commit_of(repo, unquote(revision)), unquote(file))
        else:
            raise Refusal(404, "", f"No such page: {path}")

    # Access, as the Hub grants it.

    def _token(self) -> str | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        if token is not None and token not in self.hub.tokens:
            raise Refusal(401, "", "Invalid credentials in Authorization header")
        return token

    def _repo(self, kind: str, repo_id: str) -> Repo:
        token = self._token()
        repo = self.hub.repos.get((kind, repo_id))
        if repo is None or (repo.private and repo_id not in self.hub.tokens.get(token or "", ())):
            # Without a token the Hub does not say whether the repository exists. The client takes a 401 without an
            # error code for that from https addresses only; the code gives it the same exception here.
            if token is None:
                raise Refusal(401, "RepoNotFound", "Invalid username or password.")
            raise Refusal(404, "RepoNotFound", "Repository not found")
        return repo

    def _commit_of(self, repo: Repo, revision: str) -> str:
        commit = repo.resolve(revision)
        if commit is None:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    # Answers.

    def _send_file(self, repo: Repo, commit: str, path: str) -> None:
        token = self._token()
        if repo.gated and repo.id not in self.hub.tokens.get(token or "", ()):
            message = f"Access to model {repo.id} is restricted."
            raise Refusal(401 if token is None else 403, "GatedRepo", message)
        content = repo.commits[commit].get(path)
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if content is None:
            self._send(404, b"", {**headers, "X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
            return
        headers["ETag"] = f'"{content.sha256 if isinstance(content, Large) else _blob_id(content)}"'
        start, stop = _byte_range(self.headers.get("Range"), len(content))
        if start > 0 and start >= len(content):
            self._send(416, b"", {**headers, "Content-Range": f"bytes */{len(content)}"})
        elif (start, stop) == (0, len(content)):
            self._send(200, content, headers)
        else:
            self._send(
                206, content[start:stop], {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
            )

    def _posted_paths(self) -> list[str]:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        if "json" in self.headers.get("Content-Type", ""):
            return json.loads(body)["paths"]
        return parse_qs(body)["paths"]

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        if (fault := self.lost_answer) is not None:
            self.lost_answer = None
            if fault.status is None:
                return
            status, body, headers = fault.status, b"", fault.headers
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body)), "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: self.body_limit])


def _byte_range(header: str | None, size: int) -> tuple[int, int]:
    """The half-open range that "bytes=a-b", "bytes=a-" or "bytes=-n" asks for."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header or "")
    if match is None or match.groups() == ("", ""):
        return 0, size
    first, last = match.groups()
    if not first:
        return max(size - int(last), 0), size
    return int(first), min(int(last) + 1, size) if last else size


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _info(repo: Repo, commit: str) -> dict[str, Any]:
    return {
        "_id": commit[:24],
        "id": repo.id,
        "modelId": repo.id,
        "author": repo.id.split("/")[0],
        "sha": commit,
        "lastModified": DATE,
        "createdAt": DATE,
        "private": repo.private,
        "gated": "auto" if repo.gated else False,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": [],
        "siblings": [{"rfilename": path} for path in repo.commits[commit]],
    }


def _refs(repo: Repo) -> dict[str, Any]:
    branches = [
        {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit}
        for name, commit in repo.branches.items()
        if not name.startswith("refs/")
    ]
    return {"branches": branches, "converts": [], "tags": [], "pullRequests": []}


def _tree(files: Files, folder: str, recursive: bool) -> list[dict[str, Any]]:
    prefix = f"{folder}/" if folder else ""
    inside = [path for path in files if path.startswith(prefix)]
    if folder and not inside:
        raise Refusal(404, "EntryNotFound", f"{folder} does not exist")
    folders = {
        prefix + "/".join(parts[:depth])
        for parts in (path[len(prefix) :].split("/") for path in inside)
        for depth in range(1, len(parts))
        if recursive or depth == 1
    }
    shown = [path for path in inside if recursive or "/" not in path[len(prefix) :]]
    return [_folder_entry(path) for path in sorted(folders)] + [_file_entry(path, files[path]) for path in shown]


def _paths_info(files: Files, paths: list[str]) -> list[dict[str, Any]]:
    entries = [_file_entry(path, files[path]) for path in paths if path in files]
    return entries + [_folder_entry(path) for path in paths if any(file.startswith(f"{path}/") for file in files)]


def _file_entry(path: str, content: bytes) -> dict[str, Any]:
    entry = {"type": "file", "oid": _blob_id(content), "size": len(content), "path": path}
    if isinstance(content, Large):
        entry["lfs"] = {"oid": content.sha256, "size": len(content), "pointerSize": 130}
    return entry


def _folder_entry(path: str) -> dict[str, Any]:
    return {"type": "directory", "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0, "path": path}
