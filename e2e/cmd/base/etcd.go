//go:build !cgo

package main

import (
	"context"
	"flag"
	"fmt"
	"net/url"
	"os"
	"os/signal"
	"syscall"

	"go.etcd.io/etcd/server/v3/embed"
)

// runEtcd serves one etcd member of a throw-away cluster. The member does not wait for the disk, so
// its data does not survive a crash of the machine.
func runEtcd(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("etcd", flag.ExitOnError)
	dir := flags.String("data-dir", "", "directory for the data")
	client := flags.String("listen-client-url", "http://127.0.0.1:2379", "where clients are served")
	peer := flags.String("listen-peer-url", "http://127.0.0.1:2380", "where peers would be served")
	_ = flags.Parse(args)

	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM, os.Interrupt)
	defer stop()
	return serveEtcd(ctx, *dir, *client, *peer)
}

// serveEtcd serves until ctx ends or the server fails.
func serveEtcd(ctx context.Context, dir, client, peer string) error {
	cfg := embed.NewConfig()
	cfg.Dir = dir
	cfg.UnsafeNoFsync = true
	cfg.LogLevel = "warn"
	clientURL, err := url.Parse(client)
	if err != nil {
		return fmt.Errorf("client URL: %w", err)
	}
	peerURL, err := url.Parse(peer)
	if err != nil {
		return fmt.Errorf("peer URL: %w", err)
	}
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{*clientURL}, []url.URL{*clientURL}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{*peerURL}, []url.URL{*peerURL}
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)

	server, err := embed.StartEtcd(cfg)
	if err != nil {
		return err
	}
	defer server.Close()
	select {
	case err := <-server.Err():
		return err
	case <-ctx.Done():
		return nil
	}
}
