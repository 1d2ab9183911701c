// Command module writes a Go module as a module proxy serves it: OUT/MODULE/@v/ with list, VERSION.info, VERSION.mod
// and VERSION.zip.
//
//	module DIRECTORY VERSION TIME OUT
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/mod/modfile"
	"golang.org/x/mod/module"
	"golang.org/x/mod/zip"
)

func main() {
	if len(os.Args) != 5 {
		fmt.Fprintln(os.Stderr, "usage: module DIRECTORY VERSION TIME OUT: TIME is seconds since 1970")
		os.Exit(2)
	}
	if err := write(os.Args[1], os.Args[2], os.Args[3], os.Args[4]); err != nil {
		fmt.Fprintln(os.Stderr, "module:", err)
		os.Exit(1)
	}
}

func write(directory, version, seconds, out string) error {
	mod, err := os.ReadFile(filepath.Join(directory, "go.mod"))
	if err != nil {
		return err
	}
	is := module.Version{Path: modfile.ModulePath(mod), Version: version}
	if err := module.Check(is.Path, is.Version); err != nil {
		return err
	}
	escaped, err := module.EscapePath(is.Path)
	if err != nil {
		return err
	}
	created, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		return err
	}
	info, err := json.Marshal(map[string]any{"Version": version, "Time": time.Unix(created, 0).UTC()})
	if err != nil {
		return err
	}
	to := filepath.Join(out, escaped, "@v")
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	archive, err := os.Create(filepath.Join(to, version+".zip"))
	if err != nil {
		return err
	}
	fmt.Println(archive.Name())
	return errors.Join(
		zip.CreateFromDir(archive, is, directory), // omits examples, a module of its own
		archive.Close(),
		os.WriteFile(filepath.Join(to, version+".mod"), mod, 0o644),
		os.WriteFile(filepath.Join(to, version+".info"), info, 0o644),
		os.WriteFile(filepath.Join(to, "list"), []byte(version+"\n"), 0o644),
	)
}
