// Package removal implements the protocol between the uninstall command and the agents. The command
// writes an order to an annotation of the agents' ConfigMap. Each agent answers with a condition of
// its own pod. ConfigMap and pods are deleted with Chandler.
//
// The removal has two phases, and any agent can stop it:
//
//   - [Withhold]: all physical devices are withheld, as with an unknown configuration. Each agent
//     reports the consumers in its ledger. Claims that are allocated and not prepared are found at
//     the API server. If there is any consumer, the order is withdrawn, and all agents offer their
//     devices again.
//   - [Remove]: an agent without consumers ends its sockets, and checks its ledger once more,
//     since the kubelet may have called in between. Then the agent deletes its slices, files and
//     directory, and waits for the deletion of its pod. Meanwhile it answers probes, since a
//     restarted agent would offer devices again.
//
// An order to withhold is renewed every ten seconds ([Beat]) and expires after a minute
// ([Patience]), since the command may have died. An order to remove does not expire, so that an
// agent that starts late also leaves. If an agent that waits for its deletion receives any other
// order, it exits, and the next process offers everything again. A deleted ConfigMap is no order,
// since the ConfigMap is deleted together with Chandler.
package removal
