package reviewed

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

// apiServer accepts two tokens, and permits access to /metrics for one of the users. It counts
// the reviews.
type apiServer struct {
	reviews, failing int
}

func (s *apiServer) clients() Clients {
	client := fake.NewClientset()
	client.PrependReactor("create", "tokenreviews", func(action clienttesting.Action) (bool, runtime.Object, error) {
		s.reviews++
		if s.failing > 0 {
			s.failing--
			return true, nil, errors.New("the server is down")
		}
		review := action.(clienttesting.CreateAction).GetObject().(*authenticationv1.TokenReview).DeepCopy()
		if review.Spec.Token == "prometheus" || review.Spec.Token == "other" {
			review.Status = authenticationv1.TokenReviewStatus{Authenticated: true, User: authenticationv1.UserInfo{
				Username: review.Spec.Token, UID: "1", Groups: []string{"g"}, Extra: map[string]authenticationv1.ExtraValue{"e": {"v"}},
			}}
		}
		return true, review, nil
	})
	client.PrependReactor("create", "subjectaccessreviews", func(action clienttesting.Action) (bool, runtime.Object, error) {
		review := action.(clienttesting.CreateAction).GetObject().(*authorizationv1.SubjectAccessReview).DeepCopy()
		spec := review.Spec
		review.Status.Allowed = spec.User == "prometheus" && spec.UID == "1" && spec.Groups[0] == "g" && spec.Extra["e"][0] == "v" &&
			spec.NonResourceAttributes.Path == "/metrics" && spec.NonResourceAttributes.Verb == "get"
		return true, review, nil
	})
	return Clients{client.AuthenticationV1().TokenReviews(), client.AuthorizationV1().SubjectAccessReviews()}
}

// ask returns the status of the response to a request with an Authorization header.
func ask(handler http.Handler, header, path string) int {
	request := httptest.NewRequestWithContext(context.Background(), http.MethodGet, path, nil)
	if header != "" {
		request.Header.Set("Authorization", header)
	}
	recorder := httptest.NewRecorder()
	handler.ServeHTTP(recorder, request)
	return recorder.Code
}

var ok = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "all of it") })

func TestHandler(t *testing.T) {
	handler := New((&apiServer{}).clients(), ok)
	for header, want := range map[string]int{
		"":                  http.StatusUnauthorized,
		"Bearer":            http.StatusUnauthorized,
		"Bearer ":           http.StatusUnauthorized,
		"Basic prometheus":  http.StatusUnauthorized,
		"Bearer nobody":     http.StatusUnauthorized,
		"Bearer other":      http.StatusForbidden,
		"Bearer prometheus": http.StatusOK,
		"bearer prometheus": http.StatusOK,
	} {
		for range 2 { // once reviewed, once cached
			if got := ask(handler, header, "/metrics"); got != want {
				t.Errorf("%q is answered with %d, want %d", header, got, want)
			}
		}
	}
	// A result for one path does not apply to another path.
	if got := ask(handler, "Bearer prometheus", "/debug"); got != http.StatusForbidden {
		t.Errorf("another path is answered with %d", got)
	}
}

// Results are cached for a limited time, positive results longer than negative results.
func TestAnswersAreRemembered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := &apiServer{}
		handler := New(server.clients(), ok)
		for _, step := range []struct {
			header string
			later  time.Duration
			want   int // reviews so far
		}{
			{"Bearer prometheus", 0, 1},
			{"Bearer prometheus", allowedFor - time.Second, 1},
			{"Bearer prometheus", 2 * time.Second, 2},
			{"Bearer nobody", 0, 3},
			{"Bearer nobody", refusedFor - time.Second, 3},
			{"Bearer nobody", 2 * time.Second, 4},
		} {
			time.Sleep(step.later)
			ask(handler, step.header, "/metrics")
			if server.reviews != step.want {
				t.Errorf("%+v: %d reviews", step, server.reviews)
			}
		}
		for i := range 2 * maxAnswers {
			ask(handler, fmt.Sprint("Bearer ", i), "/metrics")
		}
		if len(handler.answers) > maxAnswers {
			t.Errorf("%d answers are remembered", len(handler.answers))
		}
	})
}

// While the API server does not respond, requests are rejected, and the rejection is not
// cached.
func TestServerDown(t *testing.T) {
	server := &apiServer{failing: 1}
	handler := New(server.clients(), ok)
	if got := ask(handler, "Bearer prometheus", "/metrics"); got != http.StatusServiceUnavailable {
		t.Errorf("it is answered with %d", got)
	}
	if got := ask(handler, "Bearer prometheus", "/metrics"); got != http.StatusOK {
		t.Errorf("then with %d", got)
	}
}

// The server uses a self-signed certificate, or the current contents of the files.
func TestTLS(t *testing.T) {
	config, err := TLSConfig("node", "", "")
	if err != nil {
		t.Fatal(err)
	}
	own, err := x509.ParseCertificate(config.Certificates[0].Certificate[0])
	if err != nil || own.VerifyHostname("node") != nil || time.Until(own.NotAfter) < 365*24*time.Hour {
		t.Errorf("certificate %+v, %v", own, err)
	}
	missing := filepath.Join(t.TempDir(), "tls.crt")
	if _, err := TLSConfig("node", missing, missing); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without the files: %v", err)
	}
}
