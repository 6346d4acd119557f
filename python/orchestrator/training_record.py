"""How a checkpoint was trained, from the files of its run."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.input_files import parse_json, read_text, readable
from orchestrator.paths import Roots, shown
from orchestrator.run_files import read_streaming_config
from orchestrator.settings import DEMO_DATASET

Row = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """A source of the text that was trained on. Of local files only the names are kept, not the folders."""

    name: str
    is_on_hub: bool
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    max_samples: int | None = None
    weight: float | None = None


@dataclass(frozen=True)
class TrainingRecord:
    """A checkpoint's state, and its run's config and metrics up to that step, as far as there are files."""

    state: Row = field(default_factory=dict)
    config: Row = field(default_factory=dict)
    environment: Row = field(default_factory=dict)
    streaming: Row | None = None
    train: list[Row] = field(default_factory=list)
    evaluations: list[Row] = field(default_factory=list)

    @property
    def step(self) -> int | None:
        """Optimizer steps taken; none for a model that is not a checkpoint."""
        return self.state.get("step")

    @property
    def is_chat(self) -> bool:
        """Whether it was trained on conversations."""
        return bool(self.config.get("data", {}).get("format") == "chat")

    @property
    def base_model(self) -> tuple[str, str] | None:
        """The repository of the Hub, and its commit, whose weights training started from."""
        return repository_of(Path(self.config.get("model", {}).get("init_from") or ""))

    def sources(self) -> list[Source]:
        """Return the sources of the text that was trained on, in the order of the config."""
        data, pinned = self.config.get("data", {}), self.state.get("identity", {})
        if self.streaming is not None:
            return [_source(self.streaming["dataset"], self.streaming, pinned.get("revision"))]
        if not data.get("mixture"):
            return [Source(_names(data["train_shards"]), is_on_hub=False)] if data.get("train_shards") else []
        total = sum(component["weight"] for component in data["mixture"])
        sources = []
        for index, component in enumerate(data["mixture"]):
            weight = component["weight"] / total
            if component["dataset"] is None:
                sources.append(Source(_names(component["shards"]), is_on_hub=False, weight=weight))
            else:
                pin = pinned.get(f"data.mixture[{index}].revision")
                sources.append(_source(component["dataset"], component, pin, weight))
        return sources


def _source(name: str, settings: Row, pin: str | None, weight: float | None = None) -> Source:
    """Return a data set; `pin` is the commit that the checkpoint was trained on, where it says."""
    return Source(
        name=name,
        is_on_hub=name != DEMO_DATASET,
        config=settings.get("config"),
        split=settings.get("split") or "train",
        revision=pin or settings.get("revision"),
        max_samples=settings.get("max_samples"),
        weight=weight,
    )


def read(model: Path, run: Path | None) -> TrainingRecord:
    """Read how the checkpoint `model` was trained, from its folder and its run's; files of both may be missing."""
    state = read_object(model / "trainer_state.json")
    if run is None or not state:
        return TrainingRecord(state)
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["step"] <= state["step"]]
    return TrainingRecord(
        state=state,
        config=read_object(run / "resolved_config.json"),
        environment=read_object(run / "environment.json"),
        streaming=read_streaming_config(run),
        train=_with_loss(rows, "train"),
        evaluations=_with_loss(rows, "evaluation"),
    )


def _with_loss(rows: list[Row], kind: str) -> list[Row]:
    """Return the lines of a kind, without those whose loss was not finite."""
    return [row for row in rows if row["kind"] == kind and isinstance(row["loss"], int | float)]


def run_of(model: Path, checkpoint: Path | None, experiment: str | None) -> Path | None:
    """Return the folder of the run that made a checkpoint, if it is where a run keeps its checkpoints."""
    source = Roots.from_environment().runs / experiment if experiment else checkpoint
    candidates = [model.absolute().parent.parent, *([source] if source else [])]
    return next((folder for folder in candidates if (folder / "resolved_config.json").is_file()), None)


def repository_of(folder: Path) -> tuple[str, str] | None:
    """Return the repository and commit that a folder in huggingface_hub's cache holds."""
    cache_names = [part for part in folder.parts[-3:-2] if part.startswith("models--")]
    if not cache_names or folder.parent.name != "snapshots":
        return None
    return cache_names[0].removeprefix("models--").replace("--", "/"), folder.name


def read_object(path: Path) -> Row:
    """Return a JSON object; an empty one where there is no file."""
    value = None
    with readable(shown(path)), suppress(FileNotFoundError):
        value = parse_json(read_text(path))
    return value if isinstance(value, dict) else {}


def _names(patterns: list[str]) -> str:
    """Return the names of local files without their folders, which are nobody else's business."""
    return ", ".join(Path(pattern).name for pattern in patterns)


def read_rows(path: Path) -> list[Row]:
    """Return the lines of metrics.jsonl; a last one that is still being written is left out."""
    with readable(shown(path)), suppress(FileNotFoundError):
        lines = read_text(path).splitlines(keepends=True)
        return [parse_json(line) for line in lines if line.endswith("\n")]
    return []
