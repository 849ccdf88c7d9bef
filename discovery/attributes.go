package discovery

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// Attributes are a device's attributes by name; see docs/attributes.md for the
// vocabulary that all families share.
type Attributes map[resourceapi.QualifiedName]Attribute

// Attribute is the value of an attribute: one field is set. A [resourceapi.DeviceAttribute] has
// fields for lists too, which are in [Device.Lists], and takes four times the memory.
type Attribute struct {
	IntValue     *int64  `json:"int,omitempty"`
	BoolValue    *bool   `json:"bool,omitempty"`
	StringValue  *string `json:"string,omitempty"`
	VersionValue *string `json:"version,omitempty"`
}

// ForSlice returns the value as in a ResourceSlice.
func (a Attribute) ForSlice() resourceapi.DeviceAttribute {
	return resourceapi.DeviceAttribute{IntValue: a.IntValue, BoolValue: a.BoolValue, StringValue: a.StringValue, VersionValue: a.VersionValue}
}

// ForSlice returns the attributes as in a ResourceSlice.
func (a Attributes) ForSlice() map[resourceapi.QualifiedName]resourceapi.DeviceAttribute {
	published := make(map[resourceapi.QualifiedName]resourceapi.DeviceAttribute, len(a))
	for name, value := range a {
		published[name] = value.ForSlice()
	}
	return published
}

// AttributeOf returns the value of a published attribute without its lists.
func AttributeOf(a resourceapi.DeviceAttribute) Attribute {
	return Attribute{IntValue: a.IntValue, BoolValue: a.BoolValue, StringValue: a.StringValue, VersionValue: a.VersionValue}
}

// Lists are the values of attributes with several values, by name, as in a ResourceSlice.
type Lists map[resourceapi.QualifiedName]resourceapi.DeviceAttribute

// SetString sets a string attribute. SetString ignores an empty value, which means unknown,
// truncates a value longer than the API's limit at a character boundary, and replaces unprintable
// characters by spaces.
func (a Attributes) SetString(name resourceapi.QualifiedName, value string) {
	value = strings.TrimSpace(strings.Map(printableRune, strings.ToValidUTF8(value, "")))
	if len(value) > resourceapi.DeviceAttributeMaxValueLength {
		value = strings.TrimSpace(strings.ToValidUTF8(value[:resourceapi.DeviceAttributeMaxValueLength], ""))
	}
	if value != "" {
		a[name] = Attribute{StringValue: &value}
	}
}

func printableRune(r rune) rune {
	if unicode.IsPrint(r) {
		return r
	}
	return ' '
}

// SetInt sets an integer attribute.
func (a Attributes) SetInt(name resourceapi.QualifiedName, value int64) {
	a[name] = Attribute{IntValue: &value}
}

// SetBool sets a boolean attribute.
func (a Attributes) SetBool(name resourceapi.QualifiedName, value bool) {
	a[name] = Attribute{BoolValue: &value}
}

// Values returns the value of an attribute as text, or the values of a list.
func Values(a resourceapi.DeviceAttribute) (values []string) {
	switch {
	case a.StringValue != nil:
		return []string{*a.StringValue}
	case a.VersionValue != nil:
		return []string{*a.VersionValue}
	case a.IntValue != nil:
		return []string{strconv.FormatInt(*a.IntValue, 10)}
	case a.BoolValue != nil:
		return []string{strconv.FormatBool(*a.BoolValue)}
	}
	values = slices.Concat(a.StringValues, a.VersionValues)
	for _, value := range a.IntValues {
		values = append(values, strconv.FormatInt(value, 10))
	}
	for _, value := range a.BoolValues {
		values = append(values, strconv.FormatBool(value))
	}
	return values
}

// String returns the value of a string attribute, "" if there is none.
func (a Attributes) String(name resourceapi.QualifiedName) string {
	if value := a[name].StringValue; value != nil {
		return *value
	}
	return ""
}

// Capacity holds the countable resources of a device.
type Capacity map[resourceapi.QualifiedName]resourceapi.DeviceCapacity

// Set sets a capacity that is a number, in bytes for memory.
func (c Capacity) Set(name resourceapi.QualifiedName, value int64) {
	format := resource.DecimalSI
	if name == "memory" {
		format = resource.BinarySI
	}
	c[name] = resourceapi.DeviceCapacity{Value: *resource.NewQuantity(value, format)}
}

// versionNumbers matches "6.8.5", "550.120" and "535.104.05" of NVIDIA.
var versionNumbers = regexp.MustCompile(`^([0-9]{1,9})\.([0-9]{1,9})(?:\.([0-9]{1,9}))?$`)

// SetVersion sets a version attribute, which must be a semantic version. It converts two or three
// numbers: leading zeros are removed, and a missing third number becomes 0. The order and values of
// the numbers stay. Any other text is left out, because a semantic version cannot express it.
func (a Attributes) SetVersion(name resourceapi.QualifiedName, text string) {
	m := versionNumbers.FindStringSubmatch(text)
	if m == nil {
		return
	}
	var numbers [3]uint64
	for i, digits := range m[1:] {
		numbers[i], _ = strconv.ParseUint(digits, 10, 64) // "" is 0
	}
	version := fmt.Sprintf("%d.%d.%d", numbers[0], numbers[1], numbers[2])
	a[name] = Attribute{VersionValue: &version}
}

// SetNames sets an attribute to several names. The string value joins the names with commas. It is
// left out if the text exceeds the API's length limit, because a shortened text would hide names.
// Several names are also set as a list, which has no limit for the total length, unless a name
// exceeds the limit alone.
func (d *Device) SetNames(name resourceapi.QualifiedName, names []string) {
	if value := strings.Join(names, ","); len(value) <= resourceapi.DeviceAttributeMaxValueLength {
		d.Attributes.SetString(name, value)
	}
	long := func(name string) bool { return len(name) > resourceapi.DeviceAttributeMaxValueLength }
	if len(names) > 1 && !slices.ContainsFunc(names, long) {
		d.SetList(name, resourceapi.DeviceAttribute{StringValues: names})
	}
}

// Names returns the names set by [Device.SetNames]. The result is nil without any names, or if the
// names exceeded the limits of both the string and the list.
func (d *Device) Names(name resourceapi.QualifiedName) []string {
	if list := d.Lists[name].StringValues; list != nil {
		return list
	}
	if value := d.Attributes.String(name); value != "" {
		return strings.Split(value, ",")
	}
	return nil
}

// SetList sets a list. Copies of a device share the map, so SetList clones the map first.
func (d *Device) SetList(name resourceapi.QualifiedName, list resourceapi.DeviceAttribute) {
	d.Lists = maps.Clone(d.Lists)
	if d.Lists == nil {
		d.Lists = make(Lists)
	}
	d.Lists[name] = list
}
