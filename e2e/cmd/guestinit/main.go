// Command guestinit is the first process of a test guest. See package guest.
package main

import (
	"log"
	"os"

	"golang.org/x/sys/unix"

	"chandler.dev/e2e/guest/inside"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("guestinit: ")
	if len(os.Args) > 1 && os.Args[1] == "serve" {
		log.Fatal(inside.Serve())
	}
	log.Print(inside.Init())
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF); err != nil {
		log.Fatal(err)
	}
}
