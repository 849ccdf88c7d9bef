package publishtest

import (
	"path"
	"strings"

	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/sysfs"
)

// load is the load of the devices of a host.
type load string

const (
	busy      load = "busy"      // as the host was recorded
	idle      load = "idle"      // slow links, low clocks, low temperatures
	suspended load = "suspended" // idle, with accelerators without power
)

// idleValues are the values of an idle host, by the end of the name of the file. A narrower link is not
// among them, because it is a health state.
var idleValues = map[string]string{
	"/current_link_speed":   "2.5 GT/s PCIe",
	"/power/runtime_status": "active",
	"/temp1_input":          "31000",
	"/temp":                 "31",
	"/tt_aiclk":             "500",
	"heartbeat":             "7",
	"/npu_busy_time_us":     "12",
}

// withLoad returns the tree of a recorded host with another load, and the number of changed files by
// the end of their names.
func withLoad(recorded *discoverytest.Tree, l load) (tree *discoverytest.Tree, changed map[string]int) {
	tree, changed = recorded, make(map[string]int)
	if l == busy {
		return tree, changed
	}
	for _, name := range recorded.Files() {
		for end, value := range idleValues {
			if strings.HasSuffix(name, end) {
				tree = tree.WithFile(name, []byte(value+"\n"))
				changed[end]++
			}
		}
	}
	if l == idle {
		return tree, changed
	}
	for _, name := range recorded.Files() {
		if dir, hasLink := strings.CutSuffix(name, "/current_link_speed"); hasLink && isAccelerator(sysfs.At(recorded, dir)) {
			tree = tree.WithFile(path.Join(dir, "power/runtime_status"), []byte("suspended\n")).WithFile(path.Join(dir, "power_state"), []byte("D3cold\n"))
			changed["power_state"]++
		}
	}
	return tree, changed
}

// isAccelerator reports whether a PCI function is a display controller or a processing accelerator.
func isAccelerator(function sysfs.Device) bool {
	id, err := function.PCIID()
	return err == nil && (strings.HasPrefix(id.Class, "03") || strings.HasPrefix(id.Class, "12"))
}

// withoutInterfaces returns the tree without the network interfaces of the devices.
func withoutInterfaces(tree *discoverytest.Tree, devices []rules.Offered) *discoverytest.Tree {
	for i := range devices {
		link := path.Join("sys/class/net", devices[i].Attributes.String("ifName"))
		if target, err := tree.ReadLink(link); err == nil {
			tree = tree.WithoutFile(path.Join(path.Dir(link), target)).WithoutFile(link)
		}
	}
	return tree
}

// isMovable reports whether claims move the network interface of a device to pods.
func isMovable(d *rules.Offered) bool {
	hasRoute := d.Attributes["defaultRoute"].BoolValue
	return d.Attributes.String("ifName") != "" && d.Health.IsUsable() && (hasRoute == nil || !*hasRoute)
}
