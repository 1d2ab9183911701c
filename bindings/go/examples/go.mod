module examples

go 1.26.0

require pelton v0.0.0

require (
	github.com/golang-jwt/jwt/v5 v5.3.1
	golang.org/x/sys v0.49.0 // indirect
)

replace pelton => ../
