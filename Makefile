# make tune: tune one head dim for one GPU, present or not.   make test: the whole test suite.
# make docs: the documentation site, in site/.
# make release: the wheel of the last commit with the machine code of its rows, in dist/. Takes half an hour or more of one
# core, on all of them, and no GPU.
# They need Python 3.11 or newer and nothing else: they set up .venv first, once per pyproject.toml and constraints.txt.

GPU ?= a100
HEADDIM ?= 128
PYTHON ?= python3
VENV := .venv

# The stamp's name holds a checksum of what decides the environment, so it is rebuilt when that changes, and only then.
READY := $(VENV)/ready-$(shell cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)

.PHONY: tune test docs release setup clean

tune: setup
	$(VENV)/bin/fa2tune tune --gpu $(GPU) --headdim $(HEADDIM)

test: setup
	$(VENV)/bin/pytest

docs: setup
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo "Documentation: site/index.html"

release: setup
	rm -rf build/release dist
	mkdir -p build/release
	git archive HEAD | tar -x -C build/release
	PYTHONPATH=build/release $(VENV)/bin/python build/release/benchmarks/ship_binaries.py build/release/cache
	PYTHONPATH=build/release $(VENV)/bin/python build/release/benchmarks/ship_binaries.py build/release/cache --check
	for file in build/release/cache/*.sqlite; do PYTHONPATH=build/release $(VENV)/bin/python -P -m fa2tune cache renew --check --cache $$file || exit 1; done
	$(VENV)/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist build/release
	@large=$$(find dist -name '*.whl' -size +60000000c) && test -z "$$large" || { echo "larger than 60 MB: $$large"; exit 1; }
	@ls -l dist/*.whl

setup: $(READY)

$(READY):
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("fa2tune needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=/path/to/python3.11")'
	@echo "Setting up $(VENV): the first time downloads PyTorch, a minute or more."
	@rm -f $(VENV)/ready-*
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-latest build dist site *.egg-info
