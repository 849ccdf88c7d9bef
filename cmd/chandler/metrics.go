package main

import (
	"net/http"

	"k8s.io/component-base/metrics"

	"chandler.dev/driver"
)

// serverFeatures tells which optional fields of ResourceSlices the API server
// keeps, whenever it is asked.
type serverFeatures struct {
	metrics.BaseStableCollector
	description *metrics.Desc
	features    func() []driver.Feature
}

// metricsHandler answers with the metrics of the agent. There is none of what is
// not known yet.
func metricsHandler(features func() []driver.Feature) http.Handler {
	registry := metrics.NewKubeRegistry()
	registry.CustomMustRegister(&serverFeatures{
		description: metrics.NewDesc("chandler_dra_server_feature_enabled",
			"Whether the API server keeps the fields of ResourceSlices that belong to a feature: 1, or 0 where it drops or refuses them and something else is published instead.",
			[]string{"feature"}, nil, metrics.ALPHA, ""),
		features: features,
	})
	return metrics.HandlerFor(registry, metrics.HandlerOpts{})
}

// DescribeWithStability implements [metrics.StableCollector].
func (s *serverFeatures) DescribeWithStability(descriptions chan<- *metrics.Desc) {
	descriptions <- s.description
}

// CollectWithStability implements [metrics.StableCollector].
func (s *serverFeatures) CollectWithStability(all chan<- metrics.Metric) {
	for _, feature := range s.features() {
		kept := 0.0
		if feature.Kept {
			kept = 1
		}
		all <- metrics.NewLazyConstMetric(s.description, metrics.GaugeValue, kept, feature.Name)
	}
}
