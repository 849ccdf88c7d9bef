// Package backoff has the pauses between requests to the API server.
package backoff

import (
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// NewPause returns the pauses between requests to the API server that fail, or whose answer does not
// change: from one second to two minutes. The jitter spreads the requests of many nodes.
func NewPause() wait.Backoff {
	return wait.Backoff{Duration: time.Second, Factor: 2, Jitter: 0.5, Steps: 10, Cap: 2 * time.Minute}
}
