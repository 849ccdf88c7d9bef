package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pciids"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/inventory"
	"chandler.dev/internal/terminal"
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
	detailColumn = column{"DETAIL", func(d rules.Offered) string { return inventory.Detail(&d.Device) }, 24}
	memoryColumn = column{"MEMORY", memory, 0}
	numaColumn   = column{"NUMA", attribute(deviceattribute.StandardDeviceAttributeNUMANode), 0}
	rootColumn   = column{"PCIE ROOT", attribute(deviceattribute.StandardDeviceAttributePCIeRoot), 0}
	healthColumn = column{"HEALTH", health, 0}
)

// modelColumn has the model, from products if the kernel does not know it. It does not repeat the name
// of a device without a model.
func modelColumn(products pciids.Names, width int) column {
	return column{"MODEL", func(d rules.Offered) string {
		if model := inventory.Model(&d.Device, products); model != d.Name {
			return model
		}
		return ""
	}, width}
}

// printTable prints the columns that fit a terminal of 80 characters if all devices are healthy. It
// leaves out optional columns without a value.
func printTable(out io.Writer, s *rules.Snapshot, products pciids.Names) error {
	columns := []column{nameColumn, kindColumn, modelColumn(products, 24)}
	for _, optional := range []column{detailColumn, memoryColumn, numaColumn} {
		if slices.ContainsFunc(s.Devices, func(d rules.Offered) bool { return optional.value(d) != "" }) {
			columns = append(columns, optional)
		}
	}
	return printColumns(out, s, append(columns, healthColumn)...)
}

// printWide prints all columns without truncation.
func printWide(out io.Writer, s *rules.Snapshot, products pciids.Names) error {
	columns := []column{
		nameColumn, kindColumn, {"FAMILY", attribute("family"), 0}, {"VENDOR", attribute("vendor"), 0}, modelColumn(products, 0), detailColumn, memoryColumn,
		{"ARCHITECTURE", attribute("architecture"), 0}, {"DRIVER", attribute("driver"), 0}, numaColumn, rootColumn,
		{"EXTENDED RESOURCE", classicNames, 0}, healthColumn,
	}
	for i := range columns {
		columns[i].width = 0
	}
	return printColumns(out, s, columns...)
}

// printColumns prints a table of devices, and the number of physical devices.
func printColumns(out io.Writer, s *rules.Snapshot, columns ...column) error {
	inv := inventory.Make(inventory.Facts{Snapshot: s})
	if len(s.Devices) == 0 {
		_, err := fmt.Fprintln(out, inv.DescribeEmpty())
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
		row(func(c column) string {
			text := terminal.SafeText(strings.ReplaceAll(c.value(d), "\n", "; "))
			return cut(cmp.Or(text, "-"), c.width)
		})
	}
	if err := table.Flush(); err != nil {
		return err
	}
	counts := inv.CountText()
	if counts == "" { // only devices of the host itself
		return nil
	}
	_, err := fmt.Fprintf(out, "\n%s\n", counts)
	return err
}

// attribute returns a function that prints an attribute, "" if there is none.
func attribute(name resourceapi.QualifiedName) func(rules.Offered) string {
	return func(d rules.Offered) string { return strings.Join(discovery.Values(d.Attributes[name]), ",") }
}

func memory(d rules.Offered) string {
	capacity, ok := d.Capacity["memory"]
	if !ok {
		return ""
	}
	return capacity.Value.String()
}

func health(d rules.Offered) string {
	if d.Health.Reason == "" {
		return string(d.Health.Status)
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
