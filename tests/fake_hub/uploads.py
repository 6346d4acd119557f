"""Writes of clients: repositories, large files, commits, branches and tags, answered as the Hub does."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_hub.repository import Repository, sha256

USER, TEAM = "alice", "team"
"""The token's owner, and the organization in which the owner may write too."""
MAIN = "main"

REPOSITORY = re.compile(r"^/api/models/([^/]+/[^/]+)/(refs|preupload|commit|tag|branch)(?:/(.+))?$")
LARGE_FILES = re.compile(r"^/([^/]+/[^/]+)\.git/info/lfs/objects/(batch|verify)$")
STORE = re.compile(r"^/lfs-store/([0-9a-f]{64})$")


@dataclass(frozen=True)
class Answer:
    """A status and the JSON that is sent with it."""

    body: Any
    status: int = 200
    code: str | None = None

    @property
    def headers(self) -> list[tuple[str, str]]:
        code = [("X-Error-Code", self.code)] if self.code else []
        return [*code, ("X-Error-Message", self.body["error"])] if self.status >= 400 else []


def refusal(status: int, message: str, code: str | None = None) -> Answer:
    return Answer({"error": message}, status, code)


@dataclass
class Uploads:
    """The state that uploads change. Files of commits are copies in `.commits/COMMIT`, large files in `.lfs/SHA256`."""

    root: Path
    is_read_only: bool = False
    private: set[str] = field(default_factory=set)
    refs: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)
    """By repository the commits of its `branches` and of its `tags`, by name."""
    messages: list[str] = field(default_factory=list)
    """The messages of the commits that clients made."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def stored(self, checksum: str) -> Path:
        return self.root / ".lfs" / checksum

    def at_commit(self, name: str, commit: str) -> Repository:
        return Repository(self.root / ".commits" / commit, "models", name)

    def find(self, repository: Repository, revision: str) -> tuple[str, Repository] | None:
        """Return the commit that an uploaded repository's revision stands for, and its files."""
        refs = self.refs.get(repository.name, {})
        commit = refs.get("branches", {}).get(revision) or refs.get("tags", {}).get(revision) or revision
        files = self.at_commit(repository.name, commit)
        return (commit, files) if repository.kind == "models" and files.exists() else None

    def edit(self, name: str, files: dict[str, str]) -> None:
        """Commit files to main, as another program would."""
        with self.lock:
            staging = self.staged(name, MAIN)
            for path, content in files.items():
                (staging.folder / path).write_text(content)
            self.record(staging, MAIN)

    def staged(self, name: str, branch: str) -> Repository:
        """Copy a branch's files to a folder from which the next commit is made."""
        staging = Repository(self.root / ".staging", "models", name)
        shutil.rmtree(staging.root, ignore_errors=True)
        shutil.copytree(self.at_commit(name, self.refs[name]["branches"][branch]).folder, staging.folder)
        return staging

    def record(self, commit_content: Repository, branch: str) -> str:
        """Make a commit of a folder, the branch's newest, and return it."""
        name = commit_content.name
        commit = commit_content.commit()
        stored = self.at_commit(name, commit)
        if not stored.exists():
            shutil.copytree(commit_content.folder, stored.folder)
        self.refs[name]["branches"][branch] = commit
        if branch == MAIN:
            shutil.rmtree(self.root / "models" / name, ignore_errors=True)
            shutil.copytree(commit_content.folder, self.root / "models" / name)
        return commit


def is_upload(path: str) -> bool:
    """Whether a request is answered here, if it carries a token."""
    is_fixed_path = path in ("/api/whoami-v2", "/api/repos/create", "/api/validate-yaml")
    return is_fixed_path or bool(LARGE_FILES.match(path)) or bool(REPOSITORY.match(path))


def answer(uploads: Uploads, method: str, path: str, body: bytes, signed: Callable[[str], str]) -> Answer:
    """Answer a request of somebody whose token is valid; `signed` makes an address of the store of large files."""
    with uploads.lock:
        if path == "/api/whoami-v2":
            orgs = [{"type": "org", "name": TEAM, "roleInOrg": "write"}]
            return Answer({"type": "user", "name": USER, "orgs": orgs, "auth": {"type": "access_token"}})
        if path == "/api/validate-yaml":
            return Answer({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return _create(uploads, json.loads(body))
        large = LARGE_FILES.match(path)
        match = large or REPOSITORY.match(path)
        assert match
        name, what = match[1], match[2]
        if name not in uploads.refs:
            return refusal(404, "Repository not found", "RepoNotFound")
        if what == "refs":
            return _list_refs(uploads, name)
        if not _may_write(uploads, name.split("/")[0]):
            return refusal(403, "You don't have the required permissions to write to this repository")
        if large:
            return _large_files(uploads, name, what, json.loads(body), signed)
        do = {"preupload": _preupload, "commit": _commit, "branch": _branch}.get(what)
        if do is not None:
            return do(uploads, name, match[3], body)
        return _delete_tag(uploads, name, match[3]) if method == "DELETE" else _tag(uploads, name, match[3], body)


def store(uploads: Uploads, path: str, body: bytes) -> Answer:
    """Keep a large file that was sent to a signed address."""
    match = STORE.match(path)
    if match is None or hashlib.sha256(body).hexdigest() != match[1]:
        return refusal(400, "the content is not what the address is for")
    target = uploads.stored(match[1])
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(body)
    return Answer({})


def _may_write(uploads: Uploads, owner: str) -> bool:
    return owner in (USER, TEAM) and not uploads.is_read_only


def _create(uploads: Uploads, request: dict[str, Any]) -> Answer:
    owner = request.get("organization") or USER
    name = f"{owner}/{request['name']}"
    if not _may_write(uploads, owner):
        return refusal(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
    if name in uploads.refs:
        return refusal(409, "You already created this model repo")
    if request.get("private") or request.get("visibility") == "private":
        uploads.private.add(name)
    uploads.refs[name] = {"branches": {}, "tags": {}}
    folder = uploads.root / "models" / name
    folder.mkdir(parents=True)
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
    uploads.refs[name]["branches"][MAIN] = Repository(uploads.root, "models", name).commit()
    shutil.copytree(folder, uploads.at_commit(name, uploads.refs[name]["branches"][MAIN]).folder)
    return Answer({"url": f"https://huggingface.co/{name}", "name": name})


def _list_refs(uploads: Uploads, name: str) -> Answer:
    kinds = {"branches": "heads", "tags": "tags"}
    refs = {
        kind: [
            {"name": ref, "ref": f"refs/{folder}/{ref}", "targetCommit": commit}
            for ref, commit in uploads.refs[name][kind].items()
        ]
        for kind, folder in kinds.items()
    }
    return Answer({**refs, "converts": []})


def _preupload(uploads: Uploads, name: str, revision: str, body: bytes) -> Answer:
    resolved = uploads.find(Repository(uploads.root, "models", name), revision)
    if resolved is None:
        return refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
    files = [
        {
            "path": file["path"], "shouldIgnore": False, "oid": _content_id(resolved[1].folder / file["path"]),
            "uploadMode": "lfs" if Repository.is_large(file["path"]) else "regular",
        }
        for file in json.loads(body)["files"]
    ]  # fmt: skip
    return Answer({"files": files})


def _content_id(path: Path) -> str | None:
    """Return the hash by which the Hub compares files: the SHA-256 of large ones, git's hash of others."""
    if not path.is_file():
        return None
    if Repository.is_large(path.name):
        return sha256(path)
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _large_files(
    uploads: Uploads, name: str, what: str, request: dict[str, Any], signed: Callable[[str], str]
) -> Answer:
    def is_stored(file: dict[str, Any]) -> bool:
        path = uploads.stored(file["oid"])
        return path.is_file() and path.stat().st_size == file["size"]

    if what == "verify":
        return Answer({}) if is_stored(request) else refusal(404, "the object is not stored")
    verify = f"https://huggingface.co/{name}.git/info/lfs/objects/verify"
    objects = []
    for file in request["objects"]:
        upload = {"upload": {"href": signed(f"/lfs-store/{file['oid']}")}, "verify": {"href": verify}}
        objects.append({**file, **({} if is_stored(file) else {"actions": upload})})
    return Answer({"transfer": "basic", "objects": objects})


def _commit(uploads: Uploads, name: str, branch: str, body: bytes) -> Answer:
    if branch not in uploads.refs[name]["branches"]:
        return refusal(404, f"Invalid rev id: {branch}", "RevisionNotFound")
    staging = uploads.staged(name, branch)
    for line in body.splitlines():
        operation = json.loads(line)
        kind, value = operation["key"], operation["value"]
        if kind == "file":
            (staging.folder / value["path"]).write_bytes(base64.b64decode(value["content"]))
        elif kind == "lfsFile":
            if not uploads.stored(value["oid"]).is_file():
                return refusal(400, f"LFS pointer pointed to a file that does not exist: {value['path']}")
            shutil.copyfile(uploads.stored(value["oid"]), staging.folder / value["path"])
        elif kind == "deletedFile":
            (staging.folder / value["path"]).unlink()
    commit = uploads.record(staging, branch)
    uploads.messages.append(json.loads(body.splitlines()[0])["value"]["summary"])
    return Answer({"success": True, "commitOid": commit, "commitUrl": f"https://huggingface.co/{name}/commit/{commit}"})


def _branch(uploads: Uploads, name: str, branch: str, _body: bytes) -> Answer:
    branches = uploads.refs[name]["branches"]
    if branch in branches:
        return refusal(409, "Reference already exists")
    branches[branch] = branches[MAIN]
    return Answer({})


def _tag(uploads: Uploads, name: str, revision: str, body: bytes) -> Answer:
    resolved = uploads.find(Repository(uploads.root, "models", name), revision)
    if resolved is None:
        return refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
    tags, tag = uploads.refs[name]["tags"], json.loads(body)["tag"]
    if tag in tags:
        return refusal(409, "Tag reference exists already.")
    tags[tag] = resolved[0]
    return Answer({})


def _delete_tag(uploads: Uploads, name: str, tag: str) -> Answer:
    if uploads.refs[name]["tags"].pop(tag, None) is None:
        return refusal(404, f"Invalid rev id: {tag}", "RevisionNotFound")
    return Answer({})
