"""The sessions that are killed at their system calls: what is run, how it is resumed, and what must be equal then.

A session starts in a copy of a folder. Its phases are the parts of the programme; calls that another session covers are
left out.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fake_hub.fineweb import documents
from run_results import differences, run_results
from system_calls import Call, kill_before, reachable, record
from workspace import ORCHESTRATE, TRAINER, Workspace

CONFIG = """
model: {hidden_size: 32, intermediate_size: 64, num_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,
        max_position_embeddings: 32}
data: {train_shards: [text.jsonl], sequence_length: 32, batch_size: 2, gradient_accumulation_steps: 2,
       shuffle_buffer_size: 8, held_out_fraction: 0.2}
optimizer: {learning_rate: 3.0e-2}
scheduler: {strategy: constant, warmup_steps: 1, total_steps: 8}
runtime: {device: cpu, seed: 7, threads: 1, log_every_n_steps: 1, checkpoint: {every_n_steps: 2, max_keep: 2},
          evaluation: {every_n_steps: 2, max_batches: 1}}
"""
RUN = Path("runs", "E")
TRAIN = (TRAINER, "train", "--config", RUN / "training.yaml")
RESUME = (*TRAIN, "--resume")
REWIND = (*TRAIN, "--resume", RUN / "checkpoints" / "step-00000006")
PREPARE = (
    ORCHESTRATE, "--preset=smoke_cpu", "--input=text.jsonl", "--vocab-size=300", "--hidden-size=32", "--layers=1",
    "--intermediate-size=64", "--heads=2", "--kv-heads=1", "--seq-len=32", "--batch-size=2", "--grad-accum=2",
    "--device=cpu", "--steps=4", "--launch=none", "--experiment=E",
)  # fmt: skip

Results = dict[str, bytes]
Words = tuple[str | Path, ...]
Phases = Callable[[Sequence[Call]], list[tuple[str, Call]]]
Way = Callable[[Workspace], None]
"""One way to go on after a kill, as a user would."""


@dataclass(frozen=True)
class Session:
    """A command that is killed, in a copy of `base`, and what its folder must hold in the end."""

    name: str
    base: Path
    command: Words
    calls: list[tuple[str, Call]]
    """Its calls when it is not disturbed that `kill` reaches, each with the phase that it belongs to."""
    ways: dict[str, Way]
    results: Callable[[Workspace], Results]
    undisturbed: Results

    def kill(self, call: Call, work: Path) -> Kill | None:
        """Kill the session before a call, go on in each way, and compare; None if it ended first."""
        workspace = copy(self.base, work)
        killed = kill_before(call, self.command, work, workspace.environment, log_of(work))
        return None if killed is None else Kill(killed, self.problems(workspace))

    def problems(self, workspace: Workspace) -> list[str]:
        """Go on in each way from the state of a workspace; return what fails or differs."""
        state = workspace.root.with_name("state")
        copy(workspace.root, state)
        found = []
        for way, go_on in self.ways.items():
            try:
                go_on(copy(state, workspace.root))
                found += [f"{way}: {name} differs" for name in differences(self.results(workspace), self.undisturbed)]
            except AssertionError as error:
                found.append(f"{way}: {error}")
        return found


@dataclass(frozen=True)
class Kill:
    """A kill: the call that it came before, and what was wrong after resuming."""

    call: Call
    problems: list[str]


def undisturbed(command: Words, workspace: Workspace, phases: Phases) -> list[tuple[str, Call]]:
    """Run a command to its end; return its calls that can be killed at, each with its phase."""
    recorded = record(command, workspace.root, workspace.environment, log_of(workspace.root))
    reached = set(reachable(recorded))
    return [(phase, call) for phase, call in phases(recorded) if call in reached]


def training_sessions(root: Path) -> list[Session]:
    """Prepare the sessions of the trainer: the first one of a run, a resume and a rewind."""
    prepared, complete, interrupted, work = (root / name for name in ("prepared", "complete", "interrupted", "work"))
    prepared.mkdir()
    write_text(prepared)
    Workspace(prepared).command(*PREPARE).succeeded()
    (prepared / RUN / "training.yaml").write_text(CONFIG)
    workspace = copy(prepared, work)
    calls = undisturbed(TRAIN, workspace, phases_of_training)
    expected = trained(workspace)
    copy(work, complete)
    interrupt(TRAIN, calls, copy(prepared, work))
    copy(work, interrupted)
    resume, again = {"--resume": command(*RESUME)}, {"the same command": command(*REWIND)}
    resumed_calls = undisturbed(RESUME, workspace, start_as("resume"))
    rewound_calls = undisturbed(REWIND, copy(complete, work), all_as("rewind"))
    assert not differences(trained(workspace), expected)
    return [
        Session("train", prepared, TRAIN, calls, resume, trained, expected),
        Session("resume", interrupted, RESUME, resumed_calls, resume, trained, expected),
        Session("rewind", complete, REWIND, rewound_calls, again | resume, trained, expected),
    ]


def interrupt(command: Words, calls: list[tuple[str, Call]], workspace: Workspace) -> None:
    """Kill training before the checkpoint of step 6 gets its name: much is left of what comes after that of step 4."""
    label = re.compile(r"rename \S*/\.step-00000006\.tmp-\S* \S*/step-00000006")
    (commit,) = [call for _, call in calls if label.fullmatch(call.label)]
    killed = kill_before(commit, command, workspace.root, workspace.environment, log_of(workspace.root))
    assert killed and killed.label == commit.label


def copy(base: Path, work: Path) -> Workspace:
    """Make `work` a copy of `base`."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(base, work, symlinks=True)
    return Workspace(work)


def log_of(work: Path) -> Path:
    """Return where strace writes."""
    return work.with_name("strace.txt")


def write_text(folder: Path) -> None:
    """Write a small data set of documents that are held out one by one."""
    texts = documents(mean_characters=300)
    rows = [json.dumps({"text": next(texts)[:2000]}) for _ in range(40)]
    (folder / "text.jsonl").write_text("\n".join(rows) + "\n")


def command(*words: str | Path) -> Way:
    """Return the way that is this command."""

    def go_on(workspace: Workspace) -> None:
        workspace.command(*words).succeeded()

    return go_on


def trained(workspace: Workspace) -> Results:
    """Return the results of the run."""
    return run_results(workspace.root / RUN)


def phases_of_training(recorded: Sequence[Call]) -> list[tuple[str, Call]]:
    """Tell start-up, steps and saves apart, by what the trainer prints and syncs."""
    phase, found = "start-up", []
    for call in recorded:
        if call.name == "fdatasync" and "metrics.jsonl" in call.text:
            phase = "save"
        found.append((phase, call))
        if prints(call, "training ", "checkpoint "):
            phase = "step"
    return found


def prints(call: Call, *starts: str) -> bool:
    """Whether a call prints a line that starts so."""
    return call.name == "write" and call.text.startswith("1<") and any(f', "{start}' in call.text for start in starts)


def start_as(phase: str) -> Phases:
    """Return phases of the start of a training session; what follows is that of every session."""
    return lambda recorded: [(phase, call) for at, call in phases_of_training(recorded) if at == "start-up"]


def all_as(phase: str) -> Phases:
    """Return phases of a session that is one phase."""
    return lambda recorded: [(phase, call) for call in recorded]
