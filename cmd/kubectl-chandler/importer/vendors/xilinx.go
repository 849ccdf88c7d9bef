package vendors

import (
	"cmp"
	"path"
	"regexp"
	"slices"
	"strings"

	"chandler.dev/cmd/kubectl-chandler/importer/expression"
	"chandler.dev/cmd/kubectl-chandler/importer/plugin"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
)

// xilinx reads configurations of the Xilinx and AMD FPGA plugin (k8s-device-plugin in
// Xilinx/FPGA_as_a_Service 1.3).
type xilinx struct {
	im       *plugin.Import
	settings *plugin.Settings
	names    []source.Value // the card names of NameCustomize.json
}

// NewXilinx returns the format of the Xilinx and AMD FPGA plugin.
func NewXilinx(im *plugin.Import) *plugin.Format {
	x := &xilinx{im: im}
	x.settings = plugin.NewSettings(im, []plugin.Option{
		{Name: "name-customize", Variable: "DeviceNameCustomize", HelmField: "devicePlugin.env.DeviceNameCustomize", Fate: plugin.FateCarried},
		{Name: "u30-name", Variable: "U30NameConvention", HelmField: "devicePlugin.env.U30NameConvention", Fate: plugin.FatePodChange, Harmless: []string{"commonname"}, Reason: "name the U30's resource by its shell in an entry of resources: amd.com/<shell>-<timestamp>, as chandler discover shows them"},
		{Name: "u30-unit", Variable: "U30AllocUnit", HelmField: "devicePlugin.env.U30AllocUnit", Fate: plugin.FatePodChange, Harmless: []string{"card"}, Reason: "name the FPGAs of a U30 by their shell in an entry of resources: each FPGA is then allocated by itself"},
		{Name: "virtual", Variable: "VirtualDev", HelmField: "devicePlugin.env.VirtualDev", Fate: plugin.FatePodChange, Harmless: []string{"false"}, Reason: "no container gets all FPGAs of a node by one resource"},
		{Name: "virtual-number", Variable: "VirtualNum", HelmField: "devicePlugin.env.VirtualNum", Reason: "is for VirtualDev"},
	})
	return &plugin.Format{
		Name:         "Xilinx's FPGA device plugin",
		Forms:        "NameCustomize.json alone or in a ConfigMap, variables, DaemonSet",
		Families:     []string{"fpga-xilinx"},
		IsDocument:   x.is,
		ReadDocument: x.read,
		IsContainer: func(c plugin.Container) bool {
			_, u30 := c.Env["U30NameConvention"]
			_, unit := c.Env["U30AllocUnit"]
			_, names := c.Env["DeviceNameCustomize"]
			return strings.Contains(c.Image, "xilinx") && c.HasName("device-plugin") && !c.HasName("sfc-k8s-device-plugin") || c.HasName("xilinx-device-plugin", "xilinx_k8s_fpga_plugin", "fpga-device-plugin") || u30 || unit || names
		},
		ReadContainer: func(c plugin.Container) { x.settings.ReadFlags(c) },
		Finish:        x.finishSettings,
	}
}

// aliasKey matches a selector of cards: type, shell, and time or UUID.
var aliasKey = regexp.MustCompile(`^([A-Za-z0-9_.*]+)-([A-Za-z0-9_.*]+)-([A-Za-z0-9_.*]+)$`)

// xilinxFile is the name of the plugin's file.
const xilinxFile = "NameCustomize.json"

// is recognises an object whose keys have three parts and whose values are names made of terms. In
// the plugin's own file, any strings are recognised, so that mistakes are noted.
func (x *xilinx) is(v source.Value) bool {
	if !v.IsMap() || len(v.Node.Content) == 0 {
		return false
	}
	named := v.FieldName() == xilinxFile || v.Path == "" && path.Base(v.File) == xilinxFile
	terms := false
	for name, alias := range v.Fields() {
		if !alias.IsText() || !aliasKey.MatchString(name) && !named {
			return false
		}
		_, ok := termsOf(alias.Text())
		terms = terms || ok
	}
	return terms || named
}

func (x *xilinx) read(v source.Value) {
	for _, alias := range v.Fields() {
		x.names = append(x.names, alias)
	}
}

// The fields of a card that a name can contain.
var cardFields = []string{"deviceType", "shellVer", "uuid", "timestamp", "DBDF", "deviceID", "serial", "SN", "index"}

// A term is a part of a name: a text, or a field of the card.
type term struct{ text, field string }

// termsOf splits a name into its terms, such as 'u30'+'-'+shellVer, and reports whether the name is
// valid.
func termsOf(alias string) (terms []term, ok bool) {
	for part := range strings.SplitSeq(alias, "+") {
		part = strings.TrimSpace(part)
		if inside, quoted := strings.CutPrefix(part, "'"); quoted && strings.HasSuffix(inside, "'") {
			terms = append(terms, term{text: strings.TrimSuffix(inside, "'")})
			continue
		}
		i := slices.IndexFunc(cardFields, func(field string) bool { return strings.EqualFold(field, part) })
		if i < 0 {
			return nil, false
		}
		terms = append(terms, term{field: strings.ToLower(cardFields[i])})
	}
	return terms, true
}

func (x *xilinx) finishSettings() {
	x.settings.FinishOptions()
	if use := x.settings.Get("name-customize"); use.IsPresent() && !use.IsTrue() && len(x.names) > 0 {
		x.im.Notes.AddRemark(x.names[0], "DeviceNameCustomize is not True, so the plugin does not read the names")
		return
	} else if !use.IsPresent() && len(x.names) > 0 {
		x.im.Notes.AddRemark(x.names[0], "the plugin reads the names where its variable DeviceNameCustomize is True")
	}
	stars := func(v source.Value) int { return strings.Count(v.FieldName(), "*") }
	slices.SortStableFunc(x.names, func(a, b source.Value) int { return cmp.Compare(stars(a), stars(b)) })
	for _, alias := range x.names {
		x.readAlias(alias)
	}
}

// readAlias reads a name for some cards.
func (x *xilinx) readAlias(v source.Value) {
	m := aliasKey.FindStringSubmatch(v.FieldName())
	if m == nil {
		x.im.Notes.AddPodChange(v, "its key has not three parts, and the plugin gives no names with it")
		return
	}
	kind, shell, last := m[1], m[2], m[3]
	terms, ok := termsOf(v.Text())
	if !ok {
		x.im.Notes.AddPodChange(v, "is not made of texts in quotes and fields of cards, with + between")
		return
	}
	known := map[string]string{"devicetype": kind, "shellver": shell, "timestamp": last}
	var name strings.Builder
	for _, t := range terms {
		said := t.text
		if t.field != "" {
			said = known[t.field]
			if said == "" || strings.Contains(said, "*") {
				x.im.Notes.AddPodChange(v, "each card has another name by it; name them in entries of resources, as chandler discover shows them")
				return
			}
		}
		name.WriteString(said)
	}
	if name.Len() > 60 {
		x.im.Notes.AddRemark(v, "is longer than 60 characters, and the plugin does not take it either")
		return
	}
	cel := []string{expression.OneOf(expression.Family, []string{"fpga-xilinx"})}
	// A profile is the shell with its time: xilinx_u50_gen3x16_xdma_201920_3-1579649056.
	if shell != "*" {
		cel = append(cel, expression.Text("profile")+".startsWith("+expression.Quote(shell+"-")+")")
	}
	if kind != "*" {
		cel = append(cel, expression.Text("profile")+".matches("+expression.Quote("^[^_]*_"+regexp.QuoteMeta(kind)+"(_|-|$)")+")")
	}
	switch {
	case last == "*":
	case isUUID(last):
		x.im.Notes.AddPodChange(v, "selects cards by the end of a UUID, which the import cannot do")
		return
	default:
		cel = append(cel, expression.Text("profile")+".endsWith("+expression.Quote("-"+last)+")")
	}
	x.im.Config.AddResource(v, "amd.com/"+name.String(), expression.All(cel))
}

// isUUID reports whether the last part of a key is the end of a UUID, as opposed to a time.
func isUUID(last string) bool {
	return len(last) == 6 && strings.ContainsAny(strings.ToLower(last), "abcdef")
}
