# Two commands do everything on a fresh machine with Python 3.11 or newer:
#   make demo   installs what it needs and trains the demo
#   make test   installs what it needs, then runs linters, types and all tests

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
SGLANG := .venv-sglang

export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo setup system test lint types check sglang-cpu host-test clean

demo: setup
	$(BIN)/python examples/arithmetic_cpu/demo.py

setup: $(STAMP)

# torch comes first and alone, so that no other package chooses its build.
$(STAMP): requirements/torch.txt requirements/cpu.txt pyproject.toml setup.py
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --requirement requirements/torch.txt
	$(BIN)/pip install --quiet --requirement requirements/cpu.txt --constraint requirements/torch.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# SLURM, shellcheck and a browser for the tests that need them.
system:
	tools/system_packages.sh

# Two processes, since most tests wait or use one core; SGLang's servers need both cores for themselves.
test: system lint types sglang-cpu
	$(BIN)/python -m pytest -n 2 --dist loadfile --ignore tests/sglang
	REQUIRE_SGLANG=1 $(BIN)/python -m pytest tests/sglang

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# The demo's numbers over three seeds: about 5 minutes on two cores.
check: setup
	$(BIN)/python examples/arithmetic_cpu/check.py

# SGLang servers for a CPU, in an environment of their own: about 2 GB.
sglang-cpu: $(SGLANG)/installed

$(SGLANG)/installed: requirements/torch.txt requirements/sglang.txt requirements/sglang-no-deps.txt
	$(PYTHON) -m venv --clear $(SGLANG)
	$(SGLANG)/bin/pip install --quiet --requirement requirements/torch.txt
	$(SGLANG)/bin/pip install --quiet --requirement requirements/sglang.txt --constraint requirements/torch.txt
	$(SGLANG)/bin/pip install --quiet --no-deps --requirement requirements/sglang-no-deps.txt
	touch $@

# The adapter of one framework in that framework's own environment: make host-test HOST=verl
host-test:
	$(PYTHON) -m venv --clear .venv-$(HOST)
	.venv-$(HOST)/bin/pip install --quiet --requirement requirements/torch.txt
	.venv-$(HOST)/bin/pip install --quiet --no-deps --requirement requirements/cpu.txt
	.venv-$(HOST)/bin/pip install --quiet --no-deps --requirement requirements/hosts/$(HOST).txt
	.venv-$(HOST)/bin/python -m pytest tests/integrations --host $(HOST)

clean:
	rm -rf $(VENV) .venv-* build *.egg-info
