"""Flags typed with `--resume`: another value than the run's is refused, an equal one is accepted, an end is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from orchestrator import cli, launch, summary
from orchestrator.paths import Roots
from workspace import TINY_MODEL, Finished, Workspace

Here = Callable[..., Finished]
STARTED = ["--input=book.txt", "--experiment=run", "--steps=4", "--schedule=cosine", "--tokenizer-seed=1"]
"""How the run was started, besides `TINY_MODEL`."""


@pytest.fixture(scope="module")
def trained_workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A workspace with a finished run of 4 steps on a falling learning rate."""
    workspace = Workspace(tmp_path_factory.mktemp("resumed"))
    workspace.write_text()
    workspace.orchestrate(*TINY_MODEL, *STARTED, "--launch=bindings").succeeded()
    return workspace


@pytest.fixture
def here(
    trained_workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Here:
    """Run `orchestrate` in this process, in a copy of the folder."""
    trained_workspace.command("cp", "-a", f"{trained_workspace.root}/.", tmp_path).succeeded()
    config = tmp_path / "runs" / "run" / "training.yaml"
    config.write_text(config.read_text().replace(str(trained_workspace.root), str(tmp_path)))
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Finished:
        capfd.readouterr()
        code = cli._run([*words, "--launch=bindings"])
        return Finished(code, *capfd.readouterr())

    return run


@pytest.mark.parametrize(
    ("flags", "phrases"),
    [
        (["--vocab-size=500"], ["--vocab-size 500", "384"]),
        (["--tokenizer-json=nowhere.json"], ["--tokenizer-json", "nowhere.json"]),
        (["--tokenizer-json=other.json"], ["--tokenizer-json", "tokenizer.json"]),
        (["--force-retrain-tokenizer"], ["--force-retrain-tokenizer"]),
        (["--tokenizer-seed=3"], ["--tokenizer-seed 3", "1"]),
        (["--tokenizer-max-lines=7"], ["--tokenizer-max-lines 7"]),
        (["--layers=4"], ["--layers 4 is not its 2 (model.num_layers)"]),
        (["--heads=2"], ["--heads 2 is not its 4 (model.num_attention_heads)"]),
        (["--hidden-size=64", "--seq-len=16"], ["--hidden-size 64 is not its 32", "--seq-len 16 is not its 32"]),
        (["--seed=8"], ["--seed 8 is not its 7 (runtime.seed)"]),
        (["--precision=bf16"], ["--precision bf16 is not its fp32"]),
        (["--lora-rank=2", "--init-from=elsewhere"], ["it was started without --init-from (elsewhere)"]),
        (["--override=model.num_layers=3"], ["--override model.num_layers=3 is not its 2 (model.num_layers)"]),
        (["--preset=1b"], ["--preset 1b", "model.hidden_size", "32"]),
        (["--depth=4"], ["--depth 4", "model.num_layers 4 (the run's is 2)"]),
        (["--config=nowhere.yaml"], ["nowhere.yaml"]),
        (["--config=other.yaml"], ["--config other.yaml", "optimizer.learning_rate 0.5 (the run's is 0.003)"]),
    ],
    ids=lambda part: part[0] if part[0].startswith("--") and "=" in part[0] else "",
)
def test_another_value_is_refused_with_both(here: Here, flags: list[str], phrases: list[str]) -> None:
    Path("other.json").write_text("{}")
    other = Path("runs/run/training.yaml").read_text().replace("learning_rate: 0.003", "learning_rate: 0.5")
    Path("other.yaml").write_text(other)
    here("--experiment=run", "--resume", "--steps=5", *flags).refused(2, *phrases)


def test_the_same_command_line_is_accepted(here: Here) -> None:
    process = here(*TINY_MODEL, *STARTED, "--resume").succeeded()
    assert "nothing is left to train: the run is at step 4 and ends at step 4" in process.out + process.err
    assert "--resume --steps 8" in process.out


def test_the_runs_own_config_and_tokenizer_are_accepted(here: Here) -> None:
    own = ["--config=runs/run/training.yaml", "--tokenizer-json=runs/run/tokenizer/tokenizer.json"]
    here("--experiment=run", "--resume", *own).succeeded()


def test_an_end_before_the_checkpoint_is_told(here: Here) -> None:
    process = here("--experiment=run", "--resume", "--steps=3").succeeded()
    assert "nothing is left to train: the run is at step 4 and ends at step 3" in process.out + process.err
    assert "if an earlier session was given more steps, give them again" in process.out + process.err


def test_a_stopped_session_names_the_flags_to_repeat(here: Here, capfd: pytest.CaptureFixture[str]) -> None:
    overrides = ["scheduler.total_steps=9", "data.sequence_length=32", "runtime.logging.tensorboard=false"]
    job = launch.Job(Path("runs/run/training.yaml"), overrides, resume="latest")
    summary.show_stopped(job, Roots.from_environment().location("run", None))
    expected = "--experiment run --resume --steps 9 --override runtime.logging.tensorboard=false\n"
    assert expected in capfd.readouterr().out


def test_an_extended_schedule_tells_the_rates(here: Here) -> None:
    process = here("--experiment=run", "--resume", "--steps=8").succeeded()
    output = process.out + process.err
    assert "the learning rate was 0 at step 4, and is 1.5e-3 at step 5 and 0 at step 8" in output
    assert "scheduler.strategy=constant and optimizer.learning_rate=3.0e-4" in output


def test_a_bare_resume_takes_the_newest_run(here: Here) -> None:
    process = here("--resume", "--steps=5").succeeded()
    assert "using the newest run," in process.err
    assert "orchestrate --experiment run --resume" in process.out
    here("--resume", "run/checkpoints/step-00000004", "--steps=6").succeeded()


@pytest.fixture
def start_checkpoint(here: Here) -> Path:
    """A run that starts from the newest checkpoint of the run; return that checkpoint."""
    flags = ["--init-from=run", "--input=book.txt", "--experiment=continued", "--steps=2", "--preset=smoke_cpu"]
    here(*flags, "--seq-len=32", "--batch-size=2", "--grad-accum=2", "--device=cpu").succeeded()
    return Path("runs/run/checkpoints/step-00000004").absolute()


def test_the_model_of_the_start_is_accepted(here: Here, start_checkpoint: Path) -> None:
    link = start_checkpoint.with_name("linked")
    link.symlink_to(start_checkpoint)
    names = ["run", str(start_checkpoint), "runs/run/checkpoints/latest", "runs/run", str(link)]
    for number, name in enumerate(names):
        process = here("--experiment=continued", "--resume", f"--init-from={name}", f"--steps={3 + number}")
        assert f"step {3 + number}" in process.succeeded().out
    start_checkpoint.rename(start_checkpoint.with_name("gone"))
    here("--experiment=continued", "--resume", f"--init-from={start_checkpoint}", "--steps=9").succeeded()


def test_another_model_of_the_start_is_refused(here: Here, start_checkpoint: Path) -> None:
    other = start_checkpoint.parent / "other"
    other.mkdir()
    for model in (str(other), "nowhere", "owner/name"):
        process = here("--experiment=continued", "--resume", f"--init-from={model}", "--steps=3")
        process.refused(2, f"--init-from {model} is not its {start_checkpoint}")
    adapters = here("--experiment=continued", "--resume", f"--lora-init-from={other}", "--steps=3")
    adapters.refused(2, f"it was started without --lora-init-from ({other})")
