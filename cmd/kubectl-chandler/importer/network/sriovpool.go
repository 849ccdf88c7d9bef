package network

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"chandler.dev/cmd/kubectl-chandler/importer/expression"
	"chandler.dev/cmd/kubectl-chandler/importer/plugin"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
)

// A pool collects the expressions of one set of selectors.
type pool struct {
	im   *plugin.Import
	kind string // netdevice, accelerator, auxnetdevice
	cel  []string

	chosen map[string][]string // the selected values of each attribute
}

// selectorOf returns the expression of a set of selectors, and whether the expression is complete.
func (p *pool) selectorOf(v source.Value) (string, bool) {
	p.startExpression(v)
	complete := true
	var profiles source.Value
	for name, field := range v.Fields() {
		if field.IsNull() || field.IsList() && len(field.Node.Content) == 0 {
			continue
		}
		switch name {
		case "vendors":
			p.addOneOf(expression.Text("pciVendor"), pciIDs(field))
		case "devices":
			p.addOneOf(expression.Text("pciDevice"), pciIDs(field))
		case "drivers":
			p.addOneOf(expression.Text("driver"), field.ListTexts())
		case "pciAddresses":
			p.addOneOf(expression.BusID, lowerAll(field.ListTexts()))
		case "acpiIndexes":
			complete = p.addNumbers("acpiIndex", field) && complete
		case "auxTypes":
			complete = p.addAuxiliary(field) && complete
		case "pfNames":
			complete = p.addParts(expression.Text("pfName"), field) && complete
		case "rootDevices":
			complete = p.addParts(expression.Text("pfPCIBusID"), field) && complete
		case "linkTypes":
			p.addOneOf(expression.Text("linkLayer"), linkLayers(field))
		case "pKeys":
			p.addOneOf(expression.Text("pKey"), lowerAll(field.ListTexts()))
		case "vdpaType":
			p.addOneOf(expression.Text("vdpaType"), field.ListTexts())
		case "isRdma", "needVhostNet":
			// functions reads isRdma, and sriovdp.readSettings reads needVhostNet.
		case "ddpProfiles":
			profiles, complete = field, false
		default:
			p.im.Notes.AddUnknownField(field)
		}
	}
	if profiles.IsPresent() {
		p.im.Notes.AddPodChange(profiles, "the kernel has no file with the profile that an adapter has loaded, so the pool is left out; the other selectors are: %s", expression.BindDomain(expression.All(p.cel)))
	}
	return expression.All(p.cel), complete
}

// startExpression begins an expression with the families whose devices the plugin would consider.
func (p *pool) startExpression(v source.Value) {
	if p.kind == "accelerator" {
		p.cel = append(p.cel, expression.Text("pciVendor")+` != ""`, "!("+expression.OneOf(expression.Kind, []string{"nic"})+")", expression.Attributes+`?pciClass.orValue("12").startsWith("12")`)
		p.noteAccelerators(v)
		return
	}
	// The plugin skips interfaces that carry a default route of the host.
	const route = "!" + expression.Attributes + "?defaultRoute.orValue(false)"
	if v.At("isRdma").IsTrue() {
		p.cel = append(p.cel, expression.OneOf(expression.Family, []string{"rdma"}), route)
		return
	}
	nic := expression.OneOf(expression.Kind, []string{"nic"})
	if slices.ContainsFunc(v.At("drivers").ListTexts(), func(driver string) bool { return strings.Contains(driver, "vfio") }) {
		nic = expression.AnyOf([]string{nic, expression.Text("pciClass") + `.startsWith("02")`}) // also matches a physical function under vfio
	}
	p.cel = append(p.cel, nic, route)
}

// noteAccelerators notes the accelerators that keep the IDs and environment variables of their
// families.
func (p *pool) noteAccelerators(v source.Value) {
	drivers := v.At("drivers").ListTexts()
	if len(drivers) == 0 || slices.ContainsFunc(drivers, func(driver string) bool { return !strings.Contains(driver, "vfio") }) {
		p.im.Notes.AddPodChange(v.At("drivers").OrPlaceOf(v), "accelerators that are not under vfio have the IDs and variables of the family that describes them, in place of PCIDEVICE_…, and those under uio are not offered")
	}
}

func (p *pool) addOneOf(attribute string, values []string) {
	if len(values) == 0 {
		return
	}
	p.cel = append(p.cel, expression.OneOf(attribute, values))
	if p.chosen == nil {
		p.chosen = make(map[string][]string)
	}
	p.chosen[attribute] = values
}

// addNumbers selects by numbers in string form.
func (p *pool) addNumbers(name string, v source.Value) bool {
	var numbers []string
	for _, text := range v.ListTexts() {
		n, err := strconv.ParseUint(text, 10, 32)
		if err != nil {
			p.im.Notes.AddPodChange(v, "is not a list of numbers, so the pool is left out")
			return false
		}
		numbers = append(numbers, strconv.FormatUint(n, 10))
	}
	p.cel = append(p.cel, expression.OptionalInteger(name)+" in ["+strings.Join(numbers, ", ")+"]")
	return true
}

// addAuxiliary selects sub-functions, the only auxiliary devices that the plugin supports.
func (p *pool) addAuxiliary(v source.Value) bool {
	if slices.ContainsFunc(v.ListTexts(), func(text string) bool { return text != "sf" }) {
		p.im.Notes.AddPodChange(v, "of auxiliary devices only sub-functions (sf) are known, so the pool is left out")
		return false
	}
	p.cel = append(p.cel, expression.OneOf(expression.Text("function"), []string{"partition"}))
	return true
}

// part matches a physical function with the numbers of its selected virtual functions:
// ens1f0#0,2-7.
var part = regexp.MustCompile(`^([^#]+)(?:#([0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*))?$`)

// addParts selects by physical functions, and by the numbers of their virtual functions or
// sub-functions.
func (p *pool) addParts(attribute string, v source.Value) bool {
	index := "vfIndex"
	if p.kind == "auxnetdevice" {
		index = "sfNumber"
	}
	var whole, parts []string
	for _, said := range v.ListTexts() {
		m := part.FindStringSubmatch(strings.ReplaceAll(said, " ", ""))
		if m == nil {
			p.im.Notes.AddPodChange(v, "%q is not a name with numbers after #, so the pool is left out", said)
			return false
		}
		if m[2] == "" {
			whole = append(whole, m[1])
			continue
		}
		parts = append(parts, expression.All([]string{expression.OneOf(attribute, m[1:2]), indexExpression(expression.OptionalInteger(index), m[2])}))
	}
	if len(whole) > 0 {
		parts = append([]string{expression.OneOf(attribute, whole)}, parts...)
	}
	if len(parts) > 0 {
		p.cel = append(p.cel, expression.AnyOf(parts))
	}
	return true
}

// indexExpression returns an expression for numbers and ranges such as 0,2-7.
func indexExpression(attribute, said string) string {
	var single, any []string
	for one := range strings.SplitSeq(said, ",") {
		low, high, ranged := strings.Cut(one, "-")
		if !ranged {
			single = append(single, plainNumber(low))
			continue
		}
		any = append(any, fmt.Sprintf("%s >= %s && %s <= %s", attribute, plainNumber(low), attribute, plainNumber(high)))
	}
	if len(single) > 0 {
		any = append([]string{attribute + " in [" + strings.Join(single, ", ") + "]"}, any...)
	}
	return expression.AnyOf(any)
}

// plainNumber returns digits in CEL's number syntax.
func plainNumber(digits string) string {
	if len(digits) > 18 {
		digits = digits[:18]
	}
	n, _ := strconv.ParseUint(digits, 10, 64)
	return strconv.FormatUint(n, 10)
}

// pciIDs returns PCI IDs in the form of the attributes: four lower-case digits.
func pciIDs(v source.Value) []string {
	var out []string
	for _, id := range lowerAll(v.ListTexts()) {
		id = strings.TrimPrefix(id, "0x")
		if len(id) < 4 && id != "" && id != "..." {
			id = strings.Repeat("0", 4-len(id)) + id
		}
		out = append(out, id)
	}
	return out
}

func lowerAll(texts []string) []string {
	out := make([]string, len(texts))
	for i, text := range texts {
		out[i] = strings.ToLower(text)
	}
	return out
}

// linkLayers converts Linux link types to attribute values.
func linkLayers(v source.Value) []string {
	var out []string
	for _, text := range lowerAll(v.ListTexts()) {
		switch text {
		case "ether", "ethernet", "eth":
			text = "Ethernet"
		case "infiniband", "ib":
			text = "InfiniBand"
		}
		out = append(out, text)
	}
	return out
}
