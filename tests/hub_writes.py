"""The half of the tests' Hub that is written to: whoami, create, branch, preupload, LFS, commit, pull requests.

server.sign_in("hf_…", "me", role="write", orgs={"lab": "read"})
server.large_above = 1 << 20   # what is larger goes through LFS; weights always do
server.parts_of = 1 << 10      # LFS objects go up in parts of so many bytes
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from ruamel.yaml import YAML, YAMLError

_WRITE = re.compile(r"/api/models/([^/]+/[^/]+)/(auth-check|branch|preupload|commit|discussions)(?:/(.*))?")
_BATCH = re.compile(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch")
_LFS = re.compile(r"/lfs/(object|part|complete|verify)/([0-9a-f]{64})(?:/(\d+))?")
_MOVED = "A commit has happened since. Please refresh and try again."
_MAY_WRITE = ("admin", "write", "contributor")


class Refusal(Exception):
    """An error as the Hub sends it: status, X-Error-Code, X-Error-Message."""

    def __init__(self, status: int, code: str, message: str, body: Any = None):
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.body = {"error": message} if body is None else body


class Large(bytes):
    """A file of a commit that is stored by LFS."""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self).hexdigest()


@dataclass
class Account:
    """Whose a token is, and what it may do: role is that of the token, orgs has the user's own in each.

    granted are repositories that the user may write to beside these, such as a resource group's.
    """

    name: str
    role: str = "write"
    orgs: dict[str, str] = field(default_factory=dict)
    granted: set[str] = field(default_factory=set)

    def may_write(self, repo_id: str) -> bool:
        namespace = repo_id.split("/")[0]
        own = namespace == self.name or self.orgs.get(namespace) in _MAY_WRITE
        return self.role != "read" and (own or repo_id in self.granted)

    def to_dict(self) -> dict[str, Any]:
        return {
            "type": "user",
            "name": self.name,
            "orgs": [{"type": "org", "name": name, "roleInOrg": role} for name, role in self.orgs.items()],
            "auth": {"type": "access_token", "accessToken": {"displayName": "tests", "role": self.role}},
        }


class Store:
    """What `HubServer` has of it: accounts, LFS objects by their sha256, and settings."""

    tokens: dict[str, set[str]]
    url: str

    def forget_writes(self) -> None:
        self.accounts: dict[str, Account] = {}  # by token
        self.objects: dict[str, Large] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.large_above = 1 << 20
        self.parts_of: int | None = None

    def sign_in(
        self,
        token: str,
        name: str,
        role: str = "write",
        orgs: dict[str, str] | None = None,
        granted: set[str] | None = None,
    ) -> None:
        """Make `token` valid: a user's, who may read and write what is his own and his organisations'."""
        self.accounts[token] = Account(name, role, orgs or {}, granted or set())
        self.tokens.setdefault(token, set())


class Writes:
    """The part of the server's request handler that writes; `hub`, `headers` and the like are the handler's."""

    hub: Any
    headers: Any
    rfile: Any
    path: str
    command: str

    def route_write(self, path: str) -> bool:
        """Answer, if the request is one of these."""
        if path == "/api/whoami-v2":
            self._send_json(self._account().to_dict())
        elif path == "/api/repos/create":
            self._create_repo(json.loads(self.read_body()))
        elif path == "/api/validate-yaml":
            self._validate_card(json.loads(self.read_body())["content"])
        elif match := _BATCH.fullmatch(path):
            self._account()
            self._send_json(self._batch(json.loads(self.read_body())))
        elif match := _LFS.fullmatch(path):
            self._lfs(*match.groups())
        elif match := _WRITE.fullmatch(path):
            repo_id, verb, rest = match.groups()
            repo = self._repo("models", unquote(repo_id))
            getattr(self, "_" + verb.replace("-", "_"))(repo, unquote(rest or ""))
        else:
            return False
        return True

    def read_body(self) -> bytes:
        """The request's body, sent with its length or in chunks."""
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            return b"".join(self._chunks())
        content: bytes = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return content

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline().strip() or b"0", 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    # Who asks.

    def _account(self) -> Account:
        token = self._token()
        if token is None or token not in self.hub.accounts:
            raise Refusal(401, "", "Invalid username or password.")
        account: Account = self.hub.accounts[token]
        return account

    def _check_write(self, repo_id: str) -> Account:
        account = self._account()
        if not account.may_write(repo_id):
            raise Refusal(403, "", f"You don't have the rights to write to {repo_id} with this token")
        return account

    def _auth_check(self, repo: Any, what: str) -> None:
        if what == "write":
            self._check_write(repo.id)
        self._send_json({})

    # Repositories and branches.

    def _create_repo(self, asked: dict[str, Any]) -> None:
        account = self._account()
        repo_id = f"{asked['organization'] or account.name}/{asked['name']}"
        self._check_write(repo_id)
        url = f"{self.hub.url}/{repo_id}"
        if ("models", repo_id) in self.hub.repos:
            raise Refusal(409, "", "You already created this model repo", {"url": url, "error": "exists"})
        self.hub.add_model(
            repo_id,
            {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"},
            private=asked.get("visibility") == "private",
        )
        self.hub.tokens[self._token()].add(repo_id)
        self._send_json({"url": url, "name": repo_id})

    def _branch(self, repo: Any, name: str) -> None:
        self._check_write(repo.id)
        asked = json.loads(self.read_body())
        if name in repo.branches:
            raise Refusal(409, "", f"Reference already exists: {name}")
        repo.branches[name] = self._commit_of(repo, asked.get("startingPoint") or "main")
        self._send_json({})

    def _validate_card(self, content: str) -> None:
        if errors := card_errors(content):
            raise Refusal(400, "", "Invalid card", {"errors": [{"message": each} for each in errors], "warnings": []})
        self._send_json({"errors": [], "warnings": []})

    # Large files.

    def _preupload(self, repo: Any, revision: str) -> None:
        asked = json.loads(self.read_body())
        if not self._asks_for_pull_request():
            self._check_write(repo.id)
        files = repo.commits[self._commit_of(repo, revision)]
        rules = asked.get("gitIgnore", files.get(".gitignore", b"").decode()).splitlines()
        answer = []
        for file in asked["files"]:
            large = file["size"] > self.hub.large_above or file["path"].endswith(".safetensors")
            oid = _oid(files[file["path"]]) if file["path"] in files else None
            ignored = any(file["path"].endswith(rule.lstrip("*")) for rule in rules if rule and rule[0] != "#")
            mode = "lfs" if large else "regular"
            answer.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": ignored, "oid": oid})
        self._send_json({"files": answer})

    def _batch(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {"transfer": "basic", "objects": [self._instructions(**each) for each in asked["objects"]]}

    def _instructions(self, oid: str, size: int) -> dict[str, Any]:
        if oid in self.hub.objects:
            return {"oid": oid, "size": size}
        upload: dict[str, Any] = {"href": f"{self.hub.url}/lfs/object/{oid}"}
        if self.hub.parts_of is not None:
            numbers = range(1, -(-size // self.hub.parts_of) + 1)
            parts = {str(number): f"{self.hub.url}/lfs/part/{oid}/{number}" for number in numbers}
            upload = {
                "href": f"{self.hub.url}/lfs/complete/{oid}",
                "header": {"chunk_size": str(self.hub.parts_of), **parts},
            }
        verify = {"href": f"{self.hub.url}/lfs/verify/{oid}"}
        return {"oid": oid, "size": size, "actions": {"upload": upload, "verify": verify}}

    def _lfs(self, what: str, oid: str, number: str | None) -> None:
        body = self.read_body()
        if what == "object":
            self._store(oid, body)
        elif what == "part":
            self.hub.parts.setdefault(oid, {})[int(number or 0)] = body
        elif what == "complete":
            parts = self.hub.parts.pop(oid)
            self._store(oid, b"".join(parts[part["partNumber"]] for part in json.loads(body)["parts"]))
        elif oid not in self.hub.objects or len(self.hub.objects[oid]) != json.loads(body)["size"]:
            raise Refusal(404, "", "No such object")
        self._send(200, b"", {"ETag": f'"{hashlib.md5(body).hexdigest()}"'})

    def _store(self, oid: str, content: bytes) -> None:
        if hashlib.sha256(content).hexdigest() != oid:
            raise Refusal(400, "", "The content does not have the sha256 that was announced")
        self.hub.objects[oid] = Large(content)

    # Commits and pull requests.

    def _commit(self, repo: Any, revision: str) -> None:
        lines = [json.loads(line) for line in self.read_body().splitlines()]
        head = self._commit_of(repo, revision)
        header = lines[0]["value"]
        if header.get("parentCommit") not in (None, head):
            raise Refusal(412, "", _MOVED)
        files = dict(repo.commits[head])
        for line in lines[1:]:
            self._apply(files, line["key"], line["value"])
        branch, pull = revision, None
        if self._asks_for_pull_request():
            pull = repo.propose(header["summary"], self._account().name)
            branch = f"refs/pr/{pull}"
        else:
            self._check_write(repo.id)
        oid = repo.commit(branch, files, parent=head)
        url = f"{self.hub.url}/{repo.id}"
        answer = {"commitUrl": f"{url}/commit/{oid}", "commitOid": oid, "success": True}
        self._send_json({**answer, "pullRequestUrl": f"{url}/discussions/{pull}"} if pull else answer)

    def _apply(self, files: dict[str, bytes], key: str, value: dict[str, Any]) -> None:
        path = value["path"]
        if key == "file":
            files[path] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            if value["oid"] not in self.hub.objects:
                raise Refusal(400, "", f"{path}: the LFS object was not uploaded")
            files[path] = self.hub.objects[value["oid"]]
        elif key == "deletedFile":
            if files.pop(path, None) is None:
                raise Refusal(404, "EntryNotFound", f"A file with this name doesn't exist: {path}")
        else:
            raise Refusal(400, "", f"Unknown operation {key}")

    def _discussions(self, repo: Any, _: str) -> None:
        author = parse_qs(urlsplit(self.path).query).get("author", [None])[0]
        found = [
            {
                "num": number,
                "title": title,
                "author": {"name": name},
                "createdAt": "2026-01-01T00:00:00.000Z",
                "status": "open",
                "repo": {"name": repo.id, "type": "model"},
                "isPullRequest": True,
            }
            for number, (title, name) in enumerate(repo.pull_requests, 1)
            if author in (None, name)
        ]
        self._send_json({"discussions": found, "count": len(found), "start": 0})

    def _asks_for_pull_request(self) -> bool:
        return parse_qs(urlsplit(self.path).query).get("create_pr") == ["1"]

    # What the handler has beside.

    def _token(self) -> str | None:
        raise NotImplementedError

    def _repo(self, kind: str, repo_id: str) -> Any:
        raise NotImplementedError

    def _commit_of(self, repo: Any, revision: str) -> str:
        raise NotImplementedError

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        raise NotImplementedError

    def _send_json(self, value: Any) -> None:
        raise NotImplementedError


def _oid(content: bytes) -> str:
    if isinstance(content, Large):
        return content.sha256
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def card_errors(content: str) -> list[str]:
    """What the Hub has against the front matter of a card: not all of its rules, but those that people break."""
    match = re.match(r"\s*---\n(.*?)\n---\n", content, re.DOTALL)
    if match is None:
        return []
    try:
        data = YAML(typ="safe").load(match[1])
    except YAMLError as error:
        return [f"YAML: {str(error).splitlines()[0]}"]
    if not isinstance(data, dict):
        return ["the metadata must be a mapping"]
    errors = [f'"{name}" is empty' for name, value in data.items() if value is None]
    for name in ("base_model", "license", "library_name", "pipeline_tag", "license_name", "license_link"):
        values = data.get(name) if isinstance(data.get(name), list) and name == "base_model" else [data.get(name)]
        errors += [f'"{name}" must be a string' for value in values or [] if not isinstance(value, str | None)]
    base = data.get("base_model")
    if isinstance(base, str) and not re.fullmatch(r"[\w.-]+/[\w.-]+", base):
        errors.append(f'"base_model" with value "{base}" is not valid. Use a model id from the Hub')
    if not isinstance(data.get("tags", []), list):
        errors.append('"tags" must be an array')
    for entry in data.get("model-index") or []:
        for result in entry.get("results", []) if entry.get("name") else [{}]:
            errors += [f'"model-index" lacks {key}' for key in ("task", "dataset", "metrics") if not result.get(key)]
    return errors
