"""Finds the model that `--init-from` names: a folder, or a repository of the Hugging Face Hub."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from orchestrator import _native
from orchestrator.command_error import CommandError, ExitCode
from orchestrator.paths import shown
from orchestrator.screen import step

REPOSITORY = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
FILES = [
    "config.json", "generation_config.json", "model.safetensors", "model-*.safetensors", "model.safetensors.index.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
]  # fmt: skip
"""What is downloaded of a repository; many hold the weights a second time in another format."""


def locate(named: str) -> Path:
    """Return the folder of the model: of `OWNER/NAME[@REVISION]`, in huggingface_hub's cache.

    Of a repository only `config.json` is downloaded, which tells whether the model runs here. The folder of a
    downloaded model is that of its commit, so that the run's config pins the revision.
    """
    folder = Path(named).expanduser()
    if folder.is_dir():
        return folder.absolute()
    repository = REPOSITORY.fullmatch(named)
    if repository is None or named.startswith("."):
        raise CommandError(
            f"--init-from {named}: there is no such folder, and it is no OWNER/NAME of the Hugging Face Hub"
        )
    folder = _download(named, repository["name"], repository["revision"], ["config.json"])
    step("model", f"{repository['name']} at {folder.name[:12]}")
    return folder


def download(named: str, folder: Path) -> None:
    """Download what training starts from, of the commit that `locate` found."""
    repository = REPOSITORY.fullmatch(named)
    if not Path(named).expanduser().is_dir() and repository is not None:
        _download(named, repository["name"], folder.name, FILES)


def check(folder: Path, tokenizer_json: Path | None) -> None:
    """Raise an error unless training can start from the model, whose weights are looked at and not read yet."""
    _native.checked_model_config(folder, read_weights=False)
    if tokenizer_json == folder / "tokenizer.json" and not tokenizer_json.exists():
        raise CommandError(
            f"{shown(folder)} has no tokenizer.json; "
            "`AutoTokenizer.from_pretrained(...).save_pretrained(...)` of transformers writes one"
        )


def _download(named: str, name: str, revision: str | None, files: list[str]) -> Path:
    import huggingface_hub
    from huggingface_hub import errors
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=files))
    except errors.GatedRepoError as error:
        message = (
            f"--init-from {named}: the model is gated: accept its conditions on the Hub and log in (hf auth login)"
        )
        raise CommandError(message) from error
    except errors.RepositoryNotFoundError as error:
        message = (
            f"--init-from {named}: there is no such folder, and no such model on the Hub, or it is private: log in"
        )
        raise CommandError(f"{message} (hf auth login)") from error
    except errors.RevisionNotFoundError as error:
        raise CommandError(f"--init-from {named}: the model has no revision {revision!r}") from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        message = f"--init-from {named}: the model cannot be downloaded: {reason}. Start again to continue the download"
        raise CommandError(message, ExitCode.DATA_UNREADABLE) from error
