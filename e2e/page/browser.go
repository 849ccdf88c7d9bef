package page

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"time"

	"github.com/chromedp/chromedp"
)

// Browser starts a headless Chromium from Debian's package chromium. The function end stops it.
func Browser(ctx context.Context) (browser context.Context, end func(), err error) {
	program, err := exec.LookPath("chromium")
	if err != nil {
		if program, err = install(ctx); err != nil {
			return nil, nil, err
		}
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(program), chromedp.Flag("hide-scrollbars", true))
	if os.Geteuid() == 0 {
		options = append(options, chromedp.NoSandbox) // Chromium refuses to run as root with a sandbox.
	}
	allocator, endAllocator := chromedp.NewExecAllocator(ctx, options...)
	browser, endBrowser := chromedp.NewContext(allocator)
	if err := chromedp.Run(browser); err != nil {
		endBrowser()
		endAllocator()
		return nil, nil, fmt.Errorf("start %s: %w", program, err)
	}
	return browser, func() { endBrowser(); endAllocator() }, nil
}

// install installs Debian's Chromium.
func install(ctx context.Context) (program string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	for _, args := range [][]string{{"update", "-q"}, {"install", "-q", "-y", "--no-install-recommends", "chromium", "fonts-inter", "fonts-jetbrains-mono"}} {
		command := exec.CommandContext(ctx, "apt-get", args...)
		command.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
		if out, err := command.CombinedOutput(); err != nil {
			return "", fmt.Errorf("apt-get %s: %w\n%s", args[0], err, out)
		}
	}
	return exec.LookPath("chromium")
}
