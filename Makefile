# Versions of the tools. They run from source, without installation.
GOLANGCI_LINT := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
GOVULNCHECK   := golang.org/x/vuln/cmd/govulncheck@v1.9.0

GO      ?= go
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
.PHONY: simulate simulate-breaks build test unit e2e e2e-gpu e2e-machine e2e-skew e2e-classic lint fmt generate manifests verify fuzz captures bench image image-nvml release vuln demo cluster cluster-stop clean help docs site screenshot

build: bin/chandler-nvml ## the agent, as bin/chandler, and what asks NVML for it
	CGO_ENABLED=0 $(GO) build -trimpath -tags $(TAGS) -ldflags '$(LDFLAGS)' -o bin/chandler ./cmd/chandler

# The build needs a C compiler, but not NVML. The functions of NVML are resolved
# at their first call (-z lazy), since older libraries lack some of them.
.PHONY: bin/chandler-nvml
bin/chandler-nvml:
	@if command -v $$($(GO) env CC) >/dev/null; then set -x; \
	  CGO_ENABLED=1 CGO_CFLAGS='-O2 -Wno-deprecated-declarations' CGO_LDFLAGS='-Wl,-z,lazy' $(GO) build -trimpath -ldflags '-s -w' -o $@ ./cmd/chandler-nvml; \
	else echo "$@ is left out: there is no C compiler"; fi

test: unit simulate e2e ## every test: unit tests, the simulation, then a real Kubernetes

# The race detector makes tests five to ten times slower, and only finds faults between
# goroutines. Therefore only packages whose source starts goroutines or uses locks run with
# it (RACED), except the simulation, of which hardly anything runs here. A family is a single
# goroutine; the tests of cmd/chandler scan each recorded host with all families at once.
# ALONE lists tests of these packages in which a single goroutine goes through each recorded
# host, a thousand devices, or the kills of an agent at each write. They run without the race
# detector, with more hosts.
#
# Linking is a third of the work. Without debug tables (-s -w) it takes half the time, and the
# test programs are never debugged. Packages wait more than they compute, so four run in parallel
# with rare garbage collection. go test starts packages in the given order. WAITS lists the
# longest packages and those that wait for real time first, so that none of them runs alone at
# the end.
UNIT  := GOGC=400 $(GO) test -p 4 -parallel 8 -ldflags '-s -w'
WAITS := ./cmd/chandler/agent ./legacy/sockets ./cmd/chandler/informant ./cmd/chandler/kubectl ./legacy ./internal/traces ./internal/doctor/gather
GOES  := '^\s*go (func|[a-z])|\.Go\b|"sync["/]'
RACED  = $(WAITS) $(filter-out $(WAITS) ./internal/simulation%,$(shell grep -rlE --include='*.go' $(GOES) api cdi cmd deployments discovery driver internal legacy \
  | xargs -n 1 dirname | sort -u | sed 's,^,./,'))
ALONE := ^(TestPageOfEachHost|TestPageOfAHostThatNobodyWasAskedOf|TestExtendedResourceNames|TestConfigImportOnHosts|$\
  TestSchedulerAndDriverAgree|TestNoDeviceIsUnreachable|TestAgentIsKilledWhile\w+|TestAgentKilledWhileItDivides|$\
  TestAgentDivides|TestAgentKeepsVirtualFunctionsInUse|TestAgentCuts|TestAgentCutsForAResource)$$

unit: ## the tests that need no cluster
	$(UNIT) -race -skip '$(ALONE)' $(RACED)
	$(UNIT) $$($(GO) list ./... | grep -vxF "$$($(GO) list $(RACED))")
	$(UNIT) -run '$(ALONE)' ./cmd/chandler ./cmd/chandler/agent ./driver

# SEED=n RUNS=m repeats one seed, which has one history.
SEEDS ?= 2500
RUNS  ?= 1
HISTORIES ?= $(or $(TMPDIR),/tmp)

simulate: ## whole agents against models, with faults: SEEDS=n seeds, or SEED=n RUNS=m times one; 1,000 sequences of claims for partitions
	$(GO) test ./internal/simulation -run '$(if $(SEED),TestSimulation,TestSimulation|TestOneHistory)' -v -timeout 0 -args -histories $(HISTORIES) \
	  $(if $(SEED),-seed $(SEED) -runs $(RUNS),-seeds $(SEEDS))
	$(if $(SEED),,$(GO) test ./discovery/families/nvidia ./discovery/families/amdgpu -run TestPacking -args -sequences 1000)

simulate-breaks: ## the product with one deliberate defect at a time, each of which the simulation must find
	$(GO) test ./internal/simulation -run TestBreaks -v -timeout 0 -args -breaks

# Of the tests in guests, this target runs a short selection that takes a few minutes.
e2e: ## the tests on a real Kubernetes, on real kernels, with Prometheus, and of the page in a browser, and those of a release; needs root
	cd e2e && $(GO) test -count=1 -p 1 -timeout 60m $$($(GO) list ./... | grep -v '/e2e/guest$$')
	cd e2e && $(GO) test -count=1 -short -timeout 30m ./guest
	cd e2e/release && $(GO) test -count=1 ./...
	cd e2e/page && $(GO) test -count=1 .
	cd e2e/prometheus && $(GO) test -count=1 .
	cd e2e/prometheus/node-problem-detector && $(GO) test -count=1 .

e2e-gpu: ## the tests with an NVIDIA GPU of this machine, on a real Kubernetes; needs root, the GPU's driver and a C compiler
	cd e2e && $(GO) test -count=1 -v -timeout 60m ./gpu

e2e-machine: ## all tests on Debian's kernels, which QEMU runs without hardware virtualisation; needs Debian's apt-get, not root
	cd e2e && $(GO) test -count=1 -v -timeout 120m ./guest

# SKEW_SKIP lists tests that take minutes and do not depend on the version. SKEW_GATES lists
# gates that are off by default in Kubernetes 1.34, and SKEW_TESTS the tests of their features.
# DRAConsumableCapacity stays off, see docs/older-kubernetes.md. TestClassicLimit needs a node
# that has never offered a GPU by the device plugin API, for the reason given there.
SKEW_SKIP  := TestAgentCrashLoop|TestAgentStartsWithoutAPIServer
SKEW_GATES := DRADeviceTaints,DRAExtendedResource,DRAPartitionableDevices
SKEW_TESTS := TestWhatTheAPIServerDrops|TestEventsOfPods|TestSickDevice|TestWholeOrParts|TestPodWithTwoGPUs

e2e-skew: ## the tests on the oldest Kubernetes with resource.k8s.io/v1, 1.34; needs root
	cd e2e && $(GO) test -timeout 45m . -kubernetes v1.34.4 -gates '' -skip '$(SKEW_SKIP)'
	cd e2e && $(GO) test -timeout 45m . -kubernetes v1.34.4 -gates '$(SKEW_GATES)' -run '$(SKEW_TESTS)'
	cd e2e && $(GO) test -timeout 45m . -kubernetes v1.34.4 -gates '$(SKEW_GATES)' -run TestClassicLimit

e2e-classic: ## the tests of the device-plugin API on a Kubernetes without DRA, 1.31, and on 1.37; needs root
	cd e2e && $(GO) test -timeout 45m . -kubernetes v1.31.0 -gates '' -run TestDevicePlugin
	cd e2e && $(GO) test -timeout 45m . -run TestDevicePlugin
	cd e2e && $(GO) test -timeout 45m ./takeover -kubernetes v1.31.0

lint: ## golangci-lint with the rules of .golangci.yml, and the figures of internal/prose
	$(GO) run $(GOLANGCI_LINT) run ./...
	$(GO) run ./internal/prose
	cd e2e && $(GO) vet ./...

fmt: ## gofmt and goimports
	$(GO) run $(GOLANGCI_LINT) fmt ./...

generate: ## rewrite the golden files of recorded hosts, and the pages of doctor's codes
	$(GO) test ./discovery/families/... -update
	$(GO) test ./internal/doctor -update

docs: ## write the parts of the pages in docs that come from the code
	$(GO) test ./internal/docs ./discovery/families ./cmd/chandler -run TestDocs -update

# The target needs the Debian packages mkdocs and mkdocs-material. A broken link is an error.
site: ## a site of the pages, in bin/site/html
	rm -rf bin/site && mkdir -p bin/site/source
	git ls-files -- '*.md' docs deployments 'discovery/families/*.host' | tar -c -T - | tar -x -C bin/site/source
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

bench: ## benchmarks of the product, then of it on a real Kubernetes beside another driver; needs root and about 25 minutes
	$(GO) test -run '^$$' -bench . -benchmem ./...
	cd e2e && $(GO) run ./cmd/bench

screenshot: ## the picture of the page that the README shows; needs Debian's chromium
	cd e2e/page && $(GO) run ./screenshot -out ../../docs/images/page.png

# Files in images and releases have the time of the commit, so that builds are reproducible.
export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null)
RELEASE = cd e2e/release && $(GO) run . -version $(or $(VERSION),dev)

image: ## the agent's image for amd64 and arm64, as an OCI archive in bin/image; needs no docker
	$(RELEASE) -out ../../bin/image -tag latest image

image-nvml: ## that of an agent that asks NVML; needs Debian's apt-get, a C compiler, and for arm64 gcc-aarch64-linux-gnu
	$(RELEASE) -out ../../bin/image -tag latest image-nvml

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
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
