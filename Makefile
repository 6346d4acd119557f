# A fresh machine needs a C compiler, Rust (rustup reads rust-toolchain.toml) and Python 3.10 or later with venv; the rest is set up here.
# Stamp files in the virtual environments remember what is done, so every target can be run at any time, in any order.
# CARGO_TARGET_DIR is honoured by cargo, maturin and orchestrate alike.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ORACLE := .venv-oracle
PIP := -m pip install --quiet --disable-pip-version-check --require-hashes -r
RUST_SOURCES := $(shell find transformer_candle configs -type f) Cargo.toml Cargo.lock rust-toolchain.toml pyproject.toml

.PHONY: help demo test build lint format ci oracle learning-proof bench bench-cpu audit lock wheel binaries clean
.NOTPARALLEL:

help:
	@echo "make demo    train a small model on this machine's own text: set-up, tokenizer, training, a sample"
	@echo "make test    set-up and every test: cargo test, doc tests, pytest"
	@echo "make build   .venv with the release extension, and target/release"
	@echo "make lint    rustfmt, clippy, ruff, mypy, stubtest"
	@echo "make oracle  compare with PyTorch and transformers (a second venv of 6 GB)"
	@echo "make bench   training speed against PyTorch on this CPU"
	@echo "make ci      lint, test and oracle, as .ci/run does"
	@echo "make audit   licences and known holes of everything we depend on (compiles cargo-deny)"
	@echo "make lock    renew requirements/*.txt from pyproject.toml"

# The demo starts from nothing each time; its tokenizer and its text are kept.
demo: $(VENV)/.extension-dev binaries
	rm -rf "$${ORCHESTRATE_RUNS_ROOT:-runs}/demo"
	$(BIN)/orchestrate --stream --dataset demo --experiment demo

test: $(VENV)/.dev $(VENV)/.extension-dev binaries
	cargo test --workspace --locked
	$(BIN)/python -m pytest --ignore=tests/oracles

build: $(VENV)/.requirements
	rm -f $(VENV)/.extension-*
	VIRTUAL_ENV="$(CURDIR)/$(VENV)" PIP_QUIET=1 $(BIN)/maturin develop --release
	touch $(VENV)/.extension-release
	cargo build --release --locked
	@echo "Installed orchestrate in $(BIN)/; the trainer is $${CARGO_TARGET_DIR:-target}/release/transformer-candle"

lint: $(VENV)/.dev $(VENV)/.extension-dev
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	MYPYPATH=python $(BIN)/stubtest orchestrator._native --mypy-config-file pyproject.toml

format: $(VENV)/.dev
	cargo fmt --all
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

ci:
	$(MAKE) lint
	$(MAKE) oracle
	$(MAKE) test

# torch and transformers live apart: 150 s and 5.6 GB to install, and only these tests need them.
oracle: $(ORACLE)/.extension binaries
	$(ORACLE)/bin/python -m pytest tests/oracles

# Two runs of 2,000 steps, here and in PyTorch: 8 minutes; the figures are in docs/experiment_log.md.
learning-proof: $(ORACLE)/.extension binaries
	PYTHONPATH=tests $(ORACLE)/bin/python tests/oracles/learning_proof.py --folder "$$(mktemp -d)"

# Ours against PyTorch on this CPU, interleaved; leave the machine alone meanwhile.
bench: bench-cpu
bench-cpu: $(ORACLE)/.extension build
	$(ORACLE)/bin/python benches/cpu/run.py

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

$(ORACLE)/.requirements: requirements/oracle.txt
	$(PYTHON) -m venv $(ORACLE)
	$(ORACLE)/bin/python $(PIP) requirements/oracle.txt
	touch $@

$(ORACLE)/.extension: $(ORACLE)/.requirements $(VENV)/.extension-dev
	VIRTUAL_ENV="$(CURDIR)/$(ORACLE)" PIP_QUIET=1 $(BIN)/maturin develop
	touch $@

# Locks for every platform and Python at once, with hashes and no index named; each extends the one before.
LOCK = .venv-lock/bin/uv pip compile --quiet --universal --generate-hashes --no-header --no-emit-index-url --no-emit-find-links pyproject.toml
lock:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet uv
	$(LOCK) --python-version 3.10 --group build -o requirements/build.txt
	$(LOCK) --python-version 3.10 -c requirements/build.txt --group build --group test --group lint -o requirements/dev.txt
	$(LOCK) --python-version 3.11 -c requirements/dev.txt --group oracle -o requirements/oracle.txt

clean:
	rm -rf $(VENV) .venv-* .cargo-tools dist python/orchestrator/*.so
	cargo clean
