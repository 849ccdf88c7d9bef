package drivertest

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"runtime"
)

// BuildLibrary returns a shared library that loaders can open, with the given soname and one
// function, cuInit, which takes a number and returns 0 like the function of CUDA. No compiler is
// needed.
func BuildLibrary(soname string) ([]byte, error) {
	code, ok := map[string]struct {
		machine elf.Machine
		text    []byte
	}{
		"amd64": {elf.EM_X86_64, []byte{0x31, 0xc0, 0xc3}},                                // xor eax, eax; ret
		"arm64": {elf.EM_AARCH64, []byte{0x00, 0x00, 0x80, 0x52, 0xc0, 0x03, 0x5f, 0xd6}}, // mov w0, 0; ret
	}[runtime.GOARCH]
	if !ok {
		return nil, fmt.Errorf("no library for %s", runtime.GOARCH)
	}
	names := "\x00cuInit\x00" + soname + "\x00"
	const function, self = 1, len("\x00cuInit\x00") // offsets in names
	sections := []struct {
		name string
		kind elf.SectionType
		link uint32
		size uint64 // of an entry
		data any
	}{
		{"", elf.SHT_NULL, 0, 0, []byte{}},
		{".dynsym", elf.SHT_DYNSYM, 2, elf.Sym64Size, nil},
		{".dynstr", elf.SHT_STRTAB, 0, 0, []byte(names)},
		// One bucket; its chain contains only symbol 1.
		{".hash", elf.SHT_HASH, 1, 4, []uint32{1, 2, 1, 0, 0}},
		{".text", elf.SHT_PROGBITS, 0, 0, code.text},
		{".dynamic", elf.SHT_DYNAMIC, 2, 16, make([]elf.Dyn64, 7)},
		{".shstrtab", elf.SHT_STRTAB, 0, 0, nil},
	}
	const dynsym, dynstr, hash, text, dynamic, titles = 1, 2, 3, 4, 5, 6
	sections[dynsym].data = make([]elf.Sym64, 2)
	var all string
	var title []uint32
	for _, s := range sections {
		title = append(title, uint32(len(all)))
		all += s.name + "\x00"
	}
	sections[titles].data = []byte(all)

	// The file is mapped at address 0, so file offsets equal addresses.
	const headers = 64 + 3*56
	at := make([]uint64, len(sections))
	end := uint64(headers)
	size := func(i int) uint64 { return uint64(binary.Size(sections[i].data)) }
	for i := range sections {
		end = (end + 15) &^ 15
		at[i] = end
		end += size(i)
	}
	sections[dynsym].data = []elf.Sym64{{}, {
		Name: function, Info: byte(elf.STB_GLOBAL)<<4 | byte(elf.STT_FUNC), Shndx: text, Value: at[text], Size: size(text),
	}}
	sections[dynamic].data = []elf.Dyn64{
		{Tag: int64(elf.DT_SONAME), Val: uint64(self)},
		{Tag: int64(elf.DT_HASH), Val: at[hash]},
		{Tag: int64(elf.DT_SYMTAB), Val: at[dynsym]},
		{Tag: int64(elf.DT_STRTAB), Val: at[dynstr]},
		{Tag: int64(elf.DT_STRSZ), Val: size(dynstr)},
		{Tag: int64(elf.DT_SYMENT), Val: elf.Sym64Size},
		{Tag: int64(elf.DT_NULL)},
	}
	file := &bytes.Buffer{}
	write := func(data any) { _ = binary.Write(file, binary.LittleEndian, data) } // a buffer accepts every write
	table := (end + 15) &^ 15
	write(elf.Header64{
		Ident: [16]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)},
		Type:  uint16(elf.ET_DYN), Machine: uint16(code.machine), Version: uint32(elf.EV_CURRENT),
		Phoff: 64, Shoff: table, Ehsize: 64, Phentsize: 56, Phnum: 3, Shentsize: 64, Shnum: uint16(len(sections)), Shstrndx: titles,
	})
	write([]elf.Prog64{
		{Type: uint32(elf.PT_LOAD), Flags: uint32(elf.PF_R | elf.PF_X | elf.PF_W), Filesz: end, Memsz: end, Align: 0x10000},
		{Type: uint32(elf.PT_DYNAMIC), Flags: uint32(elf.PF_R | elf.PF_W), Off: at[dynamic], Vaddr: at[dynamic], Paddr: at[dynamic], Filesz: size(dynamic), Memsz: size(dynamic), Align: 8},
		{Type: uint32(elf.PT_GNU_STACK), Flags: uint32(elf.PF_R | elf.PF_W), Align: 16},
	})
	pad := func(to uint64) { file.Write(make([]byte, to-uint64(file.Len()))) }
	for i, s := range sections {
		pad(at[i])
		write(s.data)
	}
	pad(table)
	for i, s := range sections {
		header := elf.Section64{Name: title[i], Type: uint32(s.kind), Off: at[i], Size: size(i), Link: s.link, Addralign: 16, Entsize: s.size}
		if s.kind == elf.SHT_DYNSYM {
			header.Info = 1
		}
		if i != titles && s.kind != elf.SHT_NULL {
			header.Addr, header.Flags = at[i], uint64(elf.SHF_ALLOC)
		}
		write(header)
	}
	return file.Bytes(), nil
}
