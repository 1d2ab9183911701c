module examples

go 1.26.0

require github.com/pelton-ipc/pelton/bindings/go v0.0.0

require (
	github.com/golang-jwt/jwt/v5 v5.3.1
	golang.org/x/sys v0.49.0 // indirect
)

replace github.com/pelton-ipc/pelton/bindings/go => ../
