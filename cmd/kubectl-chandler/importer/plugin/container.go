package plugin

import (
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"

	"chandler.dev/cmd/kubectl-chandler/importer/source"
)

// A Container is a container that may run a plugin.
type Container struct {
	source.Value
	Image string
	Args  []source.Value          // including the command
	Env   map[string]source.Value // the environment variables with a literal value

	References map[string]source.Value // the sources of variables without a literal value (valueFrom), by variable
	Sources    []source.Value          // the sources of several variables (envFrom)
}

// HasName reports whether the image, the command or the container name contains one of the names.
func (c Container) HasName(names ...string) bool {
	where := []string{imageName(c.Image), c.At("name").Text()}
	for _, arg := range c.Args {
		where = append(where, path.Base(arg.Text()))
		if strings.HasPrefix(arg.Text(), "-") {
			where = where[:len(where)-1]
		}
	}
	for _, name := range names {
		if slices.ContainsFunc(where, func(text string) bool { return strings.Contains(strings.ToLower(text), name) }) {
			return true
		}
	}
	return false
}

// imageName returns an image without its version.
func imageName(image string) string {
	image, _, _ = strings.Cut(image, "@")
	if slash := strings.LastIndex(image, "/"); strings.LastIndex(image, ":") > slash {
		image = image[:strings.LastIndex(image, ":")]
	}
	return image
}

// ImageVersion returns the version of an image, "" if it has none.
func ImageVersion(image string) string {
	image, _, _ = strings.Cut(image, "@")
	if slash, colon := strings.LastIndex(image, "/"), strings.LastIndex(image, ":"); colon > slash {
		return image[colon+1:]
	}
	return ""
}

// HasFlag reports whether one of the flags is among the arguments.
func (c Container) HasFlag(names ...string) bool {
	return slices.ContainsFunc(c.Args, func(arg source.Value) bool {
		bare := strings.TrimLeft(arg.Text(), "-")
		name, _, _ := strings.Cut(bare, "=")
		return bare != arg.Text() && slices.Contains(names, name)
	})
}

// ContainerOf reads a container of a pod, or the part of a chart's values with the same fields.
func ContainerOf(v source.Value) Container {
	c := Container{Value: v, Image: imageOf(v.At("image")), Env: make(map[string]source.Value), References: make(map[string]source.Value), Sources: v.At("envFrom").ListItems()}
	for _, field := range []string{"command", source.ArgsField} {
		for _, arg := range v.At(field).ListItems() {
			if arg.IsText() {
				c.Args = append(c.Args, arg)
			}
		}
	}
	c.Args = splitShell(c.Args)
	c.SetEnv(v.At(source.EnvField))
	return c
}

// script matches the shell flag after which the script follows.
var script = regexp.MustCompile(`^-[a-z]*c$`)

// splitShell splits the script of a shell command such as sh -c into its words. Other arguments are
// returned unchanged.
func splitShell(args []source.Value) []source.Value {
	if len(args) == 0 || !slices.Contains([]string{"sh", "ash", "bash", "dash"}, path.Base(args[0].Text())) {
		return args
	}
	i := slices.IndexFunc(args, func(arg source.Value) bool { return script.MatchString(arg.Text()) }) + 1
	if i > 0 && i < len(args) && args[i].Text() == "--" {
		i++
	}
	if i == 0 || i == len(args) {
		return args
	}
	var out []source.Value
	for _, word := range source.SplitWords(args[i].Node.Value, 1) {
		word.Value, word.Line = strings.TrimRight(word.Value, ";"), args[i].Node.Line
		arg := args[i]
		arg.Node = word
		out = append(out, arg)
	}
	return out
}

// imageOf returns an image, which charts split into repository and tag.
func imageOf(v source.Value) string {
	if !v.IsMap() {
		return v.Text()
	}
	image := v.At("repository").Text()
	if tag := v.At("tag").Text(); tag != "" {
		image += ":" + tag
	}
	return image
}

// SetEnv reads environment variables from a container's list or from a map.
func (c Container) SetEnv(env source.Value) {
	maps.Insert(c.Env, env.Fields())
	if env.IsList() {
		for _, variable := range env.ListItems() {
			name := variable.At("name").Text()
			if v := variable.At("value"); v.IsPresent() {
				v.Path = "env " + name
				c.Env[name] = v
			}
			if from := variable.At("valueFrom"); from.IsMap() && c.References != nil {
				from.Path = "env " + name
				c.References[name] = from
			}
		}
	}
}

// resolveVariables sets the variables of a container whose values are in ConfigMaps among the files.
// As in the kubelet, a variable of env replaces a variable of envFrom, and a later source an earlier
// one. It returns the variables whose values are unknown.
func (im *Import) resolveVariables(c Container) (unknown map[string]source.Value) {
	unknown = make(map[string]source.Value)
	found := make(map[string]source.Value)
	for _, object := range c.Sources {
		name := object.At("configMapRef", "name").Text()
		data, ok := im.ConfigMaps[name]
		if name == "" || !ok || !data.IsMap() {
			im.Notes.AddPodChange(object, "sets environment variables from an object that is not in the files; import the ConfigMap too, or write the variables of a Secret as values")
			continue
		}
		for key, field := range data.Fields() {
			found[object.At("prefix").Text()+key] = field
		}
	}
	for name, from := range c.References {
		ref := from.At("configMapKeyRef")
		v := im.ConfigMaps[ref.At("name").Text()].At(ref.At("key").Text())
		if delete(found, name); v.IsText() {
			found[name] = v
			continue
		}
		unknown[name] = from
	}
	for name, v := range found {
		if _, ok := c.Env[name]; !ok {
			c.Env[name] = v
		}
	}
	return unknown
}
