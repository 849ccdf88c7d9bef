package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
)

// getCommand, as the first argument, makes this program run on the node and time the library's
// first step of each call: getting the claim from the API server.
const getCommand = "get-on-node"

// get runs on the node, gets a claim n times, one after another, and returns the timings.
func (b *bench) get(ctx context.Context, claim *drapb.Claim, n int) (timings, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := b.cluster.Command(ctx, self, getCommand, strconv.Itoa(n), claim.GetNamespace(), claim.GetName())
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("get a claim on the node: %w\n%s", err, stderr.Bytes())
	}
	var took timings
	return took, json.Unmarshal(out, &took)
}

// getOnNode prints the timings of n gets. The arguments are n, and the claim's namespace and name.
func getOnNode(ctx context.Context, args []string) error {
	if len(args) != 3 {
		return fmt.Errorf("%s: want 3 arguments", getCommand)
	}
	n, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	config, err := clientcmd.BuildConfigFromFlags("", nodeKubeconfig)
	if err != nil {
		return err
	}
	config.QPS = -1
	config.ContentType = "application/vnd.kubernetes.protobuf" // the same content type as Chandler's client
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	took := make(timings, 0, n)
	for i := range n + 1 {
		began := time.Now()
		if _, err := client.ResourceV1().ResourceClaims(args[1]).Get(ctx, args[2], metav1.GetOptions{}); err != nil {
			return err
		}
		if i > 0 { // The first request connects.
			took = append(took, time.Since(began))
		}
	}
	return json.NewEncoder(os.Stdout).Encode(took)
}
