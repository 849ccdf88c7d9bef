# The image contains only the agent, as a static binary, and the licences. With --target host, it also
# contains chandler-host, which calls NVML for the agent, and the C library of
# chandler-host and NVML. "make image" and "make image-host" build these images
# without Docker, byte for byte the same from the same source.
FROM --platform=$BUILDPLATFORM golang:1.26 AS build
ARG TARGETOS=linux TARGETARCH VERSION
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY api api
COPY cdi cdi
COPY cmd cmd
COPY deployments deployments
COPY discovery discovery
COPY driver driver
COPY internal internal
COPY legacy legacy
RUN CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH \
    go build -trimpath -tags grpcnotrace -ldflags "-s -w -X main.version=$VERSION" -o /chandler ./cmd/chandler

# Not cross-compiled, because the build needs the C compiler and the C library of the target platform.
FROM golang:1.26-bookworm AS build-host
ARG VERSION
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY cmd/chandler-host cmd/chandler-host
COPY discovery discovery
COPY internal internal
RUN CGO_ENABLED=1 CGO_LDFLAGS=-Wl,-z,lazy \
    go build -trimpath -ldflags "-s -w -X main.version=$VERSION" -o /chandler-host ./cmd/chandler-host

# The files of the C library, at the paths of the distribution.
FROM debian:12-slim AS libc
RUN mkdir /out && dpkg -L libc6 | \
    grep -E '/(ld-linux-[^/]*|lib(c|dl|m|pthread|rt)\.so\.[0-9]+|copyright)$' | xargs cp --parents -P -t /out

FROM scratch AS host
LABEL org.opencontainers.image.licenses=Apache-2.0
COPY --from=libc /out /
COPY LICENSE docs/licences.md /licenses/
COPY --from=build /chandler /chandler
COPY --from=build-host /chandler-host /chandler-host
ENTRYPOINT ["/chandler"]

FROM scratch
LABEL org.opencontainers.image.licenses=Apache-2.0
COPY LICENSE docs/licences.md /licenses/
COPY --from=build /chandler /chandler
ENTRYPOINT ["/chandler"]
