package intelgpu

// models maps PCI device IDs to the names of discrete GPUs in the list of PCI IDs, because no
// kernel file contains the names. IDs of several products, such as those of integrated GPUs, are
// left out.
var models = map[string]string{
	"0bd5": "Data Center GPU Max 1550",
	"0bd6": "Data Center GPU Max 1550",
	"0bd7": "Data Center GPU Max 1350",
	"0bd8": "Data Center GPU Max 1350",
	"0bd9": "Data Center GPU Max 1100",
	"0bda": "Data Center GPU Max 1100",
	"0bdb": "Data Center GPU Max 1100",
	"4905": "Iris Xe MAX Graphics",
	"4907": "Server GPU SG-18M",
	"5690": "Arc A770M",
	"5691": "Arc A730M",
	"5692": "Arc A550M",
	"5693": "Arc A370M",
	"5694": "Arc A350M",
	"56a0": "Arc A770",
	"56a1": "Arc A750",
	"56a2": "Arc A580",
	"56a5": "Arc A380",
	"56a6": "Arc A310",
	"56b0": "Arc Pro A30M",
	"56c0": "Data Center GPU Flex 170",
	"56c1": "Data Center GPU Flex 140",
	"e20b": "Arc B580",
	"e20c": "Arc B570",
	"e211": "Arc Pro B60",
	"e212": "Arc Pro B50",
}
