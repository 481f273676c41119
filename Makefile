PYTHON ?= python3
BIN := .venv/bin
BENCH ?= all

.DEFAULT_GOAL := help
.PHONY: help demo test coverage slow lint docs matrix package licences torture bench clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/^([a-z]+):[^#]*## */  make \1\t/' | expand -t 16

# The stamp makes an install happen once, and again only when what is installed changed.
.venv/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing sparsesam and its development tools into .venv (a minute or two)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps backpack-for-pytorch==1.7.1 curvlinops-for-pytorch==3.0.1
	@touch $@

demo: .venv/.installed  ## SGD, SAM, SSAM and the recommended optimizer side by side, about a minute
	@$(BIN)/sparsesam sweep demo
	@$(BIN)/sparsesam report runs/demo -o runs/demo/report.html

test: .venv/.installed  ## run the tests
	@$(BIN)/python -m pytest -q

coverage: .venv/.installed  ## run the tests and show which lines and branches they do not reach
	@$(BIN)/python -m pytest -q --cov --cov-report=term-missing:skip-covered

slow: .venv/.installed  ## run the slow tests: many architectures, compilers, processes
	@$(BIN)/python -m pytest -q -m slow

lint: .venv/.installed  ## style, types and the direction of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

docs: .venv/.installed  ## build the documentation in build/site, with every link checked
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

matrix: .venv/.installed  ## the core tests on other versions of Python and torch; writes docs/versions.md
	@$(BIN)/python tools/matrix.py

package: .venv/.installed  ## build wheel and sdist; install each alone and try it
	@$(BIN)/python tools/package.py

licences: .venv/.installed  ## list the licences of all dependencies
	@$(BIN)/python tools/licences.py

torture: .venv/.installed  ## damaged files, crashes and malformed inputs, about an hour; docs/reliability.md
	@OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore $(BIN)/python -m tests.torture

bench: .venv/.installed  ## every measured figure, about an hour; BENCH='steps --threads 1' for one
	@$(BIN)/python -m benchmarks $(BENCH)

clean:  ## remove the environment and everything the tools left
	@rm -rf .venv build dist runs .pytest_cache .hypothesis .coverage .mypy_cache .ruff_cache .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
