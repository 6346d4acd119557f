"""Training on a mixture of a data set of the Hub and local files, from the config to the proof."""

from __future__ import annotations

import json
from pathlib import Path

from fake_hub import Repository
from fake_hub.fineweb import documents
from workspace import TINY_CONFIG, Workspace

MIXTURE = """
  mixture:
    - {dataset: HuggingFaceFW/fineweb, config: CC-MAIN-2013-20, weight: 0.5}
    - {shards: [book.txt], weight: 0.3}
    - {shards: ["notes/*.jsonl"], text_column: note, weight: 0.2}
"""
STREAM = """
import json, sys
from orchestrator import RunConfig, TokenStream
config = RunConfig.load("runs/mix/training.yaml")
stream = TokenStream(config)
batches = [next(stream) for _ in range(4)]
state = json.loads(json.dumps(stream.state()))
again = TokenStream(config, state=state)
assert (next(stream)[0] == next(again)[0]).all()
print(json.dumps([position["given"] for position in state["components"]]))
"""


def mixed(workspace: Workspace) -> Path:
    """Write the local sources and a config that mixes them with the Hub's."""
    workspace.write_text("book.txt")
    notes = workspace.root / "notes"
    notes.mkdir()
    text = documents()
    for name in ("a", "b"):
        lines = [json.dumps({"note": next(text)[:400]}) for _ in range(20)]
        (notes / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    config = workspace.root / "mix.yaml"
    text_and_sizes = TINY_CONFIG.replace(
        "data: {sequence_length: 32, batch_size: 2, gradient_accumulation_steps: 2, shuffle_buffer_size: 64}",
        "data:\n  sequence_length: 32\n  sequences_per_step: 5\n  shuffle_buffer_size: 64" + MIXTURE.rstrip(),
    )
    config.write_text(text_and_sizes)
    return config


def test_a_mixture_is_trained_on_from_config_to_proof(hub_workspace: Workspace, hub_root: Path) -> None:
    config = mixed(hub_workspace)
    process = hub_workspace.orchestrate(
        "--config", config, "--experiment=mix", "--vocab-size=384", "--steps=8"
    ).succeeded()
    commit = Repository(hub_root, "datasets", "HuggingFaceFW/fineweb").commit()
    for words in ("50.0% HuggingFaceFW/fineweb at " + commit[:12], "30.0% book.txt", "20.0% notes/*.jsonl: 2 files"):
        assert words in process.out, process.out
    run = hub_workspace.run_folder("mix")
    assert not (run / "streaming_config.json").exists()
    assert commit in (run / "training.yaml").read_text()
    resolved = json.loads((run / "resolved_config.json").read_text())
    assert resolved["data"]["mixture"][0]["revision"] == commit
    proof = hub_workspace.orchestrate("validate-data", run, "--replay=1", "--replay=8", "--json").succeeded()
    report = json.loads(proof.out)
    assert [part["sequences"] for part in report["components"]] == [20, 12, 8]
    assert report["problems"] == []
    parts = hub_workspace.metrics("mix", "evaluation")[-1]["components"]
    assert [part["share"] for part in parts] == [0.5, 0.3, 0.2]
    process = hub_workspace.orchestrate("evaluate", "--experiment=mix").succeeded()
    assert "20.0% " in process.out
    more = hub_workspace.orchestrate("--experiment=mix", "--resume", "--steps=10").succeeded()
    assert "step 10/10" in more.out
    streamed = hub_workspace.command(hub_workspace.python, "-c", STREAM).succeeded()
    assert json.loads(streamed.out) == [10, 6, 4]


def test_a_tokenizer_is_retrained_when_the_mixture_changes(hub_workspace: Workspace) -> None:
    config = mixed(hub_workspace)
    prepare = ("--config", config, "--experiment=mix", "--vocab-size=384", "--launch=none")
    hub_workspace.orchestrate(*prepare).succeeded()
    assert "trained before" in hub_workspace.orchestrate(*prepare).succeeded().out
    config.write_text(config.read_text().replace("weight: 0.3", "weight: 0.1"))
    assert "trained before" not in hub_workspace.orchestrate(*prepare).succeeded().out


def test_flags_that_name_other_text_than_the_mixture_are_refused(workspace: Workspace) -> None:
    config = mixed(workspace)
    for flag in ("--dataset=demo", "--input=book.txt", "--max-samples=9"):
        workspace.orchestrate("--config", config, flag, "--launch=none").refused(2, "data.mixture", flag.split("=")[0])
