package page

import "cmp"

func (w *writer) copyable(expression string) {
	w.f(`<code class="copy"><span>%s</span></code>`, breaks(expression))
}

func (w *writer) command(text string) {
	w.f(`<code class="copy cmd"><span>%s</span></code>`, text)
}

// panel writes the details of a physical device.
func (w *writer) panel(p *panel) {
	w.f(`<section class="panel" id="%s" tabindex="-1" aria-labelledby="p-%s"><div class="ph"><div><h2 id="p-%s">`, p.ID, p.ID, p.ID)
	if p.Glyph != nil {
		w.glyph(*p.Glyph)
		w.f(` `)
	}
	w.f(`%s</h2><p><span class="kind">%s</span> `, p.Title, p.Kind)
	w.maybe(`<code>%s</code> · `, p.Addr)
	w.f(`%s</p></div><a class="x" href="#machine" aria-label="Close">×</a></div>`, p.State)
	for i := range p.Says {
		w.say(&p.Says[i])
	}
	if len(p.Do) > 0 {
		w.f(`<h3>To do <small>%s</small></h3>`, p.Code)
		for _, command := range p.Do {
			w.command(command)
		}
	}
	if len(p.Owners) > 0 || p.Nobody != "" {
		w.f(`<h3>Consumers</h3>`)
		for i := range p.Owners {
			w.owner(&p.Owners[i])
		}
		w.maybe(`<p class="quiet">%s</p>`, p.Nobody)
	}
	w.ask(p)
	if len(p.Parts) > 0 {
		w.parts(p)
	}
	w.place(p)
	if len(p.Attributes) > 0 {
		w.f(`<h3>Attributes</h3><dl class="kv at">`)
		for _, a := range p.Attributes {
			w.f(`<dt>%s`, a.Name)
			w.maybe(` <small>%s</small>`, a.Small)
			w.f(`</dt><dd>%s</dd>`, a.Value)
		}
		w.f(`</dl>`)
	}
	w.f("</section>\n")
}

func (w *writer) say(s *say) {
	w.f(`<p class="say %s">`, s.Glyph.Class)
	w.glyph(s.Glyph)
	w.f(`<span><b>%s</b>`, s.Strong)
	if s.Taint != "" {
		w.f(`<br>%s Taint <code>%s</code>, %s.</span></p>`, s.Rest, s.Taint, s.Effect)
		return
	}
	w.f(` %s</span></p>`, s.Rest)
}

func (w *writer) owner(o *owner) {
	w.f(`<dl class="kv">`)
	if o.Pod != "" {
		w.f(`<dt>Pod</dt><dd><b>%s</b> <small>in %s</small></dd>`, o.Pod, o.Namespace)
	}
	w.maybe(`<dt>Container</dt><dd>%s</dd>`, o.Container)
	switch {
	case o.Resource != "":
		w.f(`<dt>Limits</dt><dd>%s`, o.Resource)
		w.maybe(` <small>by claim %s</small>`, o.Claim)
		w.f(`</dd>`)
	case o.Claim != "":
		w.f(`<dt>Claim</dt><dd>%s`, o.Claim)
		w.maybe(` <small>request %s</small>`, o.Request)
		w.f(`</dd>`)
	}
	w.f(`<dt>API</dt><dd>%s</dd>`, o.LongAPI())
	if o.Since != nil {
		w.f(`<dt>Since</dt><dd>%s, %s</dd>`, o.Since.Exact, o.Since.Long)
	}
	w.f(`</dl>`)
	if o.Pod != "" {
		w.command("kubectl -n " + o.Namespace + " describe pod " + o.Pod)
	}
}

func (w *writer) ask(p *panel) {
	w.f(`<h3>Ask for one</h3><dl class="kv ask"><dt>DeviceClass</dt>`)
	if p.Ask.Class != "" {
		w.f(`<dd>`)
		w.copyable(p.Ask.Class)
		w.f(`</dd>`)
	} else {
		w.f(`<dd class="quiet">No DeviceClass of Chandler selects it.</dd>`)
	}
	if p.Ask.Any != "" {
		w.f(`<dt>CEL, any like it</dt><dd>`)
		w.copyable(p.Ask.Any)
		w.f(`</dd>`)
	}
	if !p.ThisByPart {
		w.f(`<dt>CEL, this one</dt><dd>`)
		if p.Ask.This != "" {
			w.copyable(p.Ask.This)
		} else {
			w.f(`<span class="quiet">No attribute distinguishes it from similar devices.</span>`)
		}
		w.f(`</dd>`)
	}
	w.f(`<dt>By limits</dt>`)
	if len(p.Ask.Limits) > 0 {
		w.f(`<dd>`)
		for _, limit := range p.Ask.Limits {
			w.copyable(limit)
		}
		w.f(`</dd></dl>`)
	} else {
		w.f(`<dd class="quiet">No extended resource name: configure one under <code>resources</code>.</dd></dl>`)
	}
	w.maybe(`<details><summary>Whole claim template</summary><pre class="copy"><span>%s</span></pre></details>`, p.Ask.Template)
}

func (w *writer) parts(p *panel) {
	w.f(`<h3>%s</h3><table class="parts"><colgroup><col><col><col><col><col></colgroup><tbody>`, p.PartsTitle)
	for i := range p.Parts {
		part := &p.Parts[i]
		w.f(`<tr id="%s" tabindex="-1"><td>`, part.ID)
		w.glyph(part.Glyph)
		w.f(`</td><th scope="row">%s</th><td><code>%s</code></td><td title="%s">`, part.Label, part.Second, part.Title)
		if why := part.Why(); why != "" {
			w.f(`<span class="%s">%s</span> `, part.Glyph.Class, why)
		}
		if part.Owner != nil {
			w.maybe(`<small>%s/</small>`, part.Owner.Namespace)
			w.f(`<b>%s</b>`, cmp.Or(part.Owner.Pod, part.Owner.Claim, "a starting container"))
			if part.Others > 0 {
				w.f(` <small>and %d more</small>`, part.Others)
			}
		} else if part.Why() == "" {
			w.f(`<span class="none">%s</span>`, part.Vacant())
		}
		w.f(`</td><td class="num">`)
		if part.Owner != nil {
			w.ago(part.Owner.Since, inShort)
		}
		w.f(`</td></tr><tr class="more"><td></td><td colspan="4">`)
		w.maybe(`<small>%s</small>`, part.Detail)
		if part.This != "" {
			w.copyable(part.This)
		} else {
			w.f(`<small>No CEL tells it from its siblings.</small>`)
		}
		w.f(`</td></tr>`)
	}
	w.f(`</tbody></table>`)
}

func (w *writer) place(p *panel) {
	if p.NUMA == "" && len(p.Crumbs) == 0 && p.Link == "" && len(p.Links) == 0 && p.IOMMU == "" && len(p.Nodes) == 0 && p.Path == "" {
		return
	}
	w.f(`<h3>Place</h3><dl class="kv">`)
	if p.NUMA != "" || len(p.Crumbs) > 0 {
		name := "PCIe"
		if len(p.Crumbs) == 0 {
			name = "Memory"
		}
		w.f(`<dt>%s</dt><dd class="crumbs">%s`, name, p.NUMA)
		for i, crumb := range p.Crumbs {
			if i > 0 || p.NUMA != "" {
				w.f(` <i>›</i> `)
			}
			w.f(`<code>%s</code>`, crumb)
		}
		w.f(`</dd>`)
	}
	w.maybe(`<dt>Link</dt><dd>%s</dd>`, p.Link)
	if len(p.Links) > 0 {
		w.f(`<dt>%s</dt><dd>`, p.LinkName)
		for _, link := range p.Links {
			w.f(`<a href="#%s"><code>%s</code></a> `, link.ID, link.Code)
		}
		w.f(`</dd>`)
	}
	w.maybe(`<dt>IOMMU group</dt><dd>%s</dd>`, p.IOMMU)
	if len(p.Nodes) > 0 {
		w.f(`<dt>Nodes</dt><dd class="nodes">`)
		for _, node := range p.Nodes {
			w.f(`<code>%s</code> `, node)
		}
		w.f(`</dd>`)
	}
	w.maybe(`<dt>In /sys</dt><dd><code>%s</code></dd>`, p.Path)
	w.f(`</dl>`)
}
