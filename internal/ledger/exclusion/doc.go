// Package exclusion decides which allocation excludes which other. Its functions are pure: they
// depend on the entries of an [Index] and the present devices only.
//
// Entries are compared by the recorded physical device and by the present one, since PCI functions
// become one physical device, or separate ones, while pods have them.
//
//   - Entries of two APIs never have the same physical device, unless sharing is unlimited.
//   - A hold on the whole physical device excludes all other consumers.
//   - Partitions are allocated together as far as their counters suffice, and shares of one form
//     as far as the capacity suffices.
//   - An entry also excludes other consumers from any device that now has one of the device nodes
//     of the entry.
package exclusion
