# The steps of a test script, for scripts in POSIX sh and bash that source it with `.`:
#
#     . "$root/verify/steps.sh"
#     suite c "$made/step.log"               the suite's name, and a file for the output of its steps
#     step "it compiles" cc -o out in.c      runs the command; a failing step prints its output and ends the script
#     beside "it runs" ./out                 the same, in parallel: as many at a time as there are processors
#     all_done                               waits for those; if one has failed, the script ends
#     suite_passed "12 tests, "              the closing line: `c: 12 tests, 3 steps passed in 4.2 s`
#
# Each step prints a line with its seconds, on standard error. If PELTON_STEPS names a file, each step also appends a
# line to it: SECONDS, a tab, `c: it compiles`. The script's own handler of EXIT calls end_steps, which ends the steps
# that still run.

suite() {
    steps_suite=$1 steps_log=$2 steps_count=0 steps_beside=0 steps_began=$(date +%s%N)
    rm -rf "$steps_log".*
}

say() { printf '%s: %s\n' "$steps_suite" "$*" >&2; }

give_up() {
    say "$*"
    exit 1
}

# seconds_since NANOSECONDS: with one decimal.
seconds_since() {
    steps_tenths=$((($(date +%s%N) - $1 + 50000000) / 100000000))
    printf '%d.%d' $((steps_tenths / 10)) $((steps_tenths % 10))
}

# timed LOG CLAIM COMMAND...: one step, with its line and its record. Returns the command's success.
timed() {
    steps_output=$1 steps_claim=$2 steps_from=$(date +%s%N)
    shift 2
    if "$@" >"$steps_output" 2>&1; then
        steps_seconds=$(seconds_since "$steps_from")
        say "ok $steps_claim ($steps_seconds s)"
        steps_code=0
    else
        steps_seconds=$(seconds_since "$steps_from")
        cat "$steps_output" >&2
        say "FAILED: $steps_claim ($steps_seconds s)"
        steps_code=1
    fi
    [ -z "${PELTON_STEPS:-}" ] || printf '%s\t%s: %s\n' "$steps_seconds" "$steps_suite" "$steps_claim" >>"$PELTON_STEPS"
    return $steps_code
}

step() {
    steps_count=$((steps_count + 1))
    timed "$steps_log" "$@" || exit 1
}

# A FIFO has one token for each step that may run; a step takes one and puts it back.
beside() {
    if [ "$steps_beside" = 0 ]; then
        mkfifo "$steps_log.tokens"
        exec 9<>"$steps_log.tokens"
        nproc | xargs seq >&9
    fi
    read -r steps_token <&9
    [ ! -e "$steps_log.failed" ] || all_done
    steps_count=$((steps_count + 1)) steps_beside=$((steps_beside + 1))
    (
        trap - EXIT
        timed "$steps_log.$steps_beside" "$@" 9>&- || : >"$steps_log.failed"
        echo "$steps_token" >&9
    ) &
    steps_pids="${steps_pids:-} $!"
}

all_done() {
    for steps_pid in ${steps_pids:-}; do
        # A killed step cannot report its failure.
        wait "$steps_pid" || : >"$steps_log.failed"
    done
    steps_pids=''
    [ ! -e "$steps_log.failed" ] || exit 1
}

# end_tree PROCESS: ends it and its children.
end_tree() {
    for steps_child in $(cat "/proc/$1/task/$1/children" 2>/dev/null); do end_tree "$steps_child"; done
    kill "$1" 2>/dev/null || true
}

end_steps() {
    for steps_pid in ${steps_pids:-}; do end_tree "$steps_pid"; done
    for steps_pid in ${steps_pids:-}; do wait "$steps_pid" 2>/dev/null || true; done
    steps_pids=''
}

suite_passed() { # [WHAT-ELSE]: `12 tests, `
    say "${1:-}$steps_count steps passed in $(seconds_since "$steps_began") s"
}
