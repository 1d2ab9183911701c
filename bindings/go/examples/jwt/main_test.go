package main

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	pelton "github.com/pelton-ipc/pelton/bindings/go"
)

func TestTokensAreVerifiedByCalls(t *testing.T) {
	directory, err := os.MkdirTemp("", "pelton-jwt")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(directory)
	name := "unix:" + directory + "/socket"
	service, err := pelton.ListenService(name, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer service.Close()
	go func() { _ = service.Serve(context.Background(), answer) }()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	client, err := pelton.ConnectClient(ctx, name, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	ask := func(token string) (string, uint32) {
		claims, err := client.Call(ctx, []byte(token))
		var failed *pelton.CallError
		if err != nil && !errors.As(err, &failed) {
			t.Fatal(err)
		}
		if failed != nil {
			return "", failed.Code
		}
		return string(claims), 0
	}
	for number, wanted := range []uint32{0, signature, expired, early} {
		made, err := token(number)
		if err != nil {
			t.Fatal(err)
		}
		claims, code := ask(made)
		if code != wanted || code == 0 && !strings.Contains(claims, `"sub":"user 0"`) {
			t.Fatal(number, claims, code)
		}
	}
	// One that chooses for itself, one that is cut short, and one that never ends.
	none, err := jwt.NewWithClaims(jwt.SigningMethodNone,
		jwt.MapClaims{"exp": time.Now().Add(time.Hour).Unix()}).SignedString(jwt.UnsafeAllowNoneSignatureType)
	if err != nil {
		t.Fatal(err)
	}
	endless, err := jwt.NewWithClaims(jwt.SigningMethodHS256, jwt.MapClaims{"sub": "user"}).SignedString(secret)
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{none, endless, endless[:len(endless)/2], "", "a.b.c"} {
		if claims, code := ask(bad); code == 0 {
			t.Fatal(bad, claims)
		}
	}
}
