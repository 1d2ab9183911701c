/* The protocol of sleeping and waking in protocol.md, for Spin: `verify/model` runs it. One lane, one sender, one
 * receiver; each may sleep, the sender for free space and the receiver for a message. The model finds a side that
 * sleeps without end (an invalid end state), and a message that is missing, incomplete, or not released in time (an
 * assertion).
 *
 * The memory is that of x86-64 (TSO): a store goes into a FIFO buffer of its process and reaches memory some time
 * later; a load reads memory. That is a store buffer without forwarding: no process loads its own stores. Rings, which
 * are system calls, and the hang-up go through the buffer too: the kernel's locks make all earlier stores visible
 * before them, and the model relies on no more than that.
 *
 * MESSAGES  number of messages                        LOSE    membarrier may be refused at any time, permanently
 * CLOSES    the receiver may close at any time        DIES    the sender (1) or the receiver (2) may die at any time
 * LIVES     so many receivers in succession take over the same pages, each with or without membarrier
 * CHOOSES   a side that rings may fence from then on, and may stop at any time; its peer then omits membarrier
 * The model tries each side with and without membarrier. The other names are mistakes, one each: each must make the
 * model fail. */

#ifndef MESSAGES
#define MESSAGES 3
#endif
#ifndef LIVES
#define LIVES 1
#endif
#ifndef DIES
#define DIES 0
#endif

/* The lane: a ring of so many slots, of which one is always cleared. */
#define SLOTS 3

/* The sender and the receiver: the owners of the buffers. */
#define S 0
#define R 1

/* The shared words. Each has one writer. Numbers begin at 1 and stand for seqs; the threshold is a seq too. */
#define HEADER 0
#define DATA 3
#define TO_RECEIVER 6 /* of the sender's page: from here on */
#define TO_SENDER 11  /* of the receiver's */
#define SLEEP 0       /* the sleep word: epoch * 8 + CLOSED + UNBARRIERED + ARMED */
#define FENCED 1
#define STATE 2
#define RING 3        /* written by this side's rings: the other side's doorbell */
#define HANG_UP 4
#define HEAD 16
#define THRESHOLD 17
#define WORDS 18

#define ARMED 1
#define UNBARRIERED 2
#define CLOSED 4
#define EPOCH 8

#define page(side) (TO_RECEIVER + 5 * (side))
#define other(side) (1 - (side))
#define at(n) ((n) % SLOTS)

byte memory[WORDS];
chan buffer[2] = [4] of { byte, byte };
bool registered[2]; /* registered for membarrier, and allowed to call it */
byte committed;     /* messages that have reached memory: not part of the protocol */
bool kill[2];

#define store(side, word, value) buffer[side]!word, value
#define fence(side) empty(buffer[side])

proctype buffered(byte side) {
    byte word, value;
end:
    do
    :: atomic {
        buffer[side]?word, value ->
        memory[word] = value;
        if
        :: word < SLOTS && value > 0 && value < 100 -> committed = value
        :: else
        fi;
        word = 0;
        value = 0
    }
    od
}

/* The sleeper's half: membarrier also makes the other side's earlier stores visible, if its process is registered.
 * It is not needed if the other side declares that it fences, as read after the sleeper's own fence. */
inline barrier(side) {
#ifdef CHOOSES
#ifndef NO_OWN_FENCE
    fence(side);
#endif
    if
    :: memory[page(other(side)) + FENCED] -> skip
    :: else -> membarrier(side)
    fi
#else
    membarrier(side)
#endif
}

inline membarrier(side) {
#ifdef LOSE
    if
    :: registered[side] -> refused = 1
    :: skip
    fi;
#endif
#ifndef NO_BARRIER
    fence(side);
#endif
#if !defined(NO_BARRIER) && !defined(PRIVATE)
    if
    :: registered[side] && !refused && registered[other(side)] -> fence(other(side))
    :: else
    fi;
#endif
    if
    :: refused && !(flags & UNBARRIERED) ->
        flags = flags | UNBARRIERED;
        store(side, page(side) + SLEEP, epoch + flags + ARMED)
    :: else
    fi
}

inline drain(side) {
    memory[page(other(side)) + RING] = 0
}

inline arm(side) {
#ifndef SAME_EPOCH
    epoch = epoch + EPOCH;
#endif
    store(side, page(side) + SLEEP, epoch + flags + ARMED);
    barrier(side)
#ifdef DRAIN_BETWEEN
    ;
    drain(side)
#endif
}

inline disarm(side) {
    store(side, page(side) + SLEEP, epoch + flags)
}

/* Whether the sleep must be a timed wait, of a millisecond. */
inline must_time_out(side) {
#ifdef NO_TIMED_WAIT
    timed = 0
#else
    timed = (flags & UNBARRIERED) && !memory[page(other(side)) + FENCED]
#endif
}

/* A timed wait ends at any time; the model tries only the ends that find a change. */
#define sleep(side, change)                                                                       \
    (memory[page(other(side)) + RING] || memory[page(other(side)) + HANG_UP] ||                    \
     (timed && ((change) || memory[page(other(side)) + FENCED])))

/* The waker's half, after its store: `found` is the sleep word. */
inline check_for_sleeper(side) {
    found = memory[page(other(side)) + SLEEP];
    if
#ifdef WAKER_TRUSTS
    :: (found & UNBARRIERED) || fences ->
#else
    :: (found & UNBARRIERED) || fences || !registered[side] ->
#endif
#ifndef NO_FENCE
        fence(side);
#endif
        store(side, page(side) + FENCED, 1);
        found = memory[page(other(side)) + SLEEP]
    :: else
    fi
#ifdef CHOOSES
    ;
    if
    :: fences && registered[side] && !(found & UNBARRIERED) ->
        fences = 0;
#ifndef ANNOUNCED_LATE
        store(side, page(side) + FENCED, 0);
#endif
#ifndef STOP_BLINDLY
        fence(side);
        found = memory[page(other(side)) + SLEEP];
#endif
#ifdef ANNOUNCED_LATE
        store(side, page(side) + FENCED, 0);
#endif
        if
        :: found & UNBARRIERED -> store(side, page(side) + FENCED, 1)
        :: else
        fi
#ifdef BEGIN_ANYWHERE
    :: fences = 1;
        store(side, page(side) + FENCED, 1)
#endif
    :: skip
    fi
#endif
}

#define sleeps (found & ARMED && found / EPOCH != rung)

inline ring(side) {
    rung = found / EPOCH;
#ifdef CHOOSES
    if
    :: fences = 1;
        store(side, page(side) + FENCED, 1)
    :: skip
    fi;
#endif
    store(side, page(side) + RING, 1)
}

/* In this order: a side that detects a later one finds the earlier ones. */
inline close(side) {
#ifdef CLOSE_LATE
    store(side, page(side) + HANG_UP, 1);
#endif
    store(side, page(side) + STATE, 2);
    store(side, page(side) + SLEEP, epoch + (flags | CLOSED));
    store(side, page(side) + RING, 1);
    store(side, page(side) + HANG_UP, 1)
}

proctype sender() {
    byte sent, head, epoch = EPOCH, flags, found, rung, threshold;
    bool timed, refused, all, fences;
#ifdef GUARD
    byte guard;
#endif
    {
#ifndef SLEEPER_SILENT
        flags = (registered[S] -> 0 : UNBARRIERED);
#endif
        do
        :: sent < MESSAGES || all ->
            head = memory[HEAD];
            if
            :: all && head == sent -> break
            :: !all && sent - head < SLOTS - 1 ->
#ifdef PUBLISH_EARLY
                store(S, HEADER + at(sent), sent + 1);
#endif
                store(S, DATA + at(sent), sent + 1);
#ifndef NO_CLEAR
                store(S, HEADER + at(sent + 1), 0);
#endif
#ifdef GUARD
                guard = memory[HEADER + at(sent)];
#endif
#ifndef PUBLISH_EARLY
                store(S, HEADER + at(sent), sent + 1);
#endif
                sent++;
#ifdef GUARD
                if
                :: guard == 100 -> store(S, page(S) + RING, 1)
                :: else
                fi
#else
                check_for_sleeper(S);
                if
                :: found & CLOSED -> goto gone
                :: else ->
                    if
                    :: sleeps -> ring(S)
                    :: else
                    fi
                fi
#endif
            :: else ->
                drain(S);
                head = memory[HEAD];
                threshold = head + (all -> sent - head : (sent - head + 1) / 2);
#ifdef BEYOND_EMPTY
                threshold = threshold + 2;
#endif
#ifndef THRESHOLD_LATE
                store(S, THRESHOLD, threshold);
#endif
                arm(S);
#ifdef THRESHOLD_LATE
                store(S, THRESHOLD, threshold);
#endif
#ifndef NO_RECHECK
                head = memory[HEAD];
#endif
                if
                :: (all && head == sent) || (!all && sent - head < SLOTS - 1) -> skip
                :: else ->
                    if
                    :: memory[page(R) + STATE] == 2 -> goto gone
                    :: else
                    fi;
#ifdef DRAIN_LATE
                    drain(S);
#endif
                    must_time_out(S);
                    sleep(S, memory[HEAD] != head);
                    if
                    :: memory[page(R) + HANG_UP] && memory[HEAD] == head -> goto gone
                    :: else
                    fi
                fi;
                disarm(S)
            fi
        :: sent == MESSAGES && !all ->
            /* It may wait until all messages are released, or not. */
            if
            :: all = 1
            :: break
            fi
        od;
gone:
        close(S);
        goto over
    } unless { kill[S] };
    /* The kernel closes its descriptors, after its stores. */
    store(S, page(S) + HANG_UP, 1);
over:
    skip
}

proctype receiver() {
    byte received, epoch = EPOCH, flags, found, rung, header, lives = 1;
    bool timed, refused, fences;
    {
#ifndef SLEEPER_SILENT
        flags = (registered[R] -> 0 : UNBARRIERED);
#endif
        do
        :: header = memory[HEADER + at(received)];
            if
            :: header == received + 1 ->
#ifdef RELEASE_EARLY
                store(R, HEAD, received + 1);
#endif
                assert(memory[DATA + at(received)] == received + 1);
                received++;
#ifndef RELEASE_EARLY
                store(R, HEAD, received);
#endif
                check_for_sleeper(R);
                if
                :: sleeps ->
#ifdef RUNG_EARLY
                    rung = found / EPOCH;
#endif
                    if
                    :: received >= memory[THRESHOLD] -> ring(R)
                    :: else
                    fi
                :: else
                fi
            :: header == 0 || header == 100 ->
                drain(R);
#ifdef GUARD
                store(R, HEADER + at(received), 100);
                fence(R);
#else
                arm(R);
#endif
#if !defined(NO_RECHECK) && !defined(GUARD)
                header = memory[HEADER + at(received)];
#endif
                if
                :: header == 0 || header == 100 ->
                    if
                    :: memory[page(S) + STATE] == 2 ->
                        /* Again: all messages committed before the close are visible now. */
#ifndef NO_LAST_CHECK
                        header = memory[HEADER + at(received)];
#endif
                        if
                        :: header == 0 -> break
                        :: else
                        fi
                    :: else ->
#ifdef DRAIN_LATE
                        drain(R);
#endif
                        must_time_out(R);
                        sleep(R, memory[HEADER + at(received)] != 0);
                        if
                        :: memory[page(S) + HANG_UP] ->
                            header = memory[HEADER + at(received)];
                            if
                            :: header == 0 ->
                                assert(kill[S] || memory[page(S) + STATE] == 2);
                                break
                            :: else
                            fi
                        :: else
                        fi
                    fi
                :: else
                fi;
                disarm(R)
            :: else -> assert(false) /* corrupt: old bytes read as a record */
            fi
        :: lives < LIVES ->
            /* A successor takes over the pages as they are, rings, and has membarrier or not. */
            fence(R);
            lives++;
            refused = 0;
            rung = 0;
            if
            :: registered[R] = 1
            :: registered[R] = 0
            fi;
            epoch = epoch + EPOCH;
#ifdef U_CLEARED
            flags = (registered[R] -> 0 : UNBARRIERED);
#else
            flags = flags | (registered[R] -> 0 : UNBARRIERED);
#endif
            disarm(R);
            found = memory[page(S) + SLEEP];
            /* The sender may already rely on the predecessor's announcement. */
            fences = memory[page(R) + FENCED];
            store(R, page(R) + FENCED, (fences || (found & UNBARRIERED) || !registered[R] -> 1 : 0));
            store(R, page(R) + RING, 1)
#ifdef CLOSES
        :: goto close_now
#endif
        od;
        /* The receiver has detected the end: it has received all committed messages. */
        assert(received == committed);
        assert(DIES != 0 || received == MESSAGES);
#ifdef CLOSES
close_now:
#endif
        close(R);
        goto over
    } unless { kill[R] };
    store(R, page(R) + HANG_UP, 1);
over:
    skip
}

init {
    atomic {
        if
        :: registered[S] = 1
        :: registered[S] = 0
        fi;
        if
        :: registered[R] = 1
        :: registered[R] = 0
        fi;
        /* A fresh page's threshold may be a number of long ago, or a future one. */
        memory[THRESHOLD] = 99;
        memory[page(S) + SLEEP] = EPOCH;
        memory[page(R) + SLEEP] = EPOCH;
#ifndef SLEEPER_SILENT
        memory[page(S) + SLEEP] = EPOCH + (registered[S] -> 0 : UNBARRIERED);
        memory[page(R) + SLEEP] = EPOCH + (registered[R] -> 0 : UNBARRIERED);
#endif
        memory[page(S) + FENCED] = !(registered[S] && registered[R]);
        memory[page(R) + FENCED] = memory[page(S) + FENCED];
        run buffered(S);
        run buffered(R);
        run sender();
        run receiver()
    }
#if DIES == 1
    ;
    kill[S] = 1
#endif
#if DIES == 2
    ;
    kill[R] = 1
#endif
}
