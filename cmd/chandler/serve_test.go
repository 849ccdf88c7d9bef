package main

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
)

// The server answers until the context ends.
func TestServe(t *testing.T) {
	address := freeAddress(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- serve(ctx, address, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "here") }))
	}()
	for {
		if connection, err := net.Dial("tcp", address); err == nil {
			connection.Close()
			break
		}
	}
	response, err := http.Get("http://" + address)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if body, err := io.ReadAll(response.Body); err != nil || string(body) != "here" {
		t.Errorf("got %q, %v", body, err)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestServeNamesTheAddress(t *testing.T) {
	err := serve(t.Context(), "127.0.0.1:99999", nil)
	if err == nil || !strings.Contains(err.Error(), "99999") {
		t.Errorf("error %v does not name the port", err)
	}
}
