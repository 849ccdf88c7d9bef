package kubelettest

import (
	"context"
	"net"
	"testing"
)

// Odds is the behaviour of a process at the kubelet's socket that is not a kubelet.
type Odds string

// The behaviours.
const (
	Gone    Odds = "gone"     // has left its socket
	Garbage Odds = "garbage"  // sends data that is not gRPC
	HangsUp Odds = "hangs up" // closes each connection
	Silent  Odds = "silent"   // accepts connections and sends nothing
)

// ServeOdd runs a process at a socket that is not a kubelet, until the test ends or stop is called.
// The file of the socket remains.
func ServeOdd(t *testing.T, socket string, does Odds) (stop func()) {
	t.Helper()
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	listener.SetUnlinkOnClose(false)
	ctx, cancel := context.WithCancel(t.Context())
	stop = func() {
		listener.Close()
		cancel()
	}
	t.Cleanup(stop)
	if does == Gone {
		stop()
	}
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			switch does {
			case Silent:
				context.AfterFunc(ctx, func() { conn.Close() })
			case Garbage:
				_, _ = conn.Write([]byte("HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n\x00\xff\x17")) // the connection may be closed
				fallthrough
			default:
				conn.Close()
			}
		}
	}()
	return stop
}
