"""LoRA runs: what they leave behind, that they resume bit for bit, and what happens when their model is not there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from workspace import TINY_MODEL, Workspace

RUN = "--seq-len=32 --steps=6 --log-every=1 --evaluate-every=3 --eval-batches=2 --checkpoint-every=3".split()
LORA = [
    "--preset=smoke_cpu", "--device=cpu", "--override=data.held_out_fraction=0.1", "--learning-rate=1e-2",
    "--override=lora.rank=4", "--override=lora.alpha=8", "--override=lora.dropout=0.2",
]  # fmt: skip
CUT = ["--batch-size=2", "--grad-accum=2"]


@pytest.fixture
def text(workspace: Workspace) -> Path:
    return workspace.write_text()


@pytest.fixture
def base(workspace: Workspace, text: Path) -> Path:
    """The last checkpoint of a short run: the model that adapters train beside."""
    workspace.orchestrate(*TINY_MODEL, f"--input={text}", "--steps=8", "--experiment=base").succeeded()
    return workspace.run_folder("base") / "checkpoints" / "step-00000008"


def train(workspace: Workspace, base: Path, text: Path, experiment: str, *flags: str) -> Path:
    """Train a run of six steps; return its folder of checkpoints."""
    flags = (*RUN, *LORA, *(flags or CUT))
    workspace.orchestrate(f"--init-from={base}", f"--input={text}", f"--experiment={experiment}", *flags).succeeded()
    return workspace.run_folder(experiment) / "checkpoints"


def same_files(one: Path, other: Path) -> bool:
    names = ("adapter_model.safetensors", "optimizer.safetensors")
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


@pytest.mark.parametrize(
    ("precision", "base_precision"), [("fp32", "auto"), ("bf16", "auto"), ("bf16", "fp8"), ("fp8", "auto")]
)
def test_a_resumed_lora_run_is_the_uninterrupted_one(
    workspace: Workspace, base: Path, text: Path, precision: str, base_precision: str
) -> None:
    flags = [*CUT, f"--override=runtime.precision={precision}", f"--override=lora.base_precision={base_precision}"]
    whole = train(workspace, base, text, "whole", *flags, "--override=runtime.threads=1")
    halves = train(workspace, base, text, "halves", *flags, "--override=runtime.threads=2")
    shutil.rmtree(halves / "step-00000006")
    config = halves.parent / "training.yaml"
    workspace.trainer("train", "--config", config, "--resume", halves / "step-00000003").succeeded()
    assert same_files(whole / "step-00000006", halves / "step-00000006")
    assert workspace.losses("whole") == workspace.losses("halves")
    file_names = {path.name for path in (whole / "step-00000006").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "base_model.json", "tokenizer.json"} <= file_names
    assert not {"config.json", "model.safetensors"} & file_names
    adapter_config = json.loads((whole / "step-00000006" / "adapter_config.json").read_text())
    assert (adapter_config["r"], adapter_config["lora_alpha"], adapter_config["lora_dropout"]) == (4, 8.0, 0.2)
    assert adapter_config["base_model_name_or_path"] == str(base)


def test_dropout_does_not_depend_on_the_micro_batch(workspace: Workspace, base: Path, text: Path) -> None:
    train(workspace, base, text, "two", "--batch-size=2", "--grad-accum=2")
    train(workspace, base, text, "four", "--batch-size=4", "--grad-accum=1")
    assert workspace.losses("two") == pytest.approx(workspace.losses("four"), abs=2e-6)
    train(workspace, base, text, "none", *CUT, "--override=lora.dropout=0")
    assert workspace.losses("two") != pytest.approx(workspace.losses("none"), abs=2e-6)


def test_commands_load_the_model_and_its_adapters(workspace: Workspace, base: Path, text: Path) -> None:
    last = train(workspace, base, text, "tuned") / "step-00000006"
    evaluations = workspace.metrics("tuned", "evaluation")
    report = json.loads(workspace.trainer("evaluate", "--checkpoint", last, "--json").succeeded().out)
    assert report["loss"] == evaluations[-1]["loss"]
    assert evaluations[-1]["loss"] < evaluations[0]["loss"]
    generate = ("generate", "--checkpoint", last, "--prompt=def", "--max-tokens=4", "--temperature=0")
    completion = workspace.trainer(*generate).succeeded().out

    moved = workspace.root / "elsewhere"
    shutil.copytree(base, moved)
    shutil.rmtree(base)
    missing_model = f"belong to the model in {base}, which is not there"
    workspace.trainer(*generate).refused(2, missing_model)
    workspace.trainer("evaluate", "--checkpoint", last).refused(2, missing_model)
    config = workspace.run_folder("tuned") / "training.yaml"
    longer = ("train", "--config", config, "--resume", "--override=scheduler.total_steps=8")
    workspace.trainer(*longer).refused(2, missing_model)
    assert workspace.trainer(*generate, f"--base-model={moved}").succeeded().out == completion

    weights = (moved / "model.safetensors").read_bytes()
    (moved / "MANIFEST.json").unlink()
    assert workspace.trainer(*generate, f"--base-model={moved}").succeeded().out == completion
    (moved / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    message = f"model.safetensors in {moved} is not what the adapters in {last} were trained beside"
    workspace.trainer(*generate, f"--base-model={moved}").refused(5, message)
    workspace.trainer(*longer, f"--override=model.init_from={moved}").refused(5, message)
    (moved / "model.safetensors").write_bytes(weights)
    workspace.trainer(*longer, f"--override=model.init_from={moved}").succeeded()
    export = workspace.orchestrate("export", "--format=hf", "--checkpoint", last)
    export.refused(2, "holds LoRA adapters, not a whole model")


def test_lora_settings_that_cannot_work_are_refused(workspace: Workspace, base: Path, text: Path) -> None:
    start = [f"--init-from={base}", f"--input={text}", "--experiment=refused", *RUN, *LORA, *CUT]
    messages = {
        "lora.target_modules=[q_proj, w_proj]": 'lora.target_modules[1]: is "w_proj", but must be `all-linear`',
        "lora.target_modules=linear": "must be `all-linear` or a list of q_proj, k_proj",
        "lora.target_modules=[]": "lora.target_modules: names no module",
        "lora.rank=0": "lora.rank: is 0, but must be an integer from 1 to 4096",
        "lora.rank=null": "lora.rank: is missing, though lora.alpha is given",
        "lora.dropout=1": "lora.dropout",
        "lora.base_precision=int8": 'lora.base_precision: is "int8", but must be',
        "lora.base_precision=fp8": "lora.base_precision: is fp8, but runtime.precision is fp32",
        "optimizer.algorithm=muon": "adapters (lora.rank) train with adamw",
    }
    for override, sentence in messages.items():
        workspace.orchestrate(*start, f"--override={override}").refused(2, sentence)
    without_base = [*TINY_MODEL, f"--input={text}", "--experiment=refused", "--override=lora.rank=4"]
    workspace.orchestrate(*without_base).refused(2, "adapters train beside the weights of a model")
    assert not (workspace.run_folder("refused") / "checkpoints").exists()


def test_another_rank_is_refused_on_resume(workspace: Workspace, base: Path, text: Path) -> None:
    checkpoints = train(workspace, base, text, "tuned")
    config = checkpoints.parent / "training.yaml"
    process = workspace.trainer("train", "--config", config, "--resume", "--override=lora.rank=8")
    process.refused(2, "lora.rank was 4 and is 8")
    plain = workspace.trainer("train", "--config", config, "--resume", "--override=lora.target_modules=[v_proj]")
    plain.refused(2, "lora.target_modules was")


def test_adapters_learn_beside_a_base_in_fp8_what_they_learn_beside_bf16(
    workspace: Workspace, base: Path, text: Path
) -> None:
    """From another program's folder, beside bf16 matmuls; commands read the adapters beside the model's own weights."""
    (base / "MANIFEST.json").unlink()
    bf16 = [*CUT, "--override=runtime.precision=bf16"]
    words = [f"--init-from={base}", f"--input={text}", "--experiment=fp8", *RUN, *LORA, *bf16]
    out = workspace.orchestrate(*words, "--override=lora.base_precision=fp8").succeeded().out
    assert ", those of the blocks in fp8, on cpu" in out
    last = workspace.run_folder("fp8") / "checkpoints" / "step-00000006"
    train(workspace, base, text, "bf16", *bf16)
    losses = [workspace.losses(name) for name in ("fp8", "bf16")]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    report = json.loads(workspace.trainer("evaluate", "--checkpoint", last, "--json").succeeded().out)
    assert report["loss"] == pytest.approx(workspace.metrics("fp8", "evaluation")[-1]["loss"], rel=2e-3)
    config = last.parents[1] / "training.yaml"
    changed = workspace.trainer("train", "--config", config, "--resume", "--override=lora.base_precision=auto")
    changed.refused(2, 'lora.base_precision was "fp8" and is "auto"')


def test_training_goes_on_from_a_run_s_adapters(workspace: Workspace, base: Path, text: Path) -> None:
    first = train(workspace, base, text, "first") / "step-00000006"
    flags = [*RUN, "--preset=smoke_cpu", "--device=cpu", "--override=data.held_out_fraction=0.1", *CUT]
    start = [f"--input={text}", f"--override=lora.init_from={first}", *flags]
    out = workspace.orchestrate(*start, f"--init-from={base}", "--experiment=second").succeeded().out
    assert f"adapters start from those in {first}" in out
    evaluations = [workspace.metrics(name, "evaluation") for name in ("first", "second")]
    assert evaluations[1][0]["loss"] == pytest.approx(evaluations[0][-1]["loss"], abs=1e-6)
    other = [*start, f"--init-from={base}", "--experiment=third", "--override=lora.rank=8"]
    workspace.orchestrate(*other).refused(2, "lora.rank: is 8, but the adapters in", "have 4")


def test_a_run_s_adapters_are_listed(workspace: Workspace, base: Path, text: Path) -> None:
    train(workspace, base, text, "tuned")
    lines = workspace.orchestrate("export", "--experiment=tuned", "--list").succeeded().out.splitlines()
    losses = {row["step"]: row["loss"] for row in workspace.metrics("tuned", "evaluation")}
    assert [line.split()[:4] for line in lines[1:]] == [
        [f"step-0000000{step}", str(step), "4", f"{losses[step]:.4f}"] for step in (3, 6)
    ]
    assert all("runs/base/checkpoints/step-00000008" in line for line in lines[1:])
    assert lines[-1].split()[5] == "latest"
    workspace.orchestrate("export", "--experiment=base", "--list").refused(2, "there are no LoRA adapters in")


@pytest.mark.slow
def test_adapters_that_cannot_be_exported_are_refused(workspace: Workspace, base: Path, text: Path) -> None:
    last = train(workspace, base, text, "tuned") / "step-00000006"
    merge = ["export", "--experiment=tuned", "--format=hf", "--merge"]
    for flags, words in {
        ("--experiment=base", "--format=hf", "--merge"): ("is a whole model", "nothing to merge, leave out --merge"),
        ("--experiment=base", "--format=adapter"): ("is a whole model", "--format hf and --format gguf export it"),
        ("--experiment=tuned", "--format=adapter", "--merge"): ("--format adapter writes the adapters alone",),
        ("--experiment=tuned", "--format=adapter", "--type=f16"): ("--type f16 is for --format gguf",),
        ("--experiment=tuned", "--format=hf"): ("holds LoRA adapters", "--merge exports the model with them"),
        ("--experiment=tuned", "--base-model=x", "--format=hf"): ("give it with --merge",),
        ("--experiment=tuned", "--list", "--checkpoint=x"): ("say one thing to list",),
    }.items():
        workspace.orchestrate("export", *flags).refused(2, *words)
    workspace.orchestrate("push", "alice/mine", "--checkpoint=nowhere").refused(2)

    moved = workspace.root / "elsewhere"
    base.rename(moved)
    workspace.orchestrate(*merge).refused(2, f"belong to the model in {base}, which is not there")
    workspace.orchestrate(*merge, f"--base-model={moved}").succeeded()
    assert (workspace.root / "tuned-hf" / "model.safetensors").stat().st_size > 0
    weights = moved / "model.safetensors"
    whole = weights.read_bytes()
    (moved / "MANIFEST.json").unlink()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    shutil.rmtree(workspace.root / "tuned-hf")
    phrases = (f"model.safetensors in {moved} is not what the adapters in ", "were trained beside")
    workspace.orchestrate(*merge, f"--base-model={moved}").refused(5, *phrases)
    workspace.orchestrate("export", "--checkpoint", last, "--format=adapter", f"--base-model={moved}").refused(
        5, *phrases
    )
    weights.write_bytes(whole)

    adapters = last / "adapter_model.safetensors"
    content = adapters.read_bytes()
    adapters.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    arguments: list[str | Path] = ["export", "--checkpoint", last, "--format=hf", "--merge", f"--base-model={moved}"]
    workspace.orchestrate(*arguments).refused(5, "adapter_model.safetensors", "corrupted")
    (last / "MANIFEST.json").unlink()
    adapters.write_bytes(content[:-4] + b"\x00\x00\xc0\x7f")
    workspace.orchestrate(*arguments).refused(5, "not finite")
    adapters.write_bytes(content[:-8])
    workspace.orchestrate(*arguments).refused(5, "adapter_model.safetensors")
    assert not list(workspace.root.glob("*-hf"))


def test_adapters_of_another_model_are_refused(workspace: Workspace, base: Path, text: Path) -> None:
    first = train(workspace, base, text, "first") / "step-00000006"
    other = workspace.root / "other"
    shutil.copytree(base, other)
    (other / "MANIFEST.json").unlink()
    weights = (other / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    start = [f"--input={text}", f"--lora-init-from={first}", f"--init-from={other}", "--experiment=second", *RUN, *CUT]
    start += ["--preset=smoke_cpu", "--device=cpu"]
    workspace.orchestrate(*start).refused(2, f"adapters in {first}", f"not trained beside the model in {other}")
    (first / "MANIFEST.json").unlink()
    workspace.orchestrate(*start).refused(2, f"adapters in {first}", f"not trained beside the model in {other}")


@pytest.mark.parametrize("existing", [False, True])
def test_bad_adapters_are_refused_before_anything_is_written(
    workspace: Workspace, base: Path, text: Path, existing: bool
) -> None:
    first = train(workspace, base, text, "first") / "step-00000006"
    flags = [f"--input={text}", "--experiment=second", *RUN, *CUT, "--preset=smoke_cpu", "--device=cpu"]
    if existing:
        workspace.orchestrate(*flags, f"--init-from={base}", "--launch=none").succeeded()
    before = contents(workspace.root / "runs") | contents(workspace.root / "artifacts")
    weights = load_file(first / "adapter_model.safetensors")
    name, matrix = next(iter(weights.items()))
    config = json.loads((first / "adapter_config.json").read_text())
    damages: dict[str, tuple[dict[str, Any], Any, bytes | None]] = {
        "not finite": (weights | {name: np.full_like(matrix, np.nan)}, config, None),
        "shape": (weights | {name: matrix[:, :-1].copy()}, config, None),
        "rank": (weights, config | {"r": 2}, None),
        name: ({other: matrix for other, matrix in weights.items() if other != name}, config, None),
        "adapter_model.safetensors": (weights, config, (first / "adapter_model.safetensors").read_bytes()[:-5]),
    }
    for number, (words, (tensors, adapter_config, content)) in enumerate(damages.items()):
        adapters = workspace.root / f"adapters-{number}"
        adapters.mkdir()
        save_file(tensors, adapters / "adapter_model.safetensors")
        if content is not None:
            (adapters / "adapter_model.safetensors").write_bytes(content)
        (adapters / "adapter_config.json").write_text(json.dumps(adapter_config))
        process = workspace.orchestrate(*flags, f"--lora-init-from={adapters}", f"--init-from={base}")
        assert process.code in (2, 5), process
        process.refused(process.code, str(adapters))
        assert contents(workspace.root / "runs") | contents(workspace.root / "artifacts") == before, words
        assert words in process.err or words == "rank", process.err


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
