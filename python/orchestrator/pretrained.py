"""Finds a model that a flag names: a folder, or a repository of the Hugging Face Hub."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from orchestrator import _native, model_tokenizer
from orchestrator.command_error import CommandError, ExitCode
from orchestrator.hub_errors import unknown_token, unreachable
from orchestrator.paths import Roots, shown
from orchestrator.screen import note
from orchestrator.training_record import read_object

REPOSITORY = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
CONFIG = "config.json"
FILES = [
    CONFIG, "generation_config.json", "model.safetensors", "model-*.safetensors", "model.safetensors.index.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "additional_chat_templates/*.jinja",
]  # fmt: skip
"""The files to download from a repository; many hold the weights a second time in another format."""


def locate(name: str, flag: str = "--init-from", files: tuple[str, ...] = (CONFIG,)) -> Path:
    """Return the folder of a model; that of `OWNER/NAME[@REVISION]` is in huggingface_hub's cache.

    The folder of a downloaded model is that of its commit, so that the run's config pins the revision.

    Args:
        name: What was typed.
        flag: The flag that it was typed for, which messages name.
        files: The files to download from a repository; `config.json` tells whether a model runs here.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.absolute()
    if problem := _native.model_file_problem(folder):
        raise CommandError(f"{flag} {problem}")
    repository = REPOSITORY.fullmatch(name)
    if repository is None or name.startswith("."):
        raise CommandError(f"{flag} {name}: there is no such folder, and it is no OWNER/NAME of the Hugging Face Hub")
    return _download(f"{flag} {name}", repository["name"], repository["revision"], list(files))


def run_named(name: str) -> Path | None:
    """Return the folder of the run that was named; None for anything else."""
    folder = Path(name).expanduser()
    if not folder.exists() and "/" not in name:
        folder = Roots.from_environment().runs / name
    is_run = folder.is_dir() and (folder / "checkpoints").is_dir() and not (folder / CONFIG).exists()
    return folder if is_run else None


def is_repository(name: str) -> bool:
    """Whether what was typed names a repository of the Hub, and no folder."""
    return not Path(name).expanduser().exists() and REPOSITORY.fullmatch(name) is not None


def download(name: str, folder: Path, flag: str = "--init-from") -> None:
    """Download the files that a model is loaded from, at the commit that `locate` found."""
    repository = REPOSITORY.fullmatch(name)
    if repository is not None and is_repository(name):
        _download(f"{flag} {name}", repository["name"], folder.name, FILES)


def check(folder: Path, tokenizer_json: Path | None) -> None:
    """Raise an error unless training can start from the model, whose weights are looked at and not read yet.

    Args:
        folder: The model.
        tokenizer_json: The tokenizer to train with.
    """
    config = json.loads(_native.checked_model_config(folder, read_weights=False))
    context, content = config["max_position_embeddings"], read_object(folder / CONFIG)
    if context < content.get("max_position_embeddings", context):
        note(f"The model attends to a sliding window: sequences have at most its {context:,} tokens.")
    if dropout := content.get("attention_dropout"):
        note(
            f"The model's config.json has attention_dropout {dropout}, which transformers applies in training: "
            "it is trained without dropout here, and the checkpoints have none."
        )
    if tokenizer_json == folder / "tokenizer.json" and not tokenizer_json.exists():
        raise CommandError(
            f"{shown(folder)} has no tokenizer.json; "
            "`AutoTokenizer.from_pretrained(...).save_pretrained(...)` of transformers writes one"
        )
    if tokenizer_json is not None and tokenizer_json.exists():
        model_tokenizer.check_fits(tokenizer_json, config["vocab_size"])


def _download(text: str, name: str, revision: str | None, files: list[str]) -> Path:
    import huggingface_hub
    from huggingface_hub import constants, errors
    from huggingface_hub.utils.tqdm import disable_progress_bars, tqdm

    class TransientBar(tqdm):
        """A progress bar that disappears: huggingface_hub leaves its own open, and they mix with later lines."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options | {"leave": False})  # type: ignore[no-untyped-call]
            bars.append(self)

    bars: list[TransientBar] = []
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        path = huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=files, tqdm_class=TransientBar)
        return Path(path)
    except errors.GatedRepoError as error:
        token = _native.hub_token()
        login = f"with the owner of the token {token[0]}" if token else "and log in (hf auth login)"
        raise CommandError(f"{text}: the model is gated: accept its conditions on the Hub {login}") from error
    except errors.RepositoryNotFoundError as error:
        message = f"{text}: there is no such folder, and no such model on the Hub, or it is private: log in"
        raise CommandError(f"{message} (hf auth login)") from error
    except errors.RevisionNotFoundError as error:
        raise CommandError(f"{text}: the model has no revision {revision!r}") from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        cause = _cause(error)
        if isinstance(cause, errors.HfHubHTTPError) and cause.response.status_code == 401:
            raise CommandError(f"{text}: {unknown_token(cause)}", ExitCode.DATA_UNREADABLE) from error
        why = unreachable(cause, constants.ENDPOINT)
        hub = _native.redacted_url(constants.ENDPOINT)
        message = f"{text}: the model cannot be downloaded from {hub}: {why}. Start again to continue the download"
        raise CommandError(message, ExitCode.DATA_UNREADABLE) from error
    finally:
        for bar in reversed(bars):  # the first one is on the cursor's line, and closes by returning to its start
            bar.close()


def _cause(error: BaseException) -> BaseException:
    """Return the error of the network or the Hub for which huggingface_hub looked into its cache in vain."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    while isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    return error
