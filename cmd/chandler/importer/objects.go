package importer

import (
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
)

// A container is what runs a plugin.
type container struct {
	value
	image string
	args  []value          // the command too
	env   map[string]value // whose value is written
}

// names reports whether the image, the command or the container has one of the
// names in it.
func (c container) names(names ...string) bool {
	where := []string{imageName(c.image), c.at("name").text()}
	for _, arg := range c.args {
		where = append(where, path.Base(arg.text()))
		if strings.HasPrefix(arg.text(), "-") {
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

// imageName returns the name of an image without registry and version.
func imageName(image string) string {
	image, _, _ = strings.Cut(image, "@")
	if slash := strings.LastIndex(image, "/"); strings.LastIndex(image, ":") > slash {
		image = image[:strings.LastIndex(image, ":")]
	}
	return image
}

// imageVersion returns the version of an image, "" if it has none.
func imageVersion(image string) string {
	image, _, _ = strings.Cut(image, "@")
	if slash, colon := strings.LastIndex(image, "/"), strings.LastIndex(image, ":"); colon > slash {
		return image[colon+1:]
	}
	return ""
}

// hasFlag reports whether one of the arguments is that flag.
func (c container) hasFlag(names ...string) bool {
	return slices.ContainsFunc(c.args, func(arg value) bool {
		bare := strings.TrimLeft(arg.text(), "-")
		name, _, _ := strings.Cut(bare, "=")
		return bare != arg.text() && slices.Contains(names, name)
	})
}

func containerOf(v value) container {
	c := container{value: v, image: imageOf(v.at("image")), env: make(map[string]value)}
	for _, field := range []string{"command", argsField} {
		for _, arg := range v.at(field).items() {
			if arg.isText() {
				c.args = append(c.args, arg)
			}
		}
	}
	c.setEnv(v.at(envField))
	return c
}

// imageOf returns an image, which charts have in parts.
func imageOf(v value) string {
	if !v.isMap() {
		return v.text()
	}
	image := v.at("repository").text()
	if tag := v.at("tag").text(); tag != "" {
		image += ":" + tag
	}
	return image
}

// setEnv reads variables, as of a container or as an object.
func (c container) setEnv(env value) {
	maps.Insert(c.env, env.fields())
	if env.isList() {
		for _, variable := range env.items() {
			if v := variable.at("value"); v.there() {
				v.path = "env " + variable.at("name").text()
				c.env[variable.at("name").text()] = v
			}
		}
	}
}

// document reads a document, and reports whether it is known.
func (im *importer) document(v value) (known bool, err error) {
	kind, version := v.at("kind").text(), v.at("apiVersion").text()
	switch {
	case v.isList():
		return im.list(v)
	case !v.isMap():
		return false, nil
	case strings.HasSuffix(kind, "List") && v.at("items").isList():
		return im.each(v.at("items").items())
	case kind == "ConfigMap" && version == "v1":
		return im.configMap(v)
	}
	if f := im.recognise(v); f != nil {
		im.take(f, v)
		return true, nil
	}
	if wrapped, ok := im.values(v); ok {
		return im.document(wrapped)
	}
	if pod := podOf(v); pod.there() && im.pod(pod) {
		return true, nil
	}
	if found := im.nested(v, 0); len(found) > 0 {
		im.onlyRead(v, found)
		return true, nil
	}
	if kind != "" && version != "" {
		im.unread[v.file] = append(im.unread[v.file], strings.TrimSpace(kind+" "+v.at("metadata", "name").text()))
	}
	return false, nil
}

// each reads documents, and reports whether one of them is known.
func (im *importer) each(documents []value) (known bool, err error) {
	var errs []error
	for _, document := range documents {
		ok, err := im.document(document)
		known, errs = known || ok, append(errs, err)
	}
	return known, errors.Join(errs...)
}

// list reads a list of arguments, of containers or of other documents.
func (im *importer) list(v value) (known bool, err error) {
	if f := im.recognise(v); f != nil {
		im.take(f, v)
		return true, nil
	}
	if slices.ContainsFunc(v.items(), value.isText) {
		return im.runs(container{args: v.items(), env: make(map[string]value)}), nil
	}
	if c, ok := patched(v); ok {
		return im.runs(c), nil
	}
	return im.each(v.items())
}

// configMap reads the files of a ConfigMap.
func (im *importer) configMap(v value) (known bool, err error) {
	of := make(map[*format][]value)
	var unread []value
	var errs []error
	for _, data := range []value{v.at("data"), v.at("stringData")} {
		for _, text := range data.fields() {
			inside, err := embedded(text)
			if err != nil && strings.ContainsAny(text.node.Value, "{:") {
				errs = append(errs, fmt.Errorf("%s: %w", text.path, err))
			}
			f := im.recognise(inside)
			if err != nil || f == nil {
				unread = append(unread, text)
				continue
			}
			of[f] = append(of[f], inside)
		}
	}
	for _, f := range im.formats {
		if len(of[f]) > 0 {
			im.chosen(f, of[f])
			known = true
		}
	}
	for _, text := range unread {
		at := text.as("")
		if known {
			im.say(at, "is no configuration that is known here")
		}
	}
	if binary := v.at("binaryData"); !binary.null() {
		im.say(binary, "is no text")
	}
	if known || im.runs(variablesIn(v.at("data"))) {
		return true, nil
	}
	return false, errors.Join(errs...)
}

// variablesIn returns a container with the variables that a ConfigMap has for it.
func variablesIn(data value) container {
	c := container{env: make(map[string]value)}
	for name, v := range data.fields() {
		if v.isText() && name == strings.ToUpper(name) || strings.HasPrefix(name, "U30") {
			c.env[name] = v
		}
	}
	return c
}

// chosen reads configurations of one format, or the one that counts if each node
// reads another.
func (im *importer) chosen(f *format, configurations []value) {
	objects := slices.ContainsFunc(configurations, func(c value) bool { return c.has("kind") })
	if !f.alternatives || len(configurations) == 1 || objects {
		for _, c := range configurations {
			im.take(f, c)
		}
		return
	}
	i := slices.IndexFunc(configurations, func(c value) bool { return nameOf(c) == im.options.Named })
	if i < 0 {
		i = max(0, slices.IndexFunc(configurations, func(c value) bool {
			return slices.Contains([]string{"default", "config.json", "config.yaml"}, nameOf(c))
		}))
	}
	im.take(f, configurations[i])
	for j, c := range configurations {
		if j != i && c.short() != configurations[i].short() {
			im.otherNode(c, nameOf(c), nameOf(configurations[i]))
		}
	}
}

// nameOf returns the name of the field that a value is.
func nameOf(v value) string {
	if inside, ok := strings.CutSuffix(v.path, "]"); ok {
		return inside[strings.LastIndex(inside, "[")+1:]
	}
	return v.path[strings.LastIndex(v.path, ".")+1:]
}

// otherNode notes a configuration that is for other nodes than the one that is
// imported. A DriverConfig says the same to all nodes.
func (im *importer) otherNode(v value, name, instead string) {
	at := v.as("")
	im.lost(at, "is another configuration for some nodes; %s is imported, and this one with --named=%s", instead, name)
}

// podOf returns what is said of the pods of a workload, nothing if it is none.
func podOf(v value) value {
	for _, at := range [][]string{
		{"spec", "jobTemplate", "spec", "template", "spec"},
		{"spec", "template", "spec"},
		{"template", "spec"},
		{"spec"},
		{},
	} {
		if pod := v.at(at...); pod.at("containers").isList() || pod.at("initContainers").isList() {
			return pod
		}
	}
	if v.hasAny(argsField, "command") || v.at(envField).isList() {
		return v
	}
	return value{}
}

// pod reads the containers of a pod, and reports whether one of them runs a
// plugin.
func (im *importer) pod(v value) (known bool) {
	if !v.hasAny("containers", "initContainers") {
		return im.runs(containerOf(v))
	}
	for _, c := range slices.Concat(v.at("initContainers").items(), v.at("containers").items()) {
		if im.runs(containerOf(c)) {
			known = true
		}
	}
	return known
}

// runs reads a container, and reports whether it runs a plugin.
func (im *importer) runs(c container) bool {
	for _, f := range im.formats {
		if f.runs != nil && f.runs(c) {
			im.found[f.name] = true
			if at := c.at("name"); f.runsAt == nil && at.there() {
				f.runsAt = &at
			} else if f.runsAt == nil {
				at := c.as("")
				f.runsAt = &at
			}
			f.container(c)
			return true
		}
	}
	return false
}
