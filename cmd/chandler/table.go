package main

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// column is one column of a table of devices.
type column struct {
	title string
	value func(rules.Offered) string
	width int // maximum width in characters, 0 for no limit
}

var (
	nameColumn   = column{"NAME", func(d rules.Offered) string { return d.Name }, 0}
	kindColumn   = column{"KIND", attribute("kind"), 0}
	modelColumn  = column{"MODEL", model, 24}
	memoryColumn = column{"MEMORY", memory, 0}
	numaColumn   = column{"NUMA", attribute(deviceattribute.StandardDeviceAttributeNUMANode), 0}
	rootColumn   = column{"PCIE ROOT", attribute(deviceattribute.StandardDeviceAttributePCIeRoot), 0}
	healthColumn = column{"HEALTH", health, 9}
)

// printTable prints the columns that fit a terminal of 80 characters.
func printTable(out io.Writer, s *rules.Snapshot) error {
	return printColumns(out, s, nameColumn, kindColumn, modelColumn, memoryColumn, numaColumn, healthColumn)
}

// printWide prints all columns without truncation.
func printWide(out io.Writer, s *rules.Snapshot) error {
	columns := []column{
		nameColumn, kindColumn, {"FAMILY", attribute("family"), 0}, {"VENDOR", attribute("vendor"), 0}, modelColumn, memoryColumn,
		{"ARCHITECTURE", attribute("architecture"), 0}, {"DRIVER", attribute("driver"), 0}, numaColumn, rootColumn,
		{"EXTENDED RESOURCE", classicNames, 0}, {"HEALTH", wideHealth, 0},
	}
	for i := range columns {
		columns[i].width = 0
	}
	return printColumns(out, s, columns...)
}

func printColumns(out io.Writer, s *rules.Snapshot, columns ...column) error {
	if len(s.Devices) == 0 {
		_, err := fmt.Fprintln(out, "No accelerators found.")
		return err
	}
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	row := func(value func(column) string) {
		cells := make([]string, len(columns))
		for i, c := range columns {
			cells[i] = value(c)
		}
		fmt.Fprintln(table, strings.TrimRight(strings.Join(cells, "\t"), "\t "))
	}
	row(func(c column) string { return c.title })
	for _, d := range s.Devices {
		row(func(c column) string { return cut(cmp.Or(c.value(d), "-"), c.width) })
	}
	return table.Flush()
}

// attribute returns a function that prints an attribute, "" if there is none.
func attribute(name resourceapi.QualifiedName) func(rules.Offered) string {
	return func(d rules.Offered) string { return strings.Join(discovery.Values(d.Attributes[name]), ",") }
}

// model returns the product name or, if unknown, the PCI IDs.
func model(d rules.Offered) string {
	if name := d.Attributes.String("model"); name != "" {
		return name
	}
	if vendor, device := d.Attributes.String("pciVendor"), d.Attributes.String("pciDevice"); vendor != "" {
		return vendor + ":" + device
	}
	return ""
}

func memory(d rules.Offered) string {
	capacity, ok := d.Capacity["memory"]
	if !ok {
		return ""
	}
	return capacity.Value.String()
}

func health(d rules.Offered) string { return string(d.Health.Status) }

func wideHealth(d rules.Offered) string {
	if d.Health.Reason == "" {
		return health(d)
	}
	return fmt.Sprintf("%s: %s", d.Health.Status, d.Health.Reason)
}

// classicNames lists the device's extended resources, with the number of IDs if it is not one.
func classicNames(d rules.Offered) string {
	offers := make([]string, len(d.Offers))
	for i, offer := range d.Offers {
		offers[i] = offer.Resource
		if n := len(offer.IDs); n != 1 {
			offers[i] += fmt.Sprintf(" x%d", n)
		}
	}
	return strings.Join(offers, ",")
}

// cut shortens a value to width characters.
func cut(s string, width int) string {
	if runes := []rune(s); width > 0 && len(runes) > width {
		return string(runes[:width-1]) + "…"
	}
	return s
}
