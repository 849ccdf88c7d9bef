# Versions of the tools that are run from source; nothing is installed.
GOLANGCI_LINT := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
GOVULNCHECK   := golang.org/x/vuln/cmd/govulncheck@v1.9.0

GO      ?= go
CAPTURES ?= ../shared/captures
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null)
LDFLAGS := -s -w -X main.version=$(VERSION)
# Without gRPC's pages for debugging, which are templates: where there is one, a
# method may be called by any name, and the linker leaves none out. The agent is
# a third smaller for it, on disk and in memory.
TAGS := grpcnotrace

# The bindings of NVML call functions that newer headers call deprecated, a hundred warnings.
export CGO_CFLAGS ?= -O2 -g -Wno-deprecated-declarations

.DEFAULT_GOAL := help
.PHONY: simulate simulate-breaks build test unit e2e e2e-machine e2e-skew e2e-classic lint fmt generate manifests verify fuzz captures bench image image-nvml release vuln demo cluster cluster-stop clean help docs site screenshot

build: bin/chandler-nvml ## the agent, as bin/chandler, and what asks NVML for it
	CGO_ENABLED=0 $(GO) build -trimpath -tags $(TAGS) -ldflags '$(LDFLAGS)' -o bin/chandler ./cmd/chandler

# It needs a C compiler, and NVML only when it runs. Functions of NVML are looked
# up when they are called, since older libraries do not have them all.
.PHONY: bin/chandler-nvml
bin/chandler-nvml:
	@if command -v $$($(GO) env CC) >/dev/null; then set -x; \
	  CGO_ENABLED=1 CGO_CFLAGS='-O2 -Wno-deprecated-declarations' CGO_LDFLAGS='-Wl,-z,lazy' $(GO) build -trimpath -ldflags '-s -w' -o $@ ./cmd/chandler-nvml; \
	else echo "$@ is left out: there is no C compiler"; fi

test: unit simulate e2e ## every test: unit tests, the simulation, then a real Kubernetes

# The race detector makes tests five to ten times as slow, and sees something only where
# goroutines meet. So it watches the packages that start goroutines or lock something, by
# their text, less the simulation, of which hardly anything is run here. A family is one
# goroutine: cmd/chandler has all families look at once, at each recorded host. Of these
# packages it leaves out the tests that one goroutine makes of each recorded host, or of a
# thousand devices, or of an agent that is killed at each write. They run without it
# instead, with more hosts. Linking is a third of the work: no debugger looks at these
# programs, and without its tables they are linked in half the time. Packages wait more
# than they compute, so four run at once, and garbage is collected seldom. go test begins
# with the packages that are named first: the longest, and those that wait for real time,
# so that the last one does not run alone.
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

# SEED=n RUNS=m repeats one seed: it fixes what happens and when, and not which
# goroutine goes first.
SEEDS ?= 2500
RUNS  ?= 100
HISTORIES ?= $(or $(TMPDIR),/tmp)

simulate: ## whole agents against models, with faults: SEEDS=n seeds, or SEED=n RUNS=m times one; 1,000 sequences of claims for partitions
	$(GO) test ./internal/simulation -run TestSimulation -v -timeout 0 -args -histories $(HISTORIES) \
	  $(if $(SEED),-seed $(SEED) -runs $(RUNS),-seeds $(SEEDS))
	$(if $(SEED),,$(GO) test ./discovery/families/nvidia ./discovery/families/amdgpu -run TestPacking -args -sequences 1000)

simulate-breaks: ## the product with one deliberate defect at a time, each of which the simulation must find
	$(GO) test ./internal/simulation -run TestBreaks -v -timeout 0 -args -breaks

# Of the tests in guests this runs the short selection, of a few minutes.
e2e: ## the tests on a real Kubernetes, on real kernels, with Prometheus, and of the page in a browser, and those of a release; needs root
	cd e2e && $(GO) test -count=1 -p 1 -timeout 60m $$($(GO) list ./... | grep -v '/e2e/guest$$')
	cd e2e && $(GO) test -count=1 -short -timeout 30m ./guest
	cd e2e/release && $(GO) test -count=1 ./...
	cd e2e/page && $(GO) test -count=1 .
	cd e2e/prometheus && $(GO) test -count=1 .
	cd e2e/prometheus/node-problem-detector && $(GO) test -count=1 .

e2e-machine: ## all tests on Debian's kernels, which QEMU runs without hardware virtualisation; needs Debian's apt-get, not root
	cd e2e && $(GO) test -count=1 -v -timeout 120m ./guest

# Two tests that take minutes whatever the version. What Kubernetes 1.34 has and
# leaves off, and the tests of that; its DRAConsumableCapacity is left off: see
# docs/older-kubernetes.md. TestClassicLimit needs a node that has offered no GPU by the
# device-plugin API: see there, too.
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

# Debian's packages mkdocs and mkdocs-material make it. A link that leads nowhere ends it.
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

# Files of images and releases have the time of the commit, so that two builds are the same.
export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null)
RELEASE = cd e2e/release && $(GO) run . -version $(or $(VERSION),dev)

image: ## the agent's image for amd64 and arm64, as an OCI archive in bin/image; needs no docker
	$(RELEASE) -out ../../bin/image -tag latest image

image-nvml: ## that of an agent that asks NVML; needs Debian's apt-get, a C compiler, and for arm64 gcc-aarch64-linux-gnu
	$(RELEASE) -out ../../bin/image -tag latest image-nvml

release: vuln ## programs, images, the chart, a bill of materials and checksums, in bin/release
	$(RELEASE) all

# It ends with 3 where it finds something, and with another number where it could not look.
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
