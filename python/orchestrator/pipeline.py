"""The main job: resolve the data set, train the tokenizer, write the run's files, start the trainer."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator import (
    _native,
    adapters,
    base_config,
    dataset_name,
    depth,
    gpus,
    launch,
    pretrained,
    resume,
    run_files,
    signals,
    start_model,
    summary,
    tokenizer,
    training_length,
    training_record,
)
from orchestrator.base_config import BaseConfig
from orchestrator.command_error import CommandError, ExitCode
from orchestrator.long_words import LARGEST_VARIETY, LONGEST_WORD
from orchestrator.paths import Roots, RunLocation, shown
from orchestrator.progress import Reading, reading
from orchestrator.screen import amount, counted, note, step, warn
from orchestrator.settings import (
    DEFAULT_DATASET,
    DEFAULT_SPLIT,
    DEFAULT_STREAM_BATCH_SIZE,
    DEMO_DATASET,
    Launch,
    Settings,
)
from orchestrator.training_source import Source, open_source, streamed_flags

DEFAULT_VOCAB_SIZE = 4096


def run(settings: Settings) -> int:
    """Run the pipeline and return the exit code. Nothing is written before every flag has been checked."""
    roots = Roots.from_environment()
    dataset_name.check(settings.dataset, settings.split)
    _check_conflicts(settings)
    location = resume.locate(settings, roots) or _location(settings, roots)
    if settings.resume is not None:
        return _resume(settings, location, roots)
    named = settings.init_from
    if typed := settings.keys.get("lora_init_from"):
        start = adapters.locate(typed, "--lora-init-from")
        settings.keys["lora_init_from"] = str(start)
        if settings.config is None:
            named = named or adapters.named_base(start)
    if named is not None:
        settings.keys["init_from"] = str(start_model.locate(named, settings.model_flag))
        if repository := training_record.repository_of(Path(settings.keys["init_from"])):
            step("model", f"{repository[0]} at {repository[1][:12]}")
    base = base_config.choose(settings)
    if base.pretrained is not None:
        if named is not None:
            pretrained.download(named, base.pretrained, settings.model_flag)
        pretrained.check(base.pretrained, settings.tokenizer_json or base.tokenizer_json)
        if (start := base.values["lora"]["init_from"]) is not None:
            _native.check_start_adapters(start, base.pretrained)
            _take_chat_template(base, Path(start), base.pretrained)
    _native.check_threads(base.values["runtime"]["threads"], base.values["data"]["num_workers"])
    if settings.launch is not Launch.NONE:
        trainer = launch.trainer(settings.launch, roots.target) if settings.nproc is None else None
        gpus.require(base.values["runtime"]["device"], trainer)
    if settings.profile is not None:
        _native.check_profile(settings.profile, base.values["scheduler"]["total_steps"])
    if settings.nproc is not None:
        _check_step_is_shared(base.values, settings.nproc)
    with _native.RunLock(location.folder.absolute()) as lock, signals.on_forced_exit(lock.release):
        _refuse_an_earlier_run(location, base, settings)
        source = open_source(settings, base)
        ready = _prepare_tokenizer(settings, location, base, source)
        config = _write_files(settings, location, base, source, ready)
        _warn_of_epochs(settings, source, base, ready)
        if settings.launch is Launch.NONE:
            summary.show_prepared(config)
            return ExitCode.DONE
        job = launch.Job(
            config, time_limit=settings.time_limit, profile=settings.profile, lock=lock, ranks=settings.nproc
        )
        return _train(job, settings.launch, roots, location)


def _check_conflicts(settings: Settings) -> None:
    if settings.input and streamed_flags(settings):
        flags = ", ".join(streamed_flags(settings))
        raise CommandError(f"--input reads local files, and {flags} is for a streamed data set: give one or the other")
    if settings.dataset == DEMO_DATASET and (settings.revision or settings.data_config):
        raise CommandError(
            "this machine makes the data set demo itself, and there is only one: leave out --revision and --data-config"
        )
    starts = {"--config": settings.config, "--preset": settings.preset, "--depth": settings.depth}
    if len(given := [flag for flag, value in starts.items() if value is not None]) > 1:
        raise CommandError(f"{' and '.join(given)} say what to start from: give one of them")
    if settings.depth is not None and settings.init_from is not None:
        raise CommandError("--init-from takes the model's own sizes: leave out --depth")
    if settings.skip_tokenizer and settings.force_retrain_tokenizer:
        raise CommandError("--skip-tokenizer and --force-retrain-tokenizer contradict each other: give one of them")
    retrains = {"--vocab-size": settings.vocab_size, "--force-retrain-tokenizer": settings.force_retrain_tokenizer}
    if settings.init_from is not None and (given := [flag for flag, value in retrains.items() if value]):
        raise CommandError(f"--init-from trains on with the model's tokenizer: leave out {' and '.join(given)}")
    if settings.rebatch and settings.resume is None:
        raise CommandError("--rebatch changes how a resumed run computes its steps: give it with --resume")
    if settings.accept_changed_data and settings.resume is None:
        raise CommandError("--accept-changed-data is about the data of a resumed run: give it with --resume")
    if settings.nproc is not None:
        launch.check_ranks(settings.launch)
    if settings.time_limit is not None:
        _native.check_time_limit(settings.time_limit)
    trains = {"--resume": settings.resume, "--profile": settings.profile}
    for flag in (flag for flag, value in trains.items() if value is not None and settings.launch is Launch.NONE):
        raise CommandError(f"{flag} trains and --launch none does not: give one of them")


def _check_step_is_shared(values: dict[str, Any], ranks: int) -> None:
    """Refuse a number of ranks that the trainer would refuse after a tokenizer was trained."""
    sequences = values["data"]["sequences_per_step"]
    if sequences is not None and not values["stages"]:
        _native.check_sequences(sequences, ranks)


def _location(settings: Settings, roots: Roots) -> RunLocation:
    name = settings.experiment
    if name is None:
        data = Path(settings.input[0]).stem if settings.input else settings.dataset or DEFAULT_DATASET
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", data.rsplit("/", 1)[-1]).strip("-._").lower() or "run"
    return roots.location(name, settings.run_dir)


def _refuse_an_earlier_run(location: RunLocation, base: BaseConfig, settings: Settings) -> None:
    """Refuse a run directory with checkpoints: the trainer does too, but only after its files were rewritten.

    Checked while holding the run's lock, so that no other command can write the first checkpoint meanwhile.
    """
    checkpoints = base.checkpoints or location.folder / "checkpoints"
    if settings.resume is None and (checkpoints / "latest").exists():
        raise CommandError(
            f"{shown(checkpoints)} holds the checkpoints of an earlier run: add --resume to continue it, "
            "or give this run its own --experiment"
        )


def _take_chat_template(base: BaseConfig, start: Path, model: Path) -> None:
    """Render conversations as those were that the adapters were trained on, unless a template is named."""
    data = base.values["data"]
    if data["format"] == "chat" and data["chat_template"] is None:
        template = adapters.own_chat_template(start, model)
        if template is not None:
            data["chat_template"] = str(template)
            note(f"the chat template is that of the adapters, {shown(template)}; --chat-template names another one")


def _max_samples(settings: Settings, base: BaseConfig, source: Source) -> int | None:
    """Return the number of rows to train on; None for all."""
    return settings.max_samples or (base.max_samples if source.shards else None)


def _prepare_tokenizer(settings: Settings, location: RunLocation, base: BaseConfig, source: Source) -> tokenizer.Ready:
    """Return the tokenizer that was named, the experiment's if it fits, or one trained on the source."""
    named = settings.tokenizer_json or base.tokenizer_json
    if settings.skip_tokenizer and named is None:
        named = location.tokenizer / "tokenizer.json"
        if not named.exists():
            raise CommandError(f"--skip-tokenizer: {shown(named)} is not there: leave out the flag to train one")
    if named is not None and not settings.force_retrain_tokenizer:
        ready = tokenizer.read(named)
        step("tokenizer", f"{ready.vocab_size:,} tokens: {shown(named)}")
        return ready
    data, max_samples = source.data, _max_samples(settings, base, source)
    request = tokenizer.Request(
        vocab_size=base.vocab_size or DEFAULT_VOCAB_SIZE,
        special_tokens=_special_tokens(location, base),
        source={
            "name": data.name, "revision": data.revision, "files": data.files, "bytes": data.bytes,
            "config": settings.data_config, "split": settings.split or base.split or DEFAULT_SPLIT,
            "text_column": base.text_column,
            **({"mixture": source.mixture} if source.mixture else {}),
        },
        max_documents=min(settings.tokenizer_max_lines, max_samples or settings.tokenizer_max_lines),
        seed=settings.tokenizer_seed,
    )  # fmt: skip
    request.check()
    found = None if settings.force_retrain_tokenizer else tokenizer.reuse(location.tokenizer, request)
    if found is not None:
        step("tokenizer", f"{found.vocab_size:,} tokens, trained before: {shown(found.path)}")
        return found
    step("tokenizer", f"training {request.vocab_size:,} tokens on up to {request.max_documents:,} documents ...")
    started = time.monotonic()
    with reading() as watch:
        documents = data.documents(max_samples, watch.note)
        ready = tokenizer.train(location.tokenizer, request, _told(documents, watch), watch)
    if skipped := documents.describe_skipped():
        note(skipped)
    if ready.facts is not None:
        read = f"{counted(ready.facts.documents, 'document')}, {amount(ready.facts.bytes)}"
        step("", f"{ready.vocab_size:,} tokens from {read} in {time.monotonic() - started:.1f} s: {shown(ready.path)}")
        _print_compression(ready.facts)
        _print_long_words(ready.facts)
    return ready


def _told(documents: _native.Documents, watch: Reading) -> Iterator[str]:
    """Yield the documents, and show at once what is skipped."""
    for text in documents:
        for notice in documents.take_notices():
            watch.note(f"warning: {notice}")
        yield text
    for notice in documents.take_notices():
        watch.note(f"warning: {notice}")


def _print_compression(facts: tokenizer.Facts) -> None:
    if facts.bytes_per_token is None:
        return
    words = f", {facts.tokens_per_word:.2f} tokens per word" if facts.tokens_per_word else ""
    gpt2 = f"; GPT-2's: {facts.gpt2_bytes_per_token:.2f} bytes per token" if facts.gpt2_bytes_per_token else ""
    text = f"on {amount(facts.held_out_bytes)} of text that it was not trained on"
    step("", f"{facts.bytes_per_token:.2f} bytes per token{words} {text}{gpt2}")


def _print_long_words(facts: tokenizer.Facts) -> None:
    """Say what the tokenizer was trained on otherwise than it stands in the text."""
    if facts.split_words:
        words = counted(facts.split_words, "word")
        note(f"{words} of more than {LONGEST_WORD} characters without a break, split for the tokenizer's training only")
    if facts.left_out_characters:
        note(
            f"{facts.left_out_characters:,} characters of long words were left out of it: there are more than "
            f"{amount(LARGEST_VARIETY)} of different ones. Training reads them all"
        )


def _special_tokens(location: RunLocation, base: BaseConfig) -> list[str]:
    """Return the tokens that must stay whole: every tokenizer's, and what the config or special_tokens.txt adds."""
    said = base.values["tokenizer"]["special_tokens"]
    if not isinstance(said, list):
        said = run_files.read_special_tokens(Path(said) if said else location.folder / run_files.SPECIAL_TOKENS)
    return list(dict.fromkeys([*tokenizer.SPECIAL_TOKENS, *said]))


def _write_files(
    settings: Settings, location: RunLocation, base: BaseConfig, source: Source, ready: tokenizer.Ready
) -> Path:
    """Write what describes the run into its folder and return the config's path."""
    values = base_config.complete(base, settings, ready, source.shards, source.mixture)
    run_files.copy_tokenizer(location.folder, ready)
    if (template := values["data"]["chat_template"]) not in (None, *_native.BUILT_IN_CHAT_TEMPLATES):
        run_files.keep_chat_template(location.folder, template)
        values["data"]["chat_template"] = None
    written = run_files.write_streaming_config(location.folder, _streaming_config(settings, location, base, source))
    if written is not None:
        step("wrote", shown(written))
    if settings.open_keys is not None and (
        said := training_length.fit(values, location.folder, settings.open_keys, settings.nproc or 1)
    ):
        note(said)
    text = _native.config_to_yaml(values)
    if base.depth is not None:
        text = depth.reasons(base.depth, settings.vocab_size, values) + text
    if ready.facts is not None and not (location.folder / run_files.SPECIAL_TOKENS).exists():
        step("wrote", shown(run_files.write_special_tokens(location.folder, _special_tokens(location, base))))
    config, former = run_files.write_training_config(location.folder, text)
    step("wrote", f"{shown(config)} (from {base.described})")
    if former is not None:
        note(f"The previous training.yaml differed and is kept as {former.name}.")
    return config


def _streaming_config(
    settings: Settings, location: RunLocation, base: BaseConfig, source: Source
) -> run_files.StreamingConfig | None:
    """Return the description of the data set that is streamed; None where none is."""
    if source.shards is not None or source.mixture is not None:
        return None
    return run_files.StreamingConfig(
        dataset=source.data.name,
        split=settings.split or DEFAULT_SPLIT,
        max_samples=settings.max_samples,
        stream_batch_size=settings.stream_batch_size or DEFAULT_STREAM_BATCH_SIZE,
        experiment=location.experiment,
        config=settings.data_config,
        revision=source.data.revision,
        text_column=base.text_column,
        tokenizer=str(run_files.TOKENIZER),
    )


def _warn_of_epochs(settings: Settings, source: Source, base: BaseConfig, ready: tokenizer.Ready) -> None:
    """Warn where the run takes more tokens than the data hold, so that the same documents are read several times."""
    needed, facts = base.tokens_in_all, ready.facts
    if needed is None or facts is None:
        return
    if samples := _max_samples(settings, base, source):
        documents: float | None = samples
        data = f"--max-samples {samples:,}"
    elif source.shards is not None:
        documents = tokenizer.documents_in_all(facts, settings.tokenizer_max_lines, settings.tokenizer_seed)
        data = "the text of --input" if settings.input else "the text of data.train_shards"
    else:
        return
    if documents is not None and needed > (there := documents * facts.tokens_per_document):
        warn(
            f"{data} is about {there:,.0f} tokens and the run takes {needed:,}: "
            f"the same documents are read about {needed / there:.1f} times"
        )


def _resume(settings: Settings, location: RunLocation, roots: Roots) -> int:
    """Resume the run as its own files describe it, with the flags as overrides."""
    config = location.folder / run_files.TRAINING_CONFIG
    if not config.is_file():
        raise CommandError(_no_such_run(location, roots))
    resume.check(settings, location.folder)
    overrides = settings.config_overrides()
    job = launch.Job(
        config, overrides, settings.resume, settings.rebatch, settings.accept_changed_data, settings.time_limit,
        settings.profile, ranks=settings.nproc,
    )  # fmt: skip
    return _train(job, settings.launch, roots, location)


def _no_such_run(location: RunLocation, roots: Roots) -> str:
    named = f"there is no run to resume in {shown(location.folder)}: it has no {run_files.TRAINING_CONFIG}"
    prepared = sorted(path.parent.name for path in roots.runs.glob(f"*/{run_files.TRAINING_CONFIG}"))
    if not location.is_usual or not prepared:
        return f"{named}; start it without --resume"
    return f"{named}; the experiments there are: {', '.join(prepared)}"


def _train(job: launch.Job, mode: Launch, roots: Roots, location: RunLocation) -> int:
    step("training", launch.describe(job, mode, roots.target))
    try:
        if job.ranks is None:
            code = launch.start(job.words(), mode, roots.target, job.lock)
        else:
            code = launch.start_ranks(job.words(), job.ranks, job.lock)
    except _native.TrainerError as error:
        _suggest_settings(job, error.exit_code)
        raise
    _suggest_settings(job, code)
    if code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED) or (code == ExitCode.DONE and summary.ran_out_of_time(job)):
        summary.show_stopped(job, location)
    elif code == ExitCode.DONE:
        summary.show_finished(job, location, tokenizer.facts(location.folder / run_files.TOKENIZER.parent))
    return code


def _suggest_settings(job: launch.Job, code: int) -> None:
    """Say what finds other settings, if the run's are too large or unstable."""
    if code in (ExitCode.OUT_OF_MEMORY, ExitCode.DIVERGED):
        summary.show_refused(job, code)
