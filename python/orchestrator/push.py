"""`orchestrate push`: uploads a model to the Hugging Face Hub, in one commit.

Files are stored by their hash before the commit names them, so a push that was stopped leaves the repository as it was,
and the next one sends only the files that are not stored yet.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import _native, hf_directory, model_card
from orchestrator.adapters import has_adapters
from orchestrator.command_error import CommandError
from orchestrator.export import opened, try_it
from orchestrator.exported_model import Model
from orchestrator.hub_errors import explained
from orchestrator.model_source import Source
from orchestrator.paths import shown
from orchestrator.pretrained import REPOSITORY
from orchestrator.screen import amount, note, step, warn
from orchestrator.temporary_folder import removed
from orchestrator.urls import redacted

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

WEIGHTS = [
    "model.safetensors", "model-*.safetensors", "model.safetensors.index.json", "config.json",
    "adapter_model.safetensors", "adapter_config.json",
]  # fmt: skip
"""Patterns of files that a push deletes from the repository unless it replaces them: stale shards or adapters."""
MAIN = "main"


@dataclass(frozen=True)
class Target:
    """The repository and the branch that a model is pushed to."""

    repository: str
    branch: str
    is_public: bool


def run(
    repository: str,
    source: Source,
    merge: bool,
    public: bool,
    branch: str,
    message: str | None,
    max_shard_size: str | None,
) -> None:
    """Upload the model of a checkpoint or an experiment, and say how it is loaded."""
    size = _checked(repository, max_shard_size)
    import huggingface_hub
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, and not in __all__
    from huggingface_hub.utils.tqdm import disable_progress_bars

    logging.getLogger("huggingface_hub.hf_api").setLevel(logging.ERROR)  # its warnings are reported below
    if not sys.stderr.isatty():
        disable_progress_bars()
    api = huggingface_hub.HfApi(library_name="transformer-candle", library_version=_native.__version__)
    target = Target(repository, branch, public)
    with explained(api, repository):
        validate_repo_id(repository)
        user = api.whoami()["name"]
    with _staging(repository) as folder:
        model = source.read(lambda resolved: _filled(folder, repository, resolved, merge, size))
        tag = None if model.record.step is None else f"step-{model.record.step:08}"
        with explained(api, repository):
            _prepare(api, target, user)
            commit = _upload(api, target, folder, message or f"Upload {model.name}" + (f", {tag}" if tag else ""))
            if tag is None:
                note("no tag: the model is not a checkpoint of a step")
            else:
                step("tag", _tag(api, repository, tag, commit))
    step("page", f"{_native.redacted_url(api.endpoint)}/{repository}" + ("" if branch == MAIN else f"/tree/{branch}"))
    step("try it", try_it(model, repository, None if branch == MAIN else tag or branch))


def preview(repository: str, source: Source, merge: bool, max_shard_size: str | None) -> None:
    """Print what `run` would upload; the Hub is not asked anything."""
    size = _checked(repository, max_shard_size)
    with _staging(repository) as folder:
        source.read(lambda resolved: _filled(folder, repository, resolved, merge, size))
        sizes = hf_directory.files_of(folder)
    for name, bytes_ in sizes.items():
        note(f"{name}  {amount(bytes_)}")
    step("dry run", f"{len(sizes)} files, {amount(sum(sizes.values()))}: nothing was sent to {repository}")


def _checked(repository: str, max_shard_size: str | None) -> int | str:
    """Return the size of a file of weights at most, in bytes; refuse what is no repository's name."""
    match = REPOSITORY.fullmatch(repository)
    if match is None or match["revision"]:
        raise CommandError(f"{repository} is not a repository of the Hub: give OWNER/NAME")
    return hf_directory.checked_size(max_shard_size or hf_directory.MAX_SHARD_SIZE)


def _filled(folder: Path, repository: str, source: Source, merge: bool, size: int | str) -> Model:
    """Open the model and write what is uploaded into a folder, in place of what is there."""
    model = _opened(source, merge)
    step("model", shown(model.folder))
    shutil.rmtree(folder)
    folder.mkdir()
    hf_directory.fill(model, folder, repository.split("/")[1], repository, size)
    return model


def _opened(source: Source, merge: bool) -> Model:
    """Open the model; adapters that are not merged are uploaded alone, if their base model is on the Hub."""
    if merge or not has_adapters(source.folder()):
        return opened(source, merge, alone=False)
    model = opened(source, merge=False, alone=True)
    if model.base_model is None:
        raise CommandError(
            f"the adapters in {shown(model.folder)} belong to the model in {model.config['base_model_name_or_path']}, "
            "which nobody else has: --base-model OWNER/NAME[@REVISION] names its repository on the Hub, "
            "--merge uploads the model with the adapters"
        )
    return model


@contextmanager
def _staging(repository: str) -> Iterator[Path]:
    """Make an empty folder for what is uploaded, in the cache; what a killed push left there is removed."""
    folder = _native.cache_root() / "push" / repository.replace("/", "--")
    folder.mkdir(parents=True, exist_ok=True)
    if folder.is_symlink() or folder.parent.is_symlink():
        raise CommandError(
            f"{shown(folder)} is, or is below, a symbolic link, and a cache follows none: remove the link"
        )
    with open(folder / "lock", "w", opener=_not_through_a_link) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CommandError(f"another push to {repository} is running on this machine: wait for it") from error
        with removed(folder / "model"):
            yield folder / "model"


def _not_through_a_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _prepare(api: HfApi, target: Target, user: str) -> None:
    """Create the repository and the branch unless they exist, and print who can see the repository."""
    from huggingface_hub.errors import HfHubHTTPError

    private, state = not target.is_public, f"made by {user}"
    try:
        api.create_repo(target.repository, private=private)
    except HfHubHTTPError as error:
        # A token may be allowed to write to a repository, and not to make one.
        if error.response.status_code not in (401, 402, 403, 409) or not api.repo_exists(target.repository):
            raise
        private, state = bool(api.model_info(target.repository).private), "there already"
    step("repository", f"{target.repository}, {'private' if private else 'public'}, {state}")
    if target.is_public and private:
        warn(f"--public is for a new repository: {target.repository} stays private, change it in its settings")
    if target.branch != MAIN:
        api.create_branch(target.repository, branch=target.branch, exist_ok=True)


def _upload(api: HfApi, target: Target, folder: Path, message: str) -> str:
    """Upload the folder in one commit, and return the commit's id."""
    from huggingface_hub import CommitOperationAdd

    before = api.model_info(target.repository, revision=target.branch)
    there = [file.rfilename for file in before.siblings or []]
    operations = _operations(api, target, folder, there)
    sizes = [operation.upload_info.size for operation in operations if isinstance(operation, CommitOperationAdd)]
    step("upload", f"{len(sizes)} files, {amount(sum(sizes))}; what the Hub has already is not sent")
    with warnings.catch_warnings(record=True) as remarks:
        commit = api.create_commit(target.repository, operations, commit_message=message, revision=target.branch)
    for remark in remarks:
        warn(redacted(str(remark.message)))
    unchanged = commit.oid == before.sha
    step("commit", f"{commit.oid}" + (": the Hub has these files already" if unchanged else ""))
    return str(commit.oid)


def _operations(
    api: HfApi, target: Target, folder: Path, there: list[str]
) -> list[CommitOperationAdd | CommitOperationDelete]:
    """Return the commit's operations: add the files but a user's own card, delete weights that are not replaced."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete
    from huggingface_hub.utils.tqdm import disable_progress_bars

    files = list(hf_directory.files_of(folder))
    if model_card.FILE in there:
        disable_progress_bars("huggingface_hub.http_get")  # a page of text needs none
        card = Path(api.hf_hub_download(target.repository, model_card.FILE, revision=target.branch))
        if model_card.GENERATED not in card.read_text(encoding="utf-8", errors="replace"):
            note(f"{model_card.FILE} of the repository is kept: it was not written by orchestrate")
            files.remove(model_card.FILE)
    stale = [name for name in there if name not in files and any(fnmatch(name, pattern) for pattern in WEIGHTS)]
    added = [CommitOperationAdd(name, folder / name) for name in files]
    return [*added, *(CommitOperationDelete(name) for name in stale)]


def _tag(api: HfApi, repository: str, tag: str, commit: str) -> str:
    """Set the tag to the commit, and return its name with what was done."""
    tags = {ref.name: ref.target_commit for ref in api.list_repo_refs(repository).tags}
    former = tags.get(tag)
    if former == commit:
        return f"{tag}, there already"
    if former is not None:
        api.delete_tag(repository, tag=tag)
    api.create_tag(repository, tag=tag, revision=commit)
    return tag if former is None else f"{tag}, moved from {former[:12]}"
