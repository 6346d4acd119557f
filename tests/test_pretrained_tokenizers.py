"""Tokenizers of open models: the ids of `tokenizers`, BOS, the end of documents, and text that keeps its spaces."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orchestrator
import pytest
import tiny_tokenizers
from fake_hub.fineweb import documents
from orchestrator import RunConfig, TokenStream
from tiny_tokenizers import KINDS, ROLES, STARTING_WITH_BOS
from tokenizers import Tokenizer
from workspace import TINY_MODEL, Workspace

LONGEST = 1 << 18
"""A sequence length of more tokens than a window has, so that no document is cut."""
CONFIG = """
model: {{hidden_size: 32, intermediate_size: 32, num_layers: 1, num_attention_heads: 1,
        max_position_embeddings: {longest}}}
tokenizer: {{tokenizer_json: {tokenizer}}}
data: {{train_shards: [{text}], validation_shards: [{text}], sequence_length: {longest}, sequences_per_step: 1,
       batch_size: 1, shuffle_buffer_size: 64}}
scheduler: {{strategy: constant, total_epochs: 1, warmup_steps: 0}}
"""
ALPHABETS = [
    "".join(map(chr, range(32, 127))),
    " \t\n\r\u00a0\u2003\u3000",
    "'s 't 'RE 'll 'D \u2019s",
    "0123456789\u0661\u2167\u00bd",
    "e\u0301\u0327a\u030a\u00e9\u1100\u1161\u11a8\uac00\u0f71\u0f72",
    "\u4e2d\u6587\u65e5\u672c\u30ab\u3099",
    "\U0001f600\U0001f469\u200d\U0001f467\ufe0f\U0001f1e9\U0001f1ea",
    "\u2581 <s></s><0x41>\u0120\u010a",
    "\x00\x7f\u200b\ufeff\u00ad",
]

RUN = "--seq-len=32 --batch-size=2 --grad-accum=2 --steps=4 --log-every=1 --evaluate-every=4 --eval-batches=2".split()
SETTINGS = [*RUN, "--preset=smoke_cpu", "--device=cpu", "--override=data.held_out_fraction=0.1"]
PROMPT = "def main(arguments):\n    return caf\u00e9 \u4e2d\u6587"


def fuzz(count: int) -> Iterator[str]:
    """Yield random texts of characters that tokenizers treat differently, and of any others."""
    generator = random.Random(0)
    for _ in range(count):
        pieces = []
        for _ in range(generator.randrange(1, 40)):
            alphabet = generator.choice([*ALPHABETS, ""])
            low, high = generator.choice([(0, 0x250), (0x250, 0xD800), (0xE000, 0x20000)])
            pieces.append(
                "".join(generator.choices(alphabet, k=4)) if alphabet else chr(generator.randrange(low, high))
            )
        yield "".join(pieces)


def streamed(config: Path) -> Iterator[tuple[int, ...]]:
    """Yield the documents of a run's stream, as targets up to the end of each."""
    run = RunConfig.load(config)
    for _, targets in TokenStream(run):
        document: list[int] = []
        row = [int(target) for target in targets[0] if target >= 0]
        for target in row:
            if target == row[-1]:
                yield tuple(document)
                document = []
            else:
                document.append(target)


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_tokenizers_package(tmp_path: Path, kind: str) -> None:
    sources = list(documents())[:2000]
    texts = [*sources, *fuzz(3000)]
    tokenizer = tiny_tokenizers.train(kind, sources[:400], 2000)
    tokenizer_folder = tiny_tokenizers.write(tokenizer, kind, tmp_path / "tokenizer")
    text = write_lines(tmp_path / "text.jsonl", texts)
    config = tmp_path / "training.yaml"
    config.write_text(CONFIG.format(tokenizer=tokenizer_folder, text=text, longest=LONGEST))
    expected = Counter(tuple(tiny_tokenizers.encode(tokenizer, text)) for text in texts)
    actual = Counter(streamed(config))
    assert actual.total() == len(texts)
    assert (actual - expected, expected - actual) == (Counter(), Counter())


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def make_model(workspace: Workspace, kind: str, text: Path, **roles: Any) -> Path:
    """Make a model folder as it is published, with a tokenizer of this kind and the weights of a short run."""
    flags = [*TINY_MODEL, f"--input={text}", "--steps=8", "--experiment=first"]
    workspace.orchestrate(*flags).succeeded()
    folder = workspace.root / "model"
    shutil.copytree(
        workspace.run_folder("first") / "checkpoints" / "step-00000008", folder,
        ignore=shutil.ignore_patterns("optimizer*", "MANIFEST*", "trainer*", "special_tokens_map*"),
    )  # fmt: skip
    tokenizer = tiny_tokenizers.train(kind, [text.read_text(encoding="utf-8")], 384)
    tiny_tokenizers.write(tokenizer, kind, folder, **roles)
    ids = {f"{role}_id": tokenizer.token_to_id(name) for role, name in ROLES[kind].items() if isinstance(name, str)}
    for name in ("config.json", "generation_config.json"):
        content = {**read(folder / name), "bos_token_id": None, **ids}
        (folder / name).write_text(json.dumps(content))
    return folder


def train_on(workspace: Workspace, model: Path, text: Path, *flags: str) -> Path:
    """Continue pre-training from a model; return the last checkpoint."""
    start: list[str | Path] = ["--init-from", model, "--input", text, *SETTINGS, "--experiment=second", *flags]
    workspace.orchestrate(*start).succeeded()
    return workspace.run_folder("second") / "checkpoints" / "step-00000004"


def greedy_ids(checkpoint: Path, ids: list[int], count: int) -> list[int]:
    """Return the most likely continuation, from the logits alone."""
    for _ in range(count):
        logits = orchestrator.logits(checkpoint, ids, device="cpu")
        ids = [*ids, int(np.argmax(logits[-1]))]
    return ids[-count:]


@pytest.mark.parametrize("kind", KINDS)
def test_training_and_generation_agree_on_bos(workspace: Workspace, kind: str) -> None:
    text = workspace.write_text()
    model = make_model(workspace, kind, text)
    checkpoint = train_on(workspace, model, text)
    run = workspace.run_folder("second")
    adds_bos = kind in STARTING_WITH_BOS
    assert read(run / "resolved_config.json")["data"]["bos"] is adds_bos
    assert read(checkpoint / "trainer_state.json")["identity"].get("data.bos", False) is adds_bos
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    end = tokenizer.token_to_id(ROLES[kind]["eos_token"])
    bos = tokenizer.token_to_id(ROLES[kind]["bos_token"]) if adds_bos else end
    config = read(checkpoint / "config.json")
    assert (config["bos_token_id"], config["eos_token_id"]) == (bos, end)
    assert (checkpoint / "tokenizer_config.json").read_bytes() == (model / "tokenizer_config.json").read_bytes()

    workspace.trainer("validate-data", run, "--replay=1", "--replay=4").succeeded()
    report = json.loads(workspace.trainer("evaluate", "--checkpoint", checkpoint, "--json").succeeded().out)
    assert report["loss"] == pytest.approx(workspace.metrics("second", "evaluation")[-1]["loss"], rel=1e-6)
    assert report["bits_per_byte"] > 0

    moved = workspace.root / "alone"
    shutil.copytree(checkpoint, moved)
    completion = orchestrator.generate(moved, PROMPT, max_tokens=12, temperature=0.0, device="cpu")
    expected = greedy_ids(moved, tiny_tokenizers.encode(tokenizer, PROMPT), len(completion.tokens))
    assert completion.tokens == expected

    resume = ["--experiment=second", "--resume", "--steps=6"]
    process = workspace.orchestrate(*resume, f"--override=data.bos={str(not adds_bos).lower()}")
    process.refused(2, "data.bos")
    shutil.rmtree(model)
    workspace.orchestrate(*resume).succeeded()


def test_printed_text_keeps_its_spaces(workspace: Workspace) -> None:
    text = workspace.write_text()
    longer = ["--steps=150", "--evaluate-every=150", "--learning-rate=1e-2"]
    train_on(workspace, make_model(workspace, "llama_2", text), text, *longer)
    checkpoint = workspace.run_folder("second") / "checkpoints" / "step-00000150"
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    comparisons = 0
    for seed, prompt in enumerate(["", "def", "return caf\u00e9", "x = \u4e2d\u6587", "a  "]):
        words = ("generate", "--checkpoint", checkpoint, "--prompt", prompt, "--max-tokens=30", f"--seed={seed}")
        output = workspace.trainer(*words).succeeded().out
        answer = json.loads(workspace.trainer(*words, "--json").succeeded().out)
        whole = tokenizer.decode([*tiny_tokenizers.encode(tokenizer, prompt), *answer["tokens"]])
        assert prompt + answer["completion"] == whole
        # Bytes that are no text are replaced one by one as they come.
        if "\ufffd" not in output:
            assert output == f"{whole}\n"
            comparisons += " " in answer["completion"]
    assert comparisons > 1


def test_a_config_decides_on_bos(workspace: Workspace) -> None:
    text = workspace.write_text()
    model = make_model(workspace, "llama_3", text)
    checkpoint = train_on(workspace, model, text, "--override=data.bos=false")
    run = workspace.run_folder("second")
    assert read(run / "resolved_config.json")["data"]["bos"] is False
    assert read(checkpoint / "tokenizer_config.json")["add_bos_token"] is False
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    completion = orchestrator.generate(checkpoint, PROMPT, max_tokens=8, temperature=0.0, device="cpu")
    ids = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    assert completion.tokens == greedy_ids(checkpoint, ids, len(completion.tokens))

    shutil.rmtree(run)
    (model / "tokenizer_config.json").write_text("{}")
    content = read(model / "tokenizer.json")
    content["post_processor"] = None
    (model / "tokenizer.json").write_text(json.dumps(content))
    for name in ("config.json", "generation_config.json"):
        (model / name).write_text(json.dumps({**read(model / name), "bos_token_id": None}))
    start: list[str | Path] = ["--init-from", model, "--input", text, *SETTINGS, "--experiment=second"]
    workspace.orchestrate(*start, "--override=data.bos=true").refused(2, "data.bos is true", "has no BOS token")
    workspace.orchestrate(*start, "--override=data.bos=maybe").refused(2, "data.bos", "`auto`, true or false")
    workspace.orchestrate(*start).succeeded()
    assert read(run / "resolved_config.json")["data"]["bos"] is False


def test_the_end_of_documents_needs_no_name(workspace: Workspace) -> None:
    text = workspace.write_text()
    model = make_model(workspace, "llama_3", text, eos_token="<|eot_id|>")
    (workspace.root / "special_tokens.txt").write_text("<|eot_id|>\n")
    ends = {"eos_token_id": [2, 1]}
    (model / "generation_config.json").write_text(json.dumps(ends))
    override = f"--override=tokenizer.special_tokens={workspace.root / 'special_tokens.txt'}"
    checkpoint = train_on(workspace, model, text, override)
    assert read(checkpoint / "config.json")["eos_token_id"] == 1, "<|end_of_text|>, not the end of a turn"
