"""Full disks, limits, links, lost permissions, moved directories: a run says so, and loses nothing that it need not."""

from __future__ import annotations

import json
import math
import os
import resource
import shlex
import shutil
import signal
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from workspace import ORCHESTRATE, TINY_MODEL, TRAINER, Finished, Workspace

NOBODY = 65534
MODEL = ("hidden_size=8", "intermediate_size=8", "num_layers=1", "num_attention_heads=2", "num_key_value_heads=1")
# Above the largest file of a checkpoint of MODEL, below what some hundred steps write to each file of the run.
FILE_SIZE = 64 << 10
ADDRESS_SPACE = 400 << 20


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A run that is prepared and not trained."""
    workspace = Workspace(tmp_path_factory.mktemp("adverse"))
    text = workspace.write_text()
    flags = "--steps=100000 --checkpoint-every=100000 --evaluate-every=100000 --launch=none --tensorboard".split()
    workspace.orchestrate(*TINY_MODEL, *flags, f"--input={text}", "--experiment=template").succeeded()
    return workspace


class Run:
    """A copy of the template in the workspace `runs`, trained by the Rust program on one thread."""

    def __init__(self, template: Workspace, workspace: Workspace, name: str) -> None:
        self.workspace = workspace
        self.folder = workspace.run_folder(name)
        shutil.copytree(template.run_folder("template"), self.folder)
        self.config = self.folder / "training.yaml"

    def arguments(self, *arguments: str | Path) -> list[str]:
        words = [TRAINER, "train", "--config", self.config, "--override", "runtime.threads=1", *arguments]
        return [str(word) for word in words]

    def train(self, *arguments: str | Path) -> Finished:
        return self.workspace.command(*self.arguments(*arguments))

    def start(self, *arguments: str, before: Callable[[], None] | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.arguments(*arguments), cwd=self.workspace.root, env=self.workspace.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, preexec_fn=before,
        )  # fmt: skip

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step-{step:08}"

    def names(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoints").iterdir())

    def state(self, step: int) -> dict[str, Any]:
        state = json.loads((self.checkpoint(step) / "trainer_state.json").read_text())
        assert isinstance(state, dict)
        return state


@pytest.fixture
def run(template: Workspace, workspace: Workspace) -> Run:
    return Run(template, workspace, "run")


@pytest.fixture
def open_run(template: Workspace) -> Iterator[Run]:
    """A run in a folder that everybody may use."""
    root = Path(tempfile.mkdtemp(prefix="adverse-"))
    shutil.copy(TRAINER, root / "trainer")
    for name in ("artifacts", "book.txt"):
        source = template.root / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, root / name)
    run = Run(template, Workspace(root), "run")
    run.config.write_text(run.config.read_text().replace(str(template.root), str(root)))
    subprocess.run(["chmod", "-R", "a+rwX", root], check=True)
    yield run
    subprocess.run(["chmod", "-R", "u+rwx", root], check=True)
    shutil.rmtree(root)


def unprivileged(run: Run, *arguments: str | Path) -> Finished:
    """Run the program as somebody whom permissions hold back."""
    drop = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    prefix = ["setpriv", *drop] if os.geteuid() == 0 else []
    return run.workspace.command(*prefix, run.workspace.root / "trainer", *arguments)


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """Return the lines up to the one that holds `words`."""
    assert process.stdout
    output = ""
    for line in process.stdout:
        output += line
        if words in line:
            return output
    raise AssertionError(f"{words!r} is not in:\n{output}")


def limited(run: Run, *arguments: str | Path) -> Finished:
    """Run the program with little address space and few threads, each of which reserves some."""
    return run.workspace.command("env", "RAYON_NUM_THREADS=2", "prlimit", f"--as={ADDRESS_SPACE}", *arguments)


def test_a_full_disk_stops_no_run_and_loses_no_line(run: Run) -> None:
    sizes = [word for size in MODEL for word in ("--override", f"model.{size}")]
    every = ["--override", "runtime.checkpoint.every_n_steps=500", "--override", "runtime.checkpoint.max_keep=100"]
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    limit = (FILE_SIZE, unlimited)
    process = run.start(*sizes, *every, before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    output = read_until(process, "checkpoint ")
    for name in ("metrics.jsonl", "ledger.jsonl", "events.out"):
        warnings = [line for line in output.splitlines() if line.startswith("warning: ") and name in line]
        assert len(warnings) == 1, output
        assert "File too large" in warnings[0]
    assert run.state(500)["ledger"] is None, "no checkpoint records lines that are not on the disk"
    run.workspace.trainer("validate-data", run.folder).refused(2, "ledger")

    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (unlimited, unlimited))
    output = read_until(process, "ledger.jsonl is written again, no line is lost")
    read_until(process, "checkpoint ")
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 143, rest
    last = int((run.folder / "checkpoints" / "latest").readlink().name.removeprefix("step-"))
    assert [row["step"] for row in run.workspace.metrics("run")] == list(range(1, last + 1))
    proof = run.workspace.trainer("validate-data", run.folder, "--replay=600", "--json").succeeded()
    assert json.loads(proof.out)["problems"] == []
    resumed_run = run.train(*sizes, "--resume", run.checkpoint(500), "--max-steps=501").succeeded()
    assert "the ledger restarts at step 500" in resumed_run.out


@pytest.mark.parametrize(
    ("source", "file", "variable"),
    [("--dataset=demo", "demo/000_00000.parquet", "ORCHESTRATE_CACHE_ROOT"),
     ("--input=book.txt", "tokenizer/job", "ORCHESTRATE_TOKENIZER_ROOT")],
)  # fmt: skip
def test_a_disk_that_takes_no_file_is_named(workspace: Workspace, source: str, file: str, variable: str) -> None:
    workspace.write_text()
    limited = f"ulimit -f 1; exec {ORCHESTRATE} {shlex.join(TINY_MODEL)} {source} --experiment=job --steps=3"
    process = workspace.command("bash", "-c", limited)
    process.refused(1, "cannot write", file, "`ulimit -f`", variable)
    assert not list(workspace.root.rglob("*.tmp-*"))


def test_printed_commands_can_be_typed(workspace: Workspace) -> None:
    text = workspace.write_text("my texts/a book's.txt")
    folder = workspace.root / "my run"
    run = [*TINY_MODEL, f"--input={text}", "--experiment=job", f"--run-dir={folder}", "--steps=3"]
    process = workspace.orchestrate(*run).succeeded()
    (resume,) = [line.strip() for line in process.out.splitlines() if "--resume" in line]
    resumed_run = workspace.command("bash", "-c", resume)
    assert "step 6/6" in resumed_run.succeeded().out
    output = workspace.orchestrate(*run[:-2], "--steps=3", f"--run-dir={folder} 2", "--launch=none").succeeded().out
    (plan,) = [line.split("#")[0].strip() for line in output.splitlines() if " plan --config " in line]
    workspace.command("bash", "-c", plan).succeeded()


def test_a_file_size_limit_is_reported_and_spares_checkpoints(run: Run) -> None:
    run.train("--max-steps=1").succeeded()
    process = run.workspace.command("prlimit", f"--fsize={FILE_SIZE}", *run.arguments("--resume", "--max-steps=2"))
    process.refused(1, "`ulimit -f`", "step 2", "raise the limit")
    assert run.names() == ["latest", "step-00000001"]


def test_an_unremovable_checkpoint_does_not_stop_training(open_run: Run) -> None:
    run, every = open_run, ("--override", "runtime.checkpoint.every_n_steps=2", "--override")
    train = ("train", "--config", run.config, *every, "runtime.checkpoint.max_keep=1")
    unprivileged(run, *train, "--max-steps=2").succeeded()
    run.checkpoint(2).chmod(0o555)
    for last in (6, 8):
        process = unprivileged(run, *train, "--resume", f"--max-steps={last}").succeeded()
        assert process.out.count("warning: cannot remove") == 1, process.out
        assert run.names() == ["latest", "step-00000002", f"step-{last:08}"]
    run.workspace.trainer("checkpoint", "verify", run.checkpoint(2)).succeeded()


def test_an_unreadable_checkpoint_is_passed_over(open_run: Run) -> None:
    run, every = open_run, ("--override", "runtime.checkpoint.every_n_steps=2")
    train = ("train", "--config", run.config, *every)
    unprivileged(run, *train, "--max-steps=4").succeeded()
    run.checkpoint(4).chmod(0)
    process = unprivileged(run, "generate", "--checkpoint", run.folder, "--prompt=def", "--max-tokens=2").succeeded()
    assert "step-00000004" in process.err
    assert "Permission denied" in process.err
    process = unprivileged(run, *train, "--resume", "--max-steps=6").succeeded()
    assert "resuming at step 2" in process.out
    assert "Permission denied" in process.out


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_a_checkpoint_named_on_resume_is_verified_whole(run: Run, name: str) -> None:
    run.train("--max-steps=1").succeeded()
    path = run.checkpoint(1) / name
    path.write_text(path.read_text() + " ")
    run.train("--resume", run.checkpoint(1), "--max-steps=2").refused(5, name)


def test_commands_inside_a_checkpoint_know_where_they_are(run: Run) -> None:
    run.train("--max-steps=1").succeeded()
    here = run.checkpoint(1)
    evaluated = run.workspace.command(TRAINER, "evaluate", "--checkpoint", ".", folder=here).succeeded()
    assert evaluated.out.startswith("loss")
    verification = run.workspace.command(TRAINER, "checkpoint", "verify", ".", folder=here).succeeded()
    assert verification.out.startswith(str(here))
    listing = run.workspace.command(TRAINER, "checkpoint", "list", ".", folder=here).succeeded()
    assert listing.out.rstrip().endswith("latest")


def test_a_checkpoint_resumed_from_inside_is_not_saved_again(run: Run) -> None:
    run.train("--max-steps=2").succeeded()
    arguments = run.arguments("--resume", ".", "--max-steps=2")
    process = run.workspace.command(*arguments, folder=run.checkpoint(2)).succeeded()
    assert "\ncheckpoint " not in process.out


def test_weights_that_give_no_numbers_are_reported(run: Run, tmp_path: Path) -> None:
    run.train("--max-steps=1").succeeded()
    model = shutil.copytree(run.checkpoint(1), tmp_path / "model")
    (model / "MANIFEST.json").unlink()
    path = model / "model.safetensors"
    content = bytearray(path.read_bytes())
    start = 8 + struct.unpack("<Q", content[:8])[0]
    generate = ("generate", "--checkpoint", model, "--prompt=def", "--max-tokens=2")
    evaluate = ("evaluate", "--checkpoint", model, f"--input={run.workspace.write_text()}")
    # Finite numbers whose attention scores overflow, and NaN.
    for number, code, words in (
        (1e15, 6, ("not a number", "earlier checkpoint")),
        (float("nan"), 5, (f"{path}: tensor `", "not finite")),
    ):
        content[start:] = struct.pack("<f", number) * ((len(content) - start) // 4)
        path.write_bytes(content)
        run.workspace.trainer(*generate).refused(code, *words)
        run.workspace.orchestrate(*generate).refused(code, *words)
        run.workspace.trainer(*evaluate).refused(code, *words)


def ignore_hang_ups() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_a_closed_terminal_saves_the_run(run: Run) -> None:
    process = run.start()
    read_until(process, "step 3/")
    process.send_signal(signal.SIGHUP)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 143, rest
    assert "SIGHUP: saving step" in rest
    assert "latest" in run.names()


def test_a_run_under_nohup_outlives_its_terminal(run: Run) -> None:
    process = run.start(before=ignore_hang_ups)
    read_until(process, "step 3/")
    process.send_signal(signal.SIGHUP)
    read_until(process, "step 500/")
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 143, rest
    assert "SIGTERM: saving step" in rest


def test_a_run_whose_directory_is_moved_stops(run: Run) -> None:
    process = run.start("--override", "runtime.checkpoint.every_n_steps=50")
    read_until(process, "checkpoint ")
    away = run.folder.with_name("away")
    run.folder.rename(away)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 1, rest
    assert f"moved and is now {away}" in rest
    assert not run.folder.exists()
    away.rename(run.folder)
    run.train("--resume", "--max-steps=1").succeeded()


@pytest.mark.parametrize("name", ["resolved_config.json", "environment.json", "metrics.jsonl"])
def test_a_link_is_replaced_and_its_target_kept(run: Run, name: str) -> None:
    precious = run.workspace.root / "precious"
    precious.write_text("precious")
    (run.folder / name).symlink_to(precious)
    run.train("--max-steps=1").succeeded()
    assert precious.read_text() == "precious"
    assert not (run.folder / name).is_symlink()


def test_a_linked_ledger_is_refused_and_its_target_kept(run: Run) -> None:
    precious = run.workspace.root / "precious"
    precious.write_text("precious")
    (run.folder / "ledger.jsonl").symlink_to(precious)
    run.train("--max-steps=1").refused(2, "ledger.jsonl is a symbolic link", "remove the link")
    assert precious.read_text() == "precious"


def test_files_of_killed_writers_are_removed_at_the_next_start(run: Run) -> None:
    (run.folder / "tensorboard").mkdir(exist_ok=True)
    leftovers = ["metrics.jsonl.tmp-42", ".environment.json.tmp-42", ".training.yaml.42", "tensorboard/.rewound.tmp-42"]
    for name in leftovers:
        (run.folder / name).write_text("half")
    run.train("--max-steps=1").succeeded()
    assert not any((run.folder / name).exists() for name in leftovers)


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", 1 << 40), ("num_hidden_layers", 1 << 20), ("hidden_size", 1 << 40), ("vocab_size", 1 << 62)],
)
def test_an_absurd_config_json_is_refused(run: Run, tmp_path: Path, key: str, value: int) -> None:
    model = model_said_to_have(run, tmp_path / "absurd", **{key: value})
    limited(run, TRAINER, "generate", "--checkpoint", model, "--prompt=def").refused(2, "config.json", "parameters")
    limited(run, TRAINER, "evaluate", "--checkpoint", model, "--input=x").refused(2, "config.json", "parameters")


def test_an_address_space_limit_bounds_what_fits(run: Run, tmp_path: Path) -> None:
    large = {"hidden_size": 1024, "intermediate_size": 32768, "num_attention_heads": 16}
    sizes = [word for key, size in large.items() for word in ("--override", f"model.{key}={size}")]
    limited(run, *run.arguments(*sizes)).refused(4, "does not fit", "ulimit -v")
    assert not (run.folder / "checkpoints").exists()
    model = model_said_to_have(run, tmp_path / "large", head_dim=64, **large)
    enlarge(model / "model.safetensors", {32: 1024, 64: 32768, 16: 128, 8: 64})
    limited(run, TRAINER, "generate", "--checkpoint", model, "--prompt=def").refused(4, "needs", "ulimit -v")
    text = ("--input", run.workspace.write_text())
    limited(run, TRAINER, "evaluate", "--checkpoint", model, *text).refused(4, "needs", "ulimit -v")


def model_said_to_have(run: Run, folder: Path, **sizes: int) -> Path:
    """Make a model directory whose config.json has other sizes than its weights."""
    run.train("--max-steps=1").succeeded()
    shutil.copytree(run.checkpoint(1), folder)
    (folder / "MANIFEST.json").unlink()
    config = json.loads((folder / "config.json").read_text()) | sizes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def enlarge(weights: Path, sizes: dict[int, int]) -> None:
    """Replace weights by zeros, which take no space on the disk, of other sizes."""
    content = weights.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    tensors = json.loads(content[8 : 8 + length])
    tensors.pop("__metadata__", None)
    end = 0
    for tensor in tensors.values():
        tensor["shape"] = [sizes.get(size, size) for size in tensor["shape"]]
        begin, end = end, end + math.prod(tensor["shape"]) * {"BF16": 2, "F32": 4}[tensor["dtype"]]
        tensor["data_offsets"] = [begin, end]
    header = json.dumps(tensors).encode()
    with weights.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(file.tell() + end)


FORK = """
import os, sys, time
from orchestrator import RunConfig, Trainer, TrainerError
trainer = Trainer(RunConfig.load(sys.argv[1]))
next(iter(trainer))
child = os.fork()
if child == 0:
    try:
        next(iter(trainer))
    except TrainerError as error:
        print(error, flush=True)
        sys.exit(7)
for _ in range(600):
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        break
    time.sleep(0.1)
else:
    os.kill(child, 9)
    sys.exit("the child hangs")
assert os.waitstatus_to_exitcode(status) == 7
print(next(iter(trainer)).step)
"""


def test_a_forked_child_is_refused_and_the_parent_trains(run: Run) -> None:
    process = run.workspace.command(run.workspace.python, "-c", FORK, run.config).succeeded()
    assert "forked from it" in process.out
    assert process.out.splitlines()[-1] == "2"
