# `make help` lists what there is. Every target installs what it needs by itself.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

# Found on first use; installed where absent.
# A KUBECONFIG on make's own command line means that cluster, not a new one.
ifeq ($(origin KUBECONFIG),command line)
export SPECSERVE_EXISTING_CLUSTER := 1
endif

uv = $(or $(UV),$(eval UV := $(shell tests/setup.sh))$(UV),$(error setup failed))
run = PYTHONPATH=operator:. $(uv) run --no-sync
pytest = $(run) python -m pytest
# Most of these tests wait. No more workers than that: a test may take a core for a while.
pytest_by_two = $(pytest) -n 2 --dist worksteal
# In shares that tests/e2e/conftest.py names. On a cluster of the user's they take turns.
pytest_by_share = $(pytest) $(if $(SPECSERVE_EXISTING_CLUSTER),,-n 2 --dist loadgroup)
run_engine = $(run) python -m tests.engine.matrix

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-16s %s\n", $$1, $$2}'

.PHONY: venv
venv:
	@$(uv) sync --frozen --quiet

.PHONY: packages
packages: venv
	@$(run) python -m tests.cluster.packages

.PHONY: binaries
binaries: packages ## Get the Kubernetes binaries: from the cache, from releases, or by building them
	@$(run) python -m tests.cluster binaries

.PHONY: demo
demo: binaries ## Watch speculation being switched in live pods (simulated engines, real Kubernetes)
	@$(run) python -m tests.demo

.PHONY: test
test: test-fast test-cluster test-chart test-integration test-e2e ## Run all tests

.PHONY: test-fast
test-fast: venv ## Pure code, the wire, the contract, the plugin's parts
	@mkdir -p build/test
	$(pytest_by_two) tests/unit tests/golden tests/wire tests/contract tests/engine --junitxml=build/test/fast.xml

.PHONY: test-cluster
test-cluster: binaries ## The test clusters themselves
	@mkdir -p build/test
	$(pytest_by_two) tests/cluster --junitxml=build/test/cluster.xml

.PHONY: test-chart
test-chart: binaries ## The Helm chart: rendering, rights, the API server's word
	@mkdir -p build/test
	$(pytest_by_two) tests/chart --junitxml=build/test/chart.xml

.PHONY: test-integration
test-integration: binaries ## The operator against a real API server; tests play kubelet
	@mkdir -p build/test
	$(pytest_by_two) tests/faults tests/integration --junitxml=build/test/integration.xml

.PHONY: test-e2e
test-e2e: binaries ## Real containers on a real kubelet: cluster, demo, Helm; needs root
	@mkdir -p build/test
	$(pytest_by_share) tests/e2e --ignore=tests/e2e/test_engine.py --junitxml=build/test/e2e.xml

.PHONY: test-engine
test-engine: venv ## The plugin in real SGLang on CPUs: each proved version, one and two ranks
	$(run_engine)

.PHONY: test-engine-ci
test-engine-ci: venv ## The part of test-engine that every commit is tried with
	$(run_engine) --ci

.PHONY: e2e
e2e: binaries ## The life of a Helm installation on a real kubelet (SPECSERVE_EXISTING_CLUSTER=1: on yours)
	@mkdir -p build/test
	$(pytest) tests/e2e/test_helm.py --junitxml=build/test/helm.xml

.PHONY: e2e-engine
e2e-engine: binaries ## Real SGLang on CPUs under the operator, on a real kubelet; needs root
	@mkdir -p build/test
	$(pytest) tests/e2e/test_engine.py --junitxml=build/test/e2e-engine.xml

.PHONY: lint
lint: venv ## ruff, mypy strict, import contracts
	$(run) ruff check .
	$(run) ruff format --check .
	$(run) mypy
	$(run) lint-imports
	$(run) hadolint images/*/Dockerfile

.PHONY: format
format: venv ## Let ruff format and mend what it can
	$(run) ruff check --fix .
	$(run) ruff format .

.PHONY: generate
generate: binaries ## Write what is generated: CRD, chart, plain manifests, golden files
	$(run) python -m specserve.schema
	$(run) python -m tests.chart.generate
	$(run) python -m tests.golden.update
	$(run) python -m tests.golden.curves

.PHONY: verify
verify: generate ## Generate again, and fail if that differs from what is committed
	$(uv) lock --check
	git diff --exit-code -- crds charts examples/install tests/golden/expected operator/specserve/curves

.PHONY: images
images: packages ## Build the container images into build/images
	@$(run) python -m tests.e2e.operator_image

.PHONY: bench
bench: binaries ## Measure flip latency and scale; writes build/bench
	$(run) python -m tests.bench.flip_latency
	$(run) python -m tests.bench.startup

.PHONY: bench-regret
bench-regret: venv ## What each strategy loses on every measured profile; writes build/bench/regret.json
	$(run) python -m tests.bench.regret

.PHONY: publish-bench
publish-bench: venv ## Copy the figures of the last benchmarks to docs/benchmarks
	$(run) python -m tests.bench.publish

.PHONY: clean
clean: ## Remove what was built here (not the caches)
	rm -rf build dist .venv
