#!/bin/sh
# The conformance driver of Lua in nginx. ../README.md has the command line; driver.lua makes the calls.
set -eu
verb=${1:-}
unsupported() {
    echo "unsupported $verb: $1"
    exit 3
}
case $verb in
call | stream) ;;
send | recv | gather) unsupported "Lua in nginx has no channels" ;;
serve | serve-stream) unsupported "Lua in nginx has clients, no services of its own" ;;
write-records | read-records) unsupported "Lua in nginx has no record files" ;;
vectors) unsupported "libpelton, which it uses, is tested with the vectors" ;;
*) unsupported "this driver does not have it" ;;
esac
are_numbers() { # COUNT SIZES
    case $1 in '' | *[!0-9]*) return 1 ;; esac
    case ,$2, in *,,* | *[!0-9,]*) return 1 ;; esac
}
[ $# -eq 4 ] && are_numbers "$3" "$4" || {
    echo "usage: driver $verb NAME COUNT SIZES, as conformance/README.md has it" >&2
    exit 2
}
seconds=${PELTON_SECONDS:-10}
out=$(cd "$(dirname "$0")" && pwd)
made=$(mktemp -d)
nginx=''
clean_up() {
    [ -z "$nginx" ] || { kill "$nginx" && wait "$nginx"; } 2>/dev/null || true
    rm -rf "$made"
}
trap clean_up EXIT
trap 'exit 1' HUP INT PIPE TERM
sed "s|OUT|$out|; s|MADE|$made|" "$out/nginx.conf" >"$made/nginx.conf"
nginx -p "$made" -c "$made/nginx.conf" 2>"$made/output" &
nginx=$!
request() { curl -s -G --unix-socket "$made/http" -o "$made/answer" -w '%{http_code}' "$@"; }
# nginx has 10 seconds until it listens; exit code 7 of curl is a refused connection.
tries=0
until code=0 && status=$(request --data-urlencode "name=$2" -d "count=$3&sizes=$4&seconds=$seconds" "http://nginx/$verb") || code=$? && [ $code != 7 ]; do
    tries=$((tries + 1))
    [ $tries -lt 500 ] && kill -0 $nginx 2>/dev/null || break
    sleep 0.02
done
if [ "$status" = 200 ]; then
    cat "$made/answer"
else
    echo "nginx replied with status $status" >&2
    cat "$made/answer" "$made/output" "$made/error.log" >&2 2>/dev/null || true
    exit 1
fi
