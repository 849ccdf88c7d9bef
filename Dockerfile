# The agent as a static binary and nothing else. The same image can be made
# without Docker: package e2e/cluster does so for the tests.
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
    go build -trimpath -ldflags "-s -w -X main.version=$VERSION" -o /chandler ./cmd/chandler

FROM scratch
COPY --from=build /chandler /chandler
ENTRYPOINT ["/chandler"]
