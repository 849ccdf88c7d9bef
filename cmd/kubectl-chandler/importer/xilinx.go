package importer

import (
	"cmp"
	"path"
	"regexp"
	"slices"
	"strings"

	"chandler.dev/cmd/kubectl-chandler/importer/source"
)

// xilinx reads configurations of the Xilinx and AMD FPGA plugin (k8s-device-plugin in
// Xilinx/FPGA_as_a_Service 1.3).
type xilinx struct {
	im       *importer
	settings *settings
	names    []source.Value // the card names of NameCustomize.json
}

func newXilinx(im *importer) *format {
	x := &xilinx{im: im}
	x.settings = newSettings(im, []option{
		{name: "name-customize", env: "DeviceNameCustomize", in: "devicePlugin.env.DeviceNameCustomize", fate: fateCarried},
		{name: "u30-name", env: "U30NameConvention", in: "devicePlugin.env.U30NameConvention", fate: fatePodChange, fine: []string{"commonname"}, why: "name the U30's resource by its shell in an entry of resources: amd.com/<shell>-<timestamp>, as chandler discover shows them"},
		{name: "u30-unit", env: "U30AllocUnit", in: "devicePlugin.env.U30AllocUnit", fate: fatePodChange, fine: []string{"card"}, why: "name the FPGAs of a U30 by their shell in an entry of resources: each FPGA is then allocated by itself"},
		{name: "virtual", env: "VirtualDev", in: "devicePlugin.env.VirtualDev", fate: fatePodChange, fine: []string{"false"}, why: "no container gets all FPGAs of a node by one resource"},
		{name: "virtual-number", env: "VirtualNum", in: "devicePlugin.env.VirtualNum", why: "is for VirtualDev"},
	})
	return &format{
		name:     "Xilinx's FPGA device plugin",
		forms:    "NameCustomize.json alone or in a ConfigMap, variables, DaemonSet",
		families: []string{"fpga-xilinx"},
		is:       x.is,
		read:     x.read,
		runs: func(c container) bool {
			_, u30 := c.env["U30NameConvention"]
			_, unit := c.env["U30AllocUnit"]
			_, names := c.env["DeviceNameCustomize"]
			return strings.Contains(c.image, "xilinx") && c.names("device-plugin") && !c.names("sfc-k8s-device-plugin") || c.names("xilinx-device-plugin", "xilinx_k8s_fpga_plugin", "fpga-device-plugin") || u30 || unit || names
		},
		container: func(c container) { x.settings.flags(c) },
		finish:    x.finishSettings,
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
	x.settings.finishOptions()
	if use := x.settings.get("name-customize"); use.IsPresent() && !use.IsTrue() && len(x.names) > 0 {
		x.im.noteRemark(x.names[0], "DeviceNameCustomize is not True, so the plugin does not read the names")
		return
	} else if !use.IsPresent() && len(x.names) > 0 {
		x.im.noteRemark(x.names[0], "the plugin reads the names where its variable DeviceNameCustomize is True")
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
		x.im.notePodChange(v, "its key has not three parts, and the plugin gives no names with it")
		return
	}
	kind, shell, last := m[1], m[2], m[3]
	terms, ok := termsOf(v.Text())
	if !ok {
		x.im.notePodChange(v, "is not made of texts in quotes and fields of cards, with + between")
		return
	}
	known := map[string]string{"devicetype": kind, "shellver": shell, "timestamp": last}
	var name strings.Builder
	for _, t := range terms {
		said := t.text
		if t.field != "" {
			said = known[t.field]
			if said == "" || strings.Contains(said, "*") {
				x.im.notePodChange(v, "each card has another name by it; name them in entries of resources, as chandler discover shows them")
				return
			}
		}
		name.WriteString(said)
	}
	if name.Len() > 60 {
		x.im.noteRemark(v, "is longer than 60 characters, and the plugin does not take it either")
		return
	}
	cel := []string{oneOf(familyAttribute, []string{"fpga-xilinx"})}
	// A profile is the shell with its time: xilinx_u50_gen3x16_xdma_201920_3-1579649056.
	if shell != "*" {
		cel = append(cel, text("profile")+".startsWith("+quote(shell+"-")+")")
	}
	if kind != "*" {
		cel = append(cel, text("profile")+".matches("+quote("^[^_]*_"+regexp.QuoteMeta(kind)+"(_|-|$)")+")")
	}
	switch {
	case last == "*":
	case isUUID(last):
		x.im.notePodChange(v, "selects cards by the end of a UUID, which the import cannot do")
		return
	default:
		cel = append(cel, text("profile")+".endsWith("+quote("-"+last)+")")
	}
	x.im.addResource(v, "amd.com/"+name.String(), all(cel))
}

// isUUID reports whether the last part of a key is the end of a UUID, as opposed to a time.
func isUUID(last string) bool {
	return len(last) == 6 && strings.ContainsAny(strings.ToLower(last), "abcdef")
}
