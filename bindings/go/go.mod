module github.com/pelton-ipc/pelton/bindings/go

go 1.26.0

require (
	github.com/klauspost/compress v1.20.4
	golang.org/x/sys v0.49.0
)
