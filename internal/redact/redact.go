// Package redact removes secrets and identities from text that is shared with others. It
// removes secrets completely. It replaces identities, such as serial numbers or network
// addresses, with pseudonyms of the same form. Equal identities get equal pseudonyms, so the
// text remains readable and a recorded host can still be scanned. The package is independent
// of vendors and of Kubernetes.
package redact

import (
	"bytes"
	"cmp"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// Gone replaces a secret.
const Gone = "[secret]"

// shortest is the minimum length of registered identities. Shorter identities also occur
// inside unrelated words.
const shortest = 6

// Redactor redacts a set of related texts. Register their identities first. A Redactor must
// not be used by several goroutines at once.
type Redactor struct {
	keep         bool              // do not replace identities
	key          [32]byte          // unique to this redactor, so that pseudonyms cannot be reversed
	known        map[string]bool   // registered identities
	names        map[string]string // pseudonyms by registered name
	made         map[string]string // pseudonyms by identity
	used         map[string]bool   // pseudonyms and identities in use
	kinds        map[string]int    // number of numbered pseudonyms, by kind
	find         *regexp.Regexp    // matches all identities and names; nil after a registration
	patternsTold *regexp.Regexp    // matches registered identities and names only
}

// New returns a Redactor that removes secrets. It also replaces identities with pseudonyms,
// unless keepIdentities is set.
func New(keepIdentities bool) *Redactor {
	r := &Redactor{
		keep: keepIdentities, known: make(map[string]bool), names: make(map[string]string),
		made: make(map[string]string), used: make(map[string]bool), kinds: make(map[string]int),
	}
	_, _ = rand.Read(r.key[:]) // never fails (crypto/rand of Go 1.24 and later)
	return r
}

// AddIdentity registers a text that identifies something, such as a serial number.
func (r *Redactor) AddIdentity(text string) {
	text = strings.TrimSpace(text)
	if len(text) < shortest || !isDistinct(text) || strings.ContainsAny(text, "\n") || r.known[text] || uuid.MatchString(text) {
		return // too short, a placeholder, or recognized by form
	}
	r.known[text], r.used[text], r.find = true, true, nil
	if number, err := strconv.ParseUint(text, 16, 64); err == nil && len(text) == 16 {
		r.pseudonym(text)
		decimal := strconv.FormatUint(number, 10)
		r.known[decimal], r.used[decimal] = true, true
	}
}

// Name registers a name. Occurrences as a whole word are replaced by a numbered name, such as
// "pod-3".
func (r *Redactor) Name(kind, name string) {
	if name != "" && r.names[name] == "" {
		r.kinds[kind]++
		r.names[name], r.find = fmt.Sprintf("%s-%d", kind, r.kinds[kind]), nil
	}
}

// isDistinct reports whether a text can identify anything. Unset identities often consist of
// zeros or Fs.
func isDistinct(text string) bool {
	for _, r := range text {
		if strings.ContainsRune("123456789abcdeABCDE", r) || r > 'F' && unicode.IsLetter(r) && !strings.ContainsRune("fFxX", r) {
			return true
		}
	}
	return false
}

// secrets match credentials. If an expression has a group, only the group is removed.
var secrets = []*regexp.Regexp{
	regexp.MustCompile(`-----BEGIN [A-Z0-9 ]+-----[\s\S]*?(?:-----END [A-Z0-9 ]+-----|$)`),
	regexp.MustCompile(`\beyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]*)?`),
	regexp.MustCompile(`(?i)\b(?:bearer|basic)[ \t]+([A-Za-z0-9._~+/=-]{8,})`),
	regexp.MustCompile(`://[^/\s:@"']*:([^/\s@"']+)@`),
	regexp.MustCompile(`\b(?:AKIA|ASIA)[A-Z0-9]{16}\b`),
	regexp.MustCompile(`\b(?:gh[pousr]_|glpat-|xox[abpr]-)[A-Za-z0-9_-]{10,}`),
	regexp.MustCompile(`(?i)(?:\b|_|-)(?:token|password|passwd|passphrase|secret|client-key-data|client_secret|api[-_]?key|private[-_]?key|authorization)\\?["']?[ \t]*[:=][ \t]*\\?["']?([^\s"',;\\{}\[\]]+)`),
}

var uuid = regexp.MustCompile(patterns[0])

const (
	hexByte = `[0-9A-Fa-f]{2}`
	hexWord = `[0-9A-Fa-f]{4}`
)

// patterns are the forms of identities that are recognized without registration.
var patterns = []string{
	`[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}`, // UUIDs
	hexByte + `(?::` + hexByte + `){5,}`,                                          // MAC addresses, WWNs, InfiniBand hardware addresses
	hexWord + `(?::` + hexWord + `){3,7}`,                                         // GUIDs, GIDs
	`[0-9A-Fa-f:]*::[0-9A-Fa-f:]*(?:\.[0-9.]+)?`,                                  // IPv6
	`(?:[0-9A-Fa-f]{1,4}:){7}[0-9A-Fa-f]{1,4}`,                                    // IPv6 in full
	`[0-9]{1,3}(?:\.[0-9]{1,3}){3}`,                                               // IPv4
	`(?:naa|eui|wwn|t10|nqn)\.[0-9A-Za-z][0-9A-Za-z._:-]{5,}`,                     // storage identifiers
}

// expression returns an expression for all identities and names. Registered texts precede the
// patterns, and longer texts precede their prefixes.
func (r *Redactor) expression() *regexp.Regexp {
	if r.find != nil {
		return r.find
	}
	var told []string
	for text := range r.known {
		told = append(told, text)
	}
	for name := range r.names {
		told = append(told, name)
	}
	slices.SortFunc(told, func(a, b string) int { return cmp.Or(cmp.Compare(len(b), len(a)), strings.Compare(a, b)) })
	var all []string
	for _, text := range told {
		all = append(all, regexp.QuoteMeta(text))
	}
	r.patternsTold = nothing
	if len(all) > 0 {
		r.patternsTold = regexp.MustCompile(strings.Join(all, "|"))
	}
	r.find = regexp.MustCompile(strings.Join(append(all, patterns...), "|"))
	return r.find
}

// nothing matches nothing.
var nothing = regexp.MustCompile(`[^\s\S]`)

// expressionOfTold returns an expression for the registered identities and names.
func (r *Redactor) expressionOfTold() *regexp.Regexp {
	r.expression()
	return r.patternsTold
}

// Text returns a text without secrets and with pseudonyms for identities.
func (r *Redactor) Text(text []byte) []byte {
	for _, secret := range secrets {
		text = replaceGroup(secret, text)
	}
	find := r.expression()
	var out bytes.Buffer
	for len(text) > 0 {
		at := find.FindIndex(text)
		if at == nil {
			break
		}
		found := string(text[at[0]:at[1]])
		replaced, is := r.replace(found, before(text, at[0], out.Bytes()), after(text, at[1]))
		if !is {
			// Another match may begin inside this match.
			out.Write(text[:at[0]+1])
			text = text[at[0]+1:]
			continue
		}
		out.Write(text[:at[0]])
		out.WriteString(replaced)
		text = text[at[1]:]
	}
	out.Write(text)
	return out.Bytes()
}

// before returns the byte before a position, or 0. Text in front of the slice is already in
// written.
func before(text []byte, at int, written []byte) byte {
	if at > 0 {
		return text[at-1]
	}
	if len(written) > 0 {
		return written[len(written)-1]
	}
	return 0
}

func after(text []byte, at int) byte {
	if at < len(text) {
		return text[at]
	}
	return 0
}

// replaceGroup replaces each match of an expression, or its group if present, with Gone.
func replaceGroup(secret *regexp.Regexp, text []byte) []byte {
	var out bytes.Buffer
	done := 0
	for _, at := range secret.FindAllSubmatchIndex(text, -1) {
		from, to := at[0], at[1]
		if len(at) > 2 {
			from, to = at[2], at[3]
		}
		out.Write(text[done:from])
		out.WriteString(Gone)
		done = to
	}
	out.Write(text[done:])
	return out.Bytes()
}

// replace returns the replacement for a match between two bytes. It returns false if the match
// is not an identity, because another match may begin inside.
func (r *Redactor) replace(found string, before, after byte) (string, bool) {
	alone := !isAlphanumeric(before) && !isAlphanumeric(after)
	if name := r.names[found]; name != "" {
		return name, alone
	}
	if r.keep {
		return found, true
	}
	if r.known[found] {
		return r.pseudonym(found), true
	}
	if !alone {
		return "", false
	}
	if address, err := netip.ParseAddr(found); err == nil {
		return r.address(address, found), true
	}
	if strings.Contains(found, "::") || strings.Count(found, ".") == 3 && !strings.Contains(found, ":") && !strings.ContainsAny(found[:1], "newt") {
		return "", false // not an address
	}
	if !isDistinct(found) {
		return found, true
	}
	return r.pseudonym(found), true
}

func isAlphanumeric(b byte) bool {
	return b >= '0' && b <= '9' || b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z'
}

// address returns a pseudonym for an IP address, from the networks reserved for documentation
// and benchmarks (RFC 2544, RFC 3849). Addresses with a universal meaning are kept.
func (r *Redactor) address(address netip.Addr, found string) string {
	if address.IsLoopback() || address.IsUnspecified() || address.IsMulticast() || strings.HasPrefix(found, "255.") {
		return found
	}
	if made := r.made[found]; made != "" {
		return made
	}
	kind := "IPv6"
	if address.Is4() {
		kind = "IPv4"
	}
	r.kinds[kind]++
	n := r.kinds[kind]
	made := fmt.Sprintf("198.18.%d.%d", n/250%250, n%250+1)
	switch {
	case kind == "IPv6" && len(found) == len("0000:0000:0000:0000:0000:0000:0000:0000"):
		made = fmt.Sprintf("2001:0db8:0000:0000:0000:0000:%04x:%04x", n>>16&0xffff, n&0xffff)
	case kind == "IPv6":
		made = fmt.Sprintf("2001:db8::%x", n)
	}
	r.made[found] = made
	return made
}

// pseudonym returns the pseudonym of an identity. Digits are replaced by digits and letters by
// letters.
func (r *Redactor) pseudonym(text string) string {
	if made := r.made[text]; made != "" {
		return made
	}
	made := text
	for attempt := range uint32(100) {
		made = r.reshape(text, attempt)
		if !r.used[made] && made != text {
			break
		}
	}
	r.made[text], r.used[made] = made, true
	if number, err := strconv.ParseUint(text, 16, 64); err == nil && len(text) == 16 {
		// Some files contain the same number in decimal.
		if other, err := strconv.ParseUint(made, 16, 64); err == nil {
			r.made[strconv.FormatUint(number, 10)] = strconv.FormatUint(other, 10)
		}
	}
	return made
}

// reshape returns a text of the same form, derived from the text and the key.
func (r *Redactor) reshape(text string, attempt uint32) string {
	hex := !strings.ContainsFunc(strings.TrimPrefix(text, "0x"), func(c rune) bool { return unicode.IsLetter(c) && !strings.ContainsRune("abcdefABCDEF", c) })
	stream := r.derivedBytes(text, attempt)
	var out strings.Builder
	for i, c := range text {
		n := rune(stream())
		switch {
		case i == 1 && c == 'x' && text[0] == '0':
			out.WriteRune(c)
		case c >= '0' && c <= '9' && i == 0 && c != '0' && len(text) > 1:
			out.WriteRune('1' + n%9) // keep the length of a number
		case c >= '0' && c <= '9':
			out.WriteRune('0' + n%10)
		case hex && c >= 'a' && c <= 'f':
			out.WriteRune('a' + n%6)
		case hex && c >= 'A' && c <= 'F':
			out.WriteRune('A' + n%6)
		case c >= 'a' && c <= 'z':
			out.WriteRune('a' + n%26)
		case c >= 'A' && c <= 'Z':
			out.WriteRune('A' + n%26)
		case c < 0x80:
			out.WriteRune(c)
		default:
			out.WriteRune('x')
		}
	}
	return out.String()
}

// derivedBytes returns a source of bytes derived from the text and the key.
func (r *Redactor) derivedBytes(text string, attempt uint32) func() byte {
	var block []byte
	count := uint32(0)
	return func() byte {
		if len(block) == 0 {
			mac := hmac.New(sha256.New, r.key[:])
			_ = binary.Write(mac, binary.BigEndian, [2]uint32{attempt, count})
			mac.Write([]byte(text))
			block = mac.Sum(nil)
			count++
		}
		b := block[0]
		block = block[1:]
		return b
	}
}
