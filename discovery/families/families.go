// Package families lists all families of accelerators. Only the program and tests import the
// package; no other package depends on a vendor.
package families

import (
	"chandler.dev/discovery"
	"chandler.dev/discovery/families/amdgpu"
	"chandler.dev/discovery/families/apex"
	"chandler.dev/discovery/families/ascend"
	"chandler.dev/discovery/families/dlb"
	"chandler.dev/discovery/families/fpgaaws"
	"chandler.dev/discovery/families/fpgaintel"
	"chandler.dev/discovery/families/fpgaxilinx"
	"chandler.dev/discovery/families/furiosa"
	"chandler.dev/discovery/families/gaudi"
	"chandler.dev/discovery/families/generic"
	"chandler.dev/discovery/families/hailo"
	"chandler.dev/discovery/families/hygon"
	"chandler.dev/discovery/families/hypervisor"
	"chandler.dev/discovery/families/idxd"
	"chandler.dev/discovery/families/intelgpu"
	"chandler.dev/discovery/families/neuron"
	"chandler.dev/discovery/families/npu"
	"chandler.dev/discovery/families/nvidia"
	"chandler.dev/discovery/families/paths"
	"chandler.dev/discovery/families/qat"
	"chandler.dev/discovery/families/rdma"
	"chandler.dev/discovery/families/sgx"
	"chandler.dev/discovery/families/slingshot"
	"chandler.dev/discovery/families/solarflare"
	"chandler.dev/discovery/families/sriovnet"
	"chandler.dev/discovery/families/tenstorrent"
	"chandler.dev/discovery/families/tpu"
	"chandler.dev/discovery/families/vfio"
	"chandler.dev/discovery/families/vpu"
)

// All lists the families in scan order: if two families describe a device with the same name, the
// device of the first family is kept.
var All = []*discovery.Family{
	amdgpu.Family,
	apex.Family,
	ascend.Family,
	dlb.Family,
	fpgaaws.Family,
	fpgaintel.Family,
	fpgaxilinx.Family,
	furiosa.Family,
	gaudi.Family,
	generic.Family,
	hailo.Family,
	hygon.Family,
	hypervisor.Family,
	idxd.Family,
	intelgpu.Family,
	neuron.Family,
	npu.Family,
	nvidia.Family,
	paths.Family,
	qat.Family,
	rdma.Family,
	sgx.Family,
	slingshot.Family,
	solarflare.Family,
	sriovnet.Family,
	tenstorrent.Family,
	tpu.Family,
	vfio.Family,
	vpu.Family,
}
