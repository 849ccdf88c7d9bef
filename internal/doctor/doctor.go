// Package doctor judges how a node is: it looks for known faults among facts, and says
// of each its code, its cause and the commands that mend it. It gathers no facts, asks
// nobody and changes nothing; see package gather.
package doctor

import (
	"fmt"
	"slices"
	"strings"
)

// Category is what a check is about.
type Category string

// The categories, in the order in which they are printed.
const (
	Kubelet Category = "kubelet"
	Runtime Category = "container runtime"
	Devices Category = "devices"
	Host    Category = "host"
	APIs    Category = "two APIs"
	Cluster Category = "cluster"
	Agent   Category = "agent"
)

// categories are all of them, with the first digits of their codes, and the names by which
// they may be asked for besides.
var categories = []struct {
	Category
	digits  string
	aliases []string
}{
	{Kubelet, "01", nil},
	{Runtime, "02", []string{"runtime", "container-runtime"}},
	{Devices, "03", nil},
	{Host, "04", nil},
	{APIs, "05", []string{"apis", "two-apis"}},
	{Cluster, "06", nil},
	{Agent, "07", nil},
}

// ParseCategories returns the categories of a list with commas between, all of "".
func ParseCategories(list string) (chosen []Category, err error) {
	for name := range strings.SplitSeq(list, ",") {
		if name = strings.TrimSpace(name); name == "" {
			continue
		}
		found := false
		for _, c := range categories {
			if name == string(c.Category) || slices.Contains(c.aliases, name) {
				chosen, found = append(chosen, c.Category), true
			}
		}
		if !found {
			return nil, fmt.Errorf("category %q: want some of kubelet, runtime, devices, host, apis, cluster, agent", name)
		}
	}
	return chosen, nil
}

// Result is how a check ended.
type Result int

// The results, the worse the higher.
const (
	NotAsked Result = iota // it does not apply, or it could not be looked
	OK
	Warning // something is not as it should be, and what there is still works
	Failed
)

// Finding is what a check says: one line that states what is so. One that is not as it should
// be has a code, the cause as the host or the cluster says it, and the commands that mend it.
type Finding struct {
	Result Result
	Text   string
	Code   string
	Cause  string
	Fix    []string // commands; a remark follows a #, and says what the command disturbs

	// Follows is the code of the finding that this one comes of, "" if it stands for itself.
	Follows string
}

// Section is what the checks of a category say.
type Section struct {
	Category Category
	Findings []Finding
}

// Report is what all checks say of a node.
type Report struct {
	Head     Head
	Sections []Section
}

// Count counts findings of a result. Sections of which nothing could be asked count once.
func (r *Report) Count(result Result) (n int) {
	for _, s := range r.Sections {
		for _, f := range s.Findings {
			if f.Result == result {
				n++
			}
		}
	}
	return n
}

// first returns the first finding of a result, before those that come of another one.
func (r *Report) first(result Result) (first Finding, found bool) {
	for _, s := range r.Sections {
		for _, f := range s.Findings {
			if f.Result == result && (!found || first.Follows != "" && f.Follows == "") {
				first, found = f, true
			}
		}
	}
	return first, found
}

// Healthy reports whether nothing is wrong; warnings count if they are to.
func (r *Report) Healthy(strict bool) bool {
	return r.Count(Failed) == 0 && (!strict || r.Count(Warning) == 0)
}

// Codes returns the codes that were found, in order, each once.
func (r *Report) Codes() (found []string) {
	for _, s := range r.Sections {
		for _, f := range s.Findings {
			if f.Code != "" && !slices.Contains(found, f.Code) {
				found = append(found, f.Code)
			}
		}
	}
	slices.Sort(found)
	return found
}

// check looks at facts. It says something of each thing that it looks at, if only that it
// could not be looked at.
type check struct {
	category Category
	codes    []string // that it may find
	look     func(f *Facts, say *saying)
}

// checks returns all checks, in the order in which they are printed.
func checks() []check {
	return slices.Concat(kubeletChecks, runtimeChecks, deviceChecks, hostChecks, apiChecks, clusterChecks, agentChecks)
}

// Judge runs the checks of some categories, or of all if none is given.
func Judge(f *Facts, only ...Category) *Report {
	r := &Report{Head: f.Head}
	for _, c := range categories {
		if len(only) > 0 && !slices.Contains(only, c.Category) {
			continue
		}
		say := &saying{}
		if why, mention := f.unasked(c.Category); why != "" {
			if mention {
				say.not("%s", why)
			}
		} else {
			for _, check := range checks() {
				if check.category == c.Category {
					check.look(f, say)
				}
			}
		}
		if len(say.findings) > 0 {
			r.Sections = append(r.Sections, Section{c.Category, say.findings})
		}
	}
	return r
}

// saying collects what checks say.
type saying struct{ findings []Finding }

func (s *saying) ok(format string, args ...any) {
	s.findings = append(s.findings, Finding{Result: OK, Text: fmt.Sprintf(format, args...)})
}

// not says that something was not looked at, and why.
func (s *saying) not(format string, args ...any) {
	s.findings = append(s.findings, Finding{Result: NotAsked, Text: fmt.Sprintf(format, args...)})
}

// found says that something is not as it should be.
func (s *saying) found(code, text, cause string, fix ...string) {
	result := Failed
	if c, known := Lookup(code); known {
		result = c.Result
	}
	for i := range fix {
		fix[i] = warned(fix[i])
	}
	s.findings = append(s.findings, Finding{Result: result, Text: text, Code: code, Cause: cause, Fix: fix})
}

// follows says that the last finding comes of another one, by its code.
func (s *saying) follows(code string) { s.findings[len(s.findings)-1].Follows = code }

// none reports whether nothing was found since so many findings.
func (s *saying) none(since int) bool {
	return !slices.ContainsFunc(s.findings[since:], func(f Finding) bool { return f.Code != "" })
}
