"""`orchestrate finetune`: a model is fine-tuned on conversations, from local files and from the Hub."""

from __future__ import annotations

import json
import re
import shutil
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_hub import FakeHub, Repository
from orchestrator import summary, training_length
from safetensors.numpy import load_file, save_file
from workspace import TINY_MODEL, Workspace

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ROWS = 96
SMALL = ["--seq-len=64", "--batch-size=4", "--grad-accum=1", "--learning-rate=3e-3", "--device=cpu", "--seed=7"]


def conversation(index: int) -> dict[str, Any]:
    """Return a conversation; one in three has two turns more."""
    turns = [("user", f"What is {index}?"), ("assistant", f"A number: {index}.")]
    turns += [("user", "And twice?"), ("assistant", f"It is {2 * index}.")] if index % 3 == 0 else []
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def write_rows(path: Path, rows: list[dict[str, Any]] | None = None) -> Path:
    rows = [conversation(index) for index in range(ROWS)] if rows is None else rows
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of ours in Hugging Face's format, with a chat template."""
    workspace = Workspace(tmp_path_factory.mktemp("pretrained"))
    workspace.write_text("book.txt")
    workspace.orchestrate("--input=book.txt", "--experiment=base", *TINY_MODEL, "--seq-len=64", "--steps=4").succeeded()
    checkpoint = workspace.run_folder("base") / "checkpoints" / workspace.checkpoints("base")[-1]
    unwanted = shutil.ignore_patterns("optimizer*", "MANIFEST*", "trainer*")
    model = Path(shutil.copytree(checkpoint, workspace.root / "model", ignore=unwanted))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


def finetune(workspace: Workspace, model: Path, *arguments: str | Path) -> Any:
    return workspace.orchestrate("finetune", "--model", model, "--experiment=chat", *SMALL, *arguments)


def test_the_loss_falls_and_the_checkpoint_is_a_chat_model(workspace: Workspace, pretrained: Path) -> None:
    rows = write_rows(workspace.root / "rows.jsonl")
    process = finetune(workspace, pretrained, "--input", rows, "--epochs=6").succeeded()
    assert "fine-tune" in process.out and ", 6 epochs," in process.out and "learning rate 0.003" in process.out
    losses = workspace.losses("chat")
    assert sum(losses[-4:]) < 0.6 * sum(losses[:4]), losses
    run = workspace.run_folder("chat")
    assert not (run / "streaming_config.json").exists()
    assert "format: chat" in (run / "training.yaml").read_text()
    checkpoint = run / "checkpoints" / workspace.checkpoints("chat")[-1]
    assert (checkpoint / "chat_template.jinja").read_text() == TEMPLATE
    workspace.orchestrate("validate-data", run).succeeded()
    workspace.orchestrate("evaluate", "--experiment=chat").succeeded()


def test_few_conversations_are_enough_steps(workspace: Workspace, pretrained: Path) -> None:
    rows, flags = write_rows(workspace.root / "rows.jsonl"), ["--device=cpu", "--seq-len=64", "--seed=7"]
    command: list[str | Path] = ["finetune", "--model", pretrained, "--input", rows, *flags]
    out = workspace.orchestrate(*command, "--experiment=chat").succeeded().out
    (sequences, epochs, per_step, steps, warmup) = map(int, re.findall(
        r"The data make (\d+) sequences: (\d) epochs with (\d+) sequences? per step are about (\d+) steps, (\d+) ", out
    )[0])  # fmt: skip
    train_rows = workspace.metrics("chat")
    assert abs(len(train_rows) - steps) <= epochs
    assert (epochs, warmup) == (3, min(10, steps // 10))
    assert steps == sequences * epochs // per_step >= 50
    assert train_rows[-1]["learning_rate"] == 2e-5
    assert "little" not in out.partition("What it learnt")[2]
    # What is given is kept.
    explicit_run = workspace.orchestrate(
        *command, "--experiment=given", "--epochs=1", "--batch-size=4", "--grad-accum=1"
    )
    assert ": 1 epoch with 4 sequences per step are about" in explicit_run.succeeded().out
    steps_given = workspace.orchestrate(*command, "--experiment=steps", "--steps=3").succeeded().out
    assert "The data make" not in steps_given
    assert "little: 3 steps hardly change a model. Give it more steps: --epochs, --steps" in steps_given


@pytest.mark.parametrize(("sequences", "requested", "expected"), [
    (1, (None, None, None), (3, 1, 0, 3)),
    (4, (None, None, None), (3, 1, 1, 12)),
    (96, (None, None, None), (3, 4, 7, 72)),
    (400, (None, None, None), (3, 16, 7, 75)),
    (1599, (None, None, None), (2, 16, 10, 199)),
    (96, (1, None, None), (1, 1, 9, 96)),
    (96, (None, 16, None), (3, 16, 1, 18)),
    (96, (None, None, 20), (3, 4, 20, 72)),
])  # fmt: skip
def test_the_length_follows_from_the_sequences(
    sequences: int, requested: tuple[int | None, int | None, int | None], expected: tuple[int, int, int, int]
) -> None:
    length = training_length.length_of(sequences, *requested)
    assert (length.epochs, length.sequences_per_step, length.warmup_steps, length.steps) == expected


@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
def test_ranks_share_the_sequences_of_a_step(ranks: int) -> None:
    assert training_length.length_of(4, None, None, None, ranks).sequences_per_step == ranks


def doubts_of(losses: list[float], warmup: int = 0, data: str = "chat") -> str:
    steps = [{"step": step, "loss": loss, "learning_rate": 1e-5} for step, loss in enumerate(losses, start=1)]
    config = {"scheduler": {"warmup_steps": warmup}, "optimizer": {"learning_rate": 2e-5}, "data": {"format": data}}
    return " ".join(summary.doubts(steps, config))


def test_the_summary_says_when_nothing_was_learnt() -> None:
    falling = [4 - step / 10 for step in range(20)]
    assert doubts_of(falling) == doubts_of([]) == ""
    assert "ended at step 20 of a warm-up of 100 steps, at a learning rate of 1.0e-05" in doubts_of(falling, warmup=100)
    assert doubts_of(falling[:9]).startswith(
        "little: 9 steps hardly change a model. Give it more steps: --epochs, --st"
    )
    assert "--epochs" not in doubts_of(falling[:9], data="text"), "pre-training has no such flag"
    flat = doubts_of([2.0, *[2.1] * 30, 2.3])
    assert flat.startswith(
        "nothing that the training loss shows: 2.094 in the first 16 logged steps, 2.113 in the last"
    )
    assert "--learning-rate" in flat


def test_a_resumed_run_has_the_same_weights(workspace: Workspace, pretrained: Path) -> None:
    rows = write_rows(workspace.root / "rows.jsonl")
    arguments: list[str | Path] = ["--input", rows, "--steps=12", "--checkpoint-every=5", "--packing=padded"]
    finetune(workspace, pretrained, *arguments).succeeded()
    checkpoints = workspace.run_folder("chat") / "checkpoints"
    weights = (checkpoints / "step-00000012" / "model.safetensors").read_bytes()
    shutil.rmtree(checkpoints / "step-00000012")
    process = workspace.orchestrate("finetune", "--experiment=chat", "--resume").succeeded()
    assert "resuming at step 10" in process.out + process.err
    assert (checkpoints / "step-00000012" / "model.safetensors").read_bytes() == weights


def test_adapters_are_trained_beside_the_model(workspace: Workspace, pretrained: Path) -> None:
    rows = write_rows(workspace.root / "chats.jsonl")
    small = [flag for flag in SMALL if not flag.startswith("--learning-rate")]
    flags = ["--experiment=chat", "--lora-rank=4", "--steps=6", *small]
    process = workspace.orchestrate("finetune", "--model", pretrained, "--input", rows, *flags).succeeded()
    assert "adapters of rank 4, learning rate 2e-4 (cosine after 0 steps of warm-up), 6 steps," in process.out
    assert re.search(r"training [\d,]+ parameters of adapters beside [\d,]+ on cpu", process.out + process.err)
    checkpoint = workspace.run_folder("chat") / "checkpoints" / "step-00000006"
    config = json.loads((checkpoint / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (4, str(pretrained))
    assert not (checkpoint / "model.safetensors").exists()
    workspace.orchestrate("generate", "--experiment=chat", "--prompt=hello", "--max-tokens=4").succeeded()


def stored_as(model: Path, dtype: str, folder: Path) -> Path:
    """Copy a model in f32 and name another type in its config; for float16 its weights are converted too."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    if dtype == "float16":
        save_file({name: value.astype(np.float16) for name, value in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("dtype") == "float32"
    # Older versions of transformers call it `torch_dtype`.
    key = "torch_dtype" if dtype == "float16" else "dtype"
    (folder / "config.json").write_text(json.dumps(config | {key: dtype}))
    return folder


@pytest.mark.parametrize(("dtype", "flags", "precision"), [
    ("float32", [], "fp32"), ("float16", [], "bf16"), ("bfloat16", [], "bf16"),
    ("bfloat16", ["--precision=fp32"], "fp32"),
])  # fmt: skip
def test_weights_of_two_bytes_are_trained_in_bf16(
    workspace: Workspace, pretrained: Path, dtype: str, flags: list[str], precision: str
) -> None:
    model, rows = stored_as(pretrained, dtype, workspace.root / dtype), write_rows(workspace.root / "rows.jsonl")
    process = finetune(workspace, model, "--input", rows, "--lora-rank=4", "--steps=2", *flags).succeeded()
    assert f"precision {precision}" in process.out
    adapters = workspace.run_folder("chat") / "checkpoints" / "step-00000002" / "adapter_model.safetensors"
    types = {info["dtype"] for info in header(adapters).values()}
    assert types == {"BF16" if precision == "bf16" else "F32"}


def header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file, which describes its tensors."""
    with path.open("rb") as file:
        content: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    content.pop("__metadata__", None)
    return content


def test_bad_rows_are_counted_and_long_ones_cut(workspace: Workspace, pretrained: Path) -> None:
    bad: list[dict[str, Any]] = [{"messages": []}, {"messages": [{"role": "user", "content": "x"}]}, {"text": "x"}]
    long = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "long " * 100}]}
    rows = write_rows(workspace.root / "rows.jsonl", [*bad, long, *map(conversation, range(300))])
    process = finetune(workspace, pretrained, "--input", rows, "--epochs=1").succeeded()
    output = process.out + process.err
    assert "2 not a conversation, 1 in which the assistant says nothing" in output, output
    assert "conversations cut to data.sequence_length: " in output, output


def test_nested_parquet_gives_the_batches_of_json_lines(workspace: Workspace, pretrained: Path) -> None:
    rows = [conversation(index) for index in range(ROWS)]
    rows[1]["messages"][1]["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    (workspace.root / "a").mkdir()
    (workspace.root / "b").mkdir()
    write_rows(workspace.root / "a" / "rows.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), workspace.root / "b" / "rows.parquet")
    for name in ("a", "b"):
        finetune(workspace, pretrained, "--input", name, "--run-dir", name + "-run", "--steps=2").succeeded()
    reports = [
        json.loads((workspace.root / f"{name}-run" / "metrics.jsonl").read_text().splitlines()[0]) for name in "ab"
    ]
    assert reports[0]["tokens"] > 0
    script = (
        "import sys; from orchestrator import RunConfig, TokenStream\n"
        "stream = TokenStream(RunConfig.load(sys.argv[1], ['scheduler.total_steps=null', 'scheduler.strategy=constant',"
        " 'scheduler.total_epochs=1', 'data.packing=padded', 'data.held_out_fraction=1e-9', 'data.batch_size=1',"
        " 'data.sequences_per_step=1', 'data.gradient_accumulation_steps=1']))\n"
        "print(sorted(row for inputs, targets in stream for row in zip(inputs.tolist(), targets.tolist())))"
    )
    read = [workspace.command(workspace.python, "-c", script, f"{name}-run/training.yaml").succeeded() for name in "ab"]
    assert len(read[0].out) > 1000
    assert set(read[0].out.split("), (")) & set(read[1].out.split("), ("))


def test_conversations_of_the_hub_are_read_to_their_end(
    hub_workspace: Workspace, hub: FakeHub, hub_root: Path, pretrained: Path
) -> None:
    del hub
    folder = Repository(hub_root, "datasets", "someone/chats").folder
    folder.mkdir(parents=True, exist_ok=True)
    rows = [conversation(index) for index in range(ROWS)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet", row_group_size=16)
    finetune(hub_workspace, pretrained, "--dataset=someone/chats").succeeded()
    streaming = json.loads((hub_workspace.run_folder("chat") / "streaming_config.json").read_text())
    assert (streaming["dataset"], streaming["max_samples"]) == ("someone/chats", None)
    hub_workspace.orchestrate("validate-data", hub_workspace.run_folder("chat")).succeeded()


def test_what_cannot_be_trained_with_is_refused(workspace: Workspace, pretrained: Path) -> None:
    rows = write_rows(workspace.root / "rows.jsonl")
    bare = Path(shutil.copytree(pretrained, workspace.root / "bare"))
    (bare / "chat_template.jinja").unlink()
    finetune(workspace, bare, "--input", rows, "--run-dir=r0").refused(2, "the model has no chat template", "chatml")
    one = finetune(workspace, bare, "--input", rows, "--run-dir=r1", "--chat-template=chatml", "--steps=1").succeeded()
    assert ", 1 step, sequences of 64 tokens" in one.out
    template = workspace.root / "counts.jinja"
    template.write_text("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}")
    counts = ("--chat-template", template, "--run-dir=r2")
    finetune(workspace, pretrained, "--input", rows, *counts).refused(2, "renders the first 2 messages otherwise")
    unknown = finetune(workspace, bare, "--input", rows, "--run-dir=r2", "--chat-template=llama3")
    unknown.refused(2, "llama3: No such file", "built-in one: there are `chatml` and `qwen3`")
    (bare / "chat_template.jinja").write_text("{% for m in messages %}")
    broken = finetune(workspace, bare, "--input", rows, "--run-dir=r2").refused(2, "r2/tokenizer/chat_template.jinja")
    assert ".counting" not in broken.err
    text = write_rows(workspace.root / "text.jsonl", [{"text": "x"}] * 9)
    finetune(workspace, pretrained, "--input", text, "--run-dir=r3").refused(3, "no conversations", "columns are text")
    finetune(workspace, pretrained, "--run-dir=r4").refused(2, "--dataset", "--input")
    finetune(workspace, pretrained, "--input", rows, "--epochs=1", "--steps=1").refused(2, "--epochs and --steps")


def typed_below(out: str, heading: str) -> list[list[str]]:
    """Return our commands under a heading of the summary, as words."""
    lines = out[out.index(heading) :].splitlines()[1:]
    return [line.split("#")[0].split()[1:] for line in takewhile(str.strip, lines)]


def test_a_run_that_does_not_fit_names_the_way_to_settings_that_do(workspace: Workspace, pretrained: Path) -> None:
    rows = write_rows(workspace.root / "rows.jsonl")
    flags = ["--lora-rank=64", "--steps=2", "--device=cpu", "--seq-len=64", "--override=runtime.memory_limit=4.5MB"]
    tune: list[str | Path] = ["finetune", "--model", pretrained, "--input", rows, "--experiment=chat", *flags]
    for launch in ("process", "bindings"):
        process = workspace.orchestrate(*tune, f"--launch={launch}").refused(4, "does not fit")
        (show,) = typed_below(process.out, "What could be changed, each setting with what it saves and costs")
        options = workspace.orchestrate(*show).succeeded().out
        assert "smaller rank         fits        saves" in options and "lora.rank=8 lora.alpha=8" in options
        apply, train = typed_below(process.out, "The same, written as a config and trained")
        output = workspace.orchestrate(*apply).succeeded().out
        assert "lora.rank: 16 (was 64)" in output and "runtime.activation_recompute: block" in output
        if launch == "process":
            (workspace.run_folder("chat") / "fits.yaml").unlink()
    workspace.orchestrate(*train).succeeded()
    adapter_config = workspace.run_folder("chat") / "checkpoints/step-00000002/adapter_config.json"
    assert json.loads(adapter_config.read_text())["r"] == 16


def test_a_run_that_diverges_names_the_way_to_stabler_settings(workspace: Workspace, pretrained: Path) -> None:
    rows = write_rows(workspace.root / "rows.jsonl")
    # The mean of two batches of 256 tokens varies by 0.6.
    guard = "{max_skipped_steps: 3, max_loss_increase: 1.0, window_steps: 2}"
    flags = ["--epochs=20", "--checkpoint-every=2", f"--override=runtime.divergence_guard={guard}"]
    small = [flag for flag in SMALL if not flag.startswith("--learning-rate")]
    tune: list[str | Path] = ["--input", rows, "--experiment=chat", *small, "--learning-rate=1", *flags]
    process = workspace.orchestrate("finetune", "--model", pretrained, *tune).refused(6, "diverged", "--unstable")
    (show,) = typed_below(process.out, "What could be changed")
    output = workspace.orchestrate(*show).succeeded().out
    assert "optimizer.learning_rate: 0.00002 (was 1): smaller updates" in output
    assert "optimizer.max_grad_norm: 0.5 (was 1)" in output
    apply, train = typed_below(process.out, "The same, written as a config and trained")
    assert "--resume" in train
    workspace.orchestrate(*apply).succeeded()
    resumed_run = workspace.orchestrate(*train, "--override=scheduler.total_epochs=3").succeeded()
    assert "resuming at step" in resumed_run.out + resumed_run.err
    assert workspace.metrics("chat")[-1]["learning_rate"] <= 2e-5
