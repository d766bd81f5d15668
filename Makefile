# make tune: tune one head dim for one GPU, present or not.   make test: the whole test suite.
# Both need Python 3.11 or newer and nothing else: they set up .venv first, once per pyproject.toml and constraints.txt.

GPU ?= a100
HEADDIM ?= 128
PYTHON ?= python3
VENV := .venv

# The stamp's name holds a checksum of what decides the environment, so it is rebuilt when that changes, and only then.
READY := $(VENV)/ready-$(shell cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)

.PHONY: tune test setup clean

tune: setup
	$(VENV)/bin/fa2tune tune --gpu $(GPU) --headdim $(HEADDIM)

test: setup
	$(VENV)/bin/pytest

setup: $(READY)

$(READY):
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("fa2tune needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=/path/to/python3.11")'
	@echo "Setting up $(VENV): the first time downloads PyTorch, a minute or more."
	@rm -f $(VENV)/ready-*
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-latest build dist *.egg-info
