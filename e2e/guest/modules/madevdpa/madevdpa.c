// SPDX-License-Identifier: GPL-2.0
/*
 * A PCI driver that creates a vDPA device on any function to which it is bound. The device has no working queues. It
 * appears in sysfs at the same place as the devices of real drivers, and so does the virtio device of virtio_vdpa.
 */
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/vdpa.h>

struct made {
	struct vdpa_device vdpa;
	u8 status;
};

static struct made *made_of(struct vdpa_device *vdpa)
{
	return container_of(vdpa, struct made, vdpa);
}

static u64 made_features(struct vdpa_device *vdpa) { return BIT_ULL(32); /* VIRTIO_F_VERSION_1 */ }
static int made_set_features(struct vdpa_device *vdpa, u64 features) { return 0; }
static u64 made_driver_features(struct vdpa_device *vdpa) { return made_features(vdpa); }
static u32 made_device_id(struct vdpa_device *vdpa) { return 0x1f; /* a virtio device without a driver */ }
static u32 made_vendor_id(struct vdpa_device *vdpa) { return 0x1af4; }
static u16 made_queue_size(struct vdpa_device *vdpa) { return 16; }
static u32 made_align(struct vdpa_device *vdpa) { return PAGE_SIZE; }
static size_t made_config_size(struct vdpa_device *vdpa) { return 0; }
static u8 made_status(struct vdpa_device *vdpa) { return made_of(vdpa)->status; }
static void made_set_status(struct vdpa_device *vdpa, u8 status) { made_of(vdpa)->status = status; }

static int made_reset(struct vdpa_device *vdpa)
{
	made_of(vdpa)->status = 0;
	return 0;
}

static const struct vdpa_config_ops ops = {
	.get_device_features = made_features,
	.set_driver_features = made_set_features,
	.get_driver_features = made_driver_features,
	.get_device_id = made_device_id,
	.get_vendor_id = made_vendor_id,
	.get_vq_num_max = made_queue_size,
	.get_vq_align = made_align,
	.get_config_size = made_config_size,
	.get_status = made_status,
	.set_status = made_set_status,
	.reset = made_reset,
};

static int made_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct made *made = vdpa_alloc_device(struct made, vdpa, &pdev->dev, &ops, 1, 1, NULL, false);
	int err;

	if (IS_ERR(made))
		return PTR_ERR(made);
	made->vdpa.dma_dev = &pdev->dev;
	pci_set_drvdata(pdev, made);
	err = vdpa_register_device(&made->vdpa, 1);
	if (err)
		put_device(&made->vdpa.dev);
	return err;
}

static void made_remove(struct pci_dev *pdev)
{
	struct made *made = pci_get_drvdata(pdev);

	vdpa_unregister_device(&made->vdpa);
}

static struct pci_driver made_driver = {
	.name = "madevdpa",
	.probe = made_probe,
	.remove = made_remove,
};
module_pci_driver(made_driver);

MODULE_DESCRIPTION("a vDPA device of any PCI function, for tests");
MODULE_LICENSE("GPL");
