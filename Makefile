# Requirements: a C compiler, Rust (rustup reads rust-toolchain.toml) and Python 3.10 or later with venv; everything else is installed
# here. Stamp files in the virtual environments record what is done, so targets can be run at any time, in any order.
# CARGO_TARGET_DIR is honoured by cargo, maturin and orchestrate alike.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ORACLE := .venv-oracle
PIP := -m pip install --quiet --disable-pip-version-check --require-hashes -r
# Tests on every core, each in a process of its own; one that is free takes over tests of another. Where tests wait for programs,
# servers and clocks, three processes share two cores.
PARALLEL := --numprocesses=auto --dist=worksteal
WAITING := --numprocesses=$(shell $(PYTHON) -c 'import os; print((3 * os.cpu_count() + 1) // 2)') --dist=worksteal
RUST_SOURCES := $(shell find transformer_candle configs -type f) Cargo.toml Cargo.lock rust-toolchain.toml pyproject.toml

# A build with CUDA shares the dependencies of one without and has its own folder for programs. CUDA uses the compiler of a CUDA
# toolkit; STAND_IN, for checks and tests only, one that compiles nothing.
TARGET := $(abspath $(or $(CARGO_TARGET_DIR),target))
CUDA := export CARGO_BUILD_BUILD_DIR="$(TARGET)" CARGO_TARGET_DIR="$(TARGET)/cuda"; \
	environment="$$(PYTHON=$(PYTHON) tools/cuda/toolchain.sh "$(TARGET)/cuda-toolchain")" && eval "$$environment" &&
STAND_IN := environment="$$(tools/cuda/stand_in.sh "$(TARGET)/cuda-emulated/libraries")" && eval "$$environment" &&

# Runs two commands at the same time; fails if one of them fails.
side_by_side = $(1) & $(2); status=$$?; wait $$! && exit $$status

.PHONY: help demo test set-up build cuda cuda-emulated lint format ci oracle check-kernels check-cuda learning-proof bench bench-cpu bench-data bench-quality torture check-examples audit lock wheel binaries clean
.NOTPARALLEL:

help:
	@echo "make demo    train a small model on text of this machine: set-up, tokenizer, training, a sample"
	@echo "make test    set-up, cargo test, doc tests, pytest without its slow tests, which make ci runs too"
	@echo "make build   .venv with the release extension, and target/release"
	@echo "make cuda    the same for NVIDIA GPUs: one program and one wheel that run with and without one"
	@echo "make lint    rustfmt, clippy (with and without CUDA), rustdoc's links, ruff, mypy, stubtest"
	@echo "make oracle  compare with PyTorch and transformers (a second venv of 6 GB)"
	@echo "make check-kernels check-cuda    the GPU kernels, and training with them, on a machine without a GPU"
	@echo "make bench   training speed against PyTorch on this CPU, data speed against datasets and DataLoader"
	@echo "make ci      lint, oracle, check-kernels, check-cuda and test, as .ci/run does"
	@echo "make torture kill runs at every system call, cut the power, refuse every write, change every byte"
	@echo "make check-examples    the examples for Slurm and SkyPilot, run on this machine (a third venv of 460 MB)"
	@echo "make audit   licenses and known vulnerabilities of all dependencies (compiles cargo-deny)"
	@echo "make lock    update requirements/*.txt from pyproject.toml"

# The demo trains from the first step each time; its tokenizer and text are reused.
demo: set-up
	rm -rf "$${ORCHESTRATE_RUNS_ROOT:-runs}/demo"
	$(BIN)/orchestrate --stream --dataset demo --experiment demo

# `make test SELECTED=` runs the slow ones too.
SELECTED ?= -m "not slow"
test: set-up
	$(call side_by_side,$(MAKE) $(VENV)/.dev,cargo test --workspace --locked)
	$(BIN)/python -m pytest $(WAITING) --ignore=tests/oracles --ignore=tests/cuda_emulator $(SELECTED)

build: $(VENV)/.requirements
	rm -f $(VENV)/.extension-*
	VIRTUAL_ENV="$(CURDIR)/$(VENV)" PIP_QUIET=1 $(BIN)/maturin develop --release
	touch $(VENV)/.extension-release
	cargo build --release --locked
	@echo "Installed orchestrate in $(BIN)/; the trainer is $${CARGO_TARGET_DIR:-target}/release/transformer-candle"

# One program and one wheel for machines with and without a GPU. Needs no GPU; a CUDA toolkit is installed if there is none.
# The commit is recorded in environment.json of every run.
cuda: $(VENV)/.requirements
	rm -f $(VENV)/.extension-*
	$(CUDA) export TRANSFORMER_CANDLE_COMMIT="$$(git rev-parse --short HEAD 2>/dev/null || true)" && \
		cargo build --release --locked --features cuda && \
		VIRTUAL_ENV="$(CURDIR)/$(VENV)" PIP_QUIET=1 $(BIN)/maturin develop --release --features cuda && \
		$(BIN)/maturin build --quiet --release --features cuda --out "$(TARGET)/cuda/wheels"
	gzip --to-stdout "$(TARGET)/cuda/release/transformer-candle" > "$(TARGET)/cuda/transformer-candle.gz"
	touch $(VENV)/.extension-cuda
	@echo "The trainer   $(TARGET)/cuda/release/transformer-candle, packed to be carried elsewhere in $(TARGET)/cuda"
	@echo "The wheel     $$(ls -t "$(TARGET)"/cuda/wheels/*.whl | head -n 1)"
	@echo "orchestrate   $(BIN)/orchestrate uses both; '$(BIN)/orchestrate doctor' says whether a GPU can be trained on"

# For the tests on an emulated driver and for nothing else: an nvcc that compiles nothing stands in for the real one.
cuda-emulated:
	$(STAND_IN) export CARGO_BUILD_BUILD_DIR="$(TARGET)" CARGO_TARGET_DIR="$(TARGET)/cuda-emulated"; \
		cargo build --locked --features cuda && cargo build --locked --features cuda -p python_bindings

lint: $(VENV)/.dev $(VENV)/.extension-dev
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	$(STAND_IN) cargo clippy -p kernels -p model -p training -p gpu_check -p cli -p python_bindings --features cuda --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links" cargo doc --workspace --no-deps --document-private-items --locked
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	MYPYPATH=python $(BIN)/stubtest orchestrator._native --mypy-config-file pyproject.toml

format: $(VENV)/.dev
	cargo fmt --all
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# Installing torch unpacks 5.6 GB on one core; the others compile meanwhile.
ci:
	$(call side_by_side,$(MAKE) $(ORACLE)/.requirements,$(MAKE) lint)
	$(MAKE) oracle
	$(MAKE) check-kernels
	$(MAKE) check-cuda
	$(MAKE) test SELECTED=

# torch, transformers and a model of 135 M parameters live apart: 150 s and 5.7 GB to install, and only these tests need them.
oracle: $(ORACLE)/.extension binaries
	$(ORACLE)/bin/python -m pytest $(WAITING) tests/oracles

# Every kernel for GPUs: its arithmetic under Triton's interpreter, its PTX made again byte for byte, and assembled.
check-kernels: $(ORACLE)/.requirements
	$(CUDA) PTXAS="$$(dirname "$$NVCC")/ptxas" OMP_NUM_THREADS=1 \
		$(ORACLE)/bin/python -m pytest $(PARALLEL) transformer_candle/kernels/triton/tests

# The trainer's way through CUDA without a GPU: on a driver that computes in the machine's memory, with Triton's interpreter.
check-cuda: $(ORACLE)/.extension cuda-emulated
	$(ORACLE)/bin/python -m pytest $(PARALLEL) tests/cuda_emulator

# Two runs of 2,000 steps, here and in PyTorch: 8 minutes; the figures are in docs/experiments/learning.md.
learning-proof: $(ORACLE)/.extension binaries
	PYTHONPATH=tests $(ORACLE)/bin/python tests/oracles/learning_proof.py --folder "$$(mktemp -d)"

# Ours against PyTorch on this CPU, interleaved; leave the machine alone meanwhile.
bench: bench-cpu bench-data
bench-cpu: $(ORACLE)/.extension build
	$(ORACLE)/bin/python benches/cpu/run.py

# Text of this machine through our stream and through datasets, tokenizers and PyTorch's DataLoader, half an hour; BENCH_TEXT keeps the text.
BENCH_TEXT ?= $(TARGET)/bench-text
bench-data: $(ORACLE)/.bench build
	PYTHONPATH=tests $(ORACLE)/bin/python benches/data/run.py --root "$(BENCH_TEXT)"
	PYTHONPATH=tests $(ORACLE)/bin/python benches/data/mixing.py
	PYTHONPATH=tests $(ORACLE)/bin/python benches/data/memory.py --root "$(BENCH_TEXT)"

# Loss against tokens and seconds, row by row, for hours: it can be killed, and resumes. QUALITY keeps the runs.
QUALITY ?= $(TARGET)/bench-quality
bench-quality: $(ORACLE)/.extension build
	mkdir -p "$(QUALITY)"
	$(ORACLE)/bin/python benches/quality/run.py --root "$(QUALITY)"

# All kills, losses of power, errors of the disk and damaged bytes, some hours; the tests draw samples of them. Needs strace. What
# TORTURE keeps of the first two is not repeated.
TORTURE ?= $(TARGET)/torture
torture: $(VENV)/.dev $(VENV)/.extension-dev binaries
	PYTHONPATH=tests $(BIN)/python tools/torture.py --root "$(TORTURE)"
	rm -rf "$(TORTURE)/disk"
	PYTHONPATH=tests $(BIN)/python tests/disk_programme.py --root "$(TORTURE)/disk"
	PYTHONPATH=tests $(BIN)/python tests/damage_programme.py

# The examples for Slurm and SkyPilot, the latter by SkyPilot itself as well (460 MB).
check-examples: $(ORACLE)/.extension .venv-skypilot/.requirements binaries
	$(ORACLE)/bin/python -m pytest $(WAITING) tests/oracles/test_examples.py

# cargo-deny is compiled from source for some minutes, which is why CI does not run it.
audit: $(VENV)/.dev
	cargo install --locked --quiet --root .cargo-tools cargo-deny@0.20.2
	.cargo-tools/bin/cargo-deny check
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet pip-audit==2.10.1
	.venv-audit/bin/pip-audit --require-hashes --disable-pip -r requirements/dev.txt

# The abi3 wheel, one for every Python from 3.10; WHEELS says where.
WHEELS ?= dist
wheel: $(VENV)/.requirements
	$(BIN)/maturin build --profile dev --out "$(WHEELS)"

# Packages are unpacked on one core; the trainer compiles meanwhile.
set-up:
	$(call side_by_side,$(MAKE) $(VENV)/.requirements,$(MAKE) binaries)
	$(MAKE) $(VENV)/.extension-dev

binaries:
	cargo build --locked

# One venv for the demo, the tests and the release build: dev.txt only adds to what build.txt installs.
$(VENV)/.requirements: requirements/build.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) requirements/build.txt
	touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.requirements
	$(BIN)/python $(PIP) requirements/dev.txt
	touch $@

$(VENV)/.extension-dev: $(RUST_SOURCES) $(VENV)/.requirements
	rm -f $(VENV)/.extension-*
	VIRTUAL_ENV="$(CURDIR)/$(VENV)" PIP_QUIET=1 $(BIN)/maturin develop
	touch $@

$(ORACLE)/.requirements: requirements/oracle.txt requirements/oracle-files.txt
	$(PYTHON) -m venv $(ORACLE)
	$(ORACLE)/bin/python $(PIP) requirements/oracle.txt
	$(ORACLE)/bin/python $(PIP) requirements/oracle-files.txt --no-deps
	touch $@

# Needs another click than typer does: an environment of its own.
.venv-skypilot/.requirements: requirements/skypilot.txt
	$(PYTHON) -m venv .venv-skypilot
	.venv-skypilot/bin/python $(PIP) requirements/skypilot.txt
	touch $@

$(ORACLE)/.bench: requirements/bench.txt $(ORACLE)/.extension
	$(ORACLE)/bin/python $(PIP) requirements/bench.txt
	touch $@

# The extension is built for any Python (abi3) and lies in python/orchestrator: this environment only has to know of it.
# Building it again would compile what depends on the interpreter's path twice, for each change.
$(ORACLE)/.extension: $(ORACLE)/.requirements $(VENV)/.extension-dev
	cp -R $(VENV)/lib/python*/site-packages/transformer_candle* $(ORACLE)/lib/python*/site-packages/
	sed '1s|.*|#!$(CURDIR)/$(ORACLE)/bin/python|' $(BIN)/orchestrate > $(ORACLE)/bin/orchestrate
	chmod +x $(ORACLE)/bin/orchestrate
	touch $@

# Locks for every platform and Python at once, with hashes and no index named; each extends the one before.
LOCK = .venv-lock/bin/uv pip compile --quiet --universal --generate-hashes --no-header --no-emit-index-url --no-emit-find-links
lock:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet uv
	$(LOCK) --python-version 3.10 pyproject.toml --group build -o requirements/build.txt
	$(LOCK) --python-version 3.10 -c requirements/build.txt pyproject.toml --group build --group test --group lint -o requirements/dev.txt
	$(LOCK) --python-version 3.11 -c requirements/dev.txt pyproject.toml --group oracle -o requirements/oracle.txt
	$(LOCK) --python-version 3.11 -c requirements/dev.txt -c requirements/oracle.txt pyproject.toml --group oracle --group bench -o requirements/bench.txt
	$(LOCK) --python-version 3.11 --group pyproject.toml:skypilot -o requirements/skypilot.txt
	$(LOCK) --python-version 3.10 --no-deps --group pyproject.toml:cuda-compiler -o requirements/cuda-compiler.txt
	$(LOCK) --python-version 3.11 --no-deps --group pyproject.toml:oracle-files -o requirements/oracle-files.txt

clean:
	rm -rf $(VENV) .venv-* .cargo-tools dist python/orchestrator/*.so
	cargo clean
