package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// metricsCommand, as the first argument, makes this program run on the node and print the metrics
// of Chandler's agent.
const metricsCommand = "metrics-on-node"

const metricsAddress = "127.0.0.1:8081"

// A sum is the total duration and the number of events.
type sum struct {
	took  time.Duration
	times uint64
}

func (s *sum) add(other sum) { s.took, s.times = s.took+other.took, s.times+other.times }

// mean returns the average duration, or 0 without events.
func (s *sum) mean() time.Duration {
	if s.times == 0 {
		return 0
	}
	return s.took / time.Duration(s.times)
}

// prepareStages returns the time that Chandler's agent itself reports for preparing claims. The
// time includes neither the kubelet's call nor getting the claim from the API server.
func (b *bench) prepareStages(ctx context.Context) (sum, error) {
	self, err := os.Executable()
	if err != nil {
		return sum{}, err
	}
	cmd := b.cluster.Command(ctx, self, metricsCommand)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return sum{}, fmt.Errorf("get the metrics of the agent: %w\n%s", err, stderr.Bytes())
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(out))
	if err != nil {
		return sum{}, fmt.Errorf("read the metrics of the agent: %w", err)
	}
	const name = "chandler_dra_duration_seconds"
	for _, m := range families[name].GetMetric() {
		if labelled(m, "operation", "prepare") && labelled(m, "stage", "claim") && labelled(m, "result", "success") {
			h := m.GetHistogram()
			return sum{time.Duration(h.GetSampleSum() * float64(time.Second)), h.GetSampleCount()}, nil
		}
	}
	return sum{}, fmt.Errorf("the agent has no metric %s of preparing", name)
}

func labelled(m *dto.Metric, name, value string) bool {
	for _, l := range m.GetLabel() {
		if l.GetName() == name {
			return l.GetValue() == value
		}
	}
	return false
}

// writeMetrics prints the metrics of the agent.
func writeMetrics(ctx context.Context) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+metricsAddress+"/metrics", nil)
	if err != nil {
		return err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("get %s: %s", request.URL, answer.Status)
	}
	_, err = io.Copy(os.Stdout, answer.Body)
	return err
}
