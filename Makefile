# Everything happens in .venv; nothing but Python >= 3.11, make and a C++ compiler is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := examples/out/bard-6m.llmc
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Tests start some hundred processes, and each would compile llmc's sources again.
unexport PYTHONDONTWRITEBYTECODE
# Tests run in so many processes, each file's tests in one of them, for what they share. In the order of their names: the
# files with the fewest tests are among the slowest, and one of them would be left at the end.
TEST_WORKERS ?= 2

.PHONY: install demo test test-slow test-minimums test-extras test-clients mutants lock lint format docs bench clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "llmc needs Python 3.11 or later, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/llmc build examples/models/bard-6m --target cpu -o $(DEMO) --force
	$(BIN)/llmc run $(DEMO) --prompt "KING RICHARD:" --max-tokens 90 --temperature 0.7 --top-k 20 --seed 5

test: $(STAMP)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow --timeout 3600

# Asks the package index for llmc's dependencies; a quarter of an hour of one core, and what it takes to download them.
test-extras: $(STAMP)
	$(BIN)/python -m pytest -m extras --timeout 3600

# Asks the package index for LangChain and LiteLLM, which are 400 MB; two minutes.
test-clients: $(STAMP)
	$(BIN)/python -m pytest -m clients tests/runtime/server/test_other_clients.py

# What the tests catch: 200 faults that are put into copies of the tree, one at a time. Hours of a core, and goes on where
# it was interrupted.
mutants: $(STAMP)
	$(BIN)/python -m tests.mutation --count 200 --jobs $(TEST_WORKERS)

# What pyproject.toml declares as the least, in an environment of its own, with the tests that meet most of other
# packages: 6 minutes of one core. Not a part of .ci/run: CI calls it once for a release. PyTorch is first, and stays: by
# default that of the other tests, which the index may have for CPUs; its own least, gigabytes where the index has it for
# CUDA, is MINIMUMS_TORCH=torch==2.11.0.
MINIMUMS := .venv-minimums
MINIMUMS_TORCH ?= torch -c constraints.txt
test-minimums:
	$(PYTHON) -m venv --clear $(MINIMUMS)
	$(MINIMUMS)/bin/python -m pip install --quiet --disable-pip-version-check uv $(MINIMUMS_TORCH)
	$(MINIMUMS)/bin/uv pip install --python $(MINIMUMS)/bin/python --resolution lowest-direct -e '.[dev]'
	$(MINIMUMS)/bin/python -m pytest -n $(TEST_WORKERS) --dist loadfile -p no:cacheprovider tests/cache tests/cli \
		tests/graph tests/debug/viz tests/runtime/test_engine.py tests/runtime/grammar \
		tests/runtime/text/test_chat_template.py tests/runtime/server tests/codegen/triton/test_compile_kernels.py

# Every package of deploy/Dockerfile with its hashes; but PyTorch, whose build for CPUs is in deploy/torch.lock.
lock: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip compile --quiet --upgrade --python-platform linux --python-version 3.12 --generate-hashes \
		--no-config --no-emit-package torch --custom-compile-command "make lock" --constraint constraints.txt \
		--override deploy/no-gpu.txt --extra serve --extra hf pyproject.toml deploy/image.in -o deploy/requirements.lock

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html: open it in a browser (its search needs a server: python -m http.server -d build/site)"

bench: $(STAMP)
	$(BIN)/python -m benchmarks.llama_1b

clean:
	rm -rf $(VENV) $(MINIMUMS) examples/out .pytest_cache .mypy_cache .ruff_cache .hypothesis
