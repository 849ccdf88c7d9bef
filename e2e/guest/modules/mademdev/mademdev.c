// SPDX-License-Identifier: GPL-2.0
/*
 * A PCI driver that can create mediated devices on any function to which it is bound. The devices have one region and
 * do nothing.
 */
#include <linux/delay.h>
#include <linux/mdev.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/vfio.h>

static unsigned int slow;
module_param(slow, uint, 0644);
MODULE_PARM_DESC(slow, "for so many seconds the driver looks at a function, and then it does not want it; 0 for never");

static struct mdev_parent parent;
static struct mdev_type type = { .sysfs_name = "one", .pretty_name = "Made of nothing" };
static struct mdev_type *types[] = { &type };

struct made {
	struct vfio_device vdev;
};

static int made_open(struct vfio_device *vdev) { return 0; }
static void made_close(struct vfio_device *vdev) { }

static long made_ioctl(struct vfio_device *vdev, unsigned int cmd, unsigned long arg)
{
	struct vfio_device_info info;
	unsigned long size = offsetofend(struct vfio_device_info, num_irqs);

	if (cmd != VFIO_DEVICE_GET_INFO)
		return -ENOTTY;
	if (copy_from_user(&info, (void __user *)arg, size))
		return -EFAULT;
	info.flags = VFIO_DEVICE_FLAGS_PCI;
	info.num_regions = 1;
	info.num_irqs = 0;
	return copy_to_user((void __user *)arg, &info, size) ? -EFAULT : 0;
}

static void made_unmap(struct vfio_device *vdev, u64 iova, u64 length) { }

static const struct vfio_device_ops ops = {
	.name = "mademdev",
	.open_device = made_open,
	.close_device = made_close,
	.ioctl = made_ioctl,
	.dma_unmap = made_unmap,
};

static int made_probe(struct mdev_device *mdev)
{
	struct made *made = vfio_alloc_device(made, vdev, &mdev->dev, &ops);
	int err;

	if (IS_ERR(made))
		return PTR_ERR(made);
	dev_set_drvdata(&mdev->dev, made);
	err = vfio_register_emulated_iommu_dev(&made->vdev);
	if (err)
		vfio_put_device(&made->vdev);
	return err;
}

static void made_remove(struct mdev_device *mdev)
{
	struct made *made = dev_get_drvdata(&mdev->dev);

	vfio_unregister_group_dev(&made->vdev);
	vfio_put_device(&made->vdev);
}

static unsigned int made_available(struct mdev_type *mtype) { return 8; }

static struct mdev_driver mdev_driver = {
	.device_api = VFIO_DEVICE_API_PCI_STRING,
	.driver = { .name = "mademdev", .owner = THIS_MODULE, .mod_name = KBUILD_MODNAME },
	.probe = made_probe,
	.remove = made_remove,
	.get_available = made_available,
};

static int parent_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	if (slow) {
		msleep(slow * 1000);
		return -ENODEV;
	}
	return mdev_register_parent(&parent, &pdev->dev, &mdev_driver, types, 1);
}

static void parent_remove(struct pci_dev *pdev) { mdev_unregister_parent(&parent); }

static struct pci_driver parent_driver = { .name = "mademdev", .probe = parent_probe, .remove = parent_remove };

static int __init made_init(void)
{
	int err = mdev_register_driver(&mdev_driver);

	if (err)
		return err;
	err = pci_register_driver(&parent_driver);
	if (err)
		mdev_unregister_driver(&mdev_driver);
	return err;
}

static void __exit made_exit(void)
{
	pci_unregister_driver(&parent_driver);
	mdev_unregister_driver(&mdev_driver);
}

module_init(made_init);
module_exit(made_exit);
MODULE_DESCRIPTION("mediated devices of any PCI function, for tests");
MODULE_LICENSE("GPL");
