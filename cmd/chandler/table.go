package main

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

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
	title    string
	value    func(rules.Offered) string
	flexible bool // shortened if a terminal is too narrow for the table
}

var (
	nameColumn   = column{"NAME", func(d rules.Offered) string { return d.Name }, false}
	kindColumn   = column{"KIND", attribute("kind"), false}
	detailColumn = column{"DETAIL", func(d rules.Offered) string { return inventory.Detail(&d.Device) }, true}
	memoryColumn = column{"MEMORY", memory, false}
	numaColumn   = column{"NUMA", attribute(deviceattribute.StandardDeviceAttributeNUMANode), false}
	rootColumn   = column{"PCIE ROOT", attribute(deviceattribute.StandardDeviceAttributePCIeRoot), false}
	healthColumn = column{"HEALTH", health, false}
)

// flexibleWidth is the width to which flexible columns are shortened at most.
const flexibleWidth = 12

// modelColumn has the model, from products if the kernel does not know it. It does not repeat the name
// of a device without a model.
func modelColumn(products pciids.Names) column {
	return column{"MODEL", func(d rules.Offered) string {
		if model := inventory.Model(&d.Device, products); model != d.Name {
			return model
		}
		return ""
	}, true}
}

// printTable prints the columns that most users need, and leaves out optional columns without a value.
// On a terminal, the table has the terminal's width, except for the reasons of unhealthy devices.
func printTable(out io.Writer, s *rules.Snapshot, products pciids.Names) error {
	columns := []column{nameColumn, kindColumn, modelColumn(products)}
	for _, optional := range []column{detailColumn, memoryColumn, numaColumn} {
		if slices.ContainsFunc(s.Devices, func(d rules.Offered) bool { return optional.value(d) != "" }) {
			columns = append(columns, optional)
		}
	}
	style := terminal.StyleOf(out, os.LookupEnv, false)
	if !terminal.IsTerminal(out) {
		style.Width = terminal.Unlimited
	}
	return printColumns(out, s, style, append(columns, healthColumn)...)
}

// printWide prints all columns without truncation.
func printWide(out io.Writer, s *rules.Snapshot, products pciids.Names) error {
	return printColumns(out, s, terminal.Style{Width: terminal.Unlimited},
		nameColumn, kindColumn, column{"FAMILY", attribute("family"), false}, column{"VENDOR", attribute("vendor"), false},
		modelColumn(products), detailColumn, memoryColumn,
		column{"ARCHITECTURE", attribute("architecture"), false}, column{"DRIVER", attribute("driver"), false}, numaColumn, rootColumn,
		column{"EXTENDED RESOURCE", classicNames, false}, healthColumn,
	)
}

// printColumns prints a table of devices, and the number of physical devices.
func printColumns(out io.Writer, s *rules.Snapshot, style terminal.Style, columns ...column) error {
	inv := inventory.Make(inventory.Facts{Snapshot: s})
	if len(s.Devices) == 0 {
		_, err := fmt.Fprintln(out, inv.DescribeEmpty())
		return err
	}
	devices := slices.Clone(s.Devices)
	slices.SortStableFunc(devices, func(a, b rules.Offered) int { return inventory.CompareDevices(a.Name, b.Name) })
	var table terminal.Table
	for i, c := range columns {
		least := 0
		if c.flexible {
			least = flexibleWidth
		}
		table.Columns = append(table.Columns, terminal.Column{Title: c.title, Least: least, Overflow: i == len(columns)-1})
	}
	for _, d := range devices {
		var row []terminal.Cell
		for _, c := range columns {
			row = append(row, terminal.TextCell(cmp.Or(strings.ReplaceAll(c.value(d), "\n", "; "), "-")))
		}
		table.AddRow(row...)
	}
	if err := table.Print(out, style); err != nil {
		return err
	}
	counts := inv.CountText()
	if counts == "" { // only devices of the host itself
		return printModeReason(out, devices)
	}
	_, err := fmt.Fprintf(out, "\n%s\n", counts)
	return err
}

// printModeReason prints which devices DRA does not publish, and why.
func printModeReason(out io.Writer, devices []rules.Offered) error {
	var names []string
	for _, d := range devices {
		if d.ModeReason != "" {
			names = append(names, d.Name)
		}
	}
	if len(names) == 0 {
		return nil
	}
	_, err := fmt.Fprintf(out, "\n%s:\n%s\n", strings.Join(names, ", "), rules.NoAccelerators)
	return err
}

// attribute returns a function that prints an attribute, "" if there is none.
func attribute(name resourceapi.QualifiedName) func(rules.Offered) string {
	return func(d rules.Offered) string {
		return strings.Join(discovery.Values(d.Attributes[name].ForSlice()), ",")
	}
}

func memory(d rules.Offered) string {
	capacity := d.Capacity["memory"]
	return strings.ReplaceAll(inventory.Bytes(capacity.Value.Value()), " ", "") // one word in a table
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
