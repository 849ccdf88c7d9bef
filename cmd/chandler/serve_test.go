package main

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"chandler.dev/internal/reviewed"
)

// The server answers until the context ends.
func TestServe(t *testing.T) {
	address := freeAddress(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- serve(ctx, address, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "here") }), nil)
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
	err := serve(t.Context(), "127.0.0.1:99999", nil, nil)
	if err == nil || !strings.Contains(err.Error(), "99999") {
		t.Errorf("error %v does not name the port", err)
	}
}

// If metrics have their own address, they are served only to clients that the API server
// authorizes, and not at the unprotected health address.
func TestServeProtectedMetrics(t *testing.T) {
	client := fake.NewClientset()
	client.PrependReactor("create", "tokenreviews", func(action clienttesting.Action) (bool, runtime.Object, error) {
		review := action.(clienttesting.CreateAction).GetObject().(*authenticationv1.TokenReview).DeepCopy()
		review.Status.Authenticated = review.Spec.Token == "prometheus"
		return true, review, nil
	})
	client.PrependReactor("create", "subjectaccessreviews", func(action clienttesting.Action) (bool, runtime.Object, error) {
		return true, &authorizationv1.SubjectAccessReview{Status: authorizationv1.SubjectAccessReviewStatus{Allowed: true}}, nil
	})
	o := runOptions{nodeName: "node", healthAddress: freeAddress(t), metricsAddress: freeAddress(t)}
	server, err := o.server(reviewed.Clients{Tokens: client.AuthenticationV1().TokenReviews(), Access: client.AuthorizationV1().SubjectAccessReviews()})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- server(ctx, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, r.URL.Path) }))
	}()
	get := httpClient(t, o.healthAddress, o.metricsAddress)
	for _, test := range []struct {
		url, token string
		want       int
	}{
		{"http://" + o.healthAddress + "/healthz", "", http.StatusOK},
		{"http://" + o.healthAddress + "/readyz", "", http.StatusOK},
		{"http://" + o.healthAddress + "/metrics", "prometheus", http.StatusNotFound},
		{"https://" + o.metricsAddress + "/metrics", "", http.StatusUnauthorized},
		{"https://" + o.metricsAddress + "/metrics", "nobody", http.StatusUnauthorized},
		{"https://" + o.metricsAddress + "/metrics", "prometheus", http.StatusOK},
		{"https://" + o.metricsAddress + "/healthz", "prometheus", http.StatusNotFound},
	} {
		if got := get(test.url, test.token); got != test.want {
			t.Errorf("%s with token %q is answered with %d, want %d", test.url, test.token, got, test.want)
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// httpClient waits until the addresses are served. It returns a function that sends a request with
// a token and returns the status.
func httpClient(t *testing.T, addresses ...string) func(url, token string) int {
	t.Helper()
	for _, address := range addresses {
		for {
			if connection, err := net.Dial("tcp", address); err == nil {
				connection.Close()
				break
			}
		}
	}
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	t.Cleanup(client.CloseIdleConnections)
	return func(url, token string) int {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
		if err != nil {
			t.Fatal(err)
		}
		if token != "" {
			request.Header.Set("Authorization", "Bearer "+token)
		}
		response, err := client.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		return response.StatusCode
	}
}
