module conformance

go 1.26.0

require github.com/pelton-ipc/pelton/bindings/go v0.0.0

require (
	github.com/klauspost/compress v1.20.4 // indirect
	golang.org/x/sys v0.49.0 // indirect
)

replace github.com/pelton-ipc/pelton/bindings/go => ../../bindings/go
