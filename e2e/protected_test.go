package e2e

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/internal/reviewed"
)

// metricsRights are the permissions of the chart's option metrics.protected. The agent may create
// reviews, and one of two service accounts may read metrics, like Prometheus.
const metricsRights = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: metrics-prometheus}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: metrics-other}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: metrics-asker}
rules:
- {apiGroups: [authentication.k8s.io], resources: [tokenreviews], verbs: [create]}
- {apiGroups: [authorization.k8s.io], resources: [subjectaccessreviews], verbs: [create]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: metrics-asker}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: metrics-asker}
subjects: [{kind: ServiceAccount, name: chandler, namespace: chandler}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: metrics-reader}
rules:
- {nonResourceURLs: [/metrics], verbs: [get]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: metrics-reader}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: metrics-reader}
subjects: [{kind: ServiceAccount, name: metrics-prometheus, namespace: default}]
`

// TestProtectedMetrics checks that the chart's permissions suffice for the agent to authorize
// metrics requests at the real API server.
func TestProtectedMetrics(t *testing.T) {
	apply(t, metricsRights)
	agent := agentOf(t, node.NodeName())
	handler := func() http.Handler { // without cached reviews
		return reviewed.New(reviewed.Clients{Tokens: agent.AuthenticationV1().TokenReviews(), Access: agent.AuthorizationV1().SubjectAccessReviews()},
			http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "metrics") }))
	}
	tokens := make(map[string]string)
	for _, account := range []string{"metrics-prometheus", "metrics-other"} {
		request, err := kube.CoreV1().ServiceAccounts(metav1.NamespaceDefault).CreateToken(within(t), account, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		tokens[account] = "Bearer " + request.Status.Token
	}
	for _, test := range []struct {
		header string
		want   int
	}{
		{"", http.StatusUnauthorized},
		{"Bearer no.such.token", http.StatusUnauthorized},
		{tokens["metrics-other"], http.StatusForbidden},
		{tokens["metrics-prometheus"], http.StatusOK},
	} {
		// The API server enforces a new permission after a moment.
		until(t, fmt.Sprintf("the answer %d", test.want), func(ctx context.Context) error {
			request := httptest.NewRequestWithContext(ctx, http.MethodGet, "/metrics", nil)
			request.Header.Set("Authorization", test.header)
			recorder := httptest.NewRecorder()
			handler().ServeHTTP(recorder, request)
			if recorder.Code != test.want {
				return fmt.Errorf("it is %d: %s", recorder.Code, recorder.Body)
			}
			return nil
		})
	}
}
