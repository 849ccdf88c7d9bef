# The agent as a static binary and nothing else. The same image can be made
# without Docker: package e2e/cluster does so for the tests. With --target nvml
# it is the agent, the program that asks NVML for it, and a C library for that.
FROM --platform=$BUILDPLATFORM golang:1.26 AS build
ARG TARGETOS=linux TARGETARCH VERSION
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY api api
COPY cdi cdi
COPY cmd cmd
COPY discovery discovery
COPY driver driver
COPY internal internal
COPY legacy legacy
RUN CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH \
    go build -trimpath -tags grpcnotrace -ldflags "-s -w -X main.version=$VERSION" -o /chandler ./cmd/chandler

# Not cross-compiled, since it needs the C compiler and library of its platform.
FROM golang:1.26-bookworm AS build-nvml
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY cmd/chandler-nvml cmd/chandler-nvml
COPY discovery/families/nvidia/facts discovery/families/nvidia/facts
RUN CGO_ENABLED=1 CGO_LDFLAGS=-Wl,-z,lazy \
    go build -trimpath -ldflags "-s -w" -o /chandler-nvml ./cmd/chandler-nvml

FROM debian:12-slim AS nvml
COPY --from=build /chandler /chandler
COPY --from=build-nvml /chandler-nvml /chandler-nvml
ENTRYPOINT ["/chandler"]

FROM scratch
COPY --from=build /chandler /chandler
ENTRYPOINT ["/chandler"]
