"""Write `tests/golden/model_*.safetensors`: a tiny Llama of transformers, its loss, gradients and training.

Run `python tests/oracles/make_models.py` in an environment with torch, transformers and safetensors. `model_tied` and
`model_untied` train; in `model_documents` each sequence holds several documents that see themselves only (attention in
blocks, positions from each document's start). Tensors:

    weights.<name>          float32, Hugging Face names (lm_head.weight only in the untied model)
    input_ids, targets      int64 [sequences, positions]; targets are already shifted, -100 = ignored
    documents               int64 [sequences, positions]: where each token's document begins (model_documents only)
    loss                    float64 [1]: mean over the targets that are not ignored
    gradients.<name>        float64: of that loss
    bf16.loss_error         float64 [1]: |loss of PyTorch's bfloat16 run - loss|
    bf16.error.<name>       float64 [1]: relative norm of the error of PyTorch's bfloat16 gradient
    training.input_ids, training.targets   int64 [steps, micro-batches, sequences, positions]
    training.learning_rates float64 [steps]
    training.losses         float64 [steps]: before each update, mean over the targets of all micro-batches
    training.grad_norms     float64 [steps]: before clipping to 1.0

Training is AdamW (betas 0.9 and 0.95, epsilon 1e-8), decoupled decay 0.1 on the projections and an untied head only.
The settings of the model itself are in `CONFIG` and, as numbers, in the file's metadata.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
CONFIG = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
}  # fmt: skip
SEQUENCES, POSITIONS, STEPS, MICRO_BATCHES = 3, 13, 20, 2
# Whether the head is tied to the embedding, and whether sequences hold documents.
MODELS = {"tied": (True, False), "untied": (False, False), "documents": (False, True)}


def build(tied: bool) -> LlamaForCausalLM:
    config = LlamaConfig(**CONFIG, tie_word_embeddings=tied, attn_implementation="eager", attention_dropout=0.0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.15 * noise)
    return model


class ExactRotary(torch.nn.Module):
    """Cosines and sines of the angles in float64, [sequences, positions, head_dim] each."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        head_dim = CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
        frequencies = CONFIG["rope_theta"] ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = (position_ids[..., None] * frequencies).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


def exact(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return the model in float64: by default norms, angles and softmax are float32, which rounds by processor."""
    model.set_attn_implementation("sdpa")
    layers = model.model.layers
    for parent, name in [(model.model, "norm")] + [
        (layer, name) for layer in layers for name in ("input_layernorm", "post_attention_layernorm")
    ]:
        norm = torch.nn.RMSNorm(CONFIG["hidden_size"], eps=CONFIG["rms_norm_eps"])
        norm.weight = getattr(parent, name).weight
        setattr(parent, name, norm)
    model.model.rotary_emb = ExactRotary()
    return model.double()


def loss_sum(
    model: LlamaForCausalLM, ids: torch.Tensor, targets: torch.Tensor, documents: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the summed loss in nats; logits are widened to float32 at least."""
    attention_arguments = {} if documents is None else kept_apart(documents, model.dtype)
    logits = model(input_ids=ids, **attention_arguments).logits
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


def kept_apart(documents: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return a block mask for attention, [sequences, 1, queries, keys], and positions from each document's start."""
    positions = torch.arange(documents.shape[-1])
    visible = (positions <= positions[:, None]) & (positions >= documents[..., None])
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
    return {"attention_mask": mask[:, None], "position_ids": positions - documents}


def draw_documents(sequences: int, positions: int) -> torch.Tensor:
    """Return where each token's document begins, [sequences, positions], for documents of 1 to 6 tokens."""
    first = torch.zeros(sequences, positions, dtype=torch.bool)
    for sequence in first:
        sequence[torch.randint(1, 7, (positions,)).cumsum(0).clamp(max=positions - 1)] = True
    return torch.where(first, torch.arange(positions), 0).cummax(dim=1).values


def draw_batch(*shape: int, ignored: float) -> tuple[torch.Tensor, torch.Tensor]:
    ids, targets = (torch.randint(0, CONFIG["vocab_size"], shape) for _ in range(2))
    return ids, targets.masked_fill(torch.rand(shape) < ignored, -100)


def gradients(
    model: LlamaForCausalLM, ids: torch.Tensor, targets: torch.Tensor, documents: torch.Tensor | None
) -> tuple[torch.Tensor, dict]:
    model.zero_grad()
    loss = loss_sum(model, ids, targets, documents) / (targets != -100).sum()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def learning_rates() -> list[float]:
    warmup, peak, floor = 4, 3e-3, 3e-4
    cosine = [
        floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * (s - warmup) / (STEPS - warmup)))
        for s in range(warmup, STEPS)
    ]
    return [peak * (s + 1) / warmup for s in range(warmup)] + cosine


def train(model: LlamaForCausalLM, ids: torch.Tensor, targets: torch.Tensor, rates: list[float]) -> tuple[list, list]:
    decays = {name: p.dim() == 2 and "embed_tokens" not in name for name, p in model.named_parameters()}
    groups = [
        {"params": [p for n, p in model.named_parameters() if decays[n] == flag], "weight_decay": 0.1 * flag}
        for flag in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step, rate in enumerate(rates):
        count = (targets[step] != -100).sum()
        optimizer.zero_grad()
        total = 0.0
        for micro in range(MICRO_BATCHES):
            loss = loss_sum(model, ids[step, micro], targets[step, micro]) / count
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        losses.append(total)
    return losses, norms


def fixture(name: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(20_261_121)
    tied, packed = MODELS[name]
    model = build(tied)
    out = {f"weights.{name}": p.detach().clone() for name, p in model.named_parameters()}
    ids, targets = draw_batch(SEQUENCES, POSITIONS, ignored=0.2)
    documents = draw_documents(SEQUENCES, POSITIONS) if packed else None
    if documents is not None:
        out["documents"] = documents
    as_released, _ = gradients(model.double(), ids, targets, documents)
    model = exact(model)
    loss, expected_gradients = gradients(model, ids, targets, documents)
    torch.testing.assert_close(loss, as_released, rtol=1e-6, atol=0.0)
    out |= {"input_ids": ids, "targets": targets, "loss": loss.reshape(1)}
    out |= {f"gradients.{name}": grad for name, grad in expected_gradients.items()}

    half = build(tied).bfloat16()
    half.load_state_dict(
        {n.removeprefix("weights."): t for n, t in out.items() if n.startswith("weights.")}, strict=False
    )
    rough_loss, rough = gradients(half, ids, targets, documents)
    out["bf16.loss_error"] = (rough_loss.double() - loss).abs().reshape(1)
    for name, grad in expected_gradients.items():
        out[f"bf16.error.{name}"] = ((rough[name].double() - grad).norm() / grad.norm()).reshape(1)

    if not packed:
        out |= training(model)
    return {name: tensor.contiguous().clone() for name, tensor in out.items()}


def training(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    rates = learning_rates()
    batch = draw_batch(1, MICRO_BATCHES, SEQUENCES, POSITIONS, ignored=0.3)
    batches = [tensor.expand(STEPS, -1, -1, -1) for tensor in batch]  # one batch over and over: it is learnt
    losses, norms = train(model, *batches, rates)
    out = {"training.input_ids": batches[0], "training.targets": batches[1]}
    for name, values in (("learning_rates", rates), ("losses", losses), ("grad_norms", norms)):
        out[f"training.{name}"] = torch.tensor(values, dtype=torch.float64)
    return out


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for name, (tied, _) in MODELS.items():
        path = GOLDEN / f"model_{name}.safetensors"
        save_file(fixture(name), path, metadata={"config": json.dumps(CONFIG | {"tie_word_embeddings": tied})})
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
