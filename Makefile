# Thin targets; continuous integration runs the same ones. Python 3.11+ and make are all that is needed.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
CONSTRAINTS ?= constraints.txt

.PHONY: env demo test lint check gpu-check triton-check support-table pictures bench peers faults soak mutation clean
env: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[test]'
	touch $@

# In two workers: files side by side, and beside them all tests of processes, one after another.
test: env lint
	$(BIN)/python -m pytest -n 2 --dist loadgroup

# Trains a small Llama on this Python's own standard library, one sequence over 4 local ranks; nothing is downloaded.
demo: env
	$(BIN)/ringspun train examples/stdlib.toml --fresh --prove \
	    --data "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"

# Slow; not part of `test`. Certifies this machine, and measures it (alone, please).
check: env
	$(BIN)/ringspun check --suite full
	$(BIN)/ringspun check --ranks 1,2,3,4,5,6,7,8 --seq-len 1,2,7,77,128,1000 --dtype float64,float32,bfloat16
	$(BIN)/ringspun check --framework jax --ranks 1,2,3,8 --seq-len 7,77,128 --dtype float64,float32,bfloat16

# Certifies the GPU here and measures it, in 5 minutes: with the machine's own PyTorch (2.11 or newer, NumPy, jaxtyping; nothing is
# installed), or with that of `make env`. Without a GPU it says so.
GPU_PYTHON ?= $(shell python3 -c 'import torch, numpy, jaxtyping' 2>/dev/null && command -v python3 || echo $(BIN)/python)
gpu-check:
	PYTHONPATH=src $(GPU_PYTHON) -m ringspun.testing.gpu_check --out benchmarks/results

# Writes the table of what each kernel does into the README, from what the conformance suite finds.
support-table: env
	$(BIN)/python -m ringspun.testing.support README.md

# Draws the pictures of README and docs/ anew; a test holds their numbers against the code.
pictures: env
	$(BIN)/python -m ringspun.pictures.docs docs/pictures

bench: env
	$(BIN)/ringspun bench ring --ranks 2,4 --seq-len 16384

# Half an hour, on an idle machine. Only who is installed: $(BIN)/pip install --no-deps -r benchmarks/peers.txt
peers: env
	OMP_NUM_THREADS=1 $(BIN)/ringspun bench peers --save benchmarks/results/peers.json --plot benchmarks/results/peers.png \
	    > benchmarks/results/$$(date +%F)-bench_peers.md

# Half an hour each, on an idle machine: what faults do to attention, and whether it stays right and small for long.
faults: env
	$(BIN)/python benchmarks/faults.py --out benchmarks/results/$$(date +%F)-faults.md

soak: env
	$(BIN)/python benchmarks/soak.py

# Slow (10 minutes on 2 cores). Plants 300 faults in the core, one at a time, and shows which of them no test notices.
mutation: env
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/mutation.py

# Minutes. Interprets the Triton kernels on the CPU, in float32, and compiles them for cards that need not be there.
triton-check: env
	$(BIN)/pip install --quiet --disable-pip-version-check triton
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/torch/test_triton.py
	$(BIN)/python benchmarks/triton_compile.py

lint: env
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs build dist
