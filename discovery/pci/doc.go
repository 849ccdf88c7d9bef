// Package pci describes PCI functions for families and scans: their common attributes, their health
// beyond the driver's own findings, their nodes under VFIO, and their virtual functions. The package
// only reads the host, except for the work of [MakeVirtual] and [UnmakeVirtual].
package pci
