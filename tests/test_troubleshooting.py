"""The commands of the guide on troubleshooting work, and its figures are what `plan` says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from workspace import ORCHESTRATE, REPOSITORY, TINY_MODEL, TRAINER, Finished, Workspace

GUIDES = REPOSITORY / "docs" / "guide"
GUIDE = (GUIDES / "troubleshooting.md").read_text(encoding="utf-8")
PROGRAMS: dict[str, Path] = {"orchestrate": ORCHESTRATE, "transformer-candle": TRAINER}
LADDER = ("plan", "--preset=rtx5090_1b", "--json", "--override=runtime.memory_limit=80GB")
BATCH = "--override=data.batch_size=4"
FLOPS_PER_TOKEN, TOKENS, PEAK = 8.416e9, 131_072, 209.5e12


def commands() -> list[str]:
    blocks = re.findall(r"^ *```sh\n(.*?)```", GUIDE, re.DOTALL | re.MULTILINE)
    lines = [line.partition(" #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


@pytest.fixture(scope="module")
def guide_workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A small run called as the guide calls it, with a checkpoint at step 4."""
    workspace = Workspace(tmp_path_factory.mktemp("guide"))
    workspace.write_text("my_texts/book.txt")
    flags = [*TINY_MODEL, "--input=my_texts/", "--steps=8", "--checkpoint-every=4", "--experiment=first"]
    workspace.orchestrate(*flags).succeeded()
    return workspace


def run(workspace: Workspace, line: str) -> Finished:
    """Type a line of the guide, at a size for tests."""
    setting, words = {}, line.split()
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        setting[name] = value
    program = PROGRAMS[words[0]]
    small = {"60": "2"} if "bench" in words else {}
    words = [small.get(word, word) for word in words[1:]]
    new = TINY_MODEL if "--input" in words else []
    return Workspace(workspace.root, setting).command(program, *new, *words)


@pytest.mark.parametrize("line", commands())
def test_a_command_of_the_guide_works(guide_workspace: Workspace, line: str) -> None:
    process = run(guide_workspace, line)
    if line == "orchestrate doctor":  # says what this machine has
        assert process.code in (0, 2)
    else:
        process.succeeded()


def test_the_guide_types_commands() -> None:
    assert len(commands()) > 10


def gigabytes(workspace: Workspace, *overrides: str) -> float:
    words = [f"--override={override}" for override in overrides]
    batch = [] if any("batch_size" in word for word in words) else [BATCH]
    return float(json.loads(workspace.orchestrate(*LADDER, *batch, *words).succeeded().out)["bytes"]) / 1e9


def test_the_memory_of_each_remedy_is_the_plans(workspace: Workspace) -> None:
    whole = gigabytes(workspace)
    assert f"needs {30.31:.2f} GB" in GUIDE.replace("\n", " ")
    assert whole == pytest.approx(30.31, rel=0.02)
    rows = re.findall(r"^\| [^|]+ \| `([^`]+=[^`]+)` \| ([\d.]+) GB \| ([\d.]+) GB \|", GUIDE, re.MULTILINE)
    assert len(rows) == 7
    for overrides, memory, saved_bytes in rows:
        assert gigabytes(workspace, *overrides.split()) == pytest.approx(float(memory), rel=0.02)
        assert float(memory) + float(saved_bytes) == pytest.approx(30.31, abs=0.011)


def test_the_speeds_follow_from_the_flops() -> None:
    step = FLOPS_PER_TOKEN * TOKENS
    for speed in (0.8, 1.0, PEAK / step, 0.8 * PEAK / step):
        text = f"{speed:.1f}" if speed >= 0.5 else f"{speed:.3f}"
        flops = speed * step / 1e12
        assert re.search(rf"\| {text} \| ({flops:,.0f}|{flops:,.1f}) \|", GUIDE), (text, flops)
    assert f"{0.8 * PEAK / FLOPS_PER_TOKEN:,.0f} tokens/s" in GUIDE
    for rate in (64, 32, 16):
        seconds = 10.55 / rate
        assert f"{seconds:.2f} s" in GUIDE
        assert f"{100 * seconds / (step / (0.8 * PEAK)):.1f} %" in GUIDE


def test_links_between_the_guides_lead_somewhere() -> None:
    for page in GUIDES.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        for target, _, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(#?)([^)]*)\)", text):
            path = (page.parent / target).resolve() if target else page
            assert path.exists(), f"{page.name}: {target}"
            if anchor and path.suffix == ".md":
                content = path.read_text(encoding="utf-8")
                titles = re.findall(r"^#+ (.*)$", content, re.MULTILINE)
                anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
                anchors.update(re.findall(r'(?:id|name)="([^"]+)"', content))
                assert anchor in anchors, f"{page.name}: {target}#{anchor}"
