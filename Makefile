# On a fresh machine, `make run` and `make test` install everything they need.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --disable-pip-version-check -c constraints.txt
# The index that torch comes from, as in the Dockerfile. Empty: the default index, whose Linux
# build is for CUDA.
TORCH_INDEX_URL ?=
# Empty without an NVIDIA driver.
NVIDIA_DRIVER = $(shell command -v nvidia-smi 2>/dev/null)$(wildcard /proc/driver/nvidia/version)

.PHONY: help run test test-fast core test-ray check format chaos soak fuzz bench-peers gpu-kit screenshots rules protocol image clean \
	version wheels notes site release-check locks

help:
	@echo "make run     install what is missing and serve the bundled checkpoint on http://127.0.0.1:8000"
	@echo "             smaller, on Linux without a GPU:"
	@echo "             make run TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu"
	@echo "make test    install what is missing and run the whole test suite"
	@echo "make test-fast  the part of it without processes and training, within a minute"
	@echo "make core    the core's tests in a copy without extensions"
	@echo "make test-ray  install Ray (300 MB) and run the tests of the service on Ray Serve"
	@echo "make fuzz    damaged pictures and requests, EXAMPLES=5000 of each kind"
	@echo "make check   lint, format, types and import contracts"
	@echo "make format  format the code"
	@echo "make chaos   attack a running service in every way under load; WORKERS=2, ONLY='heic-30 swaps'"
	@echo "make soak    mixed load for MINUTES=30; looks for growth of memory"
	@echo "make bench-peers  install the other servers, each in its own environment"
	@echo "make gpu-kit  write all files for a GPU machine without a network to $(GPU_KIT); PYTHON_THERE=3.12"
	@echo "make rules   write the Prometheus rules as a manifest of its operator"
	@echo "make image   build the container's image VARIANT=cpu, cuda or cuda12"
	@echo "make protocol  write services.binpb from the .proto files of service/extensions/inference_protocol/grpc"
	@echo "make screenshots  take the screenshots in docs/images; needs Chromium"
	@echo "make wheels  write the wheels and the source distribution to dist/"
	@echo "make site    write the documentation's site to dist/site"
	@echo "make locks   renew versions and hashes of the packages for a release, the site and the images"
	@echo "make release-check  build and try a release; needs only package indexes"
	@echo "make clean   remove the virtual environment and caches"

# One stamp for each set of packages. make installs a set again only when a file that names its
# packages changes.
$(VENV)/.made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "vitserve needs Python 3.11 or later")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Only torch and its dependencies come from TORCH_INDEX_URL. The next line keeps the installed torch.
$(VENV)/.run: $(VENV)/.made pyproject.toml constraints.txt model/images/resample.c
	@echo "Installing into $(VENV): torch (200 MB, or gigabytes with CUDA's libraries), OpenVINO (60 MB)," \
		"and small packages such as Starlette, NumPy and Pillow ..."
	@$(if $(NVIDIA_DRIVER)$(TORCH_INDEX_URL),:,[ "$$(uname)" != Linux ] || echo "No NVIDIA driver is found." \
		"The CPU build of torch is far smaller: make run TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu")
	$(if $(TORCH_INDEX_URL),@$(PIP) --index-url '$(TORCH_INDEX_URL)' torch)
	@$(PIP) -e '.[openvino]'
	@touch $@

$(VENV)/.test: $(VENV)/.run
	$(PIP) --quiet -e '.[test]'
# Reference libraries for tests. --no-deps, because their dependencies would replace a CPU build of
# torch. The line above installs the dependencies that the tests use.
	$(PIP) --quiet --no-deps timm torchvision vit-pytorch einops peft accelerate psutil
	@touch $@

$(VENV)/.check: $(VENV)/.run
	$(PIP) --quiet -e '.[test,check]'
	@touch $@

# The bundled model is calibrated, so it can abstain.
run: $(VENV)/.run
	@VIT_TEACH="$${VIT_TEACH-taught}" VIT_TEACH_THUMBNAILS="$${VIT_TEACH_THUMBNAILS-true}" exec $(BIN)/vitserve serve $(if $(VIT_CHECKPOINT)$(VIT_COVERAGE)$(VIT_IMAGE_SIZE)$(VIT_PREPROCESS),,--coverage 0.9)

# One process more than cores, because tests often wait for a server. At most four, because each
# holds torch and its servers in memory. Each process takes whole files, long files first
# (tests/conftest.py), so a file's fixtures are made once. A test that ends its process fails, and
# another process continues. A run ends after 20 minutes.
# PYTHONDONTWRITEBYTECODE is unset because dozens of processes import the same modules.
TEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --numprocesses $$(($$(getconf _NPROCESSORS_ONLN) + 1)) --maxprocesses 4 \
	--dist loadfile --no-loadscope-reorder --max-worker-restart 2 --session-timeout 1200

test: $(VENV)/.test
	$(TEST)

# No server process and no training: under a minute on two cores.
# Files that start processes, compile graphs or decode many pictures.
SLOW := $(addprefix tests/, service/engine/test_loading.py service/web/test_decoders.py \
	service/test_single_process.py service/web/routes/test_zero_shot.py service/test_children.py \
	service/test_documented_extension.py service/test_extension_starts.py service/web/test_admit.py \
	service/web/test_base64_pictures.py service/web/test_library_networks.py vitserve/test_shrinking.py)

test-fast: $(VENV)/.test
	$(TEST) -m 'not ray and not slow' tests/simulation tests/vitserve tests/service/engine tests/service/models \
		tests/service/web tests/service/observe $(filter-out $(SLOW), $(wildcard tests/service/test_*.py)) \
		tests/model/test_*.py tests/model/network \
		$(addprefix --ignore=, $(SLOW))

# The core alone: a copy without the folders `extensions/`, whose metadata names no entry points. In the copy, Python does
# not find the editable installation of this folder.
CORE := runs/core

core: $(VENV)/.test
	rm -rf $(CORE) && mkdir -p $(CORE)/vitserve.egg-info
	git ls-files -z --cached --others --exclude-standard | grep -zv '/extensions/' \
		| tar --create --null --files-from - --ignore-failed-read 2>/dev/null | tar --extract --directory $(CORE)
	printf 'import sys\nsys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in finder.__module__]\n' \
		>$(CORE)/sitecustomize.py
	cp model/images/*.so $(CORE)/model/images/ 2>/dev/null || true
	printf 'Metadata-Version: 2.1\nName: vitserve\nVersion: %s\n' $(VERSION) >$(CORE)/vitserve.egg-info/PKG-INFO
	cd $(CORE) && PYTHONPATH="$$PWD" $(TEST:$(BIN)/%=$(abspath $(BIN))/%) tests/model tests/service tests/vitserve tests/simulation

test-ray: $(VENV)/.test
	$(PIP) --quiet -e '.[ray]'
	$(BIN)/pytest -m "ray or not ray" tests/extensions/ray/test_replicas.py tests/e2e/test_ray_serve.py

DAMAGED := tests/model/checkpoint/test_damaged_files.py tests/extensions/formats/test_damaged_single_files.py

fuzz: $(VENV)/.test
	EXAMPLES=$(or $(EXAMPLES),5000) $(BIN)/pytest -n0 --timeout 0 tests/fuzz $(DAMAGED) $(if $(SEED),--hypothesis-seed $(SEED))

check: $(VENV)/.check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.check
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Records of this machine. They have their own folder, because a benchmark continues an existing
# record.
RESULTS ?= runs/benchmarks

chaos: $(VENV)/.test
	@mkdir -p $(RESULTS)
	$(BIN)/python -m benchmarks.reliability --workers $(or $(WORKERS),1) $(if $(ONLY),--only $(ONLY)) \
		--record $(RESULTS)/chaos.json

soak: $(VENV)/.test
	@mkdir -p $(RESULTS)
	$(BIN)/python -m benchmarks.reliability --soak $(or $(MINUTES),30) --record $(RESULTS)/soak.json

bench-peers: $(VENV)/.test
	$(BIN)/python -m benchmarks.peers.make_environments

# The Python version on the machine with the GPU.
PYTHON_THERE ?= 3.12
GPU_KIT := dist/gpu-kit

gpu-kit: $(VENV)/.test
	rm -rf $(GPU_KIT)
	@$(BIN)/python -m benchmarks.gpu_kit $(GPU_KIT) --python $(PYTHON_THERE)

PROMETHEUS_RULE := deploy/kubernetes/components/monitoring/prometheusrule.yaml

rules:
	sed -i '/^  groups:$$/q' $(PROMETHEUS_RULE)
	sed --separate '1,/^groups:$$/d; s/^./  &/' deploy/prometheus/rules/*.yml >>$(PROMETHEUS_RULE)

# The compiler has its own environment.
GRPC := service/extensions/inference_protocol/grpc

protocol: $(VENV)/.made
	$(BIN)/python -m venv $(VENV)/protocol
	$(VENV)/protocol/bin/pip install --quiet --disable-pip-version-check 'grpcio-tools==1.72.*'
	# v1alpha differs from v1 only in its package.
	mkdir -p $(VENV)/protocol/proto/grpc/reflection/v1alpha
	sed 's/^package .*/package grpc.reflection.v1alpha;/' $(GRPC)/proto/grpc/reflection/v1/reflection.proto \
		>$(VENV)/protocol/proto/grpc/reflection/v1alpha/reflection.proto
	$(VENV)/protocol/bin/python -m grpc_tools.protoc --proto_path=$(GRPC)/proto \
		--proto_path=$(VENV)/protocol/proto --descriptor_set_out=$(GRPC)/services.binpb \
		inference.proto grpc/health/v1/health.proto grpc/reflection/v1/reflection.proto \
		grpc/reflection/v1alpha/reflection.proto

screenshots: $(VENV)/.test
	$(BIN)/python -m tests.e2e.page.screenshots

# Tools of a release, in their own environment.
RELEASE := $(VENV)/release
VERSION = $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' pyproject.toml)

$(RELEASE)/.made: $(VENV)/.made deploy/release/requirements.txt
	$(BIN)/python -m venv $(RELEASE)
	$(RELEASE)/bin/pip install --quiet --disable-pip-version-check --require-hashes -r deploy/release/requirements.txt
	@touch $@

# requirements.in names the tools. A locked version stays until its line is deleted from
# requirements.txt. pyproject.toml names the packages of an image, constraints.txt their versions.
LOCK := $(VENV)/locks/bin/uv pip compile --quiet --universal --generate-hashes --no-annotate --python-version 3.11 \
	--custom-compile-command 'make locks' --output-file
IMAGE_EXTRAS := gpu grpc heic hub isolation openvino otel redis text timm

locks: $(VENV)/.made
	$(BIN)/python -m venv $(VENV)/locks
	$(VENV)/locks/bin/pip install --quiet --disable-pip-version-check 'uv==0.13.*'
	for name in release site; do $(LOCK) deploy/$$name/requirements.txt deploy/$$name/requirements.in || exit; done
	$(LOCK) deploy/image/requirements.txt -c constraints.txt --no-emit-package torch $(IMAGE_EXTRAS:%=--extra %) pyproject.toml

version:
	@echo $(VERSION)

# The changelog's section of this version.
notes:
	@sed -n '/^## \[$(VERSION)\]/,/^## /{/^## /!p}' CHANGELOG.md

# One wheel for Linux on x86-64, with C code for the libc of 2014, and one without C code for other
# platforms. Both are built from the same reproducible source distribution.
ZIG := $(abspath $(RELEASE))/bin/python -m ziglang cc -target x86_64-linux-gnu.2.17
PLATFORM := manylinux_2_17_x86_64
BUILD = SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(RELEASE)/bin/python -m build --outdir dist

wheels: $(RELEASE)/.made
	rm -rf dist/vitserve-*
	@VITSERVE_KERNEL=no $(BUILD) >/dev/null
	@VITSERVE_KERNEL=yes CC='$(ZIG)' LDSHARED='$(ZIG) -shared -s' $(BUILD) -C--build-option=--plat-name=$(PLATFORM) >/dev/null
	$(RELEASE)/bin/auditwheel show dist/vitserve-$(VERSION)-py3-none-$(PLATFORM).whl | grep '"$(PLATFORM)"'
	$(RELEASE)/bin/twine check --strict dist/vitserve-*

# The reference of the API comes from its OpenAPI document, that of the client from its docstrings.
SITE := $(VENV)/site

$(SITE)/.made: $(VENV)/.made deploy/site/requirements.txt
	$(BIN)/python -m venv $(SITE)
	$(SITE)/bin/pip install --quiet --disable-pip-version-check --require-hashes -r deploy/site/requirements.txt
	@touch $@

site: $(VENV)/.test $(SITE)/.made
	@mkdir -p dist
	$(BIN)/python -m deploy.site.openapi dist/openapi.json
	$(SITE)/bin/oad gen-docs -s dist/openapi.json -d dist/http.md
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --quiet

# Tries each wheel in an empty environment for each Python, outside the clone.
PYTHONS ?= $(PYTHON)

release-check: wheels site
	$(RELEASE)/bin/actionlint .github/workflows/*.yml
	$(RELEASE)/bin/zizmor --offline --quiet .github/workflows
	$(RELEASE)/bin/hadolint Dockerfile
	@[ -n "$$($(MAKE) --no-print-directory notes)" ] || { echo "CHANGELOG.md has nothing of $(VERSION)"; exit 1; }
	set -e; unset PYTHONPATH; for python in $(PYTHONS); do for wheel in $(PLATFORM) any; do \
		there=$$(mktemp -d); $$python -m venv $$there/env; \
		$(if $(TORCH_INDEX_URL),$$there/env/bin/pip install --quiet -c constraints.txt --index-url '$(TORCH_INDEX_URL)' torch;) \
		$$there/env/bin/pip install --quiet --disable-pip-version-check -c constraints.txt \
			"dist/vitserve-$(VERSION)-py3-none-$$wheel.whl[openvino]"; \
		cp deploy/release/try_wheel.py $$there; \
		(cd $$there && env/bin/python -I try_wheel.py $(VERSION) $$wheel); \
		$(RELEASE)/bin/cyclonedx-py environment $$there/env/bin/python -o dist/sbom.json; \
		rm -rf $$there; done; done

# SOURCE is a label of the image: the address of the code. VARIANT is cpu, cuda or cuda12.
SOURCE ?=
VARIANT ?= cpu
# Compose reads TORCH_INDEX_URL and EXTRAS from the environment or from .env, so make exports its
# arguments.

image:
	@command -v docker >/dev/null || { echo "make image: docker is missing; install it: https://docs.docker.com/engine/install" >&2; exit 1; }
	@docker compose version >/dev/null 2>&1 || { echo "make image: docker has no compose; install docker-compose-plugin" \
		"(of Docker) or docker-compose-v2 (of Ubuntu): https://docs.docker.com/compose/install" >&2; exit 1; }
	VARIANT=$(VARIANT) docker compose -f docker-compose.yml -f docker-compose.build.yml build \
		--build-arg VERSION="$(VERSION)" --build-arg CREATED="$$(date -u +%Y-%m-%dT%H:%M:%SZ)" \
		--build-arg SOURCE="$(SOURCE)" \
		--build-arg REVISION="$$(git describe --always --abbrev=40 --dirty --exclude '*')" vitserve

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache *.egg-info
