package redact

import (
	"bytes"
	"path"
	"regexp"
	"strings"
)

// identifying matches the names of host files that contain only an identity.
var identifying = regexp.MustCompile(`(?i)serial|unique_id|uuid|guid|(^|_)sn$|^vpd$|wwid|wwn|asset_tag|^address$|^permaddr$|hwaddr|phys_switch_id|machine-id|boot_id|asic_id`)

// versions matches the names of host files with dotted numbers that are not addresses.
var versions = regexp.MustCompile(`(?i)ver(?:sion)?$|^fw|firmware`)

// routes matches the host files that contain network addresses as bare numbers.
var routes = regexp.MustCompile(`^proc/(?:\d+/|self/)?net/(?:route|ipv6_route|if_inet6|arp)$`)

// said finds labelled serial numbers in a text.
var serial = regexp.MustCompile(`(?im)(?:\b|_)(?:serial|sn|asset[ _-]?tag)(?:[ _-]?(?:number|num|no))?\\?["']?[ \t]*[:=][ \t]*\\?["']?([^\s"',;\\{}\[\]]+)|^unique_id[ \t]+(\d+)$`)

// header begins an entry of a recorded host.
var header = regexp.MustCompile(`(?m)^-- (.*) --\n`)

// LearnIdentities registers the labelled serial numbers in a text as identities.
func (r *Redactor) LearnIdentities(text []byte) {
	for _, found := range serial.FindAllSubmatch(text, -1) {
		r.AddIdentity(string(found[1]))
		r.AddIdentity(string(found[2]))
	}
}

// LearnHost registers the identities in a recorded host, by the names of the files that
// contain them.
func (r *Redactor) LearnHost(host []byte) {
	r.LearnIdentities(host)
	eachFile(host, sameText, func(name string, content []byte) []byte {
		if identifying.MatchString(path.Base(name)) {
			for word := range strings.FieldsSeq(string(content)) {
				r.AddIdentity(word)
			}
		}
		return content
	})
}

// RedactHost returns a recorded host without secrets and with pseudonyms for identities. Discovery
// works on the result as on the original.
func (r *Redactor) RedactHost(host []byte) []byte {
	if r.keep {
		return r.Text(host)
	}
	return eachFile(host, r.Text, func(name string, content []byte) []byte {
		switch base := path.Base(name); {
		case identifying.MatchString(base):
			content = r.replaceWords(content, isDistinct)
		case routes.MatchString(name):
			content = r.replaceWords(content, func(word string) bool { return number.MatchString(word) && isDistinct(word) })
		case versions.MatchString(base) && len(content) < 64 && !r.expressionOfTold().Match(content):
			return content
		}
		return r.Text(content)
	})
}

// number matches an address written as a bare number.
var number = regexp.MustCompile(`^(?:[0-9A-Fa-f]{8}|[0-9A-Fa-f]{32})$`)

var wordOf = regexp.MustCompile(`[^\s]+`)

// replaceWords replaces the selected words of a content. Existing pseudonyms are kept, as are words
// that [Redactor.Text] recognizes by their form.
func (r *Redactor) replaceWords(content []byte, is func(string) bool) []byte {
	return wordOf.ReplaceAllFunc(content, func(word []byte) []byte {
		text := string(word)
		if !is(text) || r.known[text] || r.hasForm(text) {
			return word
		}
		return []byte(r.pseudonym(text))
	})
}

// hasForm reports whether a whole text has the form of an identity.
func (r *Redactor) hasForm(text string) bool {
	at := r.expression().FindStringIndex(text)
	return at != nil && (at[1]-at[0] == len(text) || uuid.MatchString(text))
}

func sameText(text []byte) []byte { return text }

// eachFile returns a recorded host after applying change to the contents of its files, and
// other to everything else.
func eachFile(host []byte, other func([]byte) []byte, change func(name string, content []byte) []byte) []byte {
	var out bytes.Buffer
	at := header.FindAllSubmatchIndex(host, -1)
	if len(at) == 0 {
		return other(host)
	}
	out.Write(other(host[:at[0][0]]))
	for i, h := range at {
		end := len(host)
		if i+1 < len(at) {
			end = at[i+1][0]
		}
		out.Write(other(host[h[0]:h[1]]))
		name := string(host[h[2]:h[3]])
		if strings.Contains(name, " ") { // a link, a node or an error, without content
			out.Write(other(host[h[1]:end]))
			continue
		}
		out.Write(change(name, host[h[1]:end]))
	}
	return out.Bytes()
}
