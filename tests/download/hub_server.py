"""A loopback server with the endpoints of the Hugging Face Hub that fetching and pushing models use.

Files over 1 MiB, and those that end in .safetensors, go through LFS, as on the Hub.
"""

import base64
import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from download.http_server import Server

TOKEN = "hf_SecretTokenOfTheTests"


@dataclass
class Repository:
    """The commits of a repository; the last one is `main`."""

    files: dict[str, bytes] = field(default_factory=dict)
    is_private: bool = False
    tags: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def commit(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        for name, files in {"main": self.files, **self.tags}.items():
            content = json.dumps({k: hashlib.sha256(v).hexdigest() for k, v in files.items()})
            commit = hashlib.sha1(content.encode()).hexdigest()
            if revision in (name, commit):
                return commit, files
        return None


class HubServer(Server):
    def __init__(self) -> None:
        super().__init__()
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.calls: list[tuple[str, str]] = []
        self.status: int | None = None  # answer this to everything
        self.fails_at: str | None = None  # answer 400 to paths that begin so
        self.fake_size: int | None = None  # that every head states

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path.partition("?")[0]
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        self.calls.append((handler.command, path))
        authorized = handler.headers.get("Authorization") == f"Bearer {TOKEN}"
        if self.status is not None:
            status, headers, content = self.status, {}, f"bad token {TOKEN}".encode()
        elif self.fails_at is not None and path.startswith(self.fails_at):
            status, headers, content = 400, {}, b"cannot be stored"
        elif handler.command in ("POST", "PUT"):
            status, headers, content = self._write(path, body, authorized)
        else:
            status, headers, content = self._read(path, authorized)
        handler.send_response(status)
        size = self.fake_size if handler.command == "HEAD" and self.fake_size else len(content)
        for key, value in {"Content-Length": str(size), **headers}.items():
            handler.send_header(key, value)
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(content)

    def _read(self, path: str, authorized: bool) -> tuple[int, dict[str, str], bytes]:
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        info = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?()", path)
        match = match or info
        if match is None:
            return 404, {}, b""
        repository = self.repositories.get(match[1])
        if repository is None or (repository.is_private and not authorized):
            return 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "not found"}, b""
        found = repository.commit(match[2] or "main")
        if found is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        commit, files = found
        if info is not None:
            return _json(
                {"id": match[1], "private": repository.is_private, "sha": commit, "siblings": []}
            )
        headers = {"X-Repo-Commit": commit}
        if match[3] not in files:
            return 404, {"X-Error-Code": "EntryNotFound", **headers}, b""
        content = files[match[3]]
        digest = hashlib.sha256(content).hexdigest()
        etag = digest if _is_large(match[3], len(content)) else digest[:40]
        return 200, {"ETag": f'"{etag}"', **headers}, content

    def _write(self, path: str, body: bytes, authorized: bool) -> tuple[int, dict[str, str], bytes]:
        if path.startswith("/lfs/"):
            self.blobs[path.removeprefix("/lfs/")] = body
            return 200, {}, b""
        if path == "/api/validate-yaml":
            return _json({"errors": [], "warnings": []})
        if not authorized:
            return 401, {"X-Error-Message": f"token {TOKEN} is invalid"}, b""
        if path == "/api/repos/create":
            request = json.loads(body)
            name = f"{request['organization']}/{request['name']}"
            if name in self.repositories:
                return 409, {}, json.dumps({"url": f"{self.url}/{name}"}).encode()
            is_private = request.get("visibility") == "private" or request.get("private", False)
            self.repositories[name] = Repository(is_private=is_private)
            return _json({"url": f"{self.url}/{name}"})
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**o, "actions": {"upload": {"href": f"{self.url}/lfs/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            return _json({"transfer": "basic", "objects": objects})
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", path)
        if match is None or match[1] not in self.repositories:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if match[2] == "preupload":
            modes = []
            for f in json.loads(body)["files"]:
                mode = "lfs" if _is_large(f["path"], f["size"]) else "regular"
                modes.append({"path": f["path"], "uploadMode": mode, "shouldIgnore": False})
            return _json({"files": modes})
        repository = self.repositories[match[1]]
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                repository.files[value["path"]] = self.blobs[value["oid"]]
        commit = repository.commit("main")
        url = f"{self.url}/{match[1]}/commit/{commit[0]}"
        return _json({"commitUrl": url, "commitOid": commit[0]})


@contextlib.contextmanager
def open_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Start a Hub without models, with an empty cache and a token. LFS, not Xet, which needs more."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def _is_large(name: str, size: int) -> bool:
    return name.endswith(".safetensors") or size > 1 << 20


def _json(value: Any) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()
