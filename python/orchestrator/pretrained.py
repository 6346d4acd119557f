"""Finds the model that `--init-from` names: a folder, or a repository of the Hugging Face Hub."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from orchestrator.command_error import CommandError, ExitCode

REPOSITORY = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
FILES = [
    "config.json", "generation_config.json", "model.safetensors", "model-*.safetensors", "model.safetensors.index.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja",
]  # fmt: skip
"""What is downloaded of a repository; many hold the weights a second time in another format."""


def locate(named: str) -> Path:
    """Return the folder of the model, downloaded into huggingface_hub's cache if `named` is `OWNER/NAME[@REVISION]`.

    The folder of a downloaded model is that of its commit, so that the run's config pins the revision.
    """
    folder = Path(named).expanduser()
    if folder.is_dir():
        return folder.absolute()
    repository = REPOSITORY.fullmatch(named)
    if repository is None or named.startswith("."):
        raise CommandError(
            f"--init-from {named}: there is no such folder, and it is no OWNER/NAME of the Hugging Face Hub"
        )
    return _download(named, repository["name"], repository["revision"])


def _download(named: str, name: str, revision: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub import errors
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=FILES))
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
