"""The dial `--depth`: what it chooses loads, plans, grows and trains, and says why."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from orchestrator import RunConfig, _native, depth
from workspace import REPOSITORY, Workspace

DEPTHS = range(depth.MIN_DEPTH, depth.MAX_DEPTH + 1)


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """The plan of each depth, from its YAML."""
    folder, plans = tmp_path_factory.mktemp("depths"), {}
    for layers in DEPTHS:
        path = folder / f"depth-{layers}.yaml"
        path.write_text(depth.preset(layers))
        plans[layers] = _native.memory_plan(RunConfig.load_for_planning(path)).to_dict()
    return plans


def value(layers: int, key: str) -> Any:
    return depth.keys(layers)[key][0]


def test_every_depth_plans_what_its_header_says(plans: dict[int, dict[str, Any]]) -> None:
    for layers, plan in plans.items():
        size = depth.Sizes(layers, depth.vocabulary(layers))
        assert plan["parameters"] == size.parameters, layers
        assert f"parameters          {size.parameters:,} " in depth.preset(layers)
        assert plan["total_tokens"] == pytest.approx(depth.TOKENS_PER_PARAMETER * size.parameters, rel=0.02)
        assert plan["shortage"] is None or plan["device"]["name"] != "RTX 5090" or layers > 24, layers


def test_deeper_models_are_larger_and_train_longer(plans: dict[int, dict[str, Any]]) -> None:
    for one, other in itertools.pairwise(DEPTHS):
        assert plans[one]["parameters"] < plans[other]["parameters"], other
        assert plans[one]["total_tokens"] < plans[other]["total_tokens"], other
        assert plans[one]["tokens_per_step"] <= plans[other]["tokens_per_step"], other
        assert value(one, "optimizer.learning_rate") >= value(other, "optimizer.learning_rate"), other


def test_the_rate_is_the_measured_one_where_it_was_measured() -> None:
    assert value(5, "model.hidden_size") == 320
    assert value(5, "optimizer.learning_rate") == pytest.approx(3e-3)
    assert value(3, "model.hidden_size") == 192
    assert value(3, "optimizer.learning_rate") == pytest.approx(4e-3, rel=0.05)


@pytest.mark.parametrize("layers", [1, 7, 12, 24, 32])
def test_each_key_has_its_reason_above_it(layers: int) -> None:
    text = depth.preset(layers)
    assert max(map(len, text.splitlines())) <= 120
    for key, (chosen_value, reason) in depth.keys(layers).items():
        *_, section, name = key.split(".")
        (section_text,) = re.findall(rf"^ *{section}:\n.*", text, re.MULTILINE | re.DOTALL)
        comment = re.search(rf"((?:^ *#.*\n)+) *{name}: (\S+)$", section_text, re.MULTILINE)
        assert comment, key
        assert reason in re.sub(r"\s*\n\s*# ", " ", comment.group(1).strip()), key
        assert comment.group(2) == str(chosen_value).replace("True", "true").replace("False", "false"), key


@pytest.mark.parametrize("command", [["--launch=none"], ["plan"], ["preset"]])
@pytest.mark.parametrize(("layers", "problem"), [("0", "equal to 1"), ("33", "equal to 32"), ("deep", "integer")])
def test_a_depth_out_of_range_is_refused(workspace: Workspace, command: list[str], layers: str, problem: str) -> None:
    workspace.orchestrate(*command, f"--depth={layers}").refused(2, "--depth", problem)
    assert not (workspace.root / "runs").exists()


def test_two_starting_points_are_refused(workspace: Workspace) -> None:
    workspace.orchestrate("--depth=4", "--preset=1b", "--launch=none").refused(2, "--preset and --depth")
    workspace.orchestrate("plan", "--depth=4", "--preset=1b").refused(2, "--depth")
    workspace.orchestrate("preset", "1b", "--depth=4").refused(2, "--depth")


def test_a_preset_for_a_gpu_says_how_it_fits(workspace: Workspace) -> None:
    text = workspace.orchestrate("preset", "--depth=12", "--gpu=rtx5090").succeeded().out
    (workspace.root / "mine.yaml").write_text(text)
    output = workspace.orchestrate("plan", "--config=mine.yaml", "--gpu=rtx5090", "--json").succeeded().out
    plan = json.loads(output)
    as_planned = f"as {plan['micro_batch']} x {plan['gradient_accumulation_steps']} sequences"
    assert "What `orchestrate plan --depth 12 --gpu rtx5090` says" in text
    assert as_planned in text
    too_deep = workspace.orchestrate("preset", "--depth=32", "--memory=8GB").succeeded().out
    assert "does not fit" in too_deep
    workspace.orchestrate("preset", "--depth=12", "--gpu=rtx2080").refused(2, "rtx5090")


@pytest.mark.slow
def test_a_depth_trains_on_the_demo_and_keeps_its_reasons(workspace: Workspace) -> None:
    flags = "--dataset=demo --vocab-size=512 --steps=6 --learning-rate=2e-3 --device=cpu --experiment=deep".split()
    workspace.orchestrate("--depth=2", *flags).succeeded()
    losses = workspace.losses("deep")
    assert workspace.metrics("deep")[-1]["step"] == 6
    assert losses[-1] < losses[0]
    config_text = (workspace.run_folder("deep") / "training.yaml").read_text()
    values = _native.parse_config(config_text, "yaml")
    assert values["model"]["num_layers"] == 2
    assert values["model"]["hidden_size"] == 128
    assert "# model.hidden_size 128: 64 x depth" in config_text
    assert "# optimizer.learning_rate" not in config_text, "that was typed"


@pytest.mark.slow
def test_the_guides_depths_run_as_written(workspace: Workspace) -> None:
    guide = (REPOSITORY / "docs/guide/tuning.md").read_text(encoding="utf-8")
    commands = re.findall(r"^orchestrate .*--depth.*$", guide, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        workspace.command("sh", "-c", command).succeeded()
    assert (workspace.root / "depth-12.yaml").read_text().startswith("# A model of 12 layers")
    assert workspace.metrics("deep")[-1]["step"] == 20


def test_the_guides_table_has_the_rules_values() -> None:
    guide = (REPOSITORY / "docs/guide/tuning.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (\d+) \| ([\d.]+) M \| (\d+) \| ([\d,]+) \| ([\d.e-]+) \| ([\d.]+) B \|$", guide, re.MULTILINE
    )
    assert len(rows) >= 5
    for layers, parameters, width, batch, rate, tokens in rows:
        size = depth.Sizes(int(layers), depth.vocabulary(int(layers)))
        assert float(parameters) == pytest.approx(size.parameters / 1e6, rel=0.01)
        assert int(width) == size.width
        per_step = value(int(layers), "data.sequences_per_step") * value(int(layers), "data.sequence_length")
        assert int(batch.replace(",", "")) == per_step
        assert float(rate) == value(int(layers), "optimizer.learning_rate")
        assert float(tokens) == pytest.approx(20 * size.parameters / 1e9, rel=0.02)
