// Package placement decides which API offers which device, and publishes the devices.
//
// At any time, one API offers a physical device: DRA or the device plugin API. [PlaceDevices]
// decides. It is a pure function of the previous placement, the devices, a view of the ledger, and
// facts about the cluster.
//
//   - The administrator's mode, for a device or for all devices, has precedence. Auto means DRA as
//     soon as the kubelet has registered the driver; the device plugin API if the API server does
//     not serve resource.k8s.io or the kubelet rejects the driver; and the previous API while
//     either does not answer.
//   - A physical device moves to the other API when it is free: no entry of the ledger, no
//     ResourceClaim of the API server and no slice contains it. Until then it is withheld, that
//     is, omitted from slices or listed as Unhealthy, so that it becomes free.
//   - An ID in the kubelet's list of allocated devices counts as allocated, whichever plugin
//     allocated it, so an agent that replaces a vendor's plugin allocates no device that a pod
//     already has.
//   - A claim that was allocated before the move can still be prepared.
//   - While the kubelet or the API server does not answer, all devices count as allocated.
//
// [Standing.PlanSteps] applies rules and [PlaceDevices] to the files on the node and to rules that are not
// active: this is the command "chandler migrate".
//
// placements.go writes the placement to a file. If that file cannot be read for ten seconds, or is
// damaged, the agent renames it to sides.json.unreadable, and each allocated physical device
// remains with the API of its consumer.
//
// forms.go writes how the devices of DRA are shared to a file. An agent that starts with another
// configuration first offers these devices in the recorded forms, and then puts its configuration
// in force as a reload does: claims that the scheduler allocated meanwhile can be prepared.
package placement
