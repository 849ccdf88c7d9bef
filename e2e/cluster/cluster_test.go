package cluster_test

import (
	"context"
	"testing"
	"time"

	"chandler.dev/e2e/build"
	"chandler.dev/e2e/cluster"
)

func TestSmoke(t *testing.T) {
	programs, err := build.Builder{Progress: t.Output()}.Cluster(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	dir := "/tmp/e2e-smoke"
	c, err := cluster.Start(ctx, cluster.Config{Programs: programs, Dir: dir, Progress: t.Output()})
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.Kubectl(ctx, "get", "nodes,pods,svc,sa", "-A", "-o", "wide").CombinedOutput()
	t.Log(string(out), err)
	b := time.Now()
	if err := c.Stop(); err != nil {
		t.Error(err)
	}
	t.Log("stop", time.Since(b))
}
