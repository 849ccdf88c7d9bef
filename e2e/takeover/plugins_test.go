package takeover

import (
	"crypto/sha1"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// row is a device plugin, and a pod with devices of the plugin. The facts are from the plugins'
// sources and documentation.
type row struct {
	plugin   string   // the plugin's name and its particular mode
	hosts    []string // recorded hosts of families, laid out over each other
	config   string   // the DriverConfig, except the mode
	resource string
	ids      []string // the IDs that the plugin lists
	offered  int      // the number of usable IDs that the agent lists, if different; -1 for none
	most     int      // the most of a resource that one pod can have, or 0 without a limit

	// The plugin allocates these IDs to the pod, with device nodes for this pod only, device nodes
	// for several pods, and the further edits below.
	held        []string
	own, common []string
	env         map[string]string
	mounts      []string // "HOST at CONTAINER"
	annotations map[string]string

	mute bool // The kubelet has no PodResources API.

	// If the agent cannot derive the plugin's IDs, these are the agent's own IDs for the held
	// devices. The agent lists them once the pod has ended.
	renamed []string
}

// The device nodes of the NVIDIA plugin with pass-device-specs, in addition to the GPUs' own.
var nvidiaControl = []string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"}

var rows = []row{
	{
		plugin: "NVIDIA", hosts: []string{"nvidia/testdata/h100x8"}, resource: "nvidia.com/gpu",
		ids: each("GPU-5d2c1f%s-8a41-4e0b-9c37-0b6f3d9ae4%[1]s", "1b", "43", "52", "61", "9d", "c3"), held: each("GPU-5d2c1f%s-8a41-4e0b-9c37-0b6f3d9ae4%[1]s", "43", "61"),
		own: []string{"/dev/nvidia1", "/dev/nvidia3"}, common: nvidiaControl,
		env: map[string]string{"NVIDIA_VISIBLE_DEVICES": "GPU-5d2c1f43-8a41-4e0b-9c37-0b6f3d9ae443,GPU-5d2c1f61-8a41-4e0b-9c37-0b6f3d9ae461"},
	},
	{
		plugin: "NVIDIA, volume mounts", hosts: []string{"nvidia/testdata/h100x8"}, resource: "nvidia.com/gpu",
		config: "allocation: [{resource: nvidia.com/gpu, deviceListStrategy: [VolumeMounts]}]\n",
		ids:    each("GPU-5d2c1f%s-8a41-4e0b-9c37-0b6f3d9ae4%[1]s", "1b", "43", "52", "61", "9d", "c3"), held: each("GPU-5d2c1f%s-8a41-4e0b-9c37-0b6f3d9ae4%[1]s", "9d"),
		env:    map[string]string{"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"},
		mounts: []string{"/dev/null at /var/run/nvidia-container-devices/GPU-5d2c1f9d-8a41-4e0b-9c37-0b6f3d9ae49d"},
	},
	{
		plugin: "NVIDIA, MIG by strategy mixed", hosts: []string{"nvidia/testdata/a100-single"}, resource: "nvidia.com/mig-2g.10gb",
		ids:     each("MIG-3f1b7c52-1d0e-5c6b-9a87-41f0c2d3e4%s", "03", "04", "05", "13", "14"),
		offered: 4, held: []string{"MIG-3f1b7c52-1d0e-5c6b-9a87-41f0c2d3e405"},
		own:    []string{"/dev/nvidia-caps/nvidia-cap48", "/dev/nvidia-caps/nvidia-cap49"},
		common: append([]string{"/dev/nvidia0"}, nvidiaControl...),
		env:    map[string]string{"NVIDIA_VISIBLE_DEVICES": "MIG-3f1b7c52-1d0e-5c6b-9a87-41f0c2d3e405"},
	},
	{
		plugin: "NVIDIA, time-slicing", hosts: []string{"nvidia/testdata/h100x8"}, resource: "nvidia.com/gpu",
		config: "sharing: [{cel: 'device.attributes[\"chandler.dev\"].family == \"nvidia\"', replicas: 4}]\n",
		ids:    replicas("GPU-5d2c1f%s-8a41-4e0b-9c37-0b6f3d9ae4%[1]s::%d", 4, "1b", "43", "52", "61", "9d", "c3"),
		held:   []string{"GPU-5d2c1f61-8a41-4e0b-9c37-0b6f3d9ae461::2"},
		env:    map[string]string{"NVIDIA_VISIBLE_DEVICES": "GPU-5d2c1f61-8a41-4e0b-9c37-0b6f3d9ae461"},
	},
	{
		plugin: "GKE", hosts: []string{"nvidia/testdata/gke"}, resource: "nvidia.com/gpu", config: "driverRoots: {nvidia: /home/kubernetes/bin/nvidia}\n",
		ids: []string{"nvidia0", "nvidia1/gi1", "nvidia1/gi2"}, held: []string{"nvidia0"},
		own: []string{"/dev/nvidia0"}, common: []string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"},
		mounts: []string{"/home/kubernetes/bin/nvidia at /usr/local/nvidia", "/home/kubernetes/bin/nvidia/vulkan/icd.d at /etc/vulkan/icd.d"},
	},
	{
		plugin: "GKE, time-sharing", hosts: []string{"nvidia/testdata/gke"}, resource: "nvidia.com/gpu",
		config: "driverRoots: {nvidia: /home/kubernetes/bin/nvidia}\nsharing: [{cel: 'device.attributes[\"chandler.dev\"].family == \"nvidia\"', replicas: 3}]\n",
		ids:    slices.Concat(numbered("nvidia0/vgpu", 3), numbered("nvidia1/gi1/vgpu", 3), numbered("nvidia1/gi2/vgpu", 3)), held: []string{"nvidia0/vgpu1"},
		common: []string{"/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"},
	},
	{
		plugin: "Aliyun", hosts: []string{"nvidia/testdata/mps"}, resource: "aliyun.com/gpu-mem",
		config: "sharing: [{cel: 'device.attributes[\"chandler.dev\"].kind == \"gpu\"', unit: 1Gi, resource: aliyun.com/gpu-mem}]\n",
		ids:    slices.Concat(numbered("GPU-7c1e0a01-2b41-4e0b-9c37-0b6f3d9ae401-_-", 40), numbered("GPU-7c1e0a41-2b41-4e0b-9c37-0b6f3d9ae441-_-", 44)), most: 1,
		held: numbered("GPU-7c1e0a01-2b41-4e0b-9c37-0b6f3d9ae401-_-", 38),
	},
	{
		plugin: "HAMi", hosts: []string{"nvidia/testdata/h100x8"}, resource: "nvidia.com/gpu",
		config:  "sharing: [{cel: 'device.attributes[\"chandler.dev\"].family == \"nvidia\"', replicas: 10}]\n",
		ids:     replicas("GPU-5d2c1f%s-8a41-4e0b-9c37-0b6f3d9ae4%[1]s-%d", 10, "1b", "43", "52", "61", "9d", "c3"),
		offered: 59, held: []string{"GPU-5d2c1f61-8a41-4e0b-9c37-0b6f3d9ae461-7"}, renamed: []string{"GPU-5d2c1f61-8a41-4e0b-9c37-0b6f3d9ae461::7"},
	},
	{
		plugin: "AMD", hosts: []string{"amdgpu/testdata/mi210x8"}, resource: "amd.com/gpu",
		ids: each("0000:%s:00.0", "23", "24", "43", "44", "a3", "a4", "c3", "c4"), held: each("0000:%s:00.0", "43", "a3"),
		own: []string{"/dev/dri/card4", "/dev/dri/renderD130", "/dev/dri/card2", "/dev/dri/renderD132"}, common: []string{"/dev/kfd"},
	},
	{
		plugin: "AMD, partitions", hosts: []string{"amdgpu/testdata/mi300x-cpx"}, resource: "amd.com/gpu",
		ids: append(numbered("amdgpu_xcp_", 14), "0000:05:00.0", "0000:26:00.0"), held: []string{"amdgpu_xcp_4"},
		own: []string{"/dev/dri/card5", "/dev/dri/renderD133"}, common: []string{"/dev/kfd"},
	},
	{
		plugin: "Intel GPU", hosts: []string{"intelgpu/testdata/flex170x2"}, resource: "gpu.intel.com/i915",
		ids: []string{"card1-0", "card2-0"}, held: []string{"card2-0"}, own: []string{"/dev/dri/card2", "/dev/dri/renderD129"},
		mounts: []string{"/dev/dri/by-path/pci-0000:b6:00.0-card at /dev/dri/by-path/pci-0000:b6:00.0-card"},
	},
	{
		plugin: "Intel GPU, shared", hosts: []string{"intelgpu/testdata/flex170x2"}, resource: "gpu.intel.com/i915",
		config: "sharing: [{cel: 'device.attributes[\"chandler.dev\"].family == \"intelgpu\"', replicas: 4}]\n",
		ids:    append(numbered("card1-", 4), numbered("card2-", 4)...), held: []string{"card1-2"}, common: []string{"/dev/dri/card1", "/dev/dri/renderD128"},
	},
	{
		plugin: "Intel NPU", hosts: []string{"npu/testdata/laptop"}, resource: "npu.intel.com/accel",
		config: "sharing: [{cel: 'device.attributes[\"chandler.dev\"].family == \"npu\"', replicas: 3}]\n",
		ids:    numbered("accel0-", 3), held: []string{"accel0-1"}, common: []string{"/dev/accel/accel0"},
	},
	{
		plugin: "Intel QAT", hosts: []string{"qat/testdata/4xxx"}, resource: "qat.intel.com/cy",
		ids: each("0000:6b:00.%s", "1", "2", "3"), held: []string{"0000:6b:00.2"}, own: []string{"/dev/vfio/302"}, common: []string{"/dev/vfio/vfio"},
		env: map[string]string{"QAT0": "0000:6b:00.2"},
	},
	{
		plugin: "Intel DSA, shared work queues", hosts: []string{"idxd/testdata/spr"}, resource: "dsa.intel.com/wq-user-shared",
		config: "sharing: [{cel: 'device.attributes[\"chandler.dev\"].family == \"idxd\"', replicas: 10}]\n",
		ids:    numbered("wq-user-shared-wq0.1-", 10), held: []string{"wq-user-shared-wq0.1-6"}, common: []string{"/dev/dsa/wq0.1"},
	},
	{
		plugin: "Intel IAA", hosts: []string{"idxd/testdata/spr"}, resource: "iaa.intel.com/wq-user-dedicated",
		ids: []string{"wq-user-dedicated-wq1.1-0"}, held: []string{"wq-user-dedicated-wq1.1-0"}, own: []string{"/dev/iax/wq1.1", "/dev/char/510:1"},
	},
	{
		plugin: "Intel DSA under vfio", hosts: []string{"idxd/testdata/vfio"}, resource: "dsa.intel.com/vfio",
		ids: []string{"0000:6a:01.0", "0000:e7:01.0"}, held: []string{"0000:6a:01.0"}, own: []string{"/dev/vfio/40"}, common: []string{"/dev/vfio/vfio"},
		env: map[string]string{"VFIO_BDF0": "0000:6a:01.0"},
	},
	{
		plugin: "Intel SGX", hosts: []string{"sgx/testdata/server"}, resource: "sgx.intel.com/enclave",
		ids: numbered("sgx-enclave-", 110), held: []string{"sgx-enclave-77"}, common: []string{"/dev/sgx_enclave"},
	},
	{
		plugin: "Intel DLB", hosts: []string{"dlb/testdata/two"}, resource: "dlb.intel.com/pf",
		ids: []string{"/dev/dlb0", "/dev/dlb1"}, held: []string{"/dev/dlb1"}, own: []string{"/dev/dlb1"},
	},
	{
		plugin: "Intel FPGA", hosts: []string{"fpgaintel/testdata/ports"}, resource: "fpga.intel.com/af-695.d84.aVKNtusxV3qMNmj5-qCB9thCTcSko8QT-J5DNoP5BAs",
		ids: []string{"dfl-port.0", "dfl-port.5"}, held: []string{"dfl-port.5"}, own: []string{"/dev/dfl-port.5"},
	},
	{
		plugin: "Intel FPGA, regions", hosts: []string{"fpgaintel/testdata/d5005"}, resource: "fpga.intel.com/region-bfac4d851ee856fe8c95865ce1bbaa2d",
		config: "resources: [{name: fpga.intel.com/region-bfac4d851ee856fe8c95865ce1bbaa2d, cel: 'device.attributes[\"chandler.dev\"].family == \"fpga-intel\"'}]\n",
		ids:    []string{"dfl-fme.0", "dfl-fme.1"}, held: []string{"dfl-fme.0"}, own: []string{"/dev/dfl-port.0"},
	},
	{
		plugin: "b<>com", hosts: []string{"paths/testdata/gateway"}, resource: "b-com.com/accelerator",
		config: "paths: [{name: b-com.com/accelerator, kind: fpga, groups: [{units: 40, unitEnv: ACCELERATOR_UNITS}]}]\n",
		ids:    numbered("", 40), held: []string{"11", "12"}, env: map[string]string{"ACCELERATOR_UNITS": "11,12"},
	},
	{
		plugin: "Xilinx", hosts: []string{"fpgaxilinx/testdata/alveo"}, resource: "amd.com/xilinx_u50_gen3x16_xdma_201920_3-0",
		ids: []string{"0000:af:00.1"}, held: []string{"0000:af:00.1"}, own: []string{"/dev/xclmgmt44800", "/dev/dri/renderD129"},
	},
	{
		plugin: "Xilinx, MA35", hosts: []string{"fpgaxilinx/testdata/media"}, resource: "amd.com/MA35",
		ids: []string{"0000:62:00.0", "0000:63:00.0"}, held: []string{"0000:63:00.0"}, own: []string{"/dev/ama_transcoder1"},
	},
	{
		plugin: "Xilinx, both FPGAs of a U30", hosts: []string{"fpgaxilinx/testdata/media"}, resource: "amd.com/ama_u30",
		ids: []string{"0000:0b:00.1"}, held: []string{"0000:0b:00.1"}, own: []string{"/dev/xclmgmt2816", "/dev/dri/renderD128", "/dev/xclmgmt3072", "/dev/dri/renderD129"},
	},
	{
		plugin: "Habana", hosts: []string{"gaudi/testdata/gaudi2x8"}, resource: "habana.ai/gaudi",
		ids: numbered("AN0600012", 8), offered: 7, held: []string{"AN06000123"}, renamed: []string{"0000:34:00.0"},
		own: []string{"/dev/accel/accel1", "/dev/accel/accel_controlD1"}, env: map[string]string{"HABANA_VISIBLE_DEVICES": "1"},
	},
	{
		plugin: "Furiosa", hosts: []string{"furiosa/testdata/rngd"}, resource: "furiosa.ai/rngd",
		ids: numbered("82540B87-1055-48C6-AAB1-C4CC84672C7", 4), held: []string{"82540B87-1055-48C6-AAB1-C4CC84672C72"},
		own: slices.Concat(each("/dev/rngd/npu2%s", "mgmt", "pe0", "pe0-1", "pe4-7", "dmar", "bar0", "bar2", "bar4"), numbered("/dev/rngd/npu2ch", 8)),
	},
	{
		plugin: "Huawei", hosts: []string{"ascend/testdata/a2x8"}, resource: "huawei.com/Ascend910",
		ids: numbered("Ascend910-", 8), held: []string{"Ascend910-3", "Ascend910-6"}, own: []string{"/dev/davinci3", "/dev/davinci6"},
		common: []string{"/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"}, env: map[string]string{"ASCEND_VISIBLE_DEVICES": "3,6"},
	},
	{
		plugin: "Hygon, by IDs that no file tells of", hosts: []string{"hygon/testdata/k100x8"}, resource: "hygon.com/dcu",
		ids: numbered("DCU-", 8), offered: 7, held: []string{"DCU-2"}, renamed: []string{"0000:49:00.0"},
		own: []string{"/dev/dri/card2", "/dev/dri/renderD130"}, common: []string{"/dev/kfd", "/dev/mkfd"},
	},
	{
		plugin: "Google TPU v4", hosts: []string{"tpu/testdata/accel"}, resource: "google.com/tpu",
		ids: []string{"accel0", "accel1", "accel2", "accel10"}, held: []string{"accel1", "accel10"}, own: []string{"/dev/accel1", "/dev/accel10"},
	},
	{
		plugin: "Google TPU v6e", hosts: []string{"tpu/testdata/v6e"}, resource: "google.com/tpu",
		ids: numbered("", 8), held: []string{"4"}, own: []string{"/dev/vfio/4"}, common: []string{"/dev/vfio/vfio"},
	},
	{
		plugin: "AWS Neuron", hosts: []string{"neuron/testdata/inf1"}, resource: "aws.amazon.com/neuron",
		ids: []string{"0", "1", "3"}, held: []string{"1"}, own: []string{"/dev/neuron1"},
	},
	{
		plugin: "Tenstorrent", hosts: []string{"tenstorrent/testdata/loudbox"}, resource: "tenstorrent.com/n300",
		ids: numbered("", 4), held: []string{"2"}, own: []string{"/dev/tenstorrent/2"}, mounts: []string{"/sys at /sys", "/dev/hugepages-1G at /dev/hugepages-1G"},
	},
	{
		plugin: "Qualcomm, by IDs that are not public", hosts: []string{"npu/testdata/many"}, resource: "qualcomm.com/qaic",
		ids: numbered("qid-", 4), offered: 3, held: []string{"qid-1"}, renamed: []string{"0000:44:00.0"}, own: []string{"/dev/accel/accel1"},
	},
	{
		plugin: "Onload", hosts: []string{"solarflare/testdata/x2522"}, resource: "amd.com/onload",
		ids: numbered("sfc-", 100), held: []string{"sfc-41"}, common: []string{"/dev/onload", "/dev/onload_epoll", "/dev/sfc_char"},
	},
	{
		plugin: "HPE CXI", hosts: []string{"slingshot/testdata/ex235a"}, resource: "beta.hpe.com/cxi",
		ids: numbered("", 4), held: []string{"2"}, own: []string{"/dev/cxi2"},
	},
	{
		plugin: "HDDL", hosts: []string{"vpu/testdata/hddl"}, resource: "vpu.intel.com/hddl", config: "driverRoots: {vpu: /var/tmp}\n",
		ids: numbered("hddl_service-", 2), held: []string{"hddl_service-1"}, common: []string{"/dev/ion"},
		mounts: each("/var/tmp/hddl_service%s at /var/tmp/hddl_service%[1]s", ".sock", "_ready.mutex", "_alive.mutex"),
	},
	{
		plugin: "sriovdp, virtual functions under vfio", hosts: []string{"sriovnet/testdata/e810"}, resource: "intel.com/dpdk",
		config: "resources: [{name: intel.com/dpdk, cel: 'device.attributes[\"chandler.dev\"].family == \"sriovnet\" && device.attributes[\"chandler.dev\"].driver == \"vfio-pci\"'}]\n",
		ids:    []string{"0000:16:01.0", "0000:16:01.1"}, held: []string{"0000:16:01.1"}, own: []string{"/dev/vfio/41"}, common: []string{"/dev/vfio/vfio"},
		env: map[string]string{"PCIDEVICE_INTEL_COM_DPDK": "0000:16:01.1"},
	},
	{
		plugin: "sriovdp, accelerators", hosts: []string{"vfio/testdata/groups"}, resource: "intel.com/fec",
		config: "resources: [{name: intel.com/fec, sriov: {}, cel: 'device.attributes[\"chandler.dev\"].family == \"vfio\" && device.attributes[\"chandler.dev\"].function == \"physical\"'}]\n",
		ids:    []string{"0000:01:00.0"}, held: []string{"0000:01:00.0"}, own: []string{"/dev/vfio/12"}, common: []string{"/dev/vfio/vfio"},
		env: map[string]string{"PCIDEVICE_INTEL_COM_FEC": "0000:01:00.0"},
	},
	{
		plugin: "sriovdp, sub-functions", hosts: []string{"rdma/testdata/mixed"}, resource: "nvidia.com/sf",
		config: "resources: [{name: nvidia.com/sf, cel: 'device.attributes[\"chandler.dev\"].family == \"rdma\" && device.attributes[\"chandler.dev\"].function == \"partition\"'}]\n",
		ids:    []string{"mlx5_core.sf.4"}, held: []string{"mlx5_core.sf.4"}, env: map[string]string{"PCIDEVICE_NVIDIA_COM_SF": "mlx5_core.sf.4"},
	},
	{
		plugin: "Mellanox' shared RDMA", hosts: []string{"rdma/testdata/connectx7"}, resource: "rdma/hca_shared",
		config: "sharing: [{cel: 'device.attributes[\"chandler.dev\"].family == \"rdma\"', replicas: 63, pool: true, resource: rdma/hca_shared}]\n",
		ids:    numbered("", 63), held: []string{"17"}, common: []string{"/dev/infiniband/uverbs0", "/dev/infiniband/uverbs10", "/dev/infiniband/rdma_cm"},
	},
	{
		plugin: "squat, a node", hosts: []string{"paths/testdata/gateway"}, resource: "squat.ai/serial",
		config: "paths: [{name: squat.ai/serial, groups: [{paths: [{path: '/dev/ttyUSB*'}]}]}]\n",
		ids:    []string{squat(0, "/dev/ttyUSB0"), squat(0, "/dev/ttyUSB1")}, held: []string{squat(0, "/dev/ttyUSB1")}, own: []string{"/dev/ttyUSB1"},
	},
	{
		plugin: "squat, a count", hosts: []string{"paths/testdata/gateway"}, resource: "squat.ai/fuse",
		config: "paths: [{name: squat.ai/fuse, groups: [{paths: [{path: /dev/fuse}], count: 3}]}]\n",
		ids:    []string{squat(0, "/dev/fuse"), squat(1, "/dev/fuse"), squat(2, "/dev/fuse")}, held: []string{squat(1, "/dev/fuse")}, common: []string{"/dev/fuse"},
	},
	{
		plugin: "KubeVirt, KVM", hosts: []string{"hypervisor/testdata/kvm"}, resource: "devices.kubevirt.io/kvm",
		ids: numbered("kvm", 1000), held: []string{"kvm417"}, common: []string{"/dev/kvm"},
	},
	{
		plugin: "KubeVirt, tun", hosts: []string{"hypervisor/testdata/five"}, resource: "devices.kubevirt.io/tun",
		ids: numbered("tun", 1000), held: []string{"tun3", "tun999"}, common: []string{"/dev/net/tun"},
	},
	{
		plugin: "KubeVirt, USB, whose IDs are made at random", hosts: []string{"paths/testdata/gateway"}, resource: "kubevirt.io/coral",
		config: "paths: [{name: kubevirt.io/coral, groups: [{usb: [{vendor: 18d1, product: \"9302\"}]}]}]\n",
		ids:    []string{"kubevirt.io/coral-x7qz-0"}, offered: -1, held: []string{"kubevirt.io/coral-x7qz-0"}, renamed: []string{squat(0, "/dev/bus/usb/001/012")},
		own: []string{"/dev/bus/usb/001/012"}, env: map[string]string{"USB_RESOURCE_KUBEVIRT_IO_CORAL": "1:12"},
	},
	{
		plugin: "KubeVirt, PCI", hosts: []string{"vfio/testdata/groups"}, resource: "acme.com/TU104GL",
		config: "resources: [{name: acme.com/TU104GL, cel: 'device.attributes[\"chandler.dev\"].family == \"vfio\" && device.attributes[\"chandler.dev\"].function == \"physical\"'}]\n",
		ids:    []string{"12"}, held: []string{"12"}, own: []string{"/dev/vfio/12"}, common: []string{"/dev/vfio/vfio"},
		env: map[string]string{"PCI_RESOURCE_ACME_COM_TU104GL": "0000:01:00.0"},
	},
	{
		plugin: "NVIDIA's for KubeVirt", hosts: []string{"vfio/testdata/groups"}, resource: "nvidia.com/TU104GL_TESLA_T4",
		config: "resources: [{name: nvidia.com/TU104GL_TESLA_T4, cel: 'device.attributes[\"chandler.dev\"].family == \"vfio\" && device.attributes[\"chandler.dev\"].function == \"physical\"'}]\n",
		ids:    []string{"0000:01:00.0"}, held: []string{"0000:01:00.0"}, own: []string{"/dev/vfio/12"}, common: []string{"/dev/vfio/vfio"},
		env: map[string]string{"PCI_RESOURCE_NVIDIA_COM_TU104GL_TESLA_T4": "0000:01:00.0"},
	},
	{
		plugin: "NVIDIA's for KubeVirt, vGPUs", hosts: []string{"vfio/testdata/vgpu"}, resource: "nvidia.com/GRID_T4-1Q",
		config: "resources: [{name: nvidia.com/GRID_T4-1Q, cel: 'device.attributes[\"chandler.dev\"].?profile.orValue(\"\") == \"GRID T4-1Q\"'}]\n",
		ids:    []string{"83b8f4f2-509f-382f-3c1e-e6bfe0fa1001", "aa618089-8b16-4d01-a136-25a0f3c73123"}, held: []string{"aa618089-8b16-4d01-a136-25a0f3c73123"},
		own: []string{"/dev/vfio/72"}, common: []string{"/dev/vfio/vfio"},
		env: map[string]string{"MDEV_PCI_RESOURCE_NVIDIA_COM_GRID_T4-1Q": "aa618089-8b16-4d01-a136-25a0f3c73123"},
	},
}

// numbered returns n IDs with a common prefix.
func numbered(prefix string, n int) (ids []string) {
	for i := range n {
		ids = append(ids, fmt.Sprint(prefix, i))
	}
	return ids
}

// each returns an ID for each word.
func each(format string, words ...string) (ids []string) {
	for _, word := range words {
		ids = append(ids, fmt.Sprintf(format, word))
	}
	return ids
}

// replicas returns n IDs for each word.
func replicas(format string, n int, words ...string) (ids []string) {
	for _, word := range words {
		for i := range n {
			ids = append(ids, strings.ReplaceAll(fmt.Sprintf(strings.ReplaceAll(format, "%d", "#"), word), "#", strconv.Itoa(i)))
		}
	}
	return ids
}

// squat returns the ID of a path; count numbers the repetitions of the path.
func squat(count int, path string) string {
	sum := sha1.Sum([]byte(strconv.Itoa(count) + path))
	return hex.EncodeToString(sum[:])
}
