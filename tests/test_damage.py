"""Damage to a checkpoint is detected and named, and the newest intact one is taken; damage beside it never misleads.

Takes a part of the damage that `python tests/damage_programme.py` goes through. DAMAGE_SEED repeats a choice.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from damage import Damage, StoredFolder, overwrite, replaced
from damaged_checkpoints import GOLDEN, KINDS, NEWEST, OLDER, SavedRun, all_damage, resume, saved_run, verify
from damaged_run_files import (
    RUN_FILES,
    Outcome,
    file_damage,
    pointer_damage,
    resume_damaged,
    saved_text_run,
    trained,
    write_documents,
)
from fake_hub import FakeHub
from workspace import Workspace

SEED = int(os.environ.get("DAMAGE_SEED", random.SystemRandom().randrange(1 << 32)))


@pytest.fixture
def chance(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> random.Random:
    record_property("seed", f"DAMAGE_SEED={SEED}")
    return random.Random(f"{SEED} {request.node.name}")


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, kind: str) -> SavedRun:
    return saved_run(tmp_path_factory.mktemp("saved") / kind, kind)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, kind: str) -> SavedRun:
    return saved_run(tmp_path_factory.mktemp("other") / kind, kind, "runtime.seed=9")


@pytest.fixture
def folder(run: SavedRun) -> StoredFolder:
    return StoredFolder.of(run.checkpoints / NEWEST)


def test_every_kind_of_damage_is_detected(
    run: SavedRun, other: SavedRun, folder: StoredFolder, chance: random.Random
) -> None:
    damage = list(all_damage(run, other, chance, 0.03))
    problems = {str(item): verdict.problems for item in damage if (verdict := verify(folder, item)).problems}
    assert not problems
    assert {name for item in damage for name in item.names} == set(folder.contents)


def test_runs_resume_without_the_damaged_checkpoint(
    run: SavedRun, other: SavedRun, chance: random.Random, tmp_path: Path
) -> None:
    damage = list(all_damage(run, other, chance, 0.01))
    undamaged = run.copy(tmp_path / "run")
    undamaged.train("--resume").succeeded()
    results = undamaged.results()
    for item in chance.sample(damage, 6):
        assert not resume(run.copy(tmp_path / "run"), item, results).problems, str(item)


def test_an_intact_checkpoint_is_not_called_damaged(run: SavedRun, folder: StoredFolder, tmp_path: Path) -> None:
    nothing = Damage("nothing", ("trainer_state.json",), "as it was written", lambda _: None)
    verdict = verify(folder, nothing)
    assert (verdict.detected, verdict.named, verdict.newest_taken) == (False, False, False)
    undamaged = run.copy(tmp_path / "run")
    undamaged.train("--resume").succeeded()
    results = undamaged.results()
    verdict = resume(run.copy(tmp_path / "run"), nothing, results)
    assert (verdict.detected, verdict.named, verdict.newest_taken) == (False, False, False)


def test_an_older_checkpoint_is_not_taken_for_the_newest(run: SavedRun, folder: StoredFolder) -> None:
    assert not verify(folder, replaced(folder, run.checkpoints / OLDER, "an older checkpoint")).problems


@pytest.mark.xfail(strict=True, reason="a checkpoint does not say which run has written it")
def test_a_checkpoint_of_another_run_is_not_taken(run: SavedRun, folder: StoredFolder, other: SavedRun) -> None:
    assert not verify(folder, replaced(folder, other.checkpoints / NEWEST, "one of another run")).problems


def lost(checkpoint: Path, kept: str) -> None:
    """Put in a checkpoint's place what is `kept` of it."""
    content = (checkpoint / "config.json").read_bytes() if (checkpoint / "config.json").exists() else b""
    shutil.rmtree(checkpoint)
    if kept == "a file":
        checkpoint.write_bytes(content)
    elif kept != "nothing":
        checkpoint.mkdir()


FOREIGN = {
    "model": ["adapter_config.json", "adapter_model.safetensors", "base_model.json", "added_tokens.json",
              "model.safetensors.index.json", "model-00001-of-00002.safetensors", "pytorch_model.bin",
              "optimizer-00001-of-00002.safetensors", ".trainer_state.json.tmp-1", "vocab.json", "tokenizer.model"],
    "adapters": ["model.safetensors", "optimizer-00001-of-00002.safetensors", "adapter_model.bin", "added_tokens.json"],
}  # fmt: skip


def test_files_that_do_not_belong_to_a_checkpoint_change_nothing(run: SavedRun, kind: str, tmp_path: Path) -> None:
    undamaged = run.copy(tmp_path / "run")
    undamaged.train("--resume").succeeded()
    results = undamaged.results()
    copy = run.copy(tmp_path / "run")
    for name in FOREIGN[kind]:
        assert not (copy.checkpoints / NEWEST / name).exists()
        (copy.checkpoints / NEWEST / name).write_bytes(b"{}")
    copy.train("--resume").succeeded()
    assert copy.results() == results


def test_a_file_put_beside_a_checkpoint_is_named(workspace: Workspace) -> None:
    checkpoint = workspace.root / "checkpoints" / "step-00000004"
    shutil.copytree(GOLDEN / KINDS["model"] / "run/checkpoints/step-00000004", checkpoint)
    assert "not" not in workspace.trainer("checkpoint", "verify", checkpoint).succeeded().out
    (checkpoint / "chat_template.jinja").write_text("{{ messages }}")
    verified = workspace.trainer("checkpoint", "verify", checkpoint).succeeded()
    assert "not written with it: chat_template.jinja" in verified.out


def test_a_foreign_config_hides_no_adapters(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "saved", "adapters")
    shutil.copy(run.workspace.root / "model/config.json", run.checkpoints / NEWEST)
    run.train("--resume").succeeded()


@pytest.mark.parametrize("kept", ["an empty directory", "a file", "nothing"])
def test_a_lost_checkpoint_is_named(run: SavedRun, tmp_path: Path, kept: str) -> None:
    copy = run.copy(tmp_path / "run")
    lost(copy.checkpoints / NEWEST, kept)
    process = copy.train("--resume").succeeded()
    assert f"resuming at step 4 from {copy.checkpoints / OLDER}" in process.out
    assert NEWEST in "".join(line for line in process.out.splitlines() if not line.startswith("checkpoint /"))


@pytest.fixture(scope="module")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    workspace = Workspace(tmp_path_factory.mktemp("text"))
    return saved_text_run(workspace, f"--input={write_documents(workspace)}")


@pytest.fixture(scope="module")
def streamed_run(tmp_path_factory: pytest.TempPathFactory, hub_root: Path) -> Iterator[SavedRun]:
    root = tmp_path_factory.mktemp("streamed")
    with FakeHub(hub_root) as hub:
        workspace = Workspace(root, hub.environment(root / "hf"))
        yield saved_text_run(workspace, "--stream", "--dataset=HuggingFaceFW/fineweb", "--max-samples=60")


def expect(run: SavedRun, case: Path, damage: list[Damage], *outcomes: Outcome) -> set[Outcome]:
    """Check that resumes of the damaged run have only these outcomes, and return those that they have."""
    undamaged = run.copy(case)
    undamaged.train("--resume").succeeded()
    expected = trained(undamaged)
    assert expected
    found = set()
    for item in damage:
        resumed = resume_damaged(run.copy(case), item, expected)
        assert resumed.outcome in outcomes, f"{item} {resumed}"
        found.add(resumed.outcome)
    return found


def test_damaged_run_files_are_named_or_without_effect(
    text_run: SavedRun, chance: random.Random, tmp_path: Path
) -> None:
    for name in RUN_FILES:
        damage = list(file_damage(text_run, name, chance, 0.01))
        some = chance.sample(damage, min(5, len(damage)))
        expect(text_run, tmp_path / "run", some, Outcome.HARMLESS, Outcome.TOLD, Outcome.REFUSED)


def test_a_damaged_ledger_is_never_continued(text_run: SavedRun, chance: random.Random, tmp_path: Path) -> None:
    damage = chance.sample(list(file_damage(text_run, "ledger.jsonl", chance, 0.05)), 8)
    expect(text_run, tmp_path / "run", damage, Outcome.TOLD)


def test_what_a_run_writes_for_others_changes_no_training(
    text_run: SavedRun, chance: random.Random, tmp_path: Path
) -> None:
    names = ["metrics.jsonl", "resolved_config.json", "environment.json", "tokenizer/manifest.json"]
    damage = [item for name in names for item in chance.sample(list(file_damage(text_run, name, chance, 0.02)), 3)]
    expect(text_run, tmp_path / "run", damage, Outcome.HARMLESS)


def test_damaged_pointers_mislead_no_resume(text_run: SavedRun, chance: random.Random, tmp_path: Path) -> None:
    damage = [item for name in ("latest", "best") for item in pointer_damage(name, chance)]
    some = chance.sample([item for item in damage if item.what != "a directory"], 8)
    expect(text_run, tmp_path / "run", some, Outcome.HARMLESS)


def test_a_directory_in_place_of_a_pointer_is_told_at_once(text_run: SavedRun, tmp_path: Path) -> None:
    damage = [item for item in pointer_damage("latest", random.Random(0)) if item.what == "a directory"]
    expect(text_run, tmp_path / "run", damage, Outcome.HARMLESS, Outcome.TOLD, Outcome.REFUSED)


def test_a_damaged_streaming_config_is_named(streamed_run: SavedRun, chance: random.Random, tmp_path: Path) -> None:
    damage = chance.sample(list(file_damage(streamed_run, "streaming_config.json", chance, 0.2)), 12)
    expect(streamed_run, tmp_path / "run", damage, Outcome.HARMLESS, Outcome.REFUSED)


def changed_key(run: SavedRun, key: str, value: str) -> Damage:
    """Return the damage to a key of training.yaml, of which there is one of that name."""
    text = (run.folder / "training.yaml").read_text()
    (line,) = [line for line in text.splitlines() if line.strip().startswith(f"{key}: ")]
    damaged = text.replace(line, line.split(":")[0] + f": {value}")
    return Damage("changed key", ("training.yaml",), key, overwrite("training.yaml", damaged.encode()))


@pytest.mark.parametrize(("key", "value"), [("learning_rate", "2e-2"), ("warmup_steps", "11"), ("seed", "5")])
def test_a_changed_key_is_told(text_run: SavedRun, tmp_path: Path, key: str, value: str) -> None:
    expect(text_run, tmp_path / "run", [changed_key(text_run, key, value)], Outcome.TOLD, Outcome.REFUSED)


@pytest.mark.parametrize(
    ("key", "value"), [("weight_decay", "0.9"), ("beta1", "0.8"), ("beta2", "0.85"), ("max_grad_norm", "0.1")]
)
def test_a_changed_key_of_the_optimizer_is_told(text_run: SavedRun, tmp_path: Path, key: str, value: str) -> None:
    expect(text_run, tmp_path / "run", [changed_key(text_run, key, value)], Outcome.TOLD, Outcome.REFUSED)
