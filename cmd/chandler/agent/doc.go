// Package agent implements the agent of a node. It watches the devices of a host, decides which API
// offers which device, and runs both APIs, the health checks and the Events. The package reads no
// flags and no configuration files, has no vendor-specific code, and accesses its environment only
// through its [Config], so that a test can run a whole agent.
//
// # Parts
//
// The type agent creates the parts and runs them. Each part can be read alone, because it gets what
// it needs as fields and functions:
//
//   - hostWatch scans the host, settles the states of devices (healthStates), and sends snapshots.
//   - liveSettings has the settings in force, and follows changes of the configuration.
//   - changes.Manager changes devices and undoes the changes.
//   - removalOrders follows the orders to remove Chandler from the node.
//   - classCheck reads the DeviceClasses and warns about them.
//   - featureFile writes the labels of the node.
//
// # Placement
//
// At any time, one API offers a physical device: DRA or the device plugin API. Package placement
// decides, and publishes the devices.
//
// # Reload
//
// The agent reads its configuration file every ten seconds. It does not watch the file, since the
// kubelet takes up to a minute to update a changed ConfigMap anyway. If a new configuration is
// invalid, the agent logs the reason, reports it in a metric and in an Event of its pod, and keeps
// the last valid configuration. The file config.yaml contains that configuration for an agent that
// starts while the configuration is invalid. Without that file, all physical devices are withheld,
// except that pods keep their devices of the device plugin API: after a reboot, the kubelet starts
// these pods only if their IDs are healthy.
//
// A new mode, exclusion or form is a move: the physical device keeps its earlier description,
// withheld, until it has no consumer. Then it changes. "driverRoots", "paths", "passthrough" and
// "onDemand.virtualFunctions" take effect at the next start, and so do physical functions of the
// first pool with "sriov".
//
// Entries may apply to some nodes, by name or by labels (DriverConfig.ForNode), and the node's
// label chandler.dev/mode replaces "mode". The agent has one watch of its node's metadata
// (cluster.FollowLabels), without an initial list, and resumes the watch where it ended. Changed
// labels are processed like a changed file. The active labels are in labels.json, and an agent that
// starts uses them until it receives others. If the labels have never been received and an entry
// depends on them, the configuration is invalid, without an earlier valid one.
//
// At its start, an agent has no information about the previous configuration. The files of claims
// and grants contain the form in which they have a device ("8 shares", not only "1 share"), so the
// other shares of the device are not allocated until these consumers end. A claim that was
// allocated before the change has a share of the old form, like the claims that it joins. After a
// reboot, claims have the new form.
//
// # Life of an agent
//
// [Run] runs a whole agent. Time comes from package time, which testing/synctest replaces in tests.
// No goroutine holds a mutex while it waits for time, a file or an API: the fake clock stops while
// any goroutine waits for a mutex.
//
//   - The agent starts before its dependencies, and waits for them: for the kubelet, for the API
//     server, for another agent to release the lock, for a directory, for a first device. It logs
//     each wait, and no wait ends the process. Meanwhile claims are unprepared. Nothing is
//     published before the features of the API server are known, or before 30 seconds have passed.
//   - An invalid configuration does not end the agent, since claims must be unprepared anyway. The
//     agent is then not ready, so that an upgrade stops. While another agent has the lock, the new
//     agent does not register its driver: the kubelet calls the newest, and the other agent
//     continues. An invalid command line ends the process.
//   - SIGTERM ends the agent at once during any wait. Only calls in progress, and work on a
//     device, are finished first.
//   - Background work is retried and logged, or ends the process with a reason.
//   - /healthz checks the way of the kubelet's calls: the socket where the driver registers, the
//     socket that the registration names, and the socket of each plugin. Faults that a new process
//     would not fix are ignored: no API server, no kubelet, a host that does not answer, an agent
//     that waits for the lock.
//   - /readyz reports ready as soon as the kubelet has answered the registration. It reports not
//     ready if nothing of the host could be read for a minute.
//   - An upgrade overlaps the agents (maxSurge): the new agent is registered before the old one
//     ends. No slice is deleted, and the worst effect on a call is a wait for the change of
//     agents. In the device plugin API, the agent that ends keeps its sockets until the kubelet
//     has those of the new agent, and forwards calls, since the kubelet rejects pods while no
//     socket exists (package sockets). After a restart by the kubelet, the agent has 30 seconds
//     until the kubelet deletes its slices, so the liveness probe takes half of that time.
//   - A kubelet that starts deletes all slices of its node. After a registration by the kubelet,
//     the driver therefore publishes its slices repeatedly for a while, so that the slices are
//     back within seconds.
//   - /metrics is computed on request, except for the durations of calls, which the driver reports
//     to one function (Config.Observe). Only this package depends on metrics.
//   - Events inform pods when a device of theirs becomes unusable. A namespace whose Events cannot
//     be written is tried last, at intervals from ten seconds to five minutes, and does not delay
//     other namespaces.
package agent
