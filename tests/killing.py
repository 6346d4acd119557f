"""Training runs that are killed at a random moment, counted in what can be seen of the run from outside."""

from __future__ import annotations

import json
import queue
import shutil
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_hub import FakeHub
from workspace import TRAINER, Workspace

CONFIG = """
model: {hidden_size: 32, intermediate_size: 64, num_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,
        max_position_embeddings: 64}
data: {sequence_length: 64, batch_size: 2, gradient_accumulation_steps: 4, shuffle_buffer_size: 40, cache_limit: 1B}
optimizer: {learning_rate: 3.0e-3}
scheduler: {strategy: constant, warmup_steps: 2, total_epochs: 1}
runtime: {device: cpu, seed: 7, threads: 1, log_every_n_steps: 1, checkpoint: {every_n_steps: 8, max_keep: 2},
          evaluation: {every_n_steps: 100, max_batches: 1}}
"""


@dataclass
class KilledRun:
    """A run in `workspace` started again and again. Moments are the lines it prints and its requests to the Hub."""

    workspace: Workspace
    experiment: str
    moments: queue.SimpleQueue[str | None] = field(default_factory=queue.SimpleQueue)
    lines: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.workspace.run_folder(self.experiment)

    def watch(self, hub: FakeHub) -> None:
        """Count the requests to the Hub as moments too."""
        hub.on_request = self.moments.put

    def live(self, moments: int | None = None) -> bool:
        """Start or resume the run, and kill it after `moments` observed moments; False if it finished before."""
        config = self.folder / "training.yaml"
        process = self.workspace.start(TRAINER, "train", "--config", config, "--resume")
        reader = threading.Thread(target=self._read, args=(process.stdout,))
        reader.start()
        checkpoints_seen = 0
        while moments is None or checkpoints_seen < moments:
            moment = self.moments.get(timeout=240)
            if moment is None:
                break
            checkpoints_seen += 1
        else:
            process.kill()
        code = process.wait(timeout=60)
        reader.join()
        while not self.moments.empty():
            self.moments.get()
        if moment is None:
            assert code == 0, "".join(self.lines[-30:])
            return False
        assert code == -signal.SIGKILL, "the kill hit a living process"
        return True

    def _read(self, output: Any) -> None:
        for line in output:
            self.lines.append(line)
            self.moments.put(line)
        self.moments.put(None)

    def proof(self) -> dict[str, Any]:
        """Return the report of `validate-data` on the run."""
        process = self.workspace.trainer("validate-data", self.folder, "--replay=1", "--json").succeeded()
        report = json.loads(process.out)
        assert isinstance(report, dict)
        return report

    def results(self) -> dict[str, bytes]:
        """Return the contents of the run's files that must not depend on how often it was killed."""
        latest = (self.folder / "checkpoints" / "latest").readlink().name
        names = ("model.safetensors", "optimizer.safetensors", "trainer_state.json")
        checkpoint = {name: (self.folder / "checkpoints" / latest / name).read_bytes() for name in names}
        return {"ledger": (self.folder / "ledger.jsonl").read_bytes(), **checkpoint}


def prepare(workspace: Workspace, dataset: str, samples: int, *experiments: str) -> list[KilledRun]:
    """Make runs of CONFIG that stream one epoch of `samples` documents with one tokenizer, and do not start them."""
    stream = ("--stream", f"--dataset={dataset}", f"--max-samples={samples}", "--vocab-size=384")
    flags = ("--preset=smoke_cpu", "--steps=1", "--launch=none", "--experiment=template")
    workspace.orchestrate(*stream, *flags).succeeded()
    template = workspace.run_folder("template")
    for experiment in experiments:
        folder = workspace.run_folder(experiment)
        shutil.copytree(template / "tokenizer", folder / "tokenizer")
        for name in ("streaming_config.json", "special_tokens.txt"):
            shutil.copy(template / name, folder)
        (folder / "training.yaml").write_text(CONFIG)
    return [KilledRun(workspace, experiment) for experiment in experiments]
