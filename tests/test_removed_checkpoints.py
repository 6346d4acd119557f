"""A live run removes old checkpoints while commands read them: they take the next one, or say what was removed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from test_finetune import SMALL, pretrained, write_rows
from test_held_back import stand_in
from workspace import ORCHESTRATE, TRAINER, Finished, Workspace

__all__ = ["pretrained"]

OLD, NEWEST = "step-00000002", "step-00000004"
COMMANDS = [
    ["generate", "--prompt=x", "--temperature=0"], ["evaluate"], ["chat", "--once=hi"],
    ["export", "--format=hf", "--out=out"], ["push", "--dry-run", "owner/name"],
]  # fmt: skip


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory, pretrained: Path) -> Path:
    """The folder of a run with two checkpoints."""
    workspace = Workspace(tmp_path_factory.mktemp("trained"))
    rows = write_rows(workspace.root / "rows.jsonl")
    flags = [
        "--experiment=chat",
        *SMALL,
        "--input",
        str(rows),
        "--steps=4",
        "--checkpoint-every=2",
        "--evaluate-every=4",
    ]
    workspace.orchestrate("finetune", "--model", pretrained, *flags).succeeded()
    return workspace.run_folder("chat")


class LiveRun:
    """A run whose newest checkpoint is OLD until a command reads it; then the run has saved NEWEST and removed OLD."""

    def __init__(self, workspace: Workspace, trained_run: Path) -> None:
        self.workspace, self.run = workspace, workspace.run_folder("chat")
        shutil.copytree(trained_run, self.run, symlinks=True)  # makes the workspace's folder too
        self.checkpoints = self.run / "checkpoints"
        (self.checkpoints / NEWEST).rename(self.checkpoints / "later")
        for pointer in ("latest", "best"):
            self.point(pointer, OLD)
        self.preload = stand_in(workspace.root)

    def point(self, pointer: str, checkpoint: str) -> None:
        (self.checkpoints / pointer).unlink(missing_ok=True)
        (self.checkpoints / pointer).symlink_to(checkpoint)

    def command(self, program: Path, *words: str | Path, at: str = "config.json", opening: int = 1) -> Finished:
        """Run a command; when it opens the file `at` of OLD for the `opening`-th time the run goes on."""
        go_on = f"cd '{self.checkpoints}' && mv later {NEWEST} && ln -sfn {NEWEST} latest && ln -sfn {NEWEST} best"
        environment = [
            f"AT_OPENING={self.checkpoints / OLD / at}", f"MEANWHILE={go_on} && rm -r {OLD}",
            f"LD_PRELOAD={self.preload}", f"OPENING={opening}",
        ]  # fmt: skip
        return self.workspace.command("env", *environment, program, *words)

    def has_gone_on(self) -> bool:
        return not (self.checkpoints / OLD).exists()


@pytest.fixture
def live_run(workspace: Workspace, trained_run: Path) -> LiveRun:
    return LiveRun(workspace, trained_run)


@pytest.mark.parametrize("at", ["MANIFEST.json", "model.safetensors"])
@pytest.mark.parametrize("words", COMMANDS)
def test_the_next_checkpoint_is_read(live_run: LiveRun, words: list[str], at: str) -> None:
    process = live_run.command(ORCHESTRATE, *words, live_run.run, at=at).succeeded()
    assert live_run.has_gone_on()
    assert "corrupted" not in process.out + process.err
    second_process = live_run.workspace.orchestrate(
        *[word.replace("--out=out", "--out=bis") for word in words], live_run.run
    )
    if words[0] != "evaluate":
        expected = second_process.succeeded().out.replace("bis", "out")
        assert [line for line in process.out.splitlines() if OLD not in line] == expected.splitlines()


@pytest.mark.parametrize("at", ["config.json", "tokenizer.json", "trainer_state.json"])
def test_an_export_is_of_one_checkpoint(workspace: Workspace, trained_run: Path, at: str) -> None:
    """Whichever of its reads finds the checkpoint removed."""
    expected = None
    for opening in range(1, 30):
        live_run = LiveRun(Workspace(workspace.root / str(opening)), trained_run)
        live_run.command(
            ORCHESTRATE, "export", "--format=hf", "--out=out", live_run.run, at=at, opening=opening
        ).succeeded()
        files = {path.name: path.read_bytes() for path in (live_run.workspace.root / "out").iterdir()}
        if not live_run.has_gone_on():
            assert opening > 2, "it is verified and read"
            return
        expected = expected or files
        assert files == expected, f"opening {opening}"
    raise AssertionError("it is read without end")


@pytest.mark.parametrize("pointer", ["latest", "best"])
@pytest.mark.parametrize("words", [COMMANDS[0], COMMANDS[-1]])
def test_a_link_is_followed_again(live_run: LiveRun, words: list[str], pointer: str) -> None:
    live_run.command(ORCHESTRATE, *words, live_run.checkpoints / pointer).succeeded()
    assert live_run.has_gone_on()


@pytest.mark.parametrize("words", COMMANDS)
def test_a_named_checkpoint_says_that_it_was_removed(live_run: LiveRun, words: list[str]) -> None:
    phrases = (
        f"there is no checkpoint {live_run.checkpoints / OLD}: it was removed",
        f"newest is {live_run.checkpoints / NEWEST}",
    )
    live_run.command(ORCHESTRATE, *words, live_run.checkpoints / OLD).refused(2, *phrases)
    for arguments in (
        ["--checkpoint", live_run.checkpoints / OLD],
        [live_run.checkpoints / OLD],
        [f"chat/checkpoints/{OLD}"],
    ):
        live_run.workspace.orchestrate(*words, *arguments).refused(2, "it was removed", NEWEST)


@pytest.mark.parametrize("program", [ORCHESTRATE, TRAINER])
@pytest.mark.parametrize("at", ["MANIFEST.json", "model.safetensors", "trainer_state.json"])
def test_data_are_validated_up_to_the_next_checkpoint(live_run: LiveRun, program: Path, at: str) -> None:
    process = live_run.command(program, "validate-data", live_run.run, at=at).succeeded()
    assert live_run.has_gone_on() and "up to step 4" in process.out


@pytest.mark.parametrize(("verb", "at"), [("list", "MANIFEST.json"), ("verify", "model.safetensors")])
def test_a_removed_checkpoint_is_not_called_corrupted(live_run: LiveRun, verb: str, at: str) -> None:
    process = live_run.command(TRAINER, "checkpoint", verb, live_run.run, at=at).succeeded()
    assert live_run.has_gone_on() and "corrupted" not in process.out + process.err
    live_run.workspace.trainer("checkpoint", verb, live_run.checkpoints / OLD).refused(2, "it was removed", NEWEST)


def test_resuming_at_a_removed_checkpoint_names_the_newest(live_run: LiveRun) -> None:
    removed_checkpoint = live_run.checkpoints / "step-00000001"
    live_run.workspace.orchestrate("--resume", removed_checkpoint, "--steps=6").refused(
        2, f"no checkpoint {removed_checkpoint}", OLD
    )
