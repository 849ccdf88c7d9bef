package labels

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// wordsOf returns the values of a device for the words in [discovery.Labels].
func wordsOf(d *rules.Offered) map[string]string {
	words := make(map[string]string)
	for name, attribute := range d.Attributes {
		setAttribute(words, string(name), attribute)
	}
	for name, capacity := range d.Capacity {
		bytes := capacity.Value.Value()
		words[string(name)] = strconv.FormatInt(bytes, 10)
		words[string(name)+".Mi"] = roundUnits(bytes, 1<<20)
		words[string(name)+".Gi"] = roundUnits(bytes, 1<<30)
	}
	maps.Copy(words, d.Facts)
	words["family"], words["usable"] = d.Family, strconv.FormatBool(d.Health.IsUsable())
	if len(d.Offers) > 0 {
		words["resource"] = d.Offers[0].Resource
		words["renamed"] = strconv.FormatBool(!slices.ContainsFunc(d.PluginOffers, func(offer discovery.Offer) bool {
			return offer.Resource == d.Offers[0].Resource
		}))
	}
	n := shareCount(d)
	words["replicas"], words["shared"] = strconv.FormatInt(n, 10), strconv.FormatBool(n > 1)
	return words
}

func setAttribute(words map[string]string, name string, attribute discovery.Attribute) {
	switch {
	case attribute.StringValue != nil:
		words[name] = *attribute.StringValue
	case attribute.IntValue != nil:
		words[name] = strconv.FormatInt(*attribute.IntValue, 10)
	case attribute.BoolValue != nil:
		words[name] = strconv.FormatBool(*attribute.BoolValue)
	case attribute.VersionValue != nil:
		words[name] = *attribute.VersionValue
		parts := strings.SplitN(*attribute.VersionValue, ".", 3)
		for i, part := range []string{".major", ".minor", ".patch"}[:len(parts)] {
			words[name+part] = parts[i]
		}
	}
}

func roundUnits(n, unit int64) string {
	whole := n / unit
	if n%unit >= unit/2 {
		whole++
	}
	return strconv.FormatInt(whole, 10)
}

// shareCount returns the number of containers that may share the device, one if it is not shared.
func shareCount(d *rules.Offered) int64 {
	if d.Sharing == nil {
		return 1
	}
	all, each := d.Capacity[d.Sharing.Capacity].Value, d.Sharing.Unit
	if each.Value() <= 0 {
		return 1
	}
	return all.Value() / each.Value()
}
