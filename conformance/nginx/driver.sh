#!/bin/sh
# The conformance driver of Lua in nginx. ../README.md has the command line; driver.lua makes the calls.
set -eu
case ${1:-} in
call) ;;
send | recv | serve | gather)
    echo "unsupported $1: Lua in nginx has clients of services, no channels and no services of its own"
    exit 3
    ;;
*)
    echo "unsupported ${1:-}: this driver does not have it"
    exit 3
    ;;
esac
[ $# -eq 4 ] || {
    echo "usage: driver $1 NAME COUNT SIZE" >&2
    exit 2
}
out=$(cd "$(dirname "$0")" && pwd)
made=$(mktemp -d)
nginx=''
clean_up() {
    [ -z "$nginx" ] || { kill "$nginx" && wait "$nginx"; } 2>/dev/null || true
    rm -rf "$made"
}
trap clean_up EXIT
trap 'exit 1' HUP INT TERM
sed "s|OUT|$out|; s|MADE|$made|" "$out/nginx.conf" >"$made/nginx.conf"
nginx -p "$made" -c "$made/nginx.conf" 2>"$made/output" &
nginx=$!
request() { curl -s -m 20 -G --unix-socket "$made/http" -o "$made/answer" -w '%{http_code}' "$@"; }
# nginx has 10 seconds until it listens; exit code 7 of curl is a refused connection.
tries=0
until code=0 && status=$(request --data-urlencode "name=$2" -d "count=$3" -d "size=$4" http://nginx/call) || code=$? && [ $code != 7 ]; do
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
