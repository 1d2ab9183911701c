#!/bin/sh
# The conformance driver of Rust: the pelton command, named by PELTON_TOOL. ../README.md has the command line and the
# messages.
set -eu
verb=${1:-}
case $verb in
send | recv | call | serve | gather) ;;
*)
    echo "unsupported $verb: this driver does not have it"
    exit 3
    ;;
esac
[ $# -eq 4 ] || {
    echo "usage: driver $verb NAME COUNT SIZE" >&2
    exit 2
}
name=$2 count=$3 size=$4
made=$(mktemp -d)
service=''
clean_up() {
    [ -z "$service" ] || kill "$service" 2>/dev/null || true
    rm -rf "$made"
}
trap clean_up EXIT
trap 'exit 1' HUP INT TERM

# The messages, a line each.
awk -v count="$count" -v size="$size" 'BEGIN {
    while (length(letters) < size + 26) letters = letters "abcdefghijklmnopqrstuvwxyz"
    for (i = 0; i < count; i++) print substr(letters, i % 26 + 1, size)
}' >"$made/expected"

case $verb in
send) "$PELTON_TOOL" send --timeout 10 "$name" <"$made/expected" ;;
recv)
    "$PELTON_TOOL" recv --timeout 10 "$name" >"$made/found"
    cmp "$made/expected" "$made/found" >&2
    ;;
call)
    "$PELTON_TOOL" call --timeout 10 --frame lines "$name" <"$made/expected" >"$made/found"
    cmp "$made/expected" "$made/found" >&2
    ;;
gather) "$PELTON_TOOL" recv --follow --count "$count" "$name" | cut -c "1-$size" ;;
serve)
    # `pelton serve` ends by a signal. Each `cat` reports its call through the FIFO; if the service fails, the FIFO
    # ends early.
    mkfifo "$made/calls"
    "$PELTON_TOOL" serve "$name" --exec 'cat && echo >&3' 3>"$made/calls" &
    service=$!
    served=$(timeout 20 head -n "$count" "$made/calls" | wc -l)
    # It drains: it sends the last replies before it ends.
    kill -TERM $service
    ended=0
    wait $service || ended=$?
    service=''
    [ "$served" = "$count" ] && { [ $ended = 0 ] || [ $ended = 143 ]; } || {
        echo "found $served calls and exit code $ended, expected $count and 143" >&2
        exit 1
    }
    ;;
esac
case $verb in send | recv | gather) unit=messages ;; *) unit=calls ;; esac
echo "ok $verb $count $unit"
