package discovery

import (
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/validate/content"
	"k8s.io/apimachinery/pkg/util/validation"
)

// The quick checks accept no name that Kubernetes rejects.
func TestPlainNames(t *testing.T) {
	names := []string{"", strings.Repeat("a", 32), strings.Repeat("a", 33), strings.Repeat("a", 63), strings.Repeat("a", 64), "é", "[", "@", "`", "{"}
	for _, c := range "az0-_.AZ/ " {
		for _, d := range "az9-_.AZ/\n" {
			for _, e := range "az5-_.AZ/\x00" {
				names = append(names, string(c), string([]rune{c, d}), string([]rune{c, d, e}))
			}
		}
	}
	accepted := 0
	for _, name := range names {
		for what, check := range map[string]struct {
			plain    bool
			messages []string
		}{
			"label":      {plainLabel(name), validation.IsDNS1123Label(name)},
			"domain":     {plainDomain(name), content.IsDNS1123Subdomain(name)},
			"word":       {plainWord(name), content.IsCIdentifier(name)},
			"label key":  {plainLabel(name), content.IsLabelKey(name)},
			"max label":  {plainLabel(name) && len(name) > validation.DNS1123LabelMaxLength, []string{"too long"}},
			"max domain": {plainDomain(name) && len(name) > resourceapi.DeviceMaxDomainLength, []string{"too long"}},
			"max word":   {plainWord(name) && len(name) > resourceapi.DeviceMaxIDLength, []string{"too long"}},
		} {
			if check.plain && len(check.messages) > 0 {
				t.Errorf("%s %q: accepted, but %v", what, name, check.messages)
			}
			if check.plain {
				accepted++
			}
		}
	}
	if accepted < 100 {
		t.Errorf("only %d names were accepted", accepted)
	}
}
