"""A run directory holds all that its run needs, may be moved or copied, and is written by one command at a time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from test_interrupt_and_resume import tensorboard_steps, wait_for_line
from workspace import ORCHESTRATE, TINY_MODEL, TRAINER, Finished, Workspace

SHORT = [*TINY_MODEL, "--steps=4", "--checkpoint-every=2", "--evaluate-every=4"]
SAMPLE = ("--prompt=def ", "--max-tokens=12", "--temperature=0", "--json")


def train(workspace: Workspace, experiment: str, text: Path, *more: str) -> Path:
    workspace.orchestrate(*SHORT, "--input", text, f"--experiment={experiment}", *more).succeeded()
    return workspace.run_folder(experiment)


def answers(workspace: Workspace, *model: str) -> list[object]:
    """Return the texts that both programs generate with a model, and the losses that they measure."""
    values: list[object] = []
    for program in (workspace.orchestrate, workspace.trainer):
        values.append(json.loads(program("generate", *model, *SAMPLE).succeeded().out)["completion"])
        values.append(json.loads(program("evaluate", *model, "--json").succeeded().out)["loss"])
    return values


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return time of change and bytes of every file, but for those that a run in training appends to."""
    growing = ("ledger.jsonl", "metrics.jsonl", "tensorboard")
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    files = (path for path in files if path.relative_to(folder).parts[0] not in growing)
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_moved_run_answers_with_its_own_model(workspace: Workspace) -> None:
    text = workspace.write_text()
    run = train(workspace, "exp", text)
    before = answers(workspace, "--experiment=exp")
    run.rename(workspace.run_folder("exp-old"))
    train(workspace, "exp", text, "--seed=8")
    shutil.rmtree(workspace.root / "artifacts")
    assert answers(workspace, "--experiment=exp-old") == before
    assert answers(workspace, "--experiment=exp") != before
    assert str(workspace.root / "runs") not in (workspace.run_folder("exp-old") / "resolved_config.json").read_text()


def test_moved_run_without_artifacts_is_proven_and_resumes(workspace: Workspace) -> None:
    text = workspace.write_text()
    straight = train(workspace, "straight", text, "--steps=8", "--schedule=constant")
    run = train(workspace, "exp", text, "--schedule=constant")
    moved = workspace.root / "elsewhere" / "moved"
    moved.parent.mkdir()
    run.rename(moved)
    shutil.rmtree(workspace.root / "artifacts")
    workspace.trainer("validate-data", moved, "--replay", "3").succeeded()
    workspace.orchestrate("--run-dir", moved, "--experiment=exp", "--resume", "--steps=8").succeeded()
    assert not run.exists()
    for name in ("model.safetensors", "optimizer.safetensors"):
        last = Path("checkpoints", "step-00000008", name)
        assert (moved / last).read_bytes() == (straight / last).read_bytes()


@pytest.mark.parametrize("relocate", ["move", "copy"])
def test_relocated_run_shows_each_step_once(workspace: Workspace, relocate: str) -> None:
    run = train(workspace, "exp", workspace.write_text(), "--tensorboard")
    relocated = workspace.root / "elsewhere" / "renamed"
    if relocate == "move":
        relocated.parent.mkdir()
        run.rename(relocated)
    else:
        shutil.copytree(run, relocated, symlinks=True)
    EventFileWriter(str(relocated / "tensorboard"), filename_suffix=".exp").close()
    (others,) = [path for path in (relocated / "tensorboard").iterdir() if writer_of(path) != "transformer_candle"]
    before = others.read_bytes()
    shutil.rmtree(relocated / "checkpoints/step-00000004")
    for steps in (5, 6):
        resumed_run = workspace.orchestrate("--run-dir", relocated, "--experiment=exp", "--resume", f"--steps={steps}")
        resumed_run.succeeded()
        assert tensorboard_steps(relocated, "loss/train") == list(range(1, steps + 1))
    metrics_rows = [json.loads(line) for line in (relocated / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics_rows if row["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert others.read_bytes() == before
    if relocate == "copy":
        assert tensorboard_steps(run, "loss/train") == [1, 2, 3, 4]


def writer_of(path: Path) -> str:
    """Return the writer that an event file's header names."""
    header = next(iter(EventFileLoader(str(path)).Load()))
    return str(header.source_metadata.writer)


def test_copied_run_is_verified_by_its_own_files(workspace: Workspace) -> None:
    run = train(workspace, "exp", workspace.write_text())
    copy = workspace.run_folder("copy")
    shutil.copytree(run, copy, symlinks=True)
    weights = copy / "checkpoints/step-00000004/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    workspace.trainer("checkpoint", "verify", copy).refused(5, "step-00000004")
    workspace.trainer("checkpoint", "verify", run).succeeded()


def test_run_of_an_older_version_follows_its_folder(workspace: Workspace) -> None:
    golden = Path(__file__).parent / "golden" / "checkpoints" / "first_fp32"
    shutil.copytree(golden, workspace.root, dirs_exist_ok=True)
    run = workspace.root / "run"
    # The tokenizer is no longer where it was made: the checkpoint has it.
    config = json.loads((run / "resolved_config.json").read_text())
    assert not Path(config["runtime"]["checkpoint"]["directory"]).exists()
    config["data"]["train_shards"] = [str(workspace.root / "corpus.jsonl")]
    (run / "resolved_config.json").write_text(json.dumps(config))
    workspace.trainer("checkpoint", "verify", run).succeeded()
    workspace.trainer("evaluate", "--checkpoint", run).succeeded()
    workspace.trainer("validate-data", run, "--replay", "4").succeeded()
    (workspace.root / "tokenizer.json").unlink()
    resumed_run = workspace.trainer("train", "--config", run / "training.yaml", "--resume").succeeded()
    assert "the tokenizer is the checkpoint's" in resumed_run.err + resumed_run.out


@pytest.mark.parametrize("launch", ["process", "bindings"])
def test_refused_command_leaves_a_live_run_as_it_is(workspace: Workspace, launch: str) -> None:
    text = workspace.write_text()
    live = ["--steps=100000", "--checkpoint-every=100000", "--log-every=100000", f"--launch={launch}"]
    flags = [*TINY_MODEL, "--input", str(text), "--experiment=live", "--evaluate-every=100000"]
    process = workspace.start(ORCHESTRATE, *flags, *live)
    try:
        wait_for_line(process, "step 1/")
        run = workspace.run_folder("live")
        live_contents = contents(run)
        for _ in range(2):
            second_run = workspace.orchestrate(
                *flags, "--learning-rate=0.5", "--force-retrain-tokenizer", "--vocab-size=300"
            )
            second_run.refused(2, "is in use by process", str(run))
        assert contents(run) == live_contents
        assert len(json.loads((run / "tokenizer/tokenizer.json").read_text())["model"]["vocab"]) > 300
    finally:
        process.terminate()
        process.communicate(timeout=120)
    workspace.trainer("checkpoint", "verify", run).succeeded()


def test_the_lock_is_the_trainer_s_and_outlives_its_launcher(workspace: Workspace) -> None:
    text = workspace.write_text()
    flags = [*TINY_MODEL, "--input", str(text), "--experiment=live"]
    process = workspace.start(ORCHESTRATE, *flags, "--steps=100000", "--launch=process")
    wait_for_line(process, "step 1/")
    owner = json.loads((workspace.run_folder("live") / ".trainer.lock").read_text())["pid"]
    assert owner != process.pid, "the trainer has signed"
    # It cannot end while it is stopped.
    os.kill(owner, signal.SIGSTOP)
    try:
        process.kill()
        process.wait()
        workspace.orchestrate(*flags, "--steps=3").refused(2, f"is in use by process {owner}")
    finally:
        os.kill(owner, signal.SIGCONT)
    process.communicate(timeout=120)
    assert workspace.checkpoints("live"), "it saves and ends"


def test_runs_of_one_default_name_keep_their_tokenizers(workspace: Workspace) -> None:
    a, b = (
        workspace.write_text(f"{name}/train.txt", characters=size) for name, size in (("da", 90_000), ("db", 60_000))
    )
    first, second = workspace.root / "rr1", workspace.root / "rr2"
    workspace.orchestrate(*SHORT, "--input", a, "--run-dir", first).succeeded()
    mine = (first / "tokenizer/tokenizer.json").read_bytes()
    workspace.orchestrate(*SHORT, "--input", b, "--run-dir", second).succeeded()
    assert (second / "tokenizer/tokenizer.json").read_bytes() != mine
    assert (first / "tokenizer/tokenizer.json").read_bytes() == mine
    workspace.orchestrate("--input", a, "--run-dir", first, "--resume", "--steps=6").succeeded()


def nothing_was_done(workspace: Workspace, process: Finished) -> None:
    assert "training" not in process.out
    assert not (workspace.root / "artifacts").exists()


def test_resume_of_a_misspelt_experiment_is_refused(workspace: Workspace) -> None:
    text = workspace.write_text()
    train(workspace, "exp", text)
    shutil.rmtree(workspace.root / "artifacts")
    misspelt_run = workspace.orchestrate(*SHORT, "--input", text, "--experiment=exq", "--resume")
    nothing_was_done(workspace, misspelt_run.refused(2, "exq", "exp"))
    assert not workspace.run_folder("exq").exists()
    process = workspace.orchestrate(*SHORT, "--experiment=exp", "--resume", workspace.root / "nowhere")
    process.refused(2, "nowhere")
    assert not (workspace.root / "artifacts").exists()


def test_prepared_run_resumes_at_step_zero(workspace: Workspace) -> None:
    text = workspace.write_text()
    workspace.orchestrate(*SHORT, "--input", text, "--experiment=exp", "--launch=none").succeeded()
    workspace.orchestrate("--experiment=exp", "--resume").succeeded()
    assert workspace.checkpoints("exp")[-1] == "step-00000004"


def test_unwritable_folder_is_refused_before_any_work(workspace: Workspace) -> None:
    text = workspace.write_text()
    (workspace.root / "file").write_text("not a folder")
    refused_process = workspace.orchestrate(*SHORT, "--input", text, "--run-dir", workspace.root / "file" / "run")
    nothing_was_done(workspace, refused_process.refused(2, "cannot write into the run directory", "file/run"))
    if shutil.which("setpriv") and os.geteuid() == 0:
        closed = workspace.root / "closed"
        closed.mkdir(mode=0o755)
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all", "--"]
        config = workspace.root / "closed" / "training.yaml"
        config.write_text("model: {hidden_size: 32}\n")
        process = subprocess.run([*command, str(TRAINER), "--version"], capture_output=True, check=False)
        if process.returncode == 0:
            run = workspace.command(*command, ORCHESTRATE, *SHORT, "--input", text, "--run-dir", closed)
            nothing_was_done(workspace, run.refused(2, "cannot write into the run directory"))


def test_lock_follows_no_symbolic_link(workspace: Workspace) -> None:
    text = workspace.write_text()
    run = workspace.run_folder("exp")
    run.mkdir(parents=True)
    precious = workspace.root / "precious"
    precious.write_text("mine")
    (run / ".trainer.lock").symlink_to(precious)
    workspace.orchestrate(*SHORT, "--input", text, "--experiment=exp").refused(2, ".trainer.lock")
    assert precious.read_text() == "mine"


def test_a_resumed_run_keeps_its_local_files(workspace: Workspace) -> None:
    text, other = workspace.write_text("a/book.txt"), workspace.write_text("b/book.txt")
    train(workspace, "exp", text)
    resume = ("--experiment=exp", "--resume", "--steps=6")
    for flags in (
        ("--input", other),
        ("--validation", other),
        ("--dataset=demo",),
        ("--stream",),
        ("--max-samples=5",),
    ):
        workspace.orchestrate(*resume, *flags).refused(2, str(workspace.run_folder("exp")), flags[0].split("=")[0])
    assert workspace.checkpoints("exp")[-1] == "step-00000004"
    workspace.orchestrate(*resume, "--input", text).succeeded()
    assert workspace.checkpoints("exp")[-1] == "step-00000006"


def test_a_resumed_run_keeps_its_data_set(hub_workspace: Workspace) -> None:
    source = ["--dataset=HuggingFaceFW/fineweb", "--max-samples=200", "--experiment=exp"]
    hub_workspace.orchestrate(*SHORT, *source).succeeded()
    resume = [*source, "--resume", "--steps=6"]
    for flag, own in (
        ("--max-samples=100", "with --max-samples 200"),
        ("--split=test", "with --split train"),
        ("--data-config=sample-10BT", "without --data-config"),
        ("--revision=0123456789abcdef", "with --revision"),
        ("--text-column=url", "with --text-column text"),
        ("--dataset=other/one", "trains on HuggingFaceFW/fineweb"),
    ):
        hub_workspace.orchestrate(*resume, flag).refused(2, "cannot be resumed", own, flag.replace("=", " "))
    local = ("--experiment=exp", "--resume", "--input=book.txt")
    hub_workspace.orchestrate(*local).refused(2, "without --input", "cannot be resumed", "book.txt")
    streaming = json.loads((hub_workspace.run_folder("exp") / "streaming_config.json").read_text())
    pinned = ["--split=train", f"--revision={streaming['revision'][:12]}", "--text-column=text"]
    hub_workspace.orchestrate(*resume, *pinned).succeeded()
    hub_workspace.orchestrate(*resume[:-1], "--steps=8", "--revision=main").succeeded()
    assert hub_workspace.checkpoints("exp")[-1] == "step-00000008"


def test_a_refusal_names_the_flag_that_was_typed(workspace: Workspace) -> None:
    text = workspace.write_text()
    start: list[str | Path] = [*SHORT, "--input", text, "--experiment=exp"]
    workspace.orchestrate(*start, "--heads=3").refused(2, "model.num_attention_heads: is 3", "(given by --heads)")
    workspace.orchestrate(*start, "--learning-rate=0").refused(2, "(given by --learning-rate)")
    workspace.orchestrate(*start, "--seed=3", "--override=runtime.seed=-1").refused(2, "(given by --override)")
    train(workspace, "exp", text)
    workspace.orchestrate("--experiment=exp", "--resume", "--warmup-steps=9").refused(2, "(given by --warmup-steps)")
