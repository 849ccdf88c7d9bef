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

// getCommand is the argument with which this program runs on the node and times what the library does first in each
// call: it gets the claim from the API server.
const getCommand = "get-on-node"

// get times getting a claim n times, one after another, on the node.
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

// getOnNode writes how long each of n gets took: args are n, and the claim's namespace and name.
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
	config.ContentType = "application/vnd.kubernetes.protobuf" // as Chandler asks
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
		if i > 0 { // the first one connects
			took = append(took, time.Since(began))
		}
	}
	return json.NewEncoder(os.Stdout).Encode(took)
}
