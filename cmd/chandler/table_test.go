package main

import (
	"bytes"
	"strings"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/terminal"
)

// The column MODEL does not repeat the name of a device without a model.
func TestModelColumn(t *testing.T) {
	for _, model := range []string{"", "4xxx"} {
		d := discovery.Device{Name: "qat-dev0", Attributes: make(discovery.Attributes)}
		d.Attributes.SetString("model", model)
		if got := modelColumn(nil).value(rules.Offered{Device: d}); got != model {
			t.Errorf("model %q is printed as %q", model, got)
		}
	}
}

// A table is as wide as it needs to be, and is not shortened in a file. On a narrow terminal, the
// widest of the models and details are shortened, and all other columns and the reason are complete.
func TestTableWidth(t *testing.T) {
	d := discovery.Device{Name: "pci-0000-3b-00-1", Attributes: make(discovery.Attributes)}
	d.Attributes.SetString("kind", "fpga")
	d.Attributes.SetString("model", "U250 production card")
	d.Attributes.SetString("profile", "xilinx_u250_gen3x16_xdma_shell_4_1-0")
	d.Health = discovery.Health{Status: discovery.Unhealthy, Reason: "no device node"}
	columns := []column{nameColumn, kindColumn, modelColumn(nil), detailColumn, healthColumn}
	for width, want := range map[int]string{
		terminal.Unlimited: "pci-0000-3b-00-1  fpga  U250 production card  xilinx_u250_gen3x16_xdma_shell_4_1-0  Unhealthy: no device node",
		96:                 "pci-0000-3b-00-1  fpga  U250 production card  xilinx_u250_gen3x16_xdma_shell_4_1-0  Unhealthy: no device node",
		80:                 "pci-0000-3b-00-1  fpga  U250 production card  xilinx_u250_gen3x16_x…  Unhealthy: no device node",
		60:                 "pci-0000-3b-00-1  fpga  U250 produc…  xilinx_u250…  Unhealthy: no device node",
		40:                 "pci-0000-3b-00-1  fpga  U250 produc…  xilinx_u250…  Unhealthy: no device node",
	} {
		var out bytes.Buffer
		if err := printColumns(&out, &rules.Snapshot{Devices: []rules.Offered{{Device: d}}}, terminal.Style{Width: width}, columns...); err != nil {
			t.Fatal(err)
		}
		if row := strings.Split(out.String(), "\n")[1]; row != want {
			t.Errorf("width %d:\n%s, want\n%s", width, row, want)
		}
	}
}

// A table in a file has complete names, whatever their length.
func TestTableOfAFile(t *testing.T) {
	out := mustRun(t, "discover", "../../discovery/families/fpgaxilinx/testdata/media.host")
	if !strings.Contains(out, "xilinx_u30_gen3x4_base_2-1626198029 ") || strings.Contains(out, "…") {
		t.Errorf("names are shortened:\n%s", out)
	}
}

// Devices are in the order of their addresses and numbers.
func TestTableOrder(t *testing.T) {
	var devices []rules.Offered
	for _, name := range []string{"neuron10", "pci-0000-1b-00-0-xcp-10", "neuron2", "pci-0000-9f-00-0", "pci-0000-1b-00-0-xcp-2", "pci-0000-18-00-0"} {
		devices = append(devices, rules.Offered{Device: discovery.Device{Name: name}})
	}
	var out bytes.Buffer
	if err := printColumns(&out, &rules.Snapshot{Devices: devices}, terminal.Style{}, nameColumn); err != nil {
		t.Fatal(err)
	}
	table, _, _ := strings.Cut(out.String(), "\n\n")
	if got, want := strings.Join(strings.Fields(table), " "), "NAME neuron2 neuron10 pci-0000-18-00-0 pci-0000-1b-00-0-xcp-2 pci-0000-1b-00-0-xcp-10 pci-0000-9f-00-0"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// The amount of memory is one word, in the units of the tree.
func TestTableMemory(t *testing.T) {
	for bytes, want := range map[int64]string{0: "", 65520 << 20: "64GiB", 16695808 << 10: "15.9GiB", 512 << 20: "512MiB"} {
		d := discovery.Device{Capacity: make(discovery.Capacity)}
		if bytes > 0 {
			d.Capacity.Set("memory", bytes)
		}
		if got := memory(rules.Offered{Device: d}); got != want {
			t.Errorf("%d: %q, want %q", bytes, got, want)
		}
	}
}
