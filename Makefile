# Two commands do all from a bare clone with Python 3.11, 3.12 or 3.13, make and a package index:
#   make demo    the same bits everywhere, the operators' speed, and a language model that learns real text
#   make test    linters, type checker and the whole test suite

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-hosts test-large lint docs dist matrix torture bench aclnn gpu-check kernels ascend-check digests clean

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --upgrade pip setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[demo,bench,dev]"
	touch $@

demo: $(VENV)/ready
	PYTHONPATH=examples $(BIN)/python -m demo $(ARGS)

test: $(VENV)/ready lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder

$(VENV)/hosts: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[hosts]"
	touch $@

# Against Hugging Face Transformers and Megatron-Core, installed into the same environment.
test-hosts: $(VENV)/hosts
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadscope tests/hosts

# The upstream system-test shapes above 64 MiB of tensors; the largest takes 19 GiB.
test-large: $(VENV)/ready
	MOEROUTE_LARGE=1 $(BIN)/python -m pytest tests/aclnn -k system_shapes

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/docs: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[docs]"
	touch $@

# The site, into build/site; a warning is an error. `make docs ARGS=serve` shows it while it is written.
docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(or $(ARGS),build --strict --quiet)

# Wheel and source distribution into dist, each installed into an environment of its own and tried.
dist: $(VENV)/ready
	$(BIN)/python tools/dist.py $(ARGS)

# The short suite on other versions of Python and torch, into docs/versions.md.
matrix: $(VENV)/ready
	$(BIN)/python tools/matrix.py $(ARGS)

# Ten minutes of calls that want to break something, into docs/reliability.md.
torture: $(VENV)/ready
	$(BIN)/python tools/torture.py $(ARGS)

bench: $(VENV)/ready
	$(BIN)/moeroute bench $(ARGS)

# Headers and libraries for C and C++ programs, into build/aclnn.
aclnn: $(VENV)/ready
	$(BIN)/moeroute aclnn build $(ARGS)

# On a machine with a GPU: uses the torch and Triton of $(PYTHON), installs nothing.
gpu-check:
	$(PYTHON) tools/gpu_check.py $(ARGS)

# Every specialisation of the Triton kernels, compiled for NVIDIA and AMD without a GPU, into docs/kernels.md.
kernels: $(VENV)/ready
	env -u TRITON_INTERPRET $(BIN)/python tools/kernels.py $(ARGS)

# The same kernels, lowered for Ascend, in an environment of their own (build/ascend).
ascend-check: $(VENV)/ready
	env -u TRITON_INTERPRET $(BIN)/python tools/ascend_check.py

# The digests of all expected results, remade and confirmed in float64: src/moeroute/conformance/digests.json.
digests: $(VENV)/ready
	$(BIN)/python -m moeroute.conformance.digests $(ARGS)

clean:
	rm -rf $(VENV) out build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
