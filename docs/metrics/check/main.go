// Checks a dashboard against the types that Grafana publishes, strictly: unknown, missing and wrong fields are errors.
//
//	go run . FILE
package main

import (
	"errors"
	"log"
	"os"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"github.com/grafana/grafana-foundation-sdk/go/prometheus"
	"github.com/grafana/grafana-foundation-sdk/go/table"
	"github.com/grafana/grafana-foundation-sdk/go/timeseries"
)

func main() {
	log.SetFlags(0)
	if len(os.Args) != 2 {
		log.Fatal("usage: go run . FILE")
	}
	// Only these: all of them take a minute to build.
	known := cog.NewRuntime()
	known.RegisterPanelcfgVariant(table.VariantConfig())
	known.RegisterPanelcfgVariant(timeseries.VariantConfig())
	known.RegisterDataqueryVariant(prometheus.VariantConfig())
	text, err := os.ReadFile(os.Args[1])
	check(err)
	var found dashboard.Dashboard
	check(found.UnmarshalJSONStrict(text))
	check(found.Validate())
}

func check(err error) {
	var errs cog.BuildErrors
	// Without errors it returns an empty list of them, which is no nil.
	if err == nil || errors.As(err, &errs) && len(errs) == 0 {
		return
	}
	log.Fatalf("%s: found a dashboard that Grafana's schema does not permit:\n%s", os.Args[1], err)
}
