package telemetry

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"k8s.io/component-base/metrics"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"chandler.dev/cmd/chandler/agent/placement"
	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/features"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/internal/overdue"
)

// State is the state of an agent, read for each request for metrics.
type State struct {
	Node       string
	Features   func() []features.Feature
	Prepared   func() int
	Placed     func() *placement.Placed // nil before the first placement
	View       func(exclusion.Stock) *ledger.View
	Listing    func() *kubeletapi.Listing // the kubelet's last listing, nil before the kubelet has answered
	Published  func() (slices, devices int, known bool)
	Refusal    func() string           // why the API server refuses the slices, or ""
	Registered func() (is, known bool) // whether the kubelet has registered the DRA driver

	Links func([]rules.Offered) map[string]pci.Link // the links of devices at present, by device
}

// LinkReader reads the links of devices, unless an earlier read has not ended. The zero value is
// ready to use.
type LinkReader struct{ calls overdue.Calls }

// linkLimit is how long a request for metrics waits for the links of all devices. A function that
// is being reset delays reads of its configuration space (pci_wait_cfg in drivers/pci/access.c).
const linkLimit = time.Second

// Read returns the links of devices by name, nil if a driver delays it.
func (r *LinkReader) Read(host *discovery.Host, devices []rules.Offered) map[string]pci.Link {
	const all = "links"
	if r.calls.OverdueCall(all) != nil {
		return nil
	}
	read := make(chan map[string]pci.Link, 1)
	err := r.calls.Do(linkLimit, all, "reading the links of devices", func() error {
		links := make(map[string]pci.Link)
		for i := range devices {
			if link := pci.CurrentLink(host, &devices[i].Device); link.Width > 0 {
				links[devices[i].Name] = link
			}
		}
		read <- links
		return nil
	})
	if err != nil {
		return nil
	}
	return <-read
}

// stateCollector computes metrics from the state.
type stateCollector struct {
	metrics.BaseStableCollector
	State

	metrics *Metrics
}

// deviceKeys are the labels that join with the metrics of other exporters: the DCGM exporter of
// NVIDIA has the labels UUID and pci_bus_id, and the exporter of AMD has gpu_uuid and
// serial_number.
var deviceKeys = []string{"node", "device", "uuid", "pci_address", "pci_bus_id"}

var (
	buildMetric = metrics.NewDesc("chandler_build_info",
		"1, with the version of the agent and of Go.", []string{"version", "go_version"}, nil, metrics.ALPHA, "")
	featureMetric = metrics.NewDesc("chandler_dra_server_feature_enabled",
		"Whether the API server keeps the fields of ResourceSlices that belong to a feature: 1, or 0 where it drops or refuses them and something else is published instead.",
		[]string{"feature"}, nil, metrics.ALPHA, "")
	preparedMetric   = metrics.NewDesc("chandler_dra_prepared_claims", "Claims that are prepared on this node.", nil, nil, metrics.ALPHA, "")
	registeredMetric = metrics.NewDesc("chandler_dra_registered",
		"Whether the kubelet has accepted the registration of the DRA driver: 1 or 0. Absent where the API server does not serve DRA.", nil, nil, metrics.ALPHA, "")
	slicesMetric = metrics.NewDesc("chandler_dra_published_slices",
		"ResourceSlices that are to be on the API server for this node.", nil, nil, metrics.ALPHA, "")
	publishedMetric = metrics.NewDesc("chandler_dra_published_devices",
		"Devices in these ResourceSlices. A device with numbered shares is counted once for each share.", nil, nil, metrics.ALPHA, "")
	refusedMetric = metrics.NewDesc("chandler_dra_slices_refused",
		"1 if the API server rejects the ResourceSlices of this node, for example because of an admission webhook, otherwise 0.", nil, nil, metrics.ALPHA, "")
	asideMetric = metrics.NewDesc("chandler_dra_records_set_aside",
		"Records of claims that were set aside, since they are damaged or a newer agent's. Their devices stay with the claims.", nil, nil, metrics.ALPHA, "")
	devicesMetric = metrics.NewDesc("chandler_devices",
		"Devices of the host by family, by the API that offers them, and by health: healthy, or a condition such as unknown.",
		[]string{"family", "api", "health"}, nil, metrics.ALPHA, "")
	waitingMetric = metrics.NewDesc("chandler_devices_waiting",
		"Devices that are kept from new owners until they can move to the other API, or change in how they are shared.",
		[]string{"family"}, nil, metrics.ALPHA, "")
	infoMetric = metrics.NewDesc("chandler_device_info",
		"1 for each device of the host. pci_address is as in sysfs, pci_bus_id the same as NVIDIA's tools write it, parent the device that it is a part of.",
		slices.Concat(deviceKeys, []string{"kind", "model", "family", "vendor", "serial", "driver", "driver_version", "profile", "parent"}), nil, metrics.ALPHA, "")
	conditionMetric = metrics.NewDesc("chandler_device_condition",
		"1 for each device that is not well, with its condition and what that means for pods: NoSchedule, NoExecute or None.",
		slices.Concat(deviceKeys, []string{"condition", "effect"}), nil, metrics.ALPHA, "")
	memoryMetric = metrics.NewDesc("chandler_device_memory_bytes",
		"Memory of each device that has its own.", []string{"node", "device"}, nil, metrics.ALPHA, "")
	sharesMetric = metrics.NewDesc("chandler_device_shares",
		"Number of shares of each device that the configuration shares by number.", []string{"node", "device"}, nil, metrics.ALPHA, "")
	speedMetric = metrics.NewDesc("chandler_device_link_speed_transfers_per_second",
		"Transfers per second on a lane of each device's PCIe link at present. GPUs lower it while they are idle. Absent while the device is suspended.",
		[]string{"node", "device"}, nil, metrics.ALPHA, "")
	widthMetric = metrics.NewDesc("chandler_device_link_width_lanes",
		"Lanes of each device's PCIe link at present. Absent while the device is suspended.", []string{"node", "device"}, nil, metrics.ALPHA, "")
	allocatedMetric = metrics.NewDesc("chandler_device_allocated",
		"1 for each container that has a device, by a claim (api DRA) or by the device plugin API (api DevicePlugin). "+
			"pod and container are empty while the kubelet has not named them. Claims with admin access are left out.",
		slices.Concat(deviceKeys, []string{"namespace", "pod", "container", "claim", "request", "resource", "api"}), nil, metrics.ALPHA, "")
	problemsMetric = metrics.NewDesc("chandler_scan_problems",
		"Problems of the last scan, by family: data that could not be read or parsed. The family is \"\" if it is unknown.", []string{"family"}, nil, metrics.ALPHA, "")
	lateMetric = metrics.NewDesc("chandler_scan_late",
		"1 for each family that has not answered the last scan in time. Its devices count as unreadable.", []string{"family"}, nil, metrics.ALPHA, "")
	hangingMetric = metrics.NewDesc("chandler_scan_hanging_reads",
		"Reads of the host that a driver has not answered. Their devices count as unreadable.", nil, nil, metrics.ALPHA, "")
)

// stateMetrics are all metrics of a [stateCollector].
var stateMetrics = []*metrics.Desc{
	buildMetric, featureMetric, preparedMetric, registeredMetric, slicesMetric, publishedMetric, refusedMetric, asideMetric,
	devicesMetric, waitingMetric, infoMetric, conditionMetric, memoryMetric, sharesMetric, speedMetric, widthMetric, allocatedMetric,
	sharedMetric, sharedFreeMetric, sharedAllocatedMetric,
	problemsMetric, lateMetric, hangingMetric,
}

// DescribeWithStability implements [metrics.StableCollector].
func (s *stateCollector) DescribeWithStability(descriptions chan<- *metrics.Desc) {
	for _, d := range stateMetrics {
		descriptions <- d
	}
}

// CollectWithStability implements [metrics.StableCollector].
func (s *stateCollector) CollectWithStability(all chan<- metrics.Metric) {
	gauge := func(of *metrics.Desc, value float64, labels ...string) {
		all <- metrics.NewLazyConstMetric(of, metrics.GaugeValue, value, labels...)
	}
	gauge(buildMetric, 1, s.metrics.version, goVersion())
	for _, feature := range s.Features() {
		gauge(featureMetric, boolNumber(feature.Kept), feature.Name)
	}
	gauge(preparedMetric, float64(s.Prepared()))
	if is, known := s.Registered(); known {
		gauge(registeredMetric, boolNumber(is))
	}
	if slices, devices, known := s.Published(); known {
		gauge(slicesMetric, float64(slices))
		gauge(publishedMetric, float64(devices))
	}
	gauge(refusedMetric, boolNumber(s.Refusal() != ""))
	if last := s.metrics.lastScan.Load(); last != nil {
		gauge(hangingMetric, float64(last.Hanging))
		for _, family := range last.Late {
			gauge(lateMetric, 1, family)
		}
	}
	view := s.View(nil)
	gauge(asideMetric, float64(len(view.SealedEntries())))
	p := s.Placed()
	if p == nil {
		return
	}
	for labels, n := range countDevices(p) {
		gauge(devicesMetric, float64(n), labels.family, labels.api, labels.health)
	}
	for family, n := range countProblems(p.Snapshot) {
		gauge(problemsMetric, float64(n), family)
	}
	waiting := make(map[string]int)
	for i := range p.Snapshot.Devices {
		d := &p.Snapshot.Devices[i]
		s.collectDevice(gauge, d)
		if p.Placement.Moving[d.Silicon()] != "" {
			waiting[d.Family]++
		} else {
			waiting[d.Family] += 0
		}
	}
	for name, link := range s.Links(p.Snapshot.Devices) {
		gauge(widthMetric, float64(link.Width), s.Node, name)
		if link.Speed > 0 {
			gauge(speedMetric, float64(link.Speed)*1e6, s.Node, name)
		}
	}
	for family, n := range waiting {
		gauge(waitingMetric, float64(n), family)
	}
	for _, shared := range sharedUses(p.Snapshot.Devices, view, s.Listing()) {
		keys := []string{s.Node, shared.device, string(shared.capacity), shared.unit()}
		gauge(sharedMetric, shared.all, keys...)
		gauge(sharedFreeMetric, shared.free, keys...)
		for _, u := range shared.uses {
			h := u.holder
			gauge(sharedAllocatedMetric, u.amount, append(slices.Clone(keys), h.Namespace, h.Pod, h.Claim, h.Request, h.Resource, string(h.API))...)
		}
	}
	gone := make(map[string]bool)
	for _, h := range holdersOf(view, s.Listing()) {
		d, there := p.Snapshot.Lookup(h.Device)
		if !there {
			d.Name = h.Device
		}
		if health, known := p.Snapshot.Gone[h.Device]; known && !there && !gone[h.Device] {
			gone[h.Device] = true
			gauge(conditionMetric, 1, append(s.keys(&d), string(discovery.ConditionGone), cmp.Or(string(health.Effect), "None"))...)
		}
		gauge(allocatedMetric, 1, append(s.keys(&d), h.Namespace, h.Pod, h.Container, h.Claim, h.Request, h.Resource, string(h.API))...)
	}
}

// collectDevice sends the metrics of one device.
func (s *stateCollector) collectDevice(gauge func(of *metrics.Desc, value float64, labels ...string), d *rules.Offered) {
	text := d.Attributes.String
	version := ""
	if v := d.Attributes["driverVersion"].VersionValue; v != nil {
		version = *v
	}
	gauge(infoMetric, 1, append(s.keys(d), text("kind"), text("model"), d.Family, text("vendor"), text("serial"),
		text("driver"), version, text("profile"), text("parent"))...)
	if key := d.Health.Key(); key != "" {
		gauge(conditionMetric, 1, append(s.keys(d), string(key), cmp.Or(string(d.Health.Effect), "None"))...)
	}
	if memory, has := d.Capacity["memory"]; has {
		gauge(memoryMetric, memory.Value.AsApproximateFloat64(), s.Node, d.Name)
	}
	if shares := d.Shares(); shares > 0 {
		gauge(sharesMetric, float64(shares), s.Node, d.Name)
	}
}

// keys returns the values of [deviceKeys].
func (s *stateCollector) keys(d *rules.Offered) []string {
	address := d.Attributes.String(deviceattribute.StandardDeviceAttributePCIBusID)
	keys := make([]string, 0, len(deviceKeys)+9)
	return append(keys, s.Node, d.Name, d.Attributes.String("uuid"), address, nvidiaBusID(address))
}

// nvidiaBusID returns a PCI address in the form of NVIDIA's tools: in upper case, and with eight
// digits of the domain. For text without a domain, or with a longer one, it returns "".
func nvidiaBusID(address string) string {
	domain, rest, found := strings.Cut(address, ":")
	if !found || len(domain) > 8 {
		return ""
	}
	return strings.ToUpper(strings.Repeat("0", 8-len(domain)) + domain + ":" + rest)
}

func boolNumber(is bool) float64 {
	if is {
		return 1
	}
	return 0
}

type deviceLabels struct{ family, api, health string }

// countDevices counts the devices that an API offers.
func countDevices(p *placement.Placed) map[deviceLabels]int {
	counts := make(map[deviceLabels]int)
	for i := range p.Snapshot.Devices {
		d := &p.Snapshot.Devices[i]
		api := p.Placement.API[d.Silicon()]
		if api == discovery.ModeAuto {
			continue
		}
		labels := deviceLabels{d.Family, string(api), "healthy"}
		if key := d.Health.Key(); key != "" {
			labels.health = string(key)
		}
		counts[labels]++
	}
	return counts
}

// countProblems counts problems by family. The Device of a problem is the name of a device or a
// family.
func countProblems(s *rules.Snapshot) map[string]int {
	families := make(map[string]bool)
	counts := make(map[string]int)
	for i := range s.Devices {
		families[s.Devices[i].Family] = true
		counts[s.Devices[i].Family] = 0
	}
	for _, problem := range s.Problems {
		family := ""
		if d, found := s.Lookup(problem.Device); found {
			family = d.Family
		} else if families[problem.Device] {
			family = problem.Device
		}
		counts[family]++
	}
	return counts
}
