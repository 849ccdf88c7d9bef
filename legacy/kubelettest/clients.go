package kubelettest

import "slices"

// name adds a plugin to those whose end the kubelet notices. Up to 1.36 this is only the latest
// plugin of each resource (pkg/kubelet/cm/devicemanager/plugin/v1beta1/handler.go, registerClient,
// in 1.25 to 1.37).
func (k *Kubelet) name(p *Plugin) {
	resource := p.Request.ResourceName
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.ByName {
		delete(k.clients, resource)
	}
	k.clients[resource] = append(slices.Clone(k.clients[resource]), p)
}

// removeName removes a plugin after a failed connection. Up to 1.36 no plugin has the name of the
// resource afterwards (connectClient, there).
func (k *Kubelet) removeName(p *Plugin) {
	resource := p.Request.ResourceName
	k.mu.Lock()
	defer k.mu.Unlock()
	k.clients[resource] = slices.DeleteFunc(slices.Clone(k.clients[resource]), func(c *Plugin) bool { return k.ByName || c == p })
}

// run receives a plugin's lists until the stream ends, and then disconnects the plugin. Up to 1.36
// the kubelet disconnects the plugin that has the resource's name at that time (runClient, there),
// and marks all devices unhealthy.
func (k *Kubelet) run(p *Plugin) {
	resource := p.Request.ResourceName
	p.watchLists(k.t, func(list string) {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.lists[resource] = list
	})
	if k.NoticeEnds != nil {
		select {
		case <-k.NoticeEnds:
		case <-k.t.Context().Done():
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.ByName && len(k.clients[resource]) > 0 {
		p = k.clients[resource][0]
	}
	if !slices.Contains(k.clients[resource], p) {
		return
	}
	k.clients[resource] = slices.DeleteFunc(slices.Clone(k.clients[resource]), func(c *Plugin) bool { return c == p })
	p.Conn.Close()
	if len(k.clients[resource]) == 0 {
		delete(k.lists, resource)
		k.holes[resource]++
	}
}

// forgetAll removes everything that a stopped kubelet forgets.
func (k *Kubelet) forgetAll() {
	k.mu.Lock()
	defer k.mu.Unlock()
	clear(k.clients)
	clear(k.lists)
}

// NoticesEnd reports whether the kubelet would notice the end of the plugin.
func (k *Kubelet) NoticesEnd(p *Plugin) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Contains(k.clients[p.Request.ResourceName], p)
}

// Has returns the present list of a resource, or "", and how often the resource has lost its last
// plugin.
func (k *Kubelet) Has(resource string) (list string, holes int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.lists[resource], k.holes[resource]
}
