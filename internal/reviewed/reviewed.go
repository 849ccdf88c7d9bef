// Package reviewed serves HTTP to clients authorized by the API server, as kube-rbac-proxy
// does: a TokenReview identifies the client, and a SubjectAccessReview checks the access to
// the path.
package reviewed

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	authenticationclient "k8s.io/client-go/kubernetes/typed/authentication/v1"
	authorizationclient "k8s.io/client-go/kubernetes/typed/authorization/v1"
	"k8s.io/klog/v2"
)

const (
	// allowedFor and refusedFor are the lifetimes of cached results. A revoked permission remains
	// effective for up to allowedFor, and a new permission takes effect after refusedFor at the
	// latest. With the 10 s of Kubernetes components (k8s.io/apiserver v0.37.2,
	// pkg/server/options), each scrape of each node would cause two requests to the API server.
	allowedFor = 5 * time.Minute
	refusedFor = 10 * time.Second

	// reviewTimeout limits the total time of both reviews.
	reviewTimeout = 5 * time.Second

	// maxAnswers is the size of the cache, which is emptied when full. A client that sends many
	// different tokens therefore causes more reviews for the other clients.
	maxAnswers = 256
)

// Clients send reviews to the API server. Give them a separate rate limit, so that clients
// with invalid tokens do not slow down other requests of the agent.
type Clients struct {
	Tokens authenticationclient.TokenReviewInterface
	Access authorizationclient.SubjectAccessReviewInterface
}

// Handler passes authorized requests to the next handler.
type Handler struct {
	clients Clients
	next    http.Handler

	mu      sync.Mutex
	answers map[question]answer
}

// A question is a cache key. It contains a hash of the token, not the token.
type question struct {
	token [sha256.Size]byte
	path  string
}

type answer struct {
	status int
	until  time.Time
}

// New returns a Handler that passes authorized requests to next.
func New(clients Clients, next http.Handler) *Handler {
	return &Handler{clients: clients, next: next, answers: make(map[question]answer)}
}

// ServeHTTP implements http.Handler.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	token := bearerToken(r)
	if token == "" {
		writeRefusal(w, http.StatusUnauthorized)
		return
	}
	if status := h.checkRequest(r.Context(), token, r.URL.Path); status != http.StatusOK {
		writeRefusal(w, status)
		return
	}
	h.next.ServeHTTP(w, r)
}

// bearerToken returns the request's bearer token, or "".
func bearerToken(r *http.Request) string {
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.TrimSpace(token)
}

func writeRefusal(w http.ResponseWriter, status int) {
	if status == http.StatusUnauthorized {
		w.Header().Set("WWW-Authenticate", "Bearer")
	}
	http.Error(w, http.StatusText(status), status)
}

// checkRequest returns the HTTP status for a request: OK, Unauthorized or Forbidden, or Service
// Unavailable if the API server does not respond.
func (h *Handler) checkRequest(ctx context.Context, token, path string) int {
	q := question{sha256.Sum256([]byte(token)), path}
	h.mu.Lock()
	known, found := h.answers[q]
	h.mu.Unlock()
	if found && time.Now().Before(known.until) {
		return known.status
	}
	ctx, cancel := context.WithTimeout(ctx, reviewTimeout)
	defer cancel()
	status, err := h.reviewToken(ctx, token, path)
	if err != nil {
		klog.FromContext(ctx).Error(err, "A request cannot be authorized", "path", path)
		return http.StatusServiceUnavailable
	}
	h.rememberAnswer(q, status)
	return status
}

func (h *Handler) rememberAnswer(q question, status int) {
	a := answer{status, time.Now().Add(refusedFor)}
	if status == http.StatusOK {
		a.until = time.Now().Add(allowedFor)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.answers) >= maxAnswers {
		clear(h.answers)
	}
	h.answers[q] = a
}

// reviewToken returns the HTTP status for a request according to the API server.
func (h *Handler) reviewToken(ctx context.Context, token, path string) (status int, err error) {
	who, err := h.clients.Tokens.Create(ctx, &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token}}, metav1.CreateOptions{})
	if err != nil {
		return 0, fmt.Errorf("review token: %w", err)
	}
	if !who.Status.Authenticated {
		return http.StatusUnauthorized, nil
	}
	user := who.Status.User
	access := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: user.Username, UID: user.UID, Groups: user.Groups, Extra: make(map[string]authorizationv1.ExtraValue, len(user.Extra)),
		NonResourceAttributes: &authorizationv1.NonResourceAttributes{Path: path, Verb: "get"},
	}}
	for name, value := range user.Extra {
		access.Spec.Extra[name] = authorizationv1.ExtraValue(value)
	}
	may, err := h.clients.Access.Create(ctx, access, metav1.CreateOptions{})
	if err != nil {
		return 0, fmt.Errorf("review access of %s: %w", user.Username, err)
	}
	if !may.Status.Allowed {
		return http.StatusForbidden, nil
	}
	return http.StatusOK, nil
}
