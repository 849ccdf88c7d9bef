# Versions of the tools. They run from source, without installation.
GOLANGCI_LINT := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
GOVULNCHECK   := golang.org/x/vuln/cmd/govulncheck@v1.9.0

export GO ?= go
CAPTURES ?= ../shared/captures
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null)
LDFLAGS := -s -w -X main.version=$(VERSION)
# grpcnotrace leaves out the debug pages of gRPC, which are templates. A template can
# call any method by name, so the linker would keep all methods. With the tag, the
# agent is a third smaller, on disk and in memory.
TAGS := grpcnotrace

# The NVML bindings call functions that newer headers mark as deprecated, which causes a hundred warnings.
export CGO_CFLAGS ?= -O2 -g -Wno-deprecated-declarations

.DEFAULT_GOAL := help
.PHONY: bench-check bench-fleet build test test-all unit simulate simulate-more simulate-breaks e2e e2e-takeover e2e-harness e2e-page e2e-prometheus e2e-npd e2e-karpenter e2e-release \
  e2e-machine e2e-guest-hotplug e2e-guest-passthrough e2e-guest-ondemand e2e-guest-provision e2e-guest-health e2e-guest-many e2e-guest-power e2e-guest-rest \
  e2e-skew e2e-skew-gates e2e-classic e2e-gpu flaky lint fmt generate manifests verify fuzz captures bench image image-host release vuln demo cluster cluster-stop clean help docs site screenshot

build: bin/chandler-host ## the agent as bin/chandler, the plugin bin/kubectl-chandler, and what asks NVML for the agent
	CGO_ENABLED=0 $(GO) build -trimpath -tags $(TAGS) -ldflags '$(LDFLAGS)' -o bin/ ./cmd/chandler ./cmd/kubectl-chandler

# The build needs a C compiler, but not NVML. The functions of NVML are resolved
# at their first call (-z lazy), since older libraries lack some of them.
.PHONY: bin/chandler-host
bin/chandler-host:
	@if command -v $$($(GO) env CC) >/dev/null; then set -x; \
	  CGO_ENABLED=1 CGO_CFLAGS='-O2 -Wno-deprecated-declarations' CGO_LDFLAGS='-Wl,-z,lazy' $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o $@ ./cmd/chandler-host; \
	else echo "$@ is left out: there is no C compiler"; fi

# testrun is go test with a record of times and of skipped tests: see internal/testrun.
TESTRUN := $(CURDIR)/bin/testrun
.PHONY: $(TESTRUN)
$(TESTRUN):
	@$(GO) build -o $@ ./internal/testrun

test: export TEST_RESULTS := $(CURDIR)/bin/results
test: $(TESTRUN) ## every behaviour once: unit tests, 1,000 seeds of the simulation, Kubernetes 1.37, one kernel; needs root for Kubernetes
	@rm -f $(TEST_RESULTS)
	@$(MAKE) --no-print-directory unit simulate e2e
	@$(TESTRUN) report

# Each part of the rest is a target of its own. The file .ci/parts lists them.
test-all: $(TESTRUN) ## make test, then each part of .ci/parts: older Kubernetes, more kernels, a browser, Prometheus, a release, more seeds
	@status=0; $(MAKE) --no-print-directory test || status=1; $(TESTRUN) parts .ci/parts || status=1; \
	if [ $$status != 0 ]; then echo "make test-all: FAILED, see above" >&2; fi; exit $$status

# The race detector makes tests five to ten times slower, and only finds faults between
# goroutines. Therefore only packages whose source starts goroutines or uses locks run with
# it (RACED), except the simulation, of which hardly anything runs here. A family is a single
# goroutine; the tests of cmd/chandler scan each recorded host with all families at once.
# ALONE lists tests of these packages in which a single goroutine goes through each recorded
# host, a thousand devices, or the kills of an agent at each write and request. They run without
# the race detector, with more hosts.
#
# make lint runs go vet, so go test does not (-vet=off).
# Linking is a third of the work. Without debug tables (-s -w) it takes half the time, and the
# test programs are never debugged. Packages wait more than they compute, so four run in parallel
# with rare garbage collection. go test starts packages in the given order. WAITS lists the
# longest packages and those that wait for real time first, so that none of them runs alone at
# the end.
UNIT  := GOGC=400 $(TESTRUN) test -p 4 -parallel 8 -timeout 30m -vet=off -ldflags '-s -w'
WAITS := ./cmd/chandler/agent ./legacy/sockets ./cmd/chandler/informant ./cmd/kubectl-chandler/kubectl ./legacy ./internal/traces ./internal/doctor/gather
GOES  := '^\s*go (func|[a-z])|\.Go\b|"sync["/]'
RACED  = $(WAITS) $(filter-out $(WAITS) ./internal/simulation%,$(shell grep -rlE --include='*.go' $(GOES) api cdi cmd deployments discovery driver internal legacy \
  | xargs -n 1 dirname | sort -u | sed 's,^,./,'))
ALONE := ^(TestPageOfEachHost|TestPageOfAHostWithoutConsumers|TestExtendedResourceNames|TestConfigImportOnHosts|$\
  TestSchedulerAndDriverAgree|TestNoDeviceIsUnreachable|TestAgentIsKilledWhile\w+|TestAgentPartitionsAGPU|$\
  TestAgentKeepsVirtualFunctionsInUse|TestAgentCreatesMIGPartitions|TestAgentCreatesMIGPartitionsForAResource|TestKilledAtEachRequest)$$

unit: $(TESTRUN) ## the tests that need no cluster
	$(UNIT) -race -skip '$(ALONE)' $(RACED)
	$(UNIT) $$($(GO) list ./... | grep -vxF "$$($(GO) list $(RACED))")
	$(UNIT) -run '$(ALONE)' ./cmd/chandler ./cmd/chandler/agent ./driver

# SEED=n RUNS=m repeats one seed, which has one history.
FIRST ?= 1
SEEDS ?= 1000
RUNS  ?= 1
HISTORIES ?= $(or $(TMPDIR),/tmp)

simulate: $(TESTRUN) ## whole agents against models, with faults: SEEDS=n seeds from FIRST on, or SEED=n RUNS=m times one; 1,000 sequences of claims for partitions
	$(TESTRUN) test ./internal/simulation -run '$(if $(SEED),TestSimulation,TestSimulation|TestOneHistory)' -v -timeout 0 -args -histories $(HISTORIES) \
	  $(if $(SEED),-seed $(SEED) -runs $(RUNS),-first $(FIRST) -seeds $(SEEDS))
	$(if $(SEED),,$(TESTRUN) test ./discovery/families/nvidia ./discovery/families/amdgpu -run TestPacking -args -sequences 1000)

simulate-more: ## 5,000 further seeds
	@$(MAKE) --no-print-directory simulate FIRST=1001 SEEDS=5000

simulate-breaks: $(TESTRUN) ## the product with one deliberate defect at a time, each of which the simulation must find
	$(TESTRUN) test ./internal/simulation -run TestBreaks -v -timeout 0 -args -breaks

# E2E runs tests of the module e2e. Their results depend on more than their files, so none is taken
# from the cache. Packages with clusters run one after another (-p 1).
E2E := $(TESTRUN) test -count=1 -p 1

# LIMIT includes the first build of a version of Kubernetes, which takes 10 minutes on two idle cores
# and more than half an hour on busy ones.
LIMIT := 90m

# Namespaces, mounts and control groups need root.
ROOT := $(filter 0,$(shell id -u))
NEEDS_ROOT := needs root, for namespaces, mounts and control groups
as_root = $(if $(ROOT),$(1),@$(TESTRUN) leave-out '$@' '$(NEEDS_ROOT)')

# Tests on Kubernetes wait most of the time. Therefore four groups run at the same time: three parts of
# the package e2e, each on a cluster of its own, and the other packages, two of them at a time. In the
# tests of E2E_MOVES and E2E_DEVICES, devices move to the device plugin API, or are created or shared.
# The packages of guests and takeovers run a short selection, and the package of slices every tenth
# combination of feature gates.
E2E_MOVES   := TestEvents|TestMode|TestMove|TestNodeLabel
E2E_DEVICES := TestBurst|TestDevicePlugin|TestMIG|TestSharedMemory

e2e: $(TESTRUN) ## Chandler on Kubernetes 1.37, and on one Debian kernel in QEMU; needs root for Kubernetes
	@$(MAKE) --no-print-directory -j 4 $(if $(ROOT),e2e-moves e2e-devices e2e-rest) e2e-others
ifeq ($(ROOT),)
	@$(TESTRUN) leave-out 'packages e2e and e2e/takeover' '$(NEEDS_ROOT)'
endif

.PHONY: e2e-moves e2e-devices e2e-rest e2e-others
e2e-moves: $(TESTRUN)
	cd e2e && $(E2E) -timeout $(LIMIT) -run '$(E2E_MOVES)' .

e2e-devices: $(TESTRUN)
	cd e2e && $(E2E) -timeout $(LIMIT) -run '$(E2E_DEVICES)' .

e2e-rest: $(TESTRUN)
	cd e2e && $(E2E) -timeout $(LIMIT) -skip '$(E2E_MOVES)|$(E2E_DEVICES)' .

e2e-others: $(TESTRUN)
	cd e2e && $(E2E) -p 2 -short -timeout $(LIMIT) ./guest ./chart $(if $(ROOT),./takeover )./validation ./pages

e2e-takeover: $(TESTRUN) ## takeovers from each device plugin, on the device managers of Kubernetes 1.37 and 1.31; needs root
	$(call as_root,cd e2e && $(E2E) -timeout $(LIMIT) ./takeover)
	$(call as_root,cd e2e && $(E2E) -timeout $(LIMIT) ./takeover -kubernetes v1.31.0)

e2e-harness: $(TESTRUN) ## the tests of the clusters and programs that other tests use, and slices with all combinations of feature gates
	cd e2e && $(E2E) -timeout 30m ./build ./cluster ./cmd/... ./kubectl ./machine ./validation

e2e-gpu: $(TESTRUN) ## Kubernetes with an NVIDIA GPU of this machine; needs root, the GPU's driver and a C compiler
	$(call as_root,cd e2e && $(E2E) -v -timeout 60m ./gpu)

e2e-page: $(TESTRUN) ## the web UI in a browser, which is installed if it is missing
	cd e2e/page && $(E2E) .

e2e-prometheus: $(TESTRUN) ## metrics, alerts and the dashboard in Prometheus
	cd e2e/prometheus && $(E2E) .

e2e-npd: $(TESTRUN) ## the conditions of node-problem-detector
	cd e2e/prometheus/node-problem-detector && $(E2E) .

e2e-karpenter: $(TESTRUN) ## the allocator with which Karpenter decides about new nodes
	cd e2e/karpenter && $(E2E) .

e2e-release: $(TESTRUN) ## a release, built twice
	cd e2e/release && $(E2E) ./...

# The tests on Debian's kernels run in QEMU without hardware virtualization. They need Debian's
# apt-get, but not root. The parts divide them by subject. e2e-guest-rest runs all others.
GUESTS := $(E2E) -timeout 120m ./guest
GUEST_HOTPLUG     := TestPlug|TestHotPlug
GUEST_PASSTHROUGH := TestVFIO|TestPassthrough
GUEST_ONDEMAND    := TestOnDemand|TestMediated
GUEST_PROVISION   := TestProvision
GUEST_HEALTH      := TestHealth
GUEST_MANY        := TestMany
GUEST_POWER       := TestPowerLoss
GUEST_NAMED       := $(GUEST_HOTPLUG)|$(GUEST_PASSTHROUGH)|$(GUEST_ONDEMAND)|$(GUEST_PROVISION)|$(GUEST_HEALTH)|$(GUEST_MANY)|$(GUEST_POWER)

e2e-machine: $(TESTRUN) ## all tests on Debian's kernels; needs Debian's apt-get, not root
	cd e2e && $(GUESTS) -v

e2e-guest-hotplug: $(TESTRUN) ## hot-plug on Debian's kernels
	cd e2e && $(GUESTS) -run '$(GUEST_HOTPLUG)'

e2e-guest-passthrough: $(TESTRUN) ## VFIO passthrough on Debian's kernels
	cd e2e && $(GUESTS) -run '$(GUEST_PASSTHROUGH)'

e2e-guest-ondemand: $(TESTRUN) ## virtual functions and mediated devices on demand
	cd e2e && $(GUESTS) -run '$(GUEST_ONDEMAND)'

e2e-guest-provision: $(TESTRUN) ## chandler provision on Debian's kernels
	cd e2e && $(GUESTS) -run '$(GUEST_PROVISION)'

e2e-guest-health: $(TESTRUN) ## health on Debian's kernels
	cd e2e && $(GUESTS) -run '$(GUEST_HEALTH)'

e2e-guest-many: $(TESTRUN) ## 2,048 virtual functions
	cd e2e && $(GUESTS) -run '$(GUEST_MANY)'

e2e-guest-power: $(TESTRUN) ## 20 losses of power
	cd e2e && $(GUESTS) -run '$(GUEST_POWER)' -args -resets 20

e2e-guest-rest: $(TESTRUN) ## the other tests on Debian's kernels
	cd e2e && $(GUESTS) -skip '$(GUEST_NAMED)'

# SKEW_SKIP lists tests that take minutes and do not depend on the version. SKEW_GATES lists
# gates that are off by default in Kubernetes 1.34, and SKEW_TESTS the tests of their features.
# DRAConsumableCapacity stays off, see docs/older-kubernetes.md. TestClassicLimit needs a node
# that has never offered a GPU by the device plugin API, for the reason given there.
SKEW_SKIP  := TestAgentCrashLoop|TestAgentStartsWithoutAPIServer
SKEW_GATES := DRADeviceTaints,DRAExtendedResource,DRAPartitionableDevices
SKEW_TESTS := TestWhatTheAPIServerDrops|TestEventsOfPods|TestUnhealthyDevice|TestWholeOrParts|TestPodWithTwoGPUs

e2e-skew: $(TESTRUN) ## the tests on the oldest Kubernetes with resource.k8s.io/v1, 1.34; needs root
	$(call as_root,cd e2e && $(E2E) -timeout $(LIMIT) . -kubernetes v1.34.4 -gates '' -skip '$(SKEW_SKIP)')

e2e-skew-gates: $(TESTRUN) ## the tests of feature gates of Kubernetes 1.34; needs root
	$(call as_root,cd e2e && $(E2E) -timeout $(LIMIT) . -kubernetes v1.34.4 -gates '$(SKEW_GATES)' -run '$(SKEW_TESTS)')
	$(call as_root,cd e2e && $(E2E) -timeout $(LIMIT) . -kubernetes v1.34.4 -gates '$(SKEW_GATES)' -run TestClassicLimit)

e2e-classic: $(TESTRUN) ## the tests of the device plugin API on a Kubernetes without DRA, 1.31; needs root
	$(call as_root,cd e2e && $(E2E) -timeout $(LIMIT) . -kubernetes v1.31.0 -gates '' -run TestDevicePlugin)

PACKAGES ?= ./...
ROUNDS   ?= 20
LOAD     ?= 12

# With DIR=e2e, PACKAGES are packages of that module. FLAGS can be -race, -short and -run PATTERN.
flaky: $(TESTRUN) ## the tests of PACKAGES, ROUNDS times beside LOAD busy threads; lists the failures of each test
	cd $(or $(DIR),.) && exec $(TESTRUN) flaky -rounds $(ROUNDS) -load $(LOAD) $(FLAGS) $(PACKAGES)

lint: ## golangci-lint with the rules of .golangci.yml, and the figures of internal/prose
	$(GO) run $(GOLANGCI_LINT) run ./...
	$(GO) run ./internal/prose
	cd e2e && $(GO) vet ./...

fmt: ## gofmt and goimports
	$(GO) run $(GOLANGCI_LINT) fmt ./...

generate: ## rewrite the golden files of recorded hosts, and the pages of doctor's codes
	$(GO) test $$(grep -rl --include='*_test.go' discoverytest discovery/families | xargs -n 1 dirname | sort -u | sed 's,^,./,') ./discovery/labels -update
	$(GO) test ./internal/doctor -update

docs: ## write the parts of the pages in docs that come from the code
	$(GO) test ./internal/docs ./discovery/families ./cmd/chandler -run TestDocs -update

# The target needs the Debian packages mkdocs and mkdocs-material. A broken link is an error.
site: ## a site of the pages, in bin/site/html
	rm -rf bin/site && mkdir -p bin/site/source
	git ls-files -- '*.md' LICENSE docs deployments 'discovery/families/*.host' | tar -c -T - | tar -x -C bin/site/source
	mkdocs build --quiet --strict

verify: generate ## fail if a golden file is not what the code makes of its host
	git diff --exit-code -- discovery/families docs

manifests: ## rewrite the plain manifests of deployments/ from the Helm chart
	cd e2e && $(GO) test ./chart -run 'TestManifests|TestSchemaOfConfig|TestValuesAreExplained' -update

fuzz: ## every fuzz target for ten seconds
	@set -e; for package in $$($(GO) list ./...); do \
	  for target in $$($(GO) test -list '^Fuzz' $$package | grep '^Fuzz' || true); do \
	    echo "$$package $$target"; $(GO) test -run '^$$' -fuzz "^$$target$$" -fuzztime 10s $$package; \
	  done; done

captures: ## compare what discovery finds with what is known of captured hosts, in CAPTURES
	CHANDLER_CAPTURES=$(abspath $(CAPTURES)) $(GO) test -run TestCaptures -v ./discovery/families

bench: ## benchmarks of the product, then of it on a real Kubernetes beside another driver; needs root and about 30 minutes
	$(GO) test -run '^$$' -bench . -benchmem ./...
	cd e2e && $(GO) run ./cmd/bench

bench-fleet: ## what slices cost the scheduler, and what many agents cost the API server (SIZES=50,100 nodes); needs root and about 15 minutes
	$(GO) test ./driver/pool -run '^$$' -bench Fleet -benchtime 500ms
	cd e2e && $(GO) run ./cmd/fleet -sizes $(or $(SIZES),50,100)

bench-check: ## fail if a ratio on docs/benchmarks.md differs from short benchmarks by more than a quarter
	$(GO) run ./internal/benchcheck

screenshot: ## the picture of the page that the README shows; needs Debian's chromium
	cd e2e/page && $(GO) run ./screenshot -out ../../docs/images/page.png

# Files in images and releases have the time of the commit, so that builds are reproducible.
export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null)
RELEASE = cd e2e/release && $(GO) run . -version $(or $(VERSION),dev)
IMAGES = $(CURDIR)/bin/image
PLATFORMS ?= amd64,arm64

image: ## the agent's image for PLATFORMS (amd64,arm64), as an OCI archive in bin/image, with VERSION as its tag; needs no docker
	$(RELEASE) -out $(IMAGES) -platforms $(PLATFORMS) image

image-host: ## the agent's image with chandler-host; needs Debian's apt-get, a C compiler, and for arm64 gcc-aarch64-linux-gnu
	$(RELEASE) -out $(IMAGES) -platforms $(PLATFORMS) image-host

release: vuln ## programs, images, the chart, a bill of materials and checksums, in bin/release
	$(RELEASE) all

# govulncheck exits with 3 if it finds a vulnerability, and with another nonzero status if it could not check.
vuln: ## look for known vulnerabilities in what the product calls
	@GOBIN=$(CURDIR)/bin GOFLAGS= $(GO) install $(GOVULNCHECK)
	@bin/govulncheck $(GOVULNCHECK_FLAGS) -tags $(TAGS) ./cmd/...; status=$$?; \
	case $$status in 0) ;; 3) exit 3 ;; \
	*) printf '\n%s\n%s\n%s\n\n' '***' '*** NOT CHECKED for known vulnerabilities: govulncheck did not run to its end (see above).' '***' >&2 ;; esac

demo: ## a real Kubernetes, eight recorded GPUs, and pods that use them; needs root
	cd e2e && $(GO) run ./cmd/demo

cluster: ## such a Kubernetes, left running for you to use; needs root
	cd e2e && $(GO) run ./cmd/demo --keep

cluster-stop: ## end it
	cd e2e && $(GO) run ./cmd/demo --stop

clean: ## remove what was built here
	rm -rf bin

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-21s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
