package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"chandler.dev/cmd/chandler/settings"
	"chandler.dev/discovery"
)

// asAgent is the environment variable of a process that changes a partition as an agent without a
// host service, with the kubelet's directory.
const asAgent = "CHANDLER_TEST_AGENT"

// changePartition acquires the lock of the node and then changes a partition by the agent's program.
func changePartition(kubeletRoot string) error {
	o := runOptions{nodeName: "node", kubeletRoot: kubeletRoot, hostRoot: "/", cdiRoot: filepath.Join(kubeletRoot, "cdi")}
	labels := make(chan map[string]string, 1)
	labels <- map[string]string{}
	config, err := o.agentConfig(context.Background(), &settings.File{NewLabels: labels}, clients{})
	if err != nil {
		return err
	}
	release, err := config.Lock.Acquire(context.Background())
	if err != nil {
		return err
	}
	defer release()
	_, err = config.Programs["nvidia"](context.Background(), discovery.PartitionChange{Function: "0000:01:00.0", Place: "1g.10gb@4"})
	return err
}

// An agent without a host service is killed while its program changes a partition and hangs in the
// kernel. The next agent waits for the node's lock until the program has ended. Another process in
// place of the program does the work, which no signal to the program ends.
func TestProgramKeepsTheLock(t *testing.T) {
	dir := t.TempDir()
	pipe := func(name string) *os.File {
		name = filepath.Join(dir, name)
		if err := syscall.Mkfifo(name, 0o600); err != nil {
			t.Fatal(err)
		}
		file, err := os.OpenFile(name, os.O_RDWR|syscall.O_NONBLOCK, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { file.Close() }) // ends the program
		return file
	}
	started, end := pipe("started"), pipe("end")
	program := fmt.Sprintf("#!/bin/sh\n(echo > %[1]s/started; read -r line < %[1]s/end) & wait\n", dir)
	if err := os.WriteFile(filepath.Join(dir, "chandler-host"), []byte(program), 0o755); err != nil {
		t.Fatal(err)
	}
	agent := exec.Command(os.Args[0])
	agent.Env = append(os.Environ(), asAgent+"="+dir, "PATH="+dir+":"+os.Getenv("PATH"))
	var out bytes.Buffer
	agent.Stdout, agent.Stderr = &out, &out
	if err := agent.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- agent.Wait(); started.Close() }()
	if _, err := bufio.NewReader(started).ReadString('\n'); err != nil {
		t.Fatalf("the program has not started: %v, %s", err, out.String())
	}
	if err := agent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-ended
	next := &nodeLock{stateDir: filepath.Join(dir, "plugins", discovery.Domain)}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := next.Acquire(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("the next agent starts beside the program: %v", err)
	}
	if _, err := end.WriteString("\n"); err != nil {
		t.Fatal(err)
	}
	release, err := next.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	release()
}
