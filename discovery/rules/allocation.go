package rules

// Allocation is how the device-plugin API gives out what a resource counts.
type Allocation struct {
	Policy Policy

	// One says that a container gets no more than one.
	One bool
}

// Policy says which IDs of a resource are given together.
type Policy string

// The policies.
const (
	// PolicyAligned, the default, is devices that are near to each other, and shares
	// of those devices that have most of them left.
	PolicyAligned Policy = "Aligned"

	// PolicySpread is devices that are far from each other, and shares as of
	// PolicyAligned.
	PolicySpread Policy = "Spread"

	// PolicyPacked is devices that are near to each other, and shares of those
	// devices that have fewest of them left.
	PolicyPacked Policy = "Packed"
)
