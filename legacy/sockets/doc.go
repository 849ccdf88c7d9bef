// Package sockets serves device plugins at Unix sockets in the kubelet's device-plugins directory,
// and keeps them registered with the running kubelet. The package is independent of the plugins'
// devices.
//
// # Replacing a registered plugin
//
// Up to 1.36, the kubelet identifies the plugin of a resource by the resource's name alone: the
// plugin that registered last has the name. When any stream of that resource ends, the kubelet
// disconnects the plugin that has the name at that time, and marks all devices as unhealthy. So the
// end of an old agent would also disconnect the new one. A failed registration removes the name
// from the plugin that has it, and has no other effect; after that, the end of a stream has no
// effect. From 1.37 on, the kubelet identifies plugins by name and socket.
// (pkg/kubelet/cm/devicemanager/plugin/v1beta1/handler.go, read in 1.25, 1.28, 1.31 and 1.34 to
// 1.37.) The package therefore uses this sequence with any kubelet:
//
//	old agent                     kubelet up to 1.36               new agent
//	    |                          name: old                           |
//	    |  keeps its stream        name: new      <-- registers -------|
//	    |  forwards calls          name: none     <-- fails to --------|
//	    |-- ends its stream ->     no change                           |
//	    x                          name: new      <-- registers again -|
//	                                                 keeps both streams
//
// The first stream of the new agent sends nothing more and lasts as long as the second stream,
// since its end would remove the name from the second. An agent has at most two streams of a
// resource, regardless of the number of earlier agents. If the new agent dies halfway, the kubelet
// does not notice, and rejects pods until the next agent registers.
package sockets
