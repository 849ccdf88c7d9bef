package kubelet

import (
	"context"
	"errors"
	"net"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

// StartDRA starts the library's helper for a driver, on simulated sockets.
func (p *Process) StartDRA(ctx context.Context, plugin kubeletplugin.DRAPlugin, options ...kubeletplugin.Option) (*kubeletplugin.Helper, error) {
	return kubeletplugin.Start(ctx, plugin, append(options, kubeletplugin.PluginListener(p.listen), kubeletplugin.RegistrarListener(p.listen))...)
}

func (p *Process) listen(_ context.Context, path string) (net.Listener, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.isDead() {
		return nil, errors.New("the process was killed")
	}
	l := p.kubelet.network.listen(path, p)
	p.listeners = append(p.listeners, l)
	return l, nil
}
