// Command guestkubelet runs in guests. It stands in for a kubelet and an API server, and prints the
// devices that an agent publishes, with the time in microseconds. It also makes claims and
// allocations at the agent:
//
//	guestkubelet serve /run/kubeconfig
//	guestkubelet prepare CLAIM | unprepare CLAIM | allocate RESOURCE ID | end ID
//
// A claim's name begins with the name of the claim's device. See package standin. For each
// allocated device, a pod runs that is named after the ID of the device. Command end ends the pod.
package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"chandler.dev/e2e/standin"
)

// Paths and addresses of the stand-in kubelet and API server.
const (
	root     = "/var/lib/kubelet"
	server   = "127.0.0.1:6443"
	commands = "127.0.0.1:6444"
)

func main() {
	log.SetFlags(0)
	var err error
	switch args := os.Args[1:]; {
	case len(args) == 2 && args[0] == "serve":
		err = serve(args[1])
	case len(args) >= 2:
		err = ask(args[0], args[1:])
	default:
		log.Fatal("usage: guestkubelet serve KUBECONFIG | prepare CLAIM | unprepare CLAIM | allocate RESOURCE ID | end ID")
	}
	if err != nil {
		log.Fatal(err)
	}
}

// ask sends a command to the process that serves.
func ask(command string, args []string) error {
	response, err := http.PostForm("http://"+commands+"/"+command, url.Values{"arg": args})
	if err != nil {
		return err
	}
	defer response.Body.Close()
	said, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s", strings.TrimSpace(string(said)))
	}
	return err
}

func serve(kubeconfig string) error {
	var kubelet standin.Kubelet
	kubelet.Listed = func(resource string, devices []*pluginapi.Device) { say("list "+resource, listed(devices)) }
	if err := kubelet.Serve(root); err != nil {
		return err
	}
	var api standin.API
	var published sync.Mutex
	api.Published = func() {
		published.Lock()
		defer published.Unlock()
		say("slices", offered(api.Slices()))
	}
	config, err := api.Serve(server)
	if err != nil {
		return err
	}
	if err := os.WriteFile(kubeconfig, []byte(config), 0o600); err != nil {
		return err
	}
	mux := http.NewServeMux()
	on := func(command string, do func(ctx context.Context, args []string) error) {
		mux.HandleFunc("POST /"+command, func(w http.ResponseWriter, r *http.Request) {
			_ = r.ParseForm()
			if err := do(r.Context(), r.Form["arg"]); err != nil {
				http.Error(w, err.Error(), http.StatusConflict)
			}
		})
	}
	on("prepare", func(ctx context.Context, args []string) error {
		driver, err := kubelet.Register(ctx)
		if err != nil {
			return err
		}
		return standin.Prepare(ctx, driver, args[0])
	})
	on("unprepare", func(ctx context.Context, args []string) error {
		driver, err := kubelet.Register(ctx)
		if err != nil {
			return err
		}
		return standin.Unprepare(ctx, driver, args[0])
	})
	on("allocate", func(ctx context.Context, args []string) error {
		if err := kubelet.Allocate(ctx, args[0], args[1:]...); err != nil {
			return err
		}
		kubelet.RunPod(args[1], args[0], args[1:]...)
		return nil
	})
	on("end", func(_ context.Context, args []string) error {
		kubelet.EndPod(args[0])
		return nil
	})
	fmt.Println("serving")
	return http.ListenAndServe(commands, mux) //nolint:gosec // runs until the guest ends
}

// say prints the published devices, each as NAME=STATE.
func say(what string, devices []string) {
	slices.Sort(devices)
	fmt.Printf("%s %d %s\n", what, time.Now().UnixMicro(), strings.Join(devices, " "))
}

func listed(devices []*pluginapi.Device) (all []string) {
	for _, d := range devices {
		all = append(all, d.GetID()+"="+d.GetHealth())
	}
	return all
}

// offered returns the devices of slices, each with the keys of its taints.
func offered(published []resourceapi.ResourceSlice) (all []string) {
	for _, slice := range published {
		for _, d := range slice.Spec.Devices {
			var keys []string
			for _, taint := range d.Taints {
				keys = append(keys, strings.TrimPrefix(taint.Key, "chandler.dev/"))
			}
			slices.Sort(keys)
			all = append(all, d.Name+"="+cmp.Or(strings.Join(keys, ","), "Healthy"))
		}
	}
	return all
}
