PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

LINT := $(BIN)/ruff check && $(BIN)/ruff format --check && $(BIN)/mypy && $(BIN)/lint-imports

.PHONY: demo test slow test-lowest test-python test-extras soak lint format docs notebooks benchmarks lock check-lock clean

demo: .venv/demo.installed  ## Train a small network, make it smaller, save and export it to demo/, with demo/report.html.
	$(BIN)/critical-neurons demo --save demo

# The linters run beside the tests and are shown behind them. Bytecode: without it every run rewrites all asserts again.
test: .venv/dev.installed  ## What continuous integration runs.
	@{ $(LINT); } > .venv/lint.log 2>&1 & lint=$$!; \
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist worksteal; tests=$$?; \
	wait $$lint; lint=$$?; cat .venv/lint.log; [ $$tests = 0 ] && [ $$lint = 0 ]

slow: .venv/dev.installed  ## The tests that take minutes or need data outside the repository (DATA=folder).
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow --hypothesis-profile thorough --numprocesses 2 --dist worksteal

# Whole enough to notice a package that is too old or missing, small enough to be run for every extra.
SMOKE := tests/test_package.py tests/core tests/io/test_checkpoint.py tests/io/test_mutated_files.py tests/selection/test_factorisation.py tests/solvers
UV := .throwaway/uv/bin/uv
EXTRAS := cvxpy dask datasets demo jobs onnx plot scip torch-pruning

.throwaway/uv/bin/uv:
	$(PYTHON) -m venv .throwaway/uv
	.throwaway/uv/bin/pip install --quiet --disable-pip-version-check uv

# torch is not lowered: it comes as constraints.txt pins it, the one CPU build that every index has.
test-lowest: $(UV)  ## The lowest versions that pyproject.toml admits, in an environment of their own.
	$(PYTHON) -m venv --clear .throwaway/lowest
	.throwaway/lowest/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	.throwaway/lowest/bin/pip freeze | grep '^torch==' > .throwaway/torch.txt
	$(UV) pip install --quiet --python .throwaway/lowest/bin/python --resolution lowest-direct --only-binary :all: \
		--no-binary critical-neurons --no-binary critical-neurons-reproduction --override .throwaway/torch.txt --editable '.[jobs,onnx,plot,scip,cvxpy]' --editable ./reproduction 'pytest>=8.0' 'hypothesis>=6.100'
	OMP_NUM_THREADS=1 .throwaway/lowest/bin/pytest -p no:cacheprovider $(SMOKE)

test-python: $(UV)  ## The same tests under another interpreter: PYTHON=python3.13.
	$(UV) venv --quiet --clear --python $(PYTHON) .throwaway/python
	$(UV) pip install --quiet --python .throwaway/python/bin/python $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS)) \
		--constraint constraints.txt --editable '.[jobs,onnx,plot,scip,cvxpy]' --editable ./reproduction pytest hypothesis
	OMP_NUM_THREADS=1 .throwaway/python/bin/pytest -p no:cacheprovider $(SMOKE)

test-extras: $(addprefix test-extra-,none $(EXTRAS))  ## No extra, and each one alone, in environments of their own.

test-extra-%: $(UV)
	$(UV) venv --quiet --clear --python $(PYTHON) .throwaway/$*
	$(UV) pip install --quiet --python .throwaway/$*/bin/python --constraint constraints.txt \
		$(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS)) --editable '.$(if $(filter none,$*),,[$*])'
	.throwaway/$*/bin/critical-neurons doctor
	OMP_NUM_THREADS=1 .throwaway/$*/bin/python tests/smoke.py
	rm -rf .throwaway/$*

soak: .venv/dev.installed  ## Damaged files and random networks by the thousand; goes on where it was stopped (FILES=, NETWORKS=).
	PYTHONPATH=. OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py run --files $(or $(FILES),10000) --networks $(or $(NETWORKS),2000)

lock: $(UV)  ## requirements.lock: versions and hashes of all that continuous integration may install.
	$(UV) pip compile pyproject.toml --quiet --extra dev --constraint constraints.txt --generate-hashes --no-header --no-annotate \
		$(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS)) --output-file requirements.lock

check-lock: $(UV)  ## Whether the lock can be installed as it is.
	$(UV) venv --quiet --clear --python $(PYTHON) .throwaway/locked
	$(UV) pip install --dry-run --quiet --python .throwaway/locked/bin/python --require-hashes \
		$(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS)) --requirement requirements.lock

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
	rm -rf .venv .throwaway demo docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build src/*.egg-info reproduction/build reproduction/src/*.egg-info
