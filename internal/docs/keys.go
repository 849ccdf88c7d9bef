package docs

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
)

// Keys returns a reference of all keys of a kind in the Go package at dir, as Markdown: a
// table for the kind and for each type of its fields, generated from the types' comments.
func Keys(dir, kind string) (string, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return "", err
	}
	r := &reference{types: make(map[string]*declared), told: make(map[string]bool)}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		if err != nil {
			return "", err
		}
		r.read(file)
	}
	err = r.tell(kind)
	return r.out.String(), err
}

// reference writes the tables of types, each once.
type reference struct {
	types map[string]*declared
	told  map[string]bool
	out   strings.Builder
}

// declared is a type of the package, with the values of its constants.
type declared struct {
	doc    string
	spec   ast.Expr
	values []value
}

type value struct{ text, doc string }

// key is a row of a table. Fields with a common comment share a row.
type key struct {
	names []string
	goes  map[string]string // keys by Go name, for references in comments
	types []ast.Expr
	doc   string
}

func (r *reference) read(file *ast.File) {
	for _, d := range file.Decls {
		decl, ok := d.(*ast.GenDecl)
		if !ok {
			continue
		}
		for _, spec := range decl.Specs {
			switch spec := spec.(type) {
			case *ast.TypeSpec:
				entry := r.declared(spec.Name.Name)
				entry.spec, entry.doc = spec.Type, decl.Doc.Text()
			case *ast.ValueSpec:
				if named, ok := spec.Type.(*ast.Ident); ok && decl.Tok == token.CONST {
					text := strings.Trim(spec.Values[0].(*ast.BasicLit).Value, `"`)
					doc := strings.TrimPrefix(spec.Doc.Text(), spec.Names[0].Name+" ") + spec.Comment.Text()
					entry := r.declared(named.Name)
					entry.values = append(entry.values, value{text, doc})
				}
			}
		}
	}
}

func (r *reference) declared(name string) *declared {
	if r.types[name] == nil {
		r.types[name] = new(declared)
	}
	return r.types[name]
}

// tell writes the table of a struct, followed by those of the structs in its fields.
func (r *reference) tell(name string) error {
	if r.told[name] {
		return nil
	}
	r.told[name] = true
	entry := r.types[name]
	if entry == nil {
		return fmt.Errorf("there is no type %s", name)
	}
	keys, err := r.keys(entry)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	goes := make(map[string]string)
	for _, k := range keys {
		maps.Copy(goes, k.goes)
	}
	delete(goes, name) // the first word of the type's own comment
	fmt.Fprintf(&r.out, "\n### %s\n\n%s\n\n| key | type | |\n|---|---|---|\n", name, oneLine(entry.doc, goes))
	for _, k := range keys {
		fmt.Fprintf(&r.out, "| `%s` | %s | %s |\n", strings.Join(k.names, "`, `"), r.typeNames(k.types), oneLine(k.doc, k.goes, goes))
	}
	for _, k := range keys {
		for _, t := range k.types {
			if err := r.tellType(nameOf(t)); err != nil {
				return err
			}
		}
	}
	return nil
}

// tellType writes the table of a type: its keys, or its values if any of them has a comment.
func (r *reference) tellType(name string) error {
	entry := r.types[name]
	switch {
	case entry == nil || r.told[name]:
		return nil
	case entry.values == nil:
		return r.tell(name)
	}
	r.told[name] = true
	if !slices.ContainsFunc(entry.values, func(v value) bool { return v.doc != "" }) {
		return nil
	}
	fmt.Fprintf(&r.out, "\n### %s\n\n%s\n\n| value | |\n|---|---|\n", name, oneLine(entry.doc))
	for _, v := range entry.values {
		fmt.Fprintf(&r.out, "| `%s` | %s |\n", v.text, oneLine(v.doc))
	}
	return nil
}

// keys returns the keys of a struct, including those of embedded structs.
func (r *reference) keys(of *declared) ([]key, error) {
	fields, ok := of.spec.(*ast.StructType)
	if !ok {
		return nil, fmt.Errorf("is no struct")
	}
	var keys []key
	for _, field := range fields.Fields.List {
		name := ""
		if field.Tag != nil {
			name, _, _ = strings.Cut(reflect.StructTag(strings.Trim(field.Tag.Value, "`")).Get("json"), ",")
		}
		if len(field.Names) == 0 {
			embedded, local := field.Type.(*ast.Ident)
			if !local {
				continue // apiVersion and kind
			}
			inner, err := r.keys(r.types[embedded.Name])
			if err != nil {
				return nil, err
			}
			for _, k := range inner {
				if r.told[embedded.Name] {
					k.doc = fmt.Sprintf("as in [%s](#%s)", embedded.Name, strings.ToLower(embedded.Name))
				}
				keys = append(keys, k)
			}
			continue
		}
		if !field.Names[0].IsExported() || name == "" || name == "-" {
			continue
		}
		doc := field.Doc.Text() + field.Comment.Text()
		inGo := field.Names[0].Name
		if last := len(keys) - 1; doc == "" && last >= 0 {
			keys[last].names = append(keys[last].names, name)
			keys[last].goes[inGo] = name
			keys[last].types = append(keys[last].types, field.Type)
			continue
		}
		keys = append(keys, key{names: []string{name}, goes: map[string]string{inGo: name}, types: []ast.Expr{field.Type}, doc: doc})
	}
	return keys, nil
}

func (r *reference) typeNames(types []ast.Expr) string {
	var names []string
	for _, t := range types {
		names = append(names, r.typeName(t))
	}
	return strings.Join(slices.Compact(names), "; ")
}

// typeName returns the form of a type in YAML.
func (r *reference) typeName(t ast.Expr) string {
	switch t := t.(type) {
	case *ast.StarExpr:
		return r.typeName(t.X)
	case *ast.ArrayType:
		return "list of " + r.typeName(t.Elt)
	case *ast.MapType:
		return "map to " + r.typeName(t.Value)
	case *ast.SelectorExpr:
		if t.Sel.Name == "Quantity" {
			return "quantity"
		}
		return t.Sel.Name
	case *ast.Ident:
		entry := r.types[t.Name]
		switch {
		case entry == nil:
			return t.Name
		case entry.values != nil:
			var texts []string
			for _, v := range entry.values {
				texts = append(texts, "`"+v.text+"`")
			}
			return strings.Join(texts, ", ")
		}
		return fmt.Sprintf("[%s](#%s)", t.Name, strings.ToLower(t.Name))
	}
	return ""
}

// nameOf returns the name of a type without pointers, lists and maps.
func nameOf(t ast.Expr) string {
	switch t := t.(type) {
	case *ast.StarExpr:
		return nameOf(t.X)
	case *ast.ArrayType:
		return nameOf(t.Elt)
	case *ast.MapType:
		return nameOf(t.Value)
	case *ast.Ident:
		return t.Name
	}
	return ""
}

var (
	word   = regexp.MustCompile(`\b[A-Z][A-Za-z]+\b`)
	docRef = regexp.MustCompile(`\[([A-Z][A-Za-z]+)\]([^(]|$)`)
)

// oneLine returns a comment as one line of a table. Go names of fields are replaced by keys,
// and indented lines, which are examples, become code.
func oneLine(comment string, names ...map[string]string) string {
	var parts []string
	for line := range strings.Lines(comment) {
		line = strings.TrimRight(line, "\n")
		if example, ok := strings.CutPrefix(line, "\t"); ok {
			parts = append(parts, "`"+example+"`")
			continue
		}
		line = docRef.ReplaceAllString(line, "$1$2")
		parts = append(parts, word.ReplaceAllStringFunc(line, func(w string) string {
			for i, known := range names {
				// An upper-case match of another field is more likely the word itself, such as USB.
				if name, ok := known[w]; ok && (i < len(names)-1 || w != strings.ToUpper(w)) {
					return "`" + name + "`"
				}
			}
			return w
		}))
	}
	text := strings.Join(strings.Fields(strings.Join(parts, " ")), " ")
	return strings.NewReplacer("|", `\|`, "<", "&lt;").Replace(text)
}
