"""Runs whose files beside their checkpoints are damaged, and what a resume makes of it."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import islice
from pathlib import Path

from damage import Damage, flip, overwrite, put
from damaged_checkpoints import LAST, NEWEST, SavedRun
from fake_hub.fineweb import documents
from workspace import Finished, Workspace

MODEL = (
    "--preset=smoke_cpu --hidden-size=16 --intermediate-size=16 --layers=1 --heads=2 --kv-heads=1 --seq-len=32 "
    "--batch-size=2 --grad-accum=1 --vocab-size=300 --steps=12 --checkpoint-every=4 --evaluate-every=4 "
    "--eval-batches=1 --shuffle-buffer=8 --device=cpu --log-every=1 --seed=7 --launch=none --experiment=run "
    "--override=runtime.threads=1 --override=runtime.checkpoint.max_keep=9"
).split()
KEY = r"\b(model|lora|tokenizer|data|optimizer|scheduler|stages|runtime)\.[a-z_.]+\b"
# What names the damage in a message: the file, or what is wrong with it.
NAMED_BY = {
    "training.yaml": rf"training\.yaml|{KEY}|the schedule has changed|settings have changed|does not exist; supported"
    r"|no checkpoint in",
    "streaming_config.json": r"streaming_config\.json|HuggingFaceFW|dataset|split|revision|max_samples|text_column"
    r"|tokenizer\.json|column",
    "tokenizer/tokenizer.json": r"tokenizer/tokenizer\.json|tokenizer\.tokenizer_json|the tokenizer's",
    "tokenizer/special_tokens_map.json": r"special_tokens_map\.json|tokenizer\.tokenizer_json|the tokenizer's",
}
RUN_FILES = [
    "training.yaml", "ledger.jsonl", "metrics.jsonl", "resolved_config.json", "environment.json", "special_tokens.txt",
    "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json", "tokenizer/special_tokens_map.json",
    "tokenizer/manifest.json",
]  # fmt: skip
# Trained weights, the state of the optimizer and what was trained on; the rest of a checkpoint may differ in how often
# the run was evaluated.
TRAINED = ("model.safetensors", "optimizer.safetensors", "tokenizer.json")
USUAL_LINE = re.compile(r"resuming at step |training [\d,]+ parameters|`orchestrate watch|step \d|checkpoint /|$")


class Outcome(Enum):
    """What a resume makes of a damaged file."""

    HARMLESS = "trains on as if nothing had happened"
    TOLD = "trains otherwise, and says so"
    REFUSED = "is refused, and says why"
    SILENT = "trains otherwise, and does not say so"
    UNNAMED = "is refused without naming the file"
    CRASHED = "ends with another exit code than those of an error"

    @property
    def is_sound(self) -> bool:
        return self in (Outcome.HARMLESS, Outcome.TOLD, Outcome.REFUSED)


@dataclass(frozen=True)
class Resumed:
    """A resume of a damaged run."""

    outcome: Outcome
    process: Finished


def write_documents(workspace: Workspace) -> Path:
    """Write a file of 60 documents below the workspace's folder, and return its path."""
    path = workspace.root / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in islice(documents(300), 60)))
    return path


def saved_text_run(workspace: Workspace, *source: str) -> SavedRun:
    """Prepare a run as a user does, train 8 of its 12 steps, and return it with its config written in full."""
    workspace.orchestrate(*MODEL, *source).succeeded()
    run = SavedRun(workspace, workspace.run_folder("run"))
    run.train("--max-steps=8").succeeded()
    return run


def trained(run: SavedRun) -> dict[str, bytes] | None:
    """Return what the run has trained; None if it has not come to the last step."""
    checkpoint = run.checkpoints / LAST
    if not checkpoint.is_dir():
        return None
    files = [*(checkpoint / name for name in TRAINED), run.folder / "ledger.jsonl"]
    return {file.name: file.read_bytes() for file in files}


def resume_damaged(run: SavedRun, damage: Damage, expected: dict[str, bytes]) -> Resumed:
    """Damage a file of a run and resume the run, which is used up."""
    damage.apply(run.folder)
    process = run.train("--resume")
    output = process.out + process.err
    if process.code not in (0, 2, 3, 5) or "panicked" in output:
        return Resumed(Outcome.CRASHED, process)
    (name,) = damage.names
    notices = "\n".join(line for line in output.splitlines() if not USUAL_LINE.match(line))
    is_named = bool(re.search(NAMED_BY.get(name, re.escape(name)), notices))
    if process.code != 0:
        return Resumed(Outcome.REFUSED if is_named else Outcome.UNNAMED, process)
    if trained(run) == expected:
        return Resumed(Outcome.HARMLESS, process)
    return Resumed(Outcome.TOLD if is_named else Outcome.SILENT, process)


def file_damage(run: SavedRun, name: str, chance: random.Random, part: float) -> Iterator[Damage]:
    """Give the damage to one file of a run: `part` of its bytes flipped, cut at places, removed.

    A digit becomes another one, so that what is damaged can still be read. Comments of the config are left alone.
    """
    path = run.folder / name
    content = path.read_bytes()
    places = [place for place in range(len(content)) if name != "training.yaml" or not _in_comment(content, place)]
    for place in places[chance.randrange(round(1 / part)) :: round(1 / part)]:
        mask = 1 if chr(content[place]).isdigit() else 1 << chance.randrange(8)
        yield Damage(f"flipped byte of {name}", (name,), f"byte {place} ^ {mask:#04x}", flip(name, place, mask))
    for length in [0, *chance.sample(range(1, len(content)), min(len(content) - 1, round(40 * part) + 2))]:
        yield Damage(f"cut {name}", (name,), f"cut to {length} bytes", overwrite(name, content[:length]))
    yield Damage(f"missing {name}", (name,), "removed", put(name, lambda path: None))


def _in_comment(content: bytes, place: int) -> bool:
    return b"#" in content[content.rfind(b"\n", 0, place) + 1 : place + 1]


def pointer_damage(name: str, chance: random.Random) -> Iterator[Damage]:
    """Give the damage to the link `latest` or `best`, and to the file that it is where there are no links."""
    pointer = f"checkpoints/{name}"
    texts = {"a flipped byte": _flipped_text(chance), "another step": "step-00000005", "a cut name": NEWEST[:-3],
             "a path outside": f"../../{NEWEST}"}  # fmt: skip
    links = {f"a link to {what}": partial(_link, text) for what, text in texts.items()}
    files = {f"a file with {what}": partial(_file, text.encode()) for what, text in texts.items()}
    replacements: dict[str, Callable[[Path], object]] = {
        **links, **files, "a file of random bytes": partial(_file, chance.randbytes(100)),
        "an empty file": partial(_file, b""), "a link to itself": partial(_link, name),
        "a device": partial(_link, "/dev/zero"), "a named pipe": os.mkfifo, "missing": lambda path: None,
        "a directory": Path.mkdir,
    }  # fmt: skip
    for what, create in replacements.items():
        yield Damage(f"damaged pointer {name}", (pointer,), what, put(pointer, create))


def _link(target: str, path: Path) -> None:
    path.symlink_to(target)


def _file(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def _flipped_text(chance: random.Random) -> str:
    place = chance.randrange(len(NEWEST))
    return NEWEST[:place] + chr(ord(NEWEST[place]) ^ 1 << chance.randrange(5)) + NEWEST[place + 1 :]
