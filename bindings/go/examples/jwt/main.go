// Jwt verifies JSON Web Tokens (RFC 7519) for clients in any language. A token's claims are the reply, as
// JSON; else the call fails with a code: 1 malformed, 2 wrong signature, 3 expired, 4 not valid yet.
//
//	jwt serve NAME       a short name, under which several may serve, or unix:PATH
//	jwt tokens COUNT     prints tokens, by turns: good, of another secret, expired an hour ago, valid in half an hour
//
// The secret is a published one. A real service would have its own.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/golang-jwt/jwt/v5"
	pelton "github.com/pelton-ipc/pelton/bindings/go"
)

var (
	secret  = []byte("a secret of both sides, of 32 bytes")
	another = []byte("another secret that nobody shares..")
)

const (
	malformed = 1
	signature = 2
	expired   = 3
	early     = 4
)

// The token does not choose what it is verified by.
var parser = jwt.NewParser(jwt.WithValidMethods([]string{"HS256"}), jwt.WithExpirationRequired())

// verify is the claims of a token that is what it says; else a code, and why it is not.
func verify(token string) (claims []byte, code uint32, why string) {
	parsed, err := parser.Parse(token, func(*jwt.Token) (any, error) { return secret, nil })
	switch {
	case errors.Is(err, jwt.ErrTokenExpired):
		return nil, expired, "it has expired"
	case errors.Is(err, jwt.ErrTokenNotValidYet):
		return nil, early, "it is not valid yet"
	case errors.Is(err, jwt.ErrTokenSignatureInvalid):
		return nil, signature, "the signature is not its issuer's"
	case err != nil:
		return nil, malformed, err.Error()
	}
	claims, err = json.Marshal(parsed.Claims)
	if err != nil {
		return nil, malformed, err.Error()
	}
	return claims, 0, ""
}

func answer(request pelton.Request) {
	if request.IsNotification() {
		return
	}
	claims, code, why := verify(string(request.Bytes()))
	if code != 0 {
		// The client is gone.
		_ = request.Fail(code, []byte(why))
		return
	}
	_ = request.Reply(claims)
}

func serve(name string) error {
	service, err := pelton.ListenService(name, nil)
	if err != nil {
		return err
	}
	ends := make(chan os.Signal, 1)
	signal.Notify(ends, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-ends
		service.Drain()
	}()
	return errors.Join(service.Serve(context.Background(), answer), service.Close())
}

func token(number int) (string, error) {
	key, expires := secret, time.Now().Add(time.Hour)
	claims := jwt.MapClaims{"sub": fmt.Sprintf("user %d", number)}
	switch number % 4 {
	case 1:
		key = another
	case 2:
		expires = time.Now().Add(-time.Hour)
	case 3:
		claims["nbf"] = time.Now().Add(time.Hour / 2).Unix()
	}
	claims["exp"] = expires.Unix()
	return jwt.NewWithClaims(jwt.SigningMethodHS256, claims).SignedString(key)
}

func tokens(text string) error {
	count, err := strconv.Atoi(text)
	for number := 0; number < count && err == nil; number++ {
		var made string
		if made, err = token(number); err == nil {
			fmt.Println(made)
		}
	}
	return err
}

func main() {
	err := errors.New("usage: jwt serve NAME | jwt tokens COUNT")
	if len(os.Args) == 3 {
		switch os.Args[1] {
		case "serve":
			err = serve(os.Args[2])
		case "tokens":
			err = tokens(os.Args[2])
		}
	}
	if err != nil {
		log.Fatal(err)
	}
}
