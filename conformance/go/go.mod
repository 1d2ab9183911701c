module conformance

go 1.26.0

require pelton v0.0.0

require golang.org/x/sys v0.49.0 // indirect

replace pelton => ../../bindings/go
