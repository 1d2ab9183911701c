// Apart from the library, which depends on nothing of this.
module pelton/docs/metrics/check

go 1.24

require github.com/grafana/grafana-foundation-sdk/go v0.0.22
