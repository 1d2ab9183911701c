// Package vectors reads the test vectors of spec/vectors, for tests.
package vectors

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// Variable is the environment variable that names the directory of the vectors, for a test binary that runs elsewhere
// than in its package's directory.
const Variable = "PELTON_VECTORS"

// Read decodes a file of the vectors, or skips the test where there are none.
func Read(t testing.TB, file string, into any) {
	t.Helper()
	if err := json.Unmarshal(read(t, file), into); err != nil {
		t.Fatal(err)
	}
	// The conformance driver finds this line.
	t.Logf("vectors of %s", file)
}

// Specification returns the text of a file of spec, or skips the test where there is none.
func Specification(t testing.TB, file string) []byte {
	t.Helper()
	return read(t, filepath.Join("..", file))
}

// read returns the text of a file, whose path begins at spec/vectors.
func read(t testing.TB, file string) []byte {
	t.Helper()
	directory, isNamed := os.LookupEnv(Variable)
	for up := ".."; !isNamed; up = filepath.Join(up, "..") {
		directory = filepath.Join(up, "spec/vectors")
		if _, err := os.Stat(directory); err == nil {
			break
		}
		if absolute, err := filepath.Abs(up); err != nil || absolute == "/" {
			// The module in a user's cache is without them.
			t.Skipf("no directory above this one has spec/vectors: name it in the environment variable %s", Variable)
		}
	}
	text, err := os.ReadFile(filepath.Join(directory, file))
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// Number is a JSON number, or a word as text.
type Number uint64

// UnmarshalJSON decodes either.
func (n *Number) UnmarshalJSON(text []byte) error {
	value, err := strconv.ParseUint(strings.Trim(string(text), `"`), 0, 64)
	*n = Number(value)
	return err
}

// Hex is bytes as hexadecimal text.
type Hex []byte

// UnmarshalJSON decodes them.
func (h *Hex) UnmarshalJSON(text []byte) (err error) {
	*h, err = hex.DecodeString(strings.Trim(string(text), `"`))
	return err
}
