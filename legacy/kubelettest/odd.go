package kubelettest

import (
	"context"
	"net"
	"testing"
)

// Odds is what something at a socket does that is no kubelet.
type Odds string

// Each says what such a kubelet does.
const (
	Gone    Odds = "gone"     // it left its socket
	Garbage Odds = "garbage"  // it says what is no gRPC
	HangsUp Odds = "hangs up" // it closes each connection
	Silent  Odds = "silent"   // it takes connections and says nothing
)

// Odd has something at a socket that is no kubelet, until the test ends or it is told
// to stop. Its socket stays.
func Odd(t *testing.T, socket string, does Odds) (stop func()) {
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
				_, _ = conn.Write([]byte("HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n\x00\xff\x17")) // it may be gone
				fallthrough
			default:
				conn.Close()
			}
		}
	}()
	return stop
}
