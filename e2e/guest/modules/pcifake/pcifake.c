// SPDX-License-Identifier: GPL-2.0
/*
 * pcifake makes the kernel's own PCI code enumerate functions of any identity.
 *
 *	modprobe pcifake functions=NODE/VENDOR:DEVICE:CLASS[/VFS/VFDEVICE],... [domain=0x10]
 *
 * All numbers except NODE and VFS are hexadecimal. Each NUMA node in an entry gets a root complex in a separate PCI
 * domain, domain + NODE. Each function is a PCI Express endpoint at 16 GT/s and x16 behind a separate root port, and has
 * SR-IOV unless VFS is 0. The BARs have no memory, and there are no interrupts and no DMA, so drivers of real hardware
 * do not work. The module cannot be unloaded, because the machine is thrown away after the test.
 */
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/slab.h>
#include <linux/string.h>

static char *functions = "";
module_param(functions, charp, 0444);
MODULE_PARM_DESC(functions, "NODE/VENDOR:DEVICE:CLASS[/VFS/VFDEVICE],...");
static int domain = 0x10;
module_param(domain, int, 0444);
MODULE_PARM_DESC(domain, "the PCI domain of the functions of NUMA node 0");

#define MAX_FUNCTIONS	32
#define MAX_NODES	4

/* Offsets of capabilities in the configuration space. */
#define CAP_EXPRESS	0x40
#define CAP_ARI		0x100	/* of an endpoint */
#define CAP_SRIOV	0x140
#define CAP_SERIAL	0x190
#define CAP_ACS		0x100	/* of a root port */

#define LINK		(PCI_EXP_LNKSTA_CLS_16_0GB | 16 << 4) /* 16 GT/s, x16 */
#define ACS_ALL		(PCI_ACS_SV | PCI_ACS_RR | PCI_ACS_CR | PCI_ACS_UF)

enum kind { PORT, ENDPOINT, VIRTUAL };

/* A line holds the configuration spaces of a root port, an endpoint, and all its virtual functions, which share one. */
struct line {
	u8 space[3][PCI_CFG_SPACE_EXP_SIZE];
	int node;
	int slot;
	u16 vfs;
};

/* A complex is the root complex of a NUMA node. */
struct complex {
	struct pci_sysdata sysdata;
	struct resource memory, buses;
	bool used;
};

static struct line *lines[MAX_FUNCTIONS];
static int line_count;
static struct complex complexes[MAX_NODES];

static u16 get16(const u8 *space, int at) { return space[at] | space[at + 1] << 8; }
static u32 get32(const u8 *space, int at) { return get16(space, at) | (u32)get16(space, at + 2) << 16; }
static void put16(u8 *space, int at, u16 value) { space[at] = value; space[at + 1] = value >> 8; }
static void put32(u8 *space, int at, u32 value) { put16(space, at, value); put16(space, at + 2, value >> 16); }

static void identify(u8 *space, u16 vendor, u16 device, u32 class, int type)
{
	put16(space, PCI_VENDOR_ID, vendor);
	put16(space, PCI_DEVICE_ID, device);
	put32(space, PCI_CLASS_REVISION, class << 8 | 1);
	put16(space, PCI_STATUS, PCI_STATUS_CAP_LIST);
	space[PCI_CAPABILITY_LIST] = CAP_EXPRESS;
	space[CAP_EXPRESS] = PCI_CAP_ID_EXP;
	put16(space, CAP_EXPRESS + PCI_EXP_FLAGS, 2 | type << 4);
	put32(space, CAP_EXPRESS + PCI_EXP_DEVCAP, PCI_EXP_DEVCAP_RBER | (type == PCI_EXP_TYPE_ENDPOINT ? PCI_EXP_DEVCAP_FLR : 0));
	put32(space, CAP_EXPRESS + PCI_EXP_LNKCAP, LINK);
	put16(space, CAP_EXPRESS + PCI_EXP_LNKSTA, LINK);
	put32(space, CAP_EXPRESS + PCI_EXP_LNKCAP2, PCI_EXP_LNKCAP2_SLS_2_5GB | PCI_EXP_LNKCAP2_SLS_5_0GB | PCI_EXP_LNKCAP2_SLS_8_0GB | PCI_EXP_LNKCAP2_SLS_16_0GB);
}

static void make_port(u8 *space)
{
	identify(space, PCI_VENDOR_ID_INTEL, 0x347a, PCI_CLASS_BRIDGE_PCI << 8, PCI_EXP_TYPE_ROOT_PORT);
	space[PCI_HEADER_TYPE] = PCI_HEADER_TYPE_BRIDGE;
	put32(space, CAP_EXPRESS + PCI_EXP_DEVCAP2, PCI_EXP_DEVCAP2_ARI);
	put32(space, PCI_PREF_MEMORY_BASE, PCI_PREF_RANGE_TYPE_64 << 16 | PCI_PREF_RANGE_TYPE_64);
	put32(space, CAP_ACS, PCI_EXT_CAP_ID_ACS | 1 << 16);
	put16(space, CAP_ACS + PCI_ACS_CAP, ACS_ALL);
	put16(space, CAP_ACS + PCI_ACS_CTRL, ACS_ALL);
}

static void make_endpoint(u8 *space, u16 vendor, u16 device, u32 class, u16 vfs, u16 vfdevice)
{
	identify(space, vendor, device, class, PCI_EXP_TYPE_ENDPOINT);
	put16(space, PCI_SUBSYSTEM_VENDOR_ID, vendor);
	put16(space, PCI_SUBSYSTEM_ID, 1);
	put32(space, PCI_BASE_ADDRESS_0, PCI_BASE_ADDRESS_MEM_TYPE_64 | PCI_BASE_ADDRESS_MEM_PREFETCH);
	put32(space, CAP_ARI, PCI_EXT_CAP_ID_ARI | 1 << 16 | (vfs ? CAP_SRIOV : CAP_SERIAL) << 20);
	if (vfs) {
		put32(space, CAP_SRIOV, PCI_EXT_CAP_ID_SRIOV | 1 << 16 | CAP_SERIAL << 20);
		put16(space, CAP_SRIOV + PCI_SRIOV_INITIAL_VF, vfs);
		put16(space, CAP_SRIOV + PCI_SRIOV_TOTAL_VF, vfs);
		put16(space, CAP_SRIOV + PCI_SRIOV_VF_OFFSET, 1);
		put16(space, CAP_SRIOV + PCI_SRIOV_VF_STRIDE, 1);
		put16(space, CAP_SRIOV + PCI_SRIOV_VF_DID, vfdevice);
		put32(space, CAP_SRIOV + PCI_SRIOV_SUP_PGSIZE, 1);
		put32(space, CAP_SRIOV + PCI_SRIOV_SYS_PGSIZE, 1);
		put32(space, CAP_SRIOV + PCI_SRIOV_BAR, PCI_BASE_ADDRESS_MEM_TYPE_64 | PCI_BASE_ADDRESS_MEM_PREFETCH);
	}
	put32(space, CAP_SERIAL, PCI_EXT_CAP_ID_DSN | 1 << 16);
	put32(space, CAP_SERIAL + 4, line_count + 1);
	put32(space, CAP_SERIAL + 8, vendor);
}

/* A virtual function has no IDs of its own: the kernel uses the IDs of the physical function. */
static void make_virtual(u8 *space, u16 vendor, u32 class)
{
	identify(space, 0xffff, 0xffff, class, PCI_EXP_TYPE_ENDPOINT);
	put16(space, PCI_SUBSYSTEM_VENDOR_ID, vendor);
	put16(space, PCI_SUBSYSTEM_ID, 1);
	put32(space, CAP_ARI, PCI_EXT_CAP_ID_ARI | 1 << 16);
}

/* find returns the configuration space at an address, with its line and kind, or NULL if there is no function. */
static u8 *find(struct pci_bus *bus, unsigned int devfn, struct line **line, enum kind *kind)
{
	struct complex *complex = container_of((struct pci_sysdata *)bus->sysdata, struct complex, sysdata);
	int i;

	for (i = 0; i < line_count; i++) {
		u8 *endpoint = lines[i]->space[ENDPOINT];

		*line = lines[i];
		if (lines[i]->node != complex - complexes)
			continue;
		if (bus->number == 0) {
			if (devfn != PCI_DEVFN(lines[i]->slot, 0))
				continue;
			*kind = PORT;
			return lines[i]->space[PORT];
		}
		if (lines[i]->space[PORT][PCI_SECONDARY_BUS] != bus->number)
			continue;
		if (devfn == 0) {
			*kind = ENDPOINT;
			return endpoint;
		}
		*kind = VIRTUAL;
		if (lines[i]->vfs && get16(endpoint, CAP_SRIOV + PCI_SRIOV_CTRL) & PCI_SRIOV_CTRL_VFE &&
		    devfn <= get16(endpoint, CAP_SRIOV + PCI_SRIOV_NUM_VF))
			return lines[i]->space[VIRTUAL];
		return NULL;
	}
	return NULL;
}

static int config_read(struct pci_bus *bus, unsigned int devfn, int at, int size, u32 *value)
{
	struct line *line;
	enum kind kind;
	u8 *space = find(bus, devfn, &line, &kind);

	if (!space) {
		*value = ~0;
		return PCIBIOS_DEVICE_NOT_FOUND;
	}
	*value = size == 1 ? space[at] : size == 2 ? get16(space, at) : get32(space, at);
	return PCIBIOS_SUCCESSFUL;
}

/* write_bar writes one half of a 64-bit BAR. The bits below the BAR's size cannot be set. */
static bool write_bar(u8 *space, int bar, u64 size, int at, u32 value)
{
	if (at == bar)
		put32(space, at, (value & (u32)~(size - 1)) | PCI_BASE_ADDRESS_MEM_TYPE_64 | PCI_BASE_ADDRESS_MEM_PREFETCH);
	else if (at == bar + 4)
		put32(space, at, value & (u32)(~(size - 1) >> 32));
	else
		return false;
	return true;
}

/* writable returns the bits of a byte that software may set. */
static u8 writable(const struct line *line, enum kind kind, int at)
{
	switch (at) {
	case PCI_COMMAND: case PCI_COMMAND + 1: case PCI_INTERRUPT_LINE: case PCI_CACHE_LINE_SIZE:
	case CAP_EXPRESS + PCI_EXP_DEVCTL: case CAP_EXPRESS + PCI_EXP_LNKCTL: case CAP_EXPRESS + PCI_EXP_DEVCTL2:
		return 0xff;
	case CAP_EXPRESS + PCI_EXP_DEVCTL + 1:
		return 0x7f; /* A function reset ends at once. */
	}
	if (kind == PORT) {
		switch (at) {
		case PCI_MEMORY_BASE: case PCI_MEMORY_LIMIT: case PCI_PREF_MEMORY_BASE: case PCI_PREF_MEMORY_LIMIT:
			return 0xf0;
		case PCI_BRIDGE_CONTROL:
			return 0xbf; /* A bus reset ends at once. */
		case PCI_BRIDGE_CONTROL + 1: case CAP_ACS + PCI_ACS_CTRL: case CAP_ACS + PCI_ACS_CTRL + 1:
			return 0xff;
		}
		if ((at >= PCI_PRIMARY_BUS && at <= PCI_SUBORDINATE_BUS) || (at >= PCI_MEMORY_BASE && at < PCI_IO_BASE_UPPER16))
			return 0xff;
	}
	if (kind == ENDPOINT && line->vfs) {
		switch (at) {
		case CAP_SRIOV + PCI_SRIOV_CTRL: case CAP_SRIOV + PCI_SRIOV_NUM_VF: case CAP_SRIOV + PCI_SRIOV_SYS_PGSIZE:
			return 0xff;
		}
	}
	return 0;
}

static int config_write(struct pci_bus *bus, unsigned int devfn, int at, int size, u32 value)
{
	struct line *line;
	enum kind kind;
	u8 *space = find(bus, devfn, &line, &kind);
	int i;

	if (!space)
		return PCIBIOS_DEVICE_NOT_FOUND;
	if (kind == ENDPOINT && size == 4) {
		if (write_bar(space, PCI_BASE_ADDRESS_0, SZ_1M, at, value))
			return PCIBIOS_SUCCESSFUL;
		if (line->vfs && write_bar(space, CAP_SRIOV + PCI_SRIOV_BAR, SZ_64K, at, value))
			return PCIBIOS_SUCCESSFUL;
	}
	for (i = 0; i < size; i++) {
		u8 mask = writable(line, kind, at + i);

		space[at + i] = (space[at + i] & ~mask) | (value >> 8 * i & mask);
	}
	return PCIBIOS_SUCCESSFUL;
}

static struct pci_ops config_space = { .read = config_read, .write = config_write };

static int add_line(const char *entry)
{
	unsigned int node, vendor, device, class, vfs = 0, vfdevice = 0;
	struct line *line;
	int i;

	if (sscanf(entry, "%u/%x:%x:%x/%u/%x", &node, &vendor, &device, &class, &vfs, &vfdevice) < 4 ||
	    node >= MAX_NODES || vfs > 64 || line_count == MAX_FUNCTIONS) {
		pr_err("pcifake: %s is not NODE/VENDOR:DEVICE:CLASS[/VFS/VFDEVICE], or one too many\n", entry);
		return -EINVAL;
	}
	line = kzalloc(sizeof(*line), GFP_KERNEL);
	if (!line)
		return -ENOMEM;
	line->node = node;
	line->vfs = vfs;
	for (i = 0; i < line_count; i++)
		line->slot += lines[i]->node == node;
	make_port(line->space[PORT]);
	make_endpoint(line->space[ENDPOINT], vendor, device, class, vfs, vfdevice);
	make_virtual(line->space[VIRTUAL], vendor, class);
	lines[line_count++] = line;
	complexes[node].used = true;
	return 0;
}

static int add_complex(int node)
{
	struct complex *c = &complexes[node];
	struct pci_bus *bus;
	LIST_HEAD(resources);
	int err;

	c->sysdata.domain = domain + node;
	c->sysdata.node = node_online(node) ? node : NUMA_NO_NODE;
	c->buses = (struct resource){ .name = "pcifake buses", .end = 255, .flags = IORESOURCE_BUS };
	c->memory = (struct resource){ .name = "pcifake memory", .flags = IORESOURCE_MEM | IORESOURCE_MEM_64 | IORESOURCE_PREFETCH };
	err = allocate_resource(&iomem_resource, &c->memory, SZ_1G, 0x2000000000ULL, 0x7fffffffffULL, SZ_1G, NULL, NULL);
	if (err)
		return err;
	pci_add_resource(&resources, &c->buses);
	pci_add_resource(&resources, &c->memory);
	pci_lock_rescan_remove();
	bus = pci_create_root_bus(NULL, 0, &config_space, &c->sysdata, &resources);
	if (bus) {
		pci_scan_child_bus(bus);
		pci_assign_unassigned_bus_resources(bus);
		pci_bus_add_devices(bus);
	}
	pci_unlock_rescan_remove();
	return bus ? 0 : -ENODEV;
}

static int __init pcifake_init(void)
{
	char *copy = kstrdup(functions, GFP_KERNEL), *rest = copy, *entry;
	int node, err = 0;

	while (!err && (entry = strsep(&rest, ",")))
		if (*entry)
			err = add_line(entry);
	kfree(copy);
	for (node = 0; !err && node < MAX_NODES; node++)
		if (complexes[node].used)
			err = add_complex(node);
	return err;
}
module_init(pcifake_init);

MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("PCI functions of any identity, for tests of what reads sysfs");
