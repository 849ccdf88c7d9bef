package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"
)

// docs/security.md has a row for each permission of the agent, each host directory in its pod, and
// each admission policy, and no row for permissions that the agent does not have.
func TestSecurityPage(t *testing.T) {
	page, err := os.ReadFile("../../docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := make(map[string]string) // the second cell, by each name in the first cell
	for line := range strings.Lines(string(page)) {
		if cells := strings.Split(line, "|"); len(cells) > 3 {
			for name := range strings.SplitSeq(cells[1], ",") {
				rows[strings.Trim(name, " `")] = strings.TrimSpace(cells[2])
			}
		}
	}
	for _, rule := range rights(t) {
		for _, resource := range rule.Resources {
			if got, want := rows[resource], strings.Join(rule.Verbs, ", "); got != want {
				t.Errorf("the page says that the agent may %q %s, and rbac.yaml that it may %q", got, resource, want)
			}
			delete(rows, resource)
		}
	}
	for _, resource := range []string{"secrets", "serviceaccounts", "nodes", "nodes/status", "pods", "pods/exec", "events"} {
		if rows[resource] != "" {
			t.Errorf("the agent may not %s %s", rows[resource], resource)
		}
	}
	var set appsv1.DaemonSet
	manifest(t, "daemonset.yaml", &set)
	for _, volume := range set.Spec.Template.Spec.Volumes {
		if volume.HostPath != nil && rows[volume.HostPath.Path] == "" {
			t.Errorf("there is no row for %s of the host", volume.HostPath.Path)
		}
	}
	policies, err := filepath.Glob("../../deployments/admission*.yaml")
	if err != nil || len(policies) < 4 {
		t.Fatalf("policies %q, %v", policies, err)
	}
	for _, file := range policies {
		var object struct{ Metadata struct{ Name string } }
		manifest(t, filepath.Base(file), &object)
		if rows[object.Metadata.Name] == "" {
			t.Errorf("there is no row for policy %s", object.Metadata.Name)
		}
	}
}

// manifest decodes the first object of a file in deployments/.
func manifest(t *testing.T, file string, into any) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("../../deployments", file))
	if err != nil {
		t.Fatal(err)
	}
	first, _, _ := bytes.Cut(data, []byte("\n---\n"))
	if err := yaml.Unmarshal(first, into); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
}

// rights returns the agent's permissions, in the cluster and in its namespace.
func rights(t *testing.T) (rules []rbacv1.PolicyRule) {
	t.Helper()
	data, err := os.ReadFile("../../deployments/rbac.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for document := range bytes.SplitSeq(data, []byte("\n---\n")) {
		var role rbacv1.ClusterRole // a Role has the same fields
		if err := yaml.Unmarshal(document, &role); err != nil {
			t.Fatal(err)
		}
		rules = append(rules, role.Rules...)
	}
	if len(rules) < 8 {
		t.Fatalf("rbac.yaml has %d rules", len(rules))
	}
	return rules
}
