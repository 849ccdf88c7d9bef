package hook

import (
	"fmt"
	"strings"
)

// createSymlinks creates links in the container, and replaces existing files.
var createSymlinks = Hook{
	Name:  "create-symlinks",
	Short: "create symbolic links",
	Flags: map[string]string{"link": "a link, as TARGET::LINK; the target may be relative to the link"},
	Run: func(c *Container, flags map[string][]string) error {
		for _, link := range flags["link"] {
			target, name, ok := strings.Cut(link, "::")
			if !ok || target == "" || name == "" || strings.Contains(name, "::") {
				return fmt.Errorf("link %q: not of the form TARGET::LINK", link)
			}
			if err := c.Link(target, name); err != nil {
				return fmt.Errorf("link %q: %w", link, err)
			}
		}
		return nil
	},
}
