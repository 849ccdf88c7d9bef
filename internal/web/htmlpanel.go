package web

import "cmp"

func (w *writer) writeCopyable(expression string) {
	w.printf(`<code class="copy"><span>%s</span></code>`, allowBreaks(expression))
}

func (w *writer) command(text string) {
	w.printf(`<code class="copy cmd"><span>%s</span></code>`, text)
}

// writePanel writes the details of a physical device.
func (w *writer) writePanel(p *panel) {
	w.printf(`<section class="panel" id="%s" tabindex="-1" aria-labelledby="p-%s"><div class="ph"><div><h2 id="p-%s">`, p.ID, p.ID, p.ID)
	if p.Glyph != nil {
		w.writeGlyph(*p.Glyph)
		w.printf(` `)
	}
	w.printf(`%s</h2><p><span class="kind">%s</span> `, p.Title, p.Kind)
	w.writeNonEmpty(`<code>%s</code> · `, p.Addr)
	w.printf(`%s</p></div><a class="x" href="#machine" aria-label="Close">×</a></div>`, p.State)
	for i := range p.Says {
		w.writeStatement(&p.Says[i])
	}
	if len(p.Do) > 0 {
		w.printf(`<h3>To do <small>%s</small></h3>`, p.Code)
		for _, command := range p.Do {
			w.command(command)
		}
	}
	if len(p.Owners) > 0 || p.FreeReason != "" {
		w.printf(`<h3>Consumers</h3>`)
		for i := range p.Owners {
			w.writeOwner(&p.Owners[i])
		}
		w.writeNonEmpty(`<p class="quiet">%s</p>`, p.FreeReason)
	}
	w.writeRequest(p)
	if len(p.Parts) > 0 {
		w.writeParts(p)
	}
	w.writePlace(p)
	if len(p.Attributes) > 0 {
		w.printf(`<h3>Attributes</h3><dl class="kv at">`)
		for _, a := range p.Attributes {
			w.printf(`<dt>%s`, a.Name)
			w.writeNonEmpty(` <small>%s</small>`, a.Small)
			w.printf(`</dt><dd>%s</dd>`, a.Value)
		}
		w.printf(`</dl>`)
	}
	w.printf("</section>\n")
}

func (w *writer) writeStatement(s *statement) {
	w.printf(`<p class="say %s">`, s.Glyph.Class)
	w.writeGlyph(s.Glyph)
	w.printf(`<span><b>%s</b>`, s.Strong)
	if s.Taint != "" {
		w.printf(`<br>%s Taint <code>%s</code>, %s.</span></p>`, s.Rest, s.Taint, s.Effect)
		return
	}
	w.printf(` %s</span></p>`, s.Rest)
}

func (w *writer) writeOwner(o *owner) {
	w.printf(`<dl class="kv">`)
	if o.Pod != "" {
		w.printf(`<dt>Pod</dt><dd><b>%s</b> <small>in %s</small></dd>`, o.Pod, o.Namespace)
	}
	w.writeNonEmpty(`<dt>Container</dt><dd>%s</dd>`, o.Container)
	switch {
	case o.Resource != "":
		w.printf(`<dt>Limits</dt><dd>%s`, o.Resource)
		w.writeNonEmpty(` <small>by claim %s</small>`, o.Claim)
		w.printf(`</dd>`)
	case o.Claim != "":
		w.printf(`<dt>Claim</dt><dd>%s`, o.Claim)
		w.writeNonEmpty(` <small>request %s</small>`, o.Request)
		w.printf(`</dd>`)
	}
	w.printf(`<dt>API</dt><dd>%s</dd>`, o.LongAPI())
	if o.Since != nil {
		w.printf(`<dt>Since</dt><dd>%s, %s</dd>`, o.Since.Exact, o.Since.Long)
	}
	w.printf(`</dl>`)
	if o.Pod != "" {
		w.command("kubectl -n " + o.Namespace + " describe pod " + o.Pod)
	}
}

func (w *writer) writeRequest(p *panel) {
	w.printf(`<h3>Ask for one</h3><dl class="kv ask"><dt>DeviceClass</dt>`)
	if p.Ask.Class != "" {
		w.printf(`<dd>`)
		w.writeCopyable(p.Ask.Class)
		w.printf(`</dd>`)
	} else {
		w.printf(`<dd class="quiet">No installed DeviceClass of Chandler selects it.</dd>`)
	}
	if p.Ask.Any != "" {
		w.printf(`<dt>CEL, any like it</dt><dd>`)
		w.writeCopyable(p.Ask.Any)
		w.printf(`</dd>`)
	}
	if !p.ThisByPart {
		w.printf(`<dt>CEL, this one</dt><dd>`)
		if p.Ask.This != "" {
			w.writeCopyable(p.Ask.This)
		} else {
			w.printf(`<span class="quiet">No attribute distinguishes it from similar devices.</span>`)
		}
		w.printf(`</dd>`)
	}
	w.printf(`<dt>By limits</dt>`)
	if len(p.Ask.Limits) > 0 {
		w.printf(`<dd>`)
		for _, limit := range p.Ask.Limits {
			w.writeCopyable(limit)
		}
		w.printf(`</dd></dl>`)
	} else {
		w.printf(`<dd class="quiet">No extended resource name: configure one under <code>resources</code>.</dd></dl>`)
	}
	w.writeNonEmpty(`<details><summary>Whole claim template</summary><pre class="copy"><span>%s</span></pre></details>`, p.Ask.Template)
}

func (w *writer) writeParts(p *panel) {
	w.printf(`<h3>%s</h3><table class="parts"><colgroup><col><col><col><col><col></colgroup><tbody>`, p.PartsTitle)
	for i := range p.Parts {
		part := &p.Parts[i]
		w.printf(`<tr id="%s" tabindex="-1"><td>`, part.ID)
		w.writeGlyph(part.Glyph)
		w.printf(`</td><th scope="row">%s</th><td><code>%s</code></td><td title="%s">`, part.Label, part.Second, part.Title)
		if why := part.ProblemText(); why != "" {
			w.printf(`<span class="%s">%s</span> `, part.Glyph.Class, why)
		}
		if part.Owner != nil {
			w.writeNonEmpty(`<small>%s/</small>`, part.Owner.Namespace)
			w.printf(`<b>%s</b>`, cmp.Or(part.Owner.Pod, part.Owner.Claim, "a starting container"))
			if part.Others > 0 {
				w.printf(` <small>and %d more</small>`, part.Others)
			}
		} else if part.ProblemText() == "" {
			w.printf(`<span class="none">%s</span>`, part.VacantText())
		}
		w.printf(`</td><td class="num">`)
		if part.Owner != nil {
			w.writeAge(part.Owner.Since, inShort)
		}
		w.printf(`</td></tr><tr class="more"><td></td><td colspan="4">`)
		w.writeNonEmpty(`<small>%s</small>`, part.Detail)
		if part.This != "" {
			w.writeCopyable(part.This)
		} else {
			w.printf(`<small>No CEL tells it from its siblings.</small>`)
		}
		w.printf(`</td></tr>`)
	}
	w.printf(`</tbody></table>`)
}

func (w *writer) writePlace(p *panel) {
	if p.NUMA == "" && len(p.Crumbs) == 0 && p.Link == "" && len(p.Links) == 0 && p.IOMMU == "" && len(p.Nodes) == 0 && p.Path == "" {
		return
	}
	w.printf(`<h3>Place</h3><dl class="kv">`)
	if p.NUMA != "" || len(p.Crumbs) > 0 {
		name := "PCIe"
		if len(p.Crumbs) == 0 {
			name = "Memory"
		}
		w.printf(`<dt>%s</dt><dd class="crumbs">%s`, name, p.NUMA)
		for i, crumb := range p.Crumbs {
			if i > 0 || p.NUMA != "" {
				w.printf(` <i>›</i> `)
			}
			w.printf(`<code>%s</code>`, crumb)
		}
		w.printf(`</dd>`)
	}
	w.writeNonEmpty(`<dt>Link</dt><dd>%s</dd>`, p.Link)
	if len(p.Links) > 0 {
		w.printf(`<dt>%s</dt><dd>`, p.LinkName)
		for _, link := range p.Links {
			w.printf(`<a href="#%s"><code>%s</code></a> `, link.ID, link.Code)
		}
		w.printf(`</dd>`)
	}
	w.writeNonEmpty(`<dt>IOMMU group</dt><dd>%s</dd>`, p.IOMMU)
	if len(p.Nodes) > 0 {
		w.printf(`<dt>Nodes</dt><dd class="nodes">`)
		for _, node := range p.Nodes {
			w.printf(`<code>%s</code> `, node)
		}
		w.printf(`</dd>`)
	}
	w.writeNonEmpty(`<dt>In /sys</dt><dd><code>%s</code></dd>`, p.Path)
	w.printf(`</dl>`)
}
