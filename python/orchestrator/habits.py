"""What people type who come from other programs, and what to type here.

The programs are nanoGPT, nanochat, litgpt, transformers, trl and llama.cpp. A test looks up every flag and every config
key that a hint names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

NEAR = 0.75
"""How alike two names are, from 0 to 1, for one to be a misspelling of the other."""

_RUN = "the run itself, without a flag"


def _table(*rows: tuple[str, str]) -> dict[str, str]:
    """Return rows of space-separated names and the hint they share, by name."""
    return {name: hint for names, hint in rows for name in names.split()}


TRAINING = _table(
    ("--lr --max-lr --peak-lr", "--learning-rate X"),
    ("--min-lr --lr-min", "--override scheduler.min_lr=X"),
    ("--epochs --num-epochs --num-train-epochs --n-epochs", "--override scheduler.total_epochs=N"),
    (
        "--max-steps --iters --max-iters --num-iterations --num-steps --train-steps --total-steps --n-steps "
        "--train-iters",
        "--steps N",
    ),
    (
        "--output-dir --out-dir --save-dir --output --out --work-dir",
        "--run-dir DIR, or --experiment NAME for a folder in runs/",
    ),
    ("--name --run-name --run --exp-name --model-tag --project", "--experiment NAME"),
    (
        "--block-size --context-length --max-seq-len --max-seq-length --sequence-length --seq-length --context "
        "--ctx-size --max-length --n-ctx",
        "--seq-len N",
    ),
    ("--dtype --mixed-precision --torch-dtype", "--precision bf16, fp32 or fp8"),
    ("--bf16 --fp16 --amp", "--precision bf16"),
    ("--fp8", "--precision fp8"),
    (
        "--model --model-name --model-name-or-path --base-model --pretrained --checkpoint-dir -m",
        "--init-from OWNER/NAME or --init-from DIR",
    ),
    (
        "--data --data-path --data-dir --train-data --train-file --training-data --dataset-path --dataset-name --files",
        "--input PATH for files of this machine, --dataset OWNER/NAME for the Hugging Face Hub",
    ),
    ("--val-data --validation-file --eval-data --val-file --eval-dataset", "--validation PATH"),
    ("--subset --dataset-config --dataset-config-name --config-name", "--data-config NAME"),
    ("--text-field --column --text-key --dataset-text-field", "--text-column NAME"),
    ("--limit --num-samples --max-docs --max-train-samples", "--max-samples N"),
    ("--num-workers --dataloader-num-workers", "--loader-workers N"),
    (
        "--wandb --use-wandb --wandb-project --report-to --wandb-log",
        "--tensorboard, which is written unless --no-tensorboard is given; metrics.jsonl in the run's folder has every "
        "figure",
    ),
    ("--lora-dropout", "--override lora.dropout=X"),
    ("--lora-r --rank --lora", "--lora-rank N"),
    ("--lora-target-modules --target-modules", "--override lora.target_modules=all-linear"),
    ("--merge", "after training: orchestrate export RUN --merge"),
    ("--n-layer --n-layers --num-layers --num-hidden-layers", "--layers N, or --depth N for a whole model of N layers"),
    ("--n-head --n-heads --num-heads --num-attention-heads", "--heads N"),
    ("--num-kv-heads --n-kv-heads --num-key-value-heads", "--kv-heads N"),
    ("--n-embd --d-model --dim --hidden-dim --embedding-dim", "--hidden-size N"),
    ("--d-ff --ffn-dim --ffn-hidden-size --mlp-dim", "--intermediate-size N"),
    (
        "--per-device-train-batch-size --device-batch-size --micro-batch-size --micro-batch --bs --mbs",
        "--batch-size N",
    ),
    ("--gradient-accumulation-steps --gradient-accumulation-iters --accum --grad-accum-steps", "--grad-accum N"),
    ("--global-batch-size", "--override data.sequences_per_step=N"),
    ("--total-batch-size", "--override data.tokens_per_step=N"),
    ("--warmup --warmup-iters --num-warmup-steps --lr-warmup-steps --warmup-ratio", "--warmup-steps N"),
    ("--lr-scheduler --lr-scheduler-type --scheduler --lr-schedule", "--schedule cosine, linear, constant or wsd"),
    ("--wd", "--weight-decay X"),
    ("--grad-clip --max-grad-norm --clip-grad", "--override optimizer.max_grad_norm=X"),
    ("--optimizer --optim", "--override optimizer.algorithm=adamw or muon"),
    ("--beta1 --adam-beta1", "--override optimizer.beta1=X"),
    ("--beta2 --adam-beta2", "--override optimizer.beta2=X"),
    ("--eval-interval --eval-every --eval-steps", "--evaluate-every N"),
    ("--eval-iters", "--eval-batches N"),
    ("--save-interval --save-steps --save-every --checkpoint-interval", "--checkpoint-every N"),
    ("--save-total-limit", "--max-checkpoints N"),
    ("--log-interval --logging-steps", "--log-every N"),
    ("--gpus --devices --num-gpus --nproc-per-node --num-processes", "--nproc N"),
    ("--cpu --no-cuda --use-cpu", "--device cpu"),
    ("--gpu --cuda", "--device cuda"),
    ("--compile --torch-compile", "nothing: there is nothing to compile"),
    ("--flash-attn --flash-attention --attn-implementation", "nothing: attention never stores its scores"),
    (
        "--gradient-checkpointing --activation-checkpointing",
        "--override runtime.activation_recompute=selective or block",
    ),
    ("--tokenizer --tokenizer-name --tokenizer-path --tokenizer-dir", "--tokenizer-json FILE"),
    ("--threads --num-threads -t", "--override runtime.threads=N"),
    ("--resume-from-checkpoint --resume-from --continue --resume-training", "--resume, or --resume DIR"),
)
"""Flags of training programs, for the pipeline and `finetune`."""

FINE_TUNING = TRAINING | _table(
    ("--num-epochs --num-train-epochs --n-epochs", "--epochs N"),
    (
        "--model-name --model-name-or-path --base-model --pretrained --checkpoint-dir --init-from -m",
        "--model OWNER/NAME or --model DIR",
    ),
    (
        "--load-in-4bit --load-in-8bit --qlora --quantize --quantization --bits",
        "--lora-rank N for adapters beside weights of 16 bits: quantized weights cannot be trained beside",
    ),
    ("--lora-path --adapter --adapter-name-or-path --peft-model", "--lora-init-from DIR"),
)
"""Flags that mean something else, or something more, for `finetune`."""

USING = _table(
    (
        "-m --model --model-path --ckpt --ckpt-path --checkpoint-dir --model-name-or-path --out-dir --name --run",
        _RUN,
    ),
    ("-p --start --text", "--prompt TEXT"),
    ("-f --file", "--prompt-file FILE"),
    ("-n --n-predict --max-new-tokens --max-length --num-tokens --n-tokens", "--max-tokens N"),
    ("--temp -t", "--temperature X"),
    ("-s", "--seed N"),
    ("-sys --system-prompt", "--system TEXT"),
    ("--data --dataset --eval-data --file", "--input PATH"),
    ("--eval-iters --limit", "--max-sequences N"),
    ("--outtype --quantize --quant -q --quantization", "--type q8_0"),
    ("-o --outfile --output --output-dir --output-file", "--out PATH"),
    ("--repo --repo-id --hub-model-id", "the repository itself, OWNER/NAME, without a flag"),
    ("--private", "nothing: a new repository is private unless --public is given"),
    ("--commit-message", "--message TEXT"),
    ("--revision", "--branch NAME"),
    ("--lr --learning-rate", "--override optimizer.learning_rate=X"),
    ("--steps --iters --max-iters --num-iterations", "--max-steps N"),
    ("--preset --depth", "orchestrate plan --preset NAME, or orchestrate plan --depth N"),
    ("--gpus --devices --num-gpus --nproc-per-node", "--nproc N"),
    ("--cpu", "--device cpu"),
    ("--gpu --cuda", "--device cuda"),
)
"""Flags of other programs for commands on a run or a model."""

PLANNING = USING | _table(("--gpus --devices --num-gpus --nproc --nproc-per-node --num-processes", "--ranks N"))
"""Those for `plan`, which starts no processes."""

COMMANDS = _table(
    ("resume continue restart", "orchestrate train RUN --resume"),
    ("merge merge-lora merge_lora", "orchestrate export RUN --merge"),
    ("sample inference infer complete completion -p", "orchestrate generate RUN --prompt TEXT"),
    ("-m run", "orchestrate generate RUN --prompt TEXT, or orchestrate chat RUN"),
    ("eval test", "orchestrate evaluate RUN"),
    ("pretrain pre-train base_train", "orchestrate --dataset OWNER/NAME, or orchestrate --input PATH"),
    ("sft lora chat-sft finetune-lora finetune_lora fine-tune", "orchestrate finetune --model OWNER/NAME --input PATH"),
    ("convert quantize to-gguf convert-to-litgpt", "orchestrate export RUN"),
    ("upload publish", "orchestrate push OWNER/NAME RUN"),
    ("list ls ps status", "orchestrate runs"),
    ("monitor tail logs", "orchestrate watch RUN"),
    ("sweep search", "orchestrate tune SPACE.yaml RUN"),
    ("benchmark speed", "orchestrate bench RUN"),
    ("check info env version", "orchestrate doctor"),
    ("init config configs presets", "orchestrate preset NAME"),
    ("prepare tokenize", "orchestrate --dataset OWNER/NAME --launch none"),
    ("estimate memory", "orchestrate plan RUN"),
    ("validate verify audit", "orchestrate validate-data RUN"),
)
"""Commands of other programs."""


def hyphenated(name: str) -> str:
    """Return an option's name as it is declared: underscores count as hyphens."""
    return name.replace("_", "-")


def of_flag(flag: str, known_flags: Iterable[str], command: str | None) -> str:
    """Return what to say of an option that a command does not have.

    Args:
        flag: The option.
        known_flags: The options of the command.
        command: Its name; None for the pipeline.
    """
    known_flags = list(known_flags)
    where = f"`orchestrate {command}`" if command else "`orchestrate`"
    table = {None: TRAINING, "finetune": FINE_TUNING, "plan": PLANNING}.get(command, USING)
    hint = _fitting(table, hyphenated(flag), known_flags)
    if hint is None:
        names = {name.lstrip("-"): name for name in known_flags}
        near = get_close_matches(hyphenated(flag).lstrip("-"), names, n=2, cutoff=NEAR)
        hint = " or ".join(names[name] for name in near)
    message = f"{where} has no option {flag}"
    return f"{message}: type {hint}" if hint else message


def of_command(word: str, known_commands: Iterable[str]) -> str:
    """Return what to say of a command that there is none of."""
    known_commands = list(known_commands)
    hint = COMMANDS.get(word) or COMMANDS.get(hyphenated(word))
    if hint is None and (near := get_close_matches(hyphenated(word), known_commands, n=1, cutoff=NEAR)):
        hint = f"orchestrate {near[0]}"
    message = f"there is no command {word}"
    return f"{message}: type {hint}" if hint else f"{message}; there are: {', '.join(sorted(known_commands))}"


def _fitting(table: Mapping[str, str], word: str, known_words: list[str]) -> str | None:
    """Return the hint for an option, unless it begins with an option that the command lacks."""
    hint = table.get(word)
    first = hint.split()[0].rstrip(",") if hint else ""
    return hint if not first.startswith("--") or first in known_words else None
