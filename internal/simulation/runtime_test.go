//go:build simulated

package simulation

import _ "unsafe" // for go:linkname

// The changed runtime has this variable; see [runtimeChanges].
//
//go:linkname simulated runtime.simulated
var simulated uint64

func init() { seedScheduler = func(seed uint64) { simulated = seed } }
