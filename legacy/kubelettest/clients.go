package kubelettest

import (
	"slices"
	"time"
)

// name makes a plugin one whose end the kubelet notices. To 1.36 that is one for
// each resource, the latest (pkg/kubelet/cm/devicemanager/plugin/v1beta1/
// handler.go, registerClient, in 1.25 to 1.37).
func (k *Kubelet) name(p *Plugin) {
	resource := p.Request.ResourceName
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.ByName {
		delete(k.clients, resource)
	}
	k.clients[resource] = append(slices.Clone(k.clients[resource]), p)
}

// unname takes a plugin back that could not be connected to. To 1.36 nobody has
// its resource's name then (connectClient, there).
func (k *Kubelet) unname(p *Plugin) {
	resource := p.Request.ResourceName
	k.mu.Lock()
	defer k.mu.Unlock()
	k.clients[resource] = slices.DeleteFunc(slices.Clone(k.clients[resource]), func(c *Plugin) bool { return k.ByName || c == p })
}

// run takes a plugin's lists until the stream ends, and disconnects it then. To
// 1.36 the kubelet disconnects whichever plugin has the resource's name by then
// (runClient, there), and marks all devices unhealthy.
func (k *Kubelet) run(p *Plugin) {
	resource := p.Request.ResourceName
	p.watch(k.t, func(list string) {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.lists[resource] = list
	})
	time.Sleep(k.Slow)
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

// forget is the end of a kubelet.
func (k *Kubelet) forget() {
	k.mu.Lock()
	defer k.mu.Unlock()
	clear(k.clients)
	clear(k.lists)
}

// Notices reports whether the kubelet would notice if the plugin ended that it
// calls.
func (k *Kubelet) Notices(p *Plugin) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Contains(k.clients[p.Request.ResourceName], p)
}

// Has returns the list of a resource that is in force, "" if there is none, and
// how often its last plugin has gone.
func (k *Kubelet) Has(resource string) (list string, holes int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.lists[resource], k.holes[resource]
}
