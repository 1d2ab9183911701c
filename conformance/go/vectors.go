package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
)

// replay runs the module's own tests of the vectors, which build compiles, with this directory. It returns the number
// of files: each must have been read by a test.
func replay(directory string) (int, error) {
	directory, err := filepath.Abs(directory)
	if err != nil {
		return 0, err
	}
	files, err := filepath.Glob(filepath.Join(directory, "*.json"))
	if err != nil || len(files) == 0 {
		return 0, errors.Join(err, fmt.Errorf("found no .json file in %s", directory))
	}
	own, err := os.Executable()
	if err != nil {
		return 0, err
	}
	tests, err := filepath.Glob(filepath.Join(filepath.Dir(own), "vectors", "*.test"))
	if err != nil || len(tests) == 0 {
		return 0, errors.Join(err,
			fmt.Errorf("found no test program in the directory vectors beside %s: build creates them", own))
	}
	read := map[string]bool{}
	for _, test := range tests {
		command := exec.Command(test, "-test.v", "-test.run", "TheVectorsSay")
		command.Dir = os.TempDir()
		command.Env = append(os.Environ(), "PELTON_VECTORS="+directory)
		output, err := command.CombinedOutput()
		if err != nil {
			return 0, fmt.Errorf("%s: %w\n%s", test, err, output)
		}
		for _, found := range regexp.MustCompile(`(?m)^\s*\S+: vectors of (\S+)$`).FindAllSubmatch(output, -1) {
			read[string(found[1])] = true
		}
	}
	for _, file := range files {
		if !read[filepath.Base(file)] {
			return 0, fmt.Errorf("no test reads %s", file)
		}
	}
	return len(files), nil
}
