// Command screenshot writes the picture of the web UI for the README.
package main

import (
	"context"
	"flag"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"time"

	"github.com/chromedp/chromedp"

	example "chandler.dev/e2e/page"
	"chandler.dev/internal/inventory"
	"chandler.dev/internal/web"
)

func main() {
	out := flag.String("out", "page.png", "`file` to write")
	width := flag.Int64("width", 1280, "of the window")
	height := flag.Int64("height", 800, "of the window")
	at := flag.String("at", "", "`device` whose panel is open")
	flag.Parse()
	if err := run(*out, *width, *height, *at); err != nil {
		log.Fatal(err)
	}
}

func run(out string, width, height int64, at string) error {
	facts, err := example.Example()
	if err != nil {
		return err
	}
	inv := inventory.Make(facts)
	var handler http.Handler = (&web.Server{Read: func() *inventory.Inventory { return inv }}).Handler()
	server := httptest.NewServer(handler)
	defer server.Close()
	ctx, end, err := example.Browser(context.Background())
	if err != nil {
		return err
	}
	defer end()
	var picture []byte
	url := server.URL
	if at != "" {
		url += "/#" + at
	}
	if err := chromedp.Run(ctx, chromedp.EmulateViewport(width, height, chromedp.EmulateScale(1.5)), chromedp.Navigate(url), chromedp.Sleep(500*time.Millisecond), chromedp.CaptureScreenshot(&picture)); err != nil {
		return err
	}
	return os.WriteFile(out, picture, 0o644) //nolint:gosec // The picture is public.
}
