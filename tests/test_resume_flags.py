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
def trained(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A workspace with a finished run of 4 steps on a falling learning rate."""
    workspace = Workspace(tmp_path_factory.mktemp("resumed"))
    workspace.write_text()
    workspace.orchestrate(*TINY_MODEL, *STARTED, "--launch=bindings").succeeded()
    return workspace


@pytest.fixture
def here(
    trained: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Here:
    """Run `orchestrate` in this process, in a copy of the folder."""
    trained.command("cp", "-a", f"{trained.root}/.", tmp_path).succeeded()
    config = tmp_path / "runs" / "run" / "training.yaml"
    config.write_text(config.read_text().replace(str(trained.root), str(tmp_path)))
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Finished:
        capfd.readouterr()
        code = cli._run([*words, "--launch=bindings"])
        return Finished(code, *capfd.readouterr())

    return run


@pytest.mark.parametrize(
    ("flags", "said"),
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
def test_another_value_is_refused_with_both(here: Here, flags: list[str], said: list[str]) -> None:
    Path("other.json").write_text("{}")
    other = Path("runs/run/training.yaml").read_text().replace("learning_rate: 0.003", "learning_rate: 0.5")
    Path("other.yaml").write_text(other)
    here("--experiment=run", "--resume", "--steps=5", *flags).refused(2, *said)


def test_the_same_command_line_is_accepted(here: Here) -> None:
    done = here(*TINY_MODEL, *STARTED, "--resume").succeeded()
    assert "nothing is left to train: the run is at step 4 and ends at step 4" in done.out + done.err
    assert "--resume --steps 8" in done.out


def test_the_runs_own_config_and_tokenizer_are_accepted(here: Here) -> None:
    own = ["--config=runs/run/training.yaml", "--tokenizer-json=runs/run/tokenizer/tokenizer.json"]
    here("--experiment=run", "--resume", *own).succeeded()


def test_an_end_before_the_checkpoint_is_told(here: Here) -> None:
    done = here("--experiment=run", "--resume", "--steps=3").succeeded()
    assert "nothing is left to train: the run is at step 4 and ends at step 3" in done.out + done.err
    assert "if an earlier session was given more steps, give them again" in done.out + done.err


def test_a_stopped_session_names_the_flags_to_repeat(here: Here, capfd: pytest.CaptureFixture[str]) -> None:
    overrides = ["scheduler.total_steps=9", "data.sequence_length=32", "runtime.logging.tensorboard=false"]
    job = launch.Job(Path("runs/run/training.yaml"), overrides, resume="latest")
    summary.show_stopped(job, Roots.from_environment().location("run", None))
    wanted = "--experiment run --resume --steps 9 --override runtime.logging.tensorboard=false\n"
    assert wanted in capfd.readouterr().out


def test_an_extended_schedule_tells_the_rates(here: Here) -> None:
    done = here("--experiment=run", "--resume", "--steps=8").succeeded()
    said = done.out + done.err
    assert "the learning rate was 0 at step 4, and is 1.5e-3 at step 5 and 0 at step 8" in said
    assert "scheduler.strategy=constant and optimizer.learning_rate=3.0e-4" in said


def test_a_bare_resume_takes_the_newest_run(here: Here) -> None:
    done = here("--resume", "--steps=5").succeeded()
    assert "using the newest run," in done.err
    assert "orchestrate --experiment run --resume" in done.out
    here("--resume", "run/checkpoints/step-00000004", "--steps=6").succeeded()


@pytest.fixture
def continued(here: Here) -> Path:
    """A run that starts from the newest checkpoint of the run; return that checkpoint."""
    flags = ["--init-from=run", "--input=book.txt", "--experiment=continued", "--steps=2", "--preset=smoke_cpu"]
    here(*flags, "--seq-len=32", "--batch-size=2", "--grad-accum=2", "--device=cpu").succeeded()
    return Path("runs/run/checkpoints/step-00000004").absolute()


def test_the_model_of_the_start_is_accepted(here: Here, continued: Path) -> None:
    linked = continued.with_name("linked")
    linked.symlink_to(continued)
    names = ["run", str(continued), "runs/run/checkpoints/latest", "runs/run", str(linked)]
    for number, named in enumerate(names):
        resumed = here("--experiment=continued", "--resume", f"--init-from={named}", f"--steps={3 + number}")
        assert f"step {3 + number}" in resumed.succeeded().out
    continued.rename(continued.with_name("gone"))
    here("--experiment=continued", "--resume", f"--init-from={continued}", "--steps=9").succeeded()


def test_another_model_of_the_start_is_refused(here: Here, continued: Path) -> None:
    other = continued.parent / "other"
    other.mkdir()
    for named in (str(other), "nowhere", "owner/name"):
        refused = here("--experiment=continued", "--resume", f"--init-from={named}", "--steps=3")
        refused.refused(2, f"--init-from {named} is not its {continued}")
    adapters = here("--experiment=continued", "--resume", f"--lora-init-from={other}", "--steps=3")
    adapters.refused(2, f"it was started without --lora-init-from ({other})")
