package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/e2e/cluster"
)

// comparedDevices is the number of devices of both drivers in comparisons.
const comparedDevices = 64

// settled is the idle time before an agent's memory is read.
const settled = 5 * time.Second

// measureMemory measures the resident memory after devices are published, and after 100 claims.
func (b *bench) measureMemory(ctx context.Context) error {
	if err := b.simulate(comparedDevices, 0); err != nil {
		return err
	}
	agents := []*agent{b.chandlerAgent("Chandler", comparedDevices), b.exampleAgent("example driver", comparedDevices, liftedLimit...)}
	claims, err := b.claimsOf(ctx, agents, "memory", comparedDevices, 1)
	if err != nil {
		return err
	}
	published, used := make(map[*agent][]cluster.Usage), make(map[*agent][]cluster.Usage)
	for range b.rounds {
		for _, a := range agents {
			before, after, err := b.memoryOf(ctx, a, claims[a])
			if err != nil {
				return err
			}
			published[a], used[a] = append(published[a], before), append(used[a], after)
		}
	}
	var rows [][]string
	for _, a := range agents {
		rows = append(rows, []string{a.name, megabytes(published[a]), megabytes(used[a])})
	}
	b.table(fmt.Sprintf("Resident memory with %d devices, in MB, lowest to highest (of it without pages of files):", comparedDevices), []string{"", "published", "after 100 claims"}, rows)
	return b.done(ctx, agents, claims)
}

// A server with serverGPUs GPUs and serverFunctions virtual functions, in a cluster with foreignClaims
// claims that are not of its pods.
const (
	serverGPUs      = 8
	serverFunctions = 128
	foreignClaims   = 2000

	joinedFunctions = "pci-ffff-01-00-0-vfs-iavf" // the one device of all virtual functions
)

// measureServer measures the resident memory on a server with GPUs and virtual functions: with the
// functions as one device, beside many claims, and with a device for each function.
func (b *bench) measureServer(ctx context.Context) error {
	if err := b.simulate(serverGPUs, serverFunctions); err != nil {
		return err
	}
	const apart = "/var/lib/apart.yaml"
	config := "apiVersion: " + v1alpha1.APIVersion + "\nkind: DriverConfig\nattributes: [vfIndex]\n"
	if err := os.WriteFile(b.cluster.NodePath(apart), []byte(config), 0o644); err != nil {
		return err
	}
	joined := b.chandlerAgent("as one device", serverGPUs+1)
	crowded := b.chandlerAgent(fmt.Sprintf("as one device, beside %d claims", foreignClaims), serverGPUs+1)
	each := b.chandlerAgent("as a device for each", serverGPUs+serverFunctions, "--config="+apart)
	var rows [][]string
	var foreign []*drapb.Claim
	for _, a := range []*agent{joined, crowded, each} {
		if a == crowded {
			var err error
			if foreign, err = b.newClaims(ctx, a, "foreign", 0, foreignClaims, 1); err != nil {
				return err
			}
		}
		claims, err := b.newClaims(ctx, a, "server", 0, serverGPUs, 1)
		if err != nil {
			return err
		}
		var published, used []cluster.Usage
		for range b.rounds {
			before, after, err := b.memoryOf(ctx, a, claims)
			if err != nil {
				return err
			}
			published, used = append(published, before), append(used, after)
		}
		rows = append(rows, []string{a.name, megabytes(published), megabytes(used)})
		if err := b.deleteClaims(ctx, claims); err != nil {
			return err
		}
	}
	b.table(fmt.Sprintf("Resident memory with %d GPUs and %d virtual functions, in MB, lowest to highest (of it without pages of files):", serverGPUs, serverFunctions), []string{"virtual functions", "published", "after 100 claims"}, rows)
	return b.deleteClaims(ctx, foreign)
}

// memoryOf starts an agent and returns its resident memory after the start and after 100 claims.
func (b *bench) memoryOf(ctx context.Context, a *agent, claims []*drapb.Claim) (before, after cluster.Usage, err error) {
	r, err := b.start(ctx, a)
	if err != nil {
		return before, after, err
	}
	defer func() { err = errors.Join(err, r.stop(), b.forget(ctx, a)) }()
	time.Sleep(settled)
	if before, err = cluster.UsageOf(r.cmd); err != nil {
		return before, after, err
	}
	var ignored measurement
	for i := range 100 {
		if err := ignored.once(ctx, &load{claims: 1, calls: 1}, r, claims[i%len(claims):]); err != nil {
			return before, after, err
		}
	}
	time.Sleep(settled)
	after, err = cluster.UsageOf(r.cmd)
	return before, after, err
}

// megabytes formats the lowest and the highest sample of all memory, and of the memory that no file
// backs.
func megabytes(samples []cluster.Usage) string {
	var all, anon []float64
	for _, sample := range samples {
		all, anon = append(all, float64(sample.Memory)/1e6), append(anon, float64(sample.Anonymous)/1e6)
	}
	return fmt.Sprintf("%.1f to %.1f (%.1f to %.1f)", slices.Min(all), slices.Max(all), slices.Min(anon), slices.Max(anon))
}

// claimsOf creates a set of claims for each agent. Agents of the same driver share a set.
func (b *bench) claimsOf(ctx context.Context, agents []*agent, set string, n, devices int) (map[*agent][]*drapb.Claim, error) {
	claims := make(map[*agent][]*drapb.Claim)
	of := make(map[string][]*drapb.Claim)
	for _, a := range agents {
		if of[a.driver] == nil {
			made, err := b.newClaims(ctx, a, set, 0, n, devices)
			if err != nil {
				return nil, err
			}
			of[a.driver] = made
		}
		claims[a] = of[a.driver]
	}
	return claims, nil
}

// done deletes the claims of the agents.
func (b *bench) done(ctx context.Context, agents []*agent, claims map[*agent][]*drapb.Claim) error {
	deleted := make(map[string]bool)
	for _, a := range agents {
		if deleted[a.driver] {
			continue
		}
		deleted[a.driver] = true
		if err := b.deleteClaims(ctx, claims[a]); err != nil {
			return err
		}
	}
	return nil
}
