PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

LINT := $(BIN)/ruff check && $(BIN)/ruff format --check && $(BIN)/mypy && $(BIN)/lint-imports

.PHONY: demo test slow lint format docs notebooks benchmarks clean

demo: .venv/demo.installed  ## Train a small network, make it smaller, save and export it to demo/, with demo/report.html.
	$(BIN)/critical-neurons demo --save demo

# The linters run beside the tests and are shown behind them. Bytecode: without it every run rewrites all asserts again.
test: .venv/dev.installed  ## What continuous integration runs.
	@{ $(LINT); } > .venv/lint.log 2>&1 & lint=$$!; \
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist worksteal; tests=$$?; \
	wait $$lint; lint=$$?; cat .venv/lint.log; [ $$tests = 0 ] && [ $$lint = 0 ]

slow: .venv/dev.installed  ## The tests that take minutes or need data outside the repository (DATA=folder).
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow --hypothesis-profile thorough --numprocesses 2 --dist worksteal

lint: .venv/dev.installed
	$(LINT)

format: .venv/dev.installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: .venv/docs.installed  ## The documentation, into docs/_build/html; a broken link or reference is an error.
	$(BIN)/python docs/render_command_line.py
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --builder html --doctree-dir docs/_build/doctrees docs docs/_build/html

notebooks: .venv/docs.installed  ## Run the notebooks and store their outputs.
	cd docs/notebooks && OMP_NUM_THREADS=1 $(CURDIR)/$(BIN)/jupyter execute --inplace *.ipynb

benchmarks: .venv/dev.installed  ## Time the cases that are not stored yet; docs/performance.md (DATA=folder VGG=weights RESNET=weights).
	$(BIN)/python benchmarks/performance.py run $(if $(DATA),--data $(DATA)) $(if $(VGG),--vgg $(VGG)) $(if $(RESNET),--resnet $(RESNET))
	$(BIN)/python benchmarks/performance.py page

# torch first and by itself: the pin in constraints.txt picks the CPU build.
.venv/torch.installed: constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) torch
	touch $@

.venv/%.installed: .venv/torch.installed pyproject.toml
	$(PIP) --editable '.[$*]'
	touch $@

# The paper's experiments are a package of their own.
.venv/dev.installed .venv/docs.installed: .venv/%.installed: .venv/torch.installed pyproject.toml reproduction/pyproject.toml
	$(PIP) --editable '.[$*]' --editable ./reproduction
	touch $@

clean:
	rm -rf .venv demo docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build src/*.egg-info reproduction/build reproduction/src/*.egg-info
