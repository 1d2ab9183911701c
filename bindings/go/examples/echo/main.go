// Echo is a service that answers each request with its own bytes, until a signal ends it: then it drains, so that
// one started before takes its place without a call failing.
//
//	echo NAME       a short name, under which several may serve, or unix:PATH
package main

import (
	"context"
	"log"
	"os"
	"os/signal"
	"syscall"

	pelton "github.com/pelton-ipc/pelton/bindings/go"
)

func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: echo NAME")
	}
	service, err := pelton.ListenService(os.Args[1], nil)
	if err != nil {
		log.Fatal(err)
	}
	ends := make(chan os.Signal, 1)
	signal.Notify(ends, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-ends
		service.Drain()
	}()
	err = service.Serve(context.Background(), func(request pelton.Request) {
		if request.IsNotification() {
			return
		}
		if err := request.Reply(request.Bytes()); err != nil {
			log.Print("a client got no reply: ", err)
		}
	})
	if err != nil {
		log.Fatal(err)
	}
	_ = service.Close()
}
