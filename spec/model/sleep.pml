/* Sleep and wake, as protocol.md has it, for Spin: `verify/model` runs it. One lane, one sender, one receiver; each may sleep, one
 * for room and one for a message. It looks for a side that sleeps for ever (an invalid end state) and for a message that is not
 * there, not whole, or not released when it should be (an assertion).
 *
 * The memory is that of x86-64 (TSO): a store goes into a buffer of its process, first in first out, and reaches memory some time
 * later; a load reads memory. That is a store buffer without forwarding: no process loads what it stores. System calls that ring,
 * and the hang-up, go through the buffer too: the kernel's locks let nobody see them before what came before, and no more than
 * that is relied on.
 *
 * MESSAGES  so many are sent                          LOSE    membarrier may be refused at any time, for good
 * CLOSES    the receiver may close at any time        DIES    the sender (1) or the receiver (2) may die at any time
 * LIVES     so many receivers, one after the other, take over the same pages, each with or without membarrier
 * CHOOSES   a side that rings may fence from then on, and stop at any time; who reads that it fences leaves membarrier out
 * Whether each side has membarrier is tried both ways. The other names are mistakes, one each: with any, the model must fail. */

#ifndef MESSAGES
#define MESSAGES 3
#endif
#ifndef LIVES
#define LIVES 1
#endif
#ifndef DIES
#define DIES 0
#endif

/* The lane: a ring of so many places, of which one is always cleared. */
#define SLOTS 3

/* The sender, and the receiver: whose buffer it is. */
#define S 0
#define R 1

/* The shared words. Each has one writer. Numbers begin at 1 and stand for seqs; room is a seq too. */
#define HEADER 0
#define DATA 3
#define TO_RECEIVER 6 /* of the sender's page: from here on */
#define TO_SENDER 11  /* of the receiver's */
#define SLEEP 0       /* the sleep word: epoch * 8 + CLOSED + UNBARRIERED + ARMED */
#define FENCED 1
#define STATE 2
#define RING 3        /* what that side has rung: the other's bell */
#define HANG_UP 4
#define HEAD 16
#define ROOM 17
#define WORDS 18

#define ARMED 1
#define UNBARRIERED 2
#define CLOSED 4
#define EPOCH 8

#define page(who) (TO_RECEIVER + 5 * (who))
#define other(who) (1 - (who))
#define at(n) ((n) % SLOTS)

byte memory[WORDS];
chan buffer[2] = [4] of { byte, byte };
bool registered[2]; /* for membarrier, and may call it */
byte committed;     /* what has reached memory: not a part of the protocol */
bool kill[2];

#define store(who, word, value) buffer[who]!word, value
#define fence(who) empty(buffer[who])

proctype buffered(byte who) {
    byte word, value;
end:
    do
    :: atomic {
        buffer[who]?word, value ->
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

/* The sleeper's half: with membarrier, what the other has stored so far is seen too, if its process is registered. Not if the other
 * says, behind the sleeper's own fence, that it fences. */
inline barrier(who) {
#ifdef CHOOSES
#ifndef NO_OWN_FENCE
    fence(who);
#endif
    if
    :: memory[page(other(who)) + FENCED] -> skip
    :: else -> membarrier(who)
    fi
#else
    membarrier(who)
#endif
}

inline membarrier(who) {
#ifdef LOSE
    if
    :: registered[who] -> refused = 1
    :: skip
    fi;
#endif
#ifndef NO_BARRIER
    fence(who);
#endif
#if !defined(NO_BARRIER) && !defined(PRIVATE)
    if
    :: registered[who] && !refused && registered[other(who)] -> fence(other(who))
    :: else
    fi;
#endif
    if
    :: refused && !(flags & UNBARRIERED) ->
        flags = flags | UNBARRIERED;
        store(who, page(who) + SLEEP, epoch + flags + ARMED)
    :: else
    fi
}

inline drain(who) {
    memory[page(other(who)) + RING] = 0
}

inline arm(who) {
#ifndef SAME_EPOCH
    epoch = epoch + EPOCH;
#endif
    store(who, page(who) + SLEEP, epoch + flags + ARMED);
    barrier(who)
#ifdef DRAIN_BETWEEN
    ;
    drain(who)
#endif
}

inline disarm(who) {
    store(who, page(who) + SLEEP, epoch + flags)
}

/* Whether a sleep may last a millisecond only. */
inline must_nap(who) {
#ifdef NO_NAP
    nap = 0
#else
    nap = (flags & UNBARRIERED) && !memory[page(other(who)) + FENCED]
#endif
}

/* A nap ends at any time; only where it finds a change need that be tried. */
#define sleep(who, change)                                                                       \
    (memory[page(other(who)) + RING] || memory[page(other(who)) + HANG_UP] ||                    \
     (nap && ((change) || memory[page(other(who)) + FENCED])))

/* The waker's half, after its store: `found` is the sleep word. */
inline look_for_sleeper(who) {
    found = memory[page(other(who)) + SLEEP];
    if
#ifdef WAKER_TRUSTS
    :: (found & UNBARRIERED) || fences ->
#else
    :: (found & UNBARRIERED) || fences || !registered[who] ->
#endif
#ifndef NO_FENCE
        fence(who);
#endif
        store(who, page(who) + FENCED, 1);
        found = memory[page(other(who)) + SLEEP]
    :: else
    fi
#ifdef CHOOSES
    ;
    if
    :: fences && registered[who] && !(found & UNBARRIERED) ->
        fences = 0;
#ifndef SAID_LATE
        store(who, page(who) + FENCED, 0);
#endif
#ifndef STOP_BLINDLY
        fence(who);
        found = memory[page(other(who)) + SLEEP];
#endif
#ifdef SAID_LATE
        store(who, page(who) + FENCED, 0);
#endif
        if
        :: found & UNBARRIERED -> store(who, page(who) + FENCED, 1)
        :: else
        fi
#ifdef BEGIN_ANYWHERE
    :: fences = 1;
        store(who, page(who) + FENCED, 1)
#endif
    :: skip
    fi
#endif
}

#define sleeps (found & ARMED && found / EPOCH != rung)

inline ring(who) {
    rung = found / EPOCH;
#ifdef CHOOSES
    if
    :: fences = 1;
        store(who, page(who) + FENCED, 1)
    :: skip
    fi;
#endif
    store(who, page(who) + RING, 1)
}

/* In this order: whoever hears a later one finds the earlier. */
inline close(who) {
#ifdef CLOSE_LATE
    store(who, page(who) + HANG_UP, 1);
#endif
    store(who, page(who) + STATE, 2);
    store(who, page(who) + SLEEP, epoch + (flags | CLOSED));
    store(who, page(who) + RING, 1);
    store(who, page(who) + HANG_UP, 1)
}

proctype sender() {
    byte sent, head, epoch = EPOCH, flags, found, rung, wanted;
    bool nap, refused, all, fences;
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
                look_for_sleeper(S);
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
                wanted = head + (all -> sent - head : (sent - head + 1) / 2);
#ifdef BEYOND_EMPTY
                wanted = wanted + 2;
#endif
#ifndef ROOM_LATE
                store(S, ROOM, wanted);
#endif
                arm(S);
#ifdef ROOM_LATE
                store(S, ROOM, wanted);
#endif
#ifndef NO_LOOK
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
                    must_nap(S);
                    sleep(S, memory[HEAD] != head);
                    if
                    :: memory[page(R) + HANG_UP] && memory[HEAD] == head -> goto gone
                    :: else
                    fi
                fi;
                disarm(S)
            fi
        :: sent == MESSAGES && !all ->
            /* It may wait until everything has been taken, or not. */
            if
            :: all = 1
            :: break
            fi
        od;
gone:
        close(S);
        goto over
    } unless { kill[S] };
    /* The system closes what it had; its stores come first. */
    store(S, page(S) + HANG_UP, 1);
over:
    skip
}

proctype receiver() {
    byte taken, epoch = EPOCH, flags, found, rung, header, lives = 1;
    bool nap, refused, fences;
    {
#ifndef SLEEPER_SILENT
        flags = (registered[R] -> 0 : UNBARRIERED);
#endif
        do
        :: header = memory[HEADER + at(taken)];
            if
            :: header == taken + 1 ->
#ifdef RELEASE_EARLY
                store(R, HEAD, taken + 1);
#endif
                assert(memory[DATA + at(taken)] == taken + 1);
                taken++;
#ifndef RELEASE_EARLY
                store(R, HEAD, taken);
#endif
                look_for_sleeper(R);
                if
                :: sleeps ->
#ifdef RUNG_EARLY
                    rung = found / EPOCH;
#endif
                    if
                    :: taken >= memory[ROOM] -> ring(R)
                    :: else
                    fi
                :: else
                fi
            :: header == 0 || header == 100 ->
                drain(R);
#ifdef GUARD
                store(R, HEADER + at(taken), 100);
                fence(R);
#else
                arm(R);
#endif
#if !defined(NO_LOOK) && !defined(GUARD)
                header = memory[HEADER + at(taken)];
#endif
                if
                :: header == 0 || header == 100 ->
                    if
                    :: memory[page(S) + STATE] == 2 ->
                        /* Once more: what was committed before closing is visible now. */
#ifndef NO_LAST_LOOK
                        header = memory[HEADER + at(taken)];
#endif
                        if
                        :: header == 0 -> break
                        :: else
                        fi
                    :: else ->
#ifdef DRAIN_LATE
                        drain(R);
#endif
                        must_nap(R);
                        sleep(R, memory[HEADER + at(taken)] != 0);
                        if
                        :: memory[page(S) + HANG_UP] ->
                            header = memory[HEADER + at(taken)];
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
            :: else -> assert(false) /* corrupt: old bytes taken for a record */
            fi
        :: lives < LIVES ->
            /* A successor takes the pages over where they are, rings, and has membarrier or not. */
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
            /* What the one before said may be relied on already. */
            fences = memory[page(R) + FENCED];
            store(R, page(R) + FENCED, (fences || (found & UNBARRIERED) || !registered[R] -> 1 : 0));
            store(R, page(R) + RING, 1)
#ifdef CLOSES
        :: goto close_now
#endif
        od;
        /* The end has been told: everything committed has been taken. */
        assert(taken == committed);
        assert(DIES != 0 || taken == MESSAGES);
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
        /* What a fresh page says may be a number of long ago, or one to come. */
        memory[ROOM] = 99;
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
