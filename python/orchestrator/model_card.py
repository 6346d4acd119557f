"""Writes the README.md of an exported model from its files and its run's: a model card of the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from orchestrator import _native
from orchestrator.exported_model import Kind, Model
from orchestrator.settings import DEMO_DATASET
from orchestrator.training_record import Row, Source, TrainingRecord

FILE = "README.md"
GENERATED = "<!-- Written by orchestrate. Remove this line after editing: `orchestrate push` then keeps the page. -->"
"""Marks a generated card; a card on the Hub without this line is a user's and is kept."""
MOST_EVALUATIONS = 12
"""Rows of the table of the loss curve, at most."""
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon for the projections of the blocks, AdamW for the rest"}
PROGRAM = "transformer_candle"


def written(model: Model, name: str, source: str) -> str:
    """Return the card's text.

    Args:
        model: What is exported.
        name: What the model is called.
        source: The folder or the repository that the model is loaded from.
    """
    record = model.record
    parts = [
        f"---\n{_front_matter(model)}\n---\n\n{GENERATED}\n\n# {name}\n\n{_summary(model)}",
        "## Use\n\n" + _usage(model, source),
        "## Model\n\n" + _model_table(model),
        _data_section(record),
        _training_section(model),
        _evaluation_section(record),
        _origin(record),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(model: Model) -> str:
    from huggingface_hub import ModelCardData

    datasets = list(dict.fromkeys(source.name for source in model.record.sources() if source.is_on_hub))
    base, is_adapter = model.base_model, model.kind is Kind.ADAPTERS
    data = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        datasets=datasets or None,
        base_model=base[0] if base else None,
        tags=["lora"] if is_adapter else None,
    )
    return str(data.to_yaml())


def _summary(model: Model) -> str:
    record = model.record
    parameters = sum(tensor.elements for tensor in model.tensors.values())
    about = f"A language model of {parameters:,} parameters with the architecture `{_architecture(model)}`"
    if model.kind is Kind.ADAPTERS:
        about = f"LoRA adapters of {parameters:,} parameters for a model with the architecture `{_architecture(model)}`"
    if record.step is None:
        return f"{about}."
    tokens = f" ({record.state['tokens']:,} tokens)" if "tokens" in record.state else ""
    how = "fine-tuned on conversations" if record.is_chat else "trained" if model.adapters else "pre-trained"
    origin = _beginning(model)
    ends = "It answers in conversations." if record.is_chat else "It continues text."
    return f"{about}, {how} {origin}{' ' if origin else ''}for {record.step:,} steps{tokens}. {ends}"


def _beginning(model: Model) -> str:
    """Return which weights training started from."""
    relation = "beside the weights of" if model.adapters else "from the weights of"
    if base := model.base_model:
        return f"{relation} [{base[0]}](https://huggingface.co/{base[0]}) at `{base[1][:12]}`"
    start = model.adapters.base if model.adapters else model.record.config.get("model", {}).get("init_from")
    if start:
        return f"{relation} the local model `{Path(start).name}`"
    return "from random weights" if model.record.config else ""


def _usage(model: Model, source: str) -> str:
    loader = "AutoModelForCausalLM"
    imports = "from transformers import AutoModelForCausalLM, AutoTokenizer"
    if model.kind is Kind.ADAPTERS:
        loader = "AutoPeftModelForCausalLM"
        imports = "from peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer"
    if model.has_chat_template:
        prompt = """messages = [{"role": "user", "content": "Hello!"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")"""
    else:
        prompt = 'inputs = tokenizer("Once upon a time", return_tensors="pt")'
    return f"""```python
{imports}

tokenizer = AutoTokenizer.from_pretrained("{source}")
model = {loader}.from_pretrained("{source}", dtype="auto")
{prompt}
tokens = model.generate(**inputs, max_new_tokens=64, do_sample=True)
print(tokenizer.decode(tokens[0], skip_special_tokens=True))
```"""


def _model_table(model: Model) -> str:
    config, tensors = _architecture_config(model), model.tensors.values()
    heads = config.get("num_attention_heads")
    rows: dict[str, object] = {
        "architecture": f"`{_architecture(model)}`",
        "parameters": sum(tensor.elements for tensor in tensors),
    }
    if model.kind is Kind.ADAPTERS:
        rows |= _adapter_rows(model)
    else:
        rows |= {
            "layers": config.get("num_hidden_layers"),
            "hidden size": config.get("hidden_size"),
            "intermediate size": config.get("intermediate_size"),
            "attention heads": heads,
            "key-value heads": config.get("num_key_value_heads") or heads,
            "head size": config.get("head_dim"),
            "vocabulary": config.get("vocab_size"),
            "context length": config.get("max_position_embeddings"),
            "tied embeddings": "yes" if config.get("tie_word_embeddings") else "no",
        }
    rows["stored as"] = ", ".join(sorted({tensor.dtype for tensor in tensors}))
    known_rows = [(label, f"{value:,}" if isinstance(value, int) else value) for label, value in rows.items() if value]
    return _table(["", ""], known_rows)


def _adapter_rows(model: Model) -> dict[str, object]:
    config = model.config
    modules = config["target_modules"]
    return {
        "rank": config["r"],
        "alpha": f"{config['lora_alpha']:g}" + (" (rsLoRA)" if config.get("use_rslora") else ""),
        "dropout": f"{config['lora_dropout']:g}" if config.get("lora_dropout") else None,
        "modules": modules if isinstance(modules, str) else ", ".join(modules),
    }


def _data_section(record: TrainingRecord) -> str:
    sources = record.sources()
    if not sources:
        return ""
    parts: list[dict[str, Any]] = [{}] * len(sources)
    if record.evaluations and len(record.evaluations[-1].get("components") or []) == len(sources):
        parts = record.evaluations[-1]["components"]
    columns = {
        "source": [_linked(source) for source in sources],
        "configuration": [source.config or "" for source in sources],
        "split": [source.split or "" for source in sources],
        "revision": [f"`{source.revision}`" if source.revision else "" for source in sources],
        "documents": [f"the first {source.max_samples:,}" if source.max_samples else "" for source in sources],
        "mixture weight": [f"{source.weight:.1%}" if source.weight is not None else "" for source in sources],
        "held-out loss": [f"{part['loss']:.4f}" if part else "" for part in parts],
    }
    filled = {head: cells for head, cells in columns.items() if any(cells)}
    return "## Data\n\n" + _table(list(filled), zip(*filled.values(), strict=True))


def _linked(source: Source) -> str:
    if source.is_on_hub:
        return f"[{source.name}](https://huggingface.co/datasets/{source.name})"
    if source.name == DEMO_DATASET:
        return f"the demo text of {PROGRAM}"
    return f"local files `{source.name}`"


def _stages(stages: list[dict[str, Any]]) -> dict[str, str]:
    """Return the row of a run with stages that replaces its row `batch`; empty for a run without."""
    texts = (
        f"{stage['steps']:,} steps of {stage['sequences_per_step']:,} sequences of {stage['sequence_length']:,} tokens"
        for stage in stages
    )
    return {"batch": "; then ".join(texts)} if stages else {}


def _training_section(model: Model) -> str:
    record = model.record
    if not record.config:
        return ""
    data, optimizer, schedule, runtime = (record.config[part] for part in ("data", "optimizer", "scheduler", "runtime"))
    sequences, length = data["sequences_per_step"], data["sequence_length"]
    total, warmup = schedule.get("total_steps"), schedule.get("batch_warmup_steps")
    clipping = optimizer.get("max_grad_norm")
    rows = {
        "steps": f"{record.step:,}" + (f" of {total:,}" if total else ""),
        "tokens": f"{record.state['tokens']:,}",
        "batch": f"{sequences:,} sequences of {length:,} tokens"
        + (f", reached after {warmup:,} steps" if warmup else ""),
        **_stages(record.config.get("stages") or []),
        "adapters": _adapters(model),
        "precision": runtime["precision"],
        "optimizer": f"{OPTIMIZERS.get(optimizer['algorithm'], optimizer['algorithm'])}; "
        f"betas {optimizer['beta1']:g} and {optimizer['beta2']:g}, weight decay {optimizer['weight_decay']:g}"
        + (f", gradient norm clipped to {clipping:g}" if clipping else ""),
        "learning rate": f"{optimizer['learning_rate']:g}, {schedule['strategy']}, "
        f"{schedule['warmup_steps']:,} warm-up steps, at least {schedule['min_lr']:g}",
        "seed": runtime["seed"],
    }
    return "## Training\n\n" + _table(["", ""], [row for row in rows.items() if row[1] is not None])


def _adapters(model: Model) -> str | None:
    """Return what was trained beside the weights of a model that the adapters are merged into."""
    if model.adapters is None or model.kind is Kind.ADAPTERS:
        return None
    return f"LoRA of rank {model.adapters.rank} and scale {model.adapters.scale:g}, merged into the weights"


def _evaluation_section(record: TrainingRecord) -> str:
    if not record.evaluations:
        if not record.train:
            return ""
        last = record.train[-1]
        text = f"The training loss at step {last['step']:,} was {last['loss']:.4f}; nothing was evaluated."
        return f"## Evaluation\n\n{text}"
    last, best = record.evaluations[-1], min(record.evaluations, key=lambda row: float(row["loss"]))
    has_own_text = record.config.get("data", {}).get("validation_shards")
    where = "a validation set" if has_own_text else "text held out of the data"
    text = f"On {where}, in nats per token. The last evaluation, at step {last['step']:,}: {_scores(last)}."
    if best is last:
        text += " It is the best."
    else:
        text += f" The best, at step {best['step']:,}: {_scores(best)}."
    heads = ["step", "training loss", "held-out loss", "perplexity", "bits per byte"]
    rows = [
        [f"{row['step']:,}", _training_loss(record.train, row["step"]), *_numbers(row)]
        for row in _picked(record.evaluations, best)
    ]
    return f"## Evaluation\n\n{text}\n\n{_table(heads, rows, numeric=True)}"


def _numbers(row: Row) -> list[str]:
    bits = row.get("bits_per_byte")
    return [f"{row['loss']:.4f}", f"{row['perplexity']:,.2f}", "" if bits is None else f"{bits:.4f}"]


def _scores(row: Row) -> str:
    loss, perplexity, bits = _numbers(row)
    return f"loss {loss}, perplexity {perplexity}" + (f", {bits} bits per byte" if bits else "")


def _training_loss(train: list[Row], step: int) -> str:
    """Return the loss of the last step that was logged up to `step`."""
    rows = [row for row in train if row["step"] <= step]
    return f"{rows[-1]['loss']:.4f}" if rows else ""


def _picked(evaluations: list[Row], best: Row) -> list[Row]:
    """Return some of many evaluations, evenly spaced, the first, the last and the best among them."""
    last = len(evaluations) - 1
    count = min(MOST_EVALUATIONS, last + 1)
    places = {round(place * last / max(count - 1, 1)) for place in range(count)}
    return [row for place, row in enumerate(evaluations) if place in places or row is best]


def _origin(record: TrainingRecord) -> str:
    environment = record.environment
    export_note = f"exported with {PROGRAM} {_native.__version__}"
    if not environment:
        return export_note.capitalize() + "."
    commit = f" (commit `{environment['commit']}`)" if environment.get("commit") else ""
    hardware = (environment.get("card") or {}).get("name") or environment.get("processor")
    place = f" on {hardware}" if hardware else ""
    return f"Trained with {PROGRAM} {environment['version']}{commit}{place}; {export_note}."


def _architecture(model: Model) -> str:
    config = _architecture_config(model)
    names = config.get("architectures") or [config.get("model_type", "unknown")]
    return str(names[0])


def _architecture_config(model: Model) -> Row:
    """Return the model's own config.json; that of adapters is another file."""
    return model.checked_config if model.kind is Kind.ADAPTERS else model.config


def _table(heads: list[str], rows: Iterable[Iterable[object]], numeric: bool = False) -> str:
    rule = "|" + ("--:|" if numeric else "---|") * len(heads)
    lines = ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in [heads, *rows]]
    return "\n".join([lines[0], rule, *lines[1:]])
