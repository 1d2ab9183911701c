'use strict';
// The one queue of an endpoint's waits: what waits longest is served first. The loop rings when the descriptor is
// readable; then the waits are tried in order, up to a number of them in one turn of the loop.

const { PeltonError, closedHandle, timedOut } = require('./errors.js');

/** What always finds a message, or space, lets timers and sockets have a turn after this number of them. A guess. */
const TURN = 256;

/** A wait that a poll of some microseconds ended counts as this many: a turn polls for a millisecond at most. */
const POLLED = 16;

/** Rejects as the signal says. */
function aborted(signal) {
  return signal.reason;
}

class Waits {
  #native;
  #arm;
  #noun;
  #idle;
  #queue = [];
  #isScheduled = false;
  // Whether the loop watches the descriptor, which keeps the process alive.
  #isAwaited = false;
  #rejectStep;
  // What was found in this turn of the loop without a wait. A message of a batch costs about a quarter of one alone.
  taken = 0;
  // Its native object has only a weak reference to it while nothing waits.
  #rung = () => {
    this.#isAwaited = false;
    this.taken = 0;
    this.#serve();
    if (!this.isWaiting) this.#idle?.();
  };

  /**
   * `arm(bytes)` has the descriptor watched, unless something is there: then it returns false. `idle` is called when
   * nothing waits any more, and when the descriptor was readable while nothing waited.
   */
  constructor(native, arm, noun, idle) {
    this.#native = native;
    this.#arm = arm;
    this.#noun = noun;
    this.#idle = idle;
    native.watch(this.#rung);
  }

  /** Whether an attempt may be made now: nothing waits, and the loop had its turn. */
  get isFree() {
    return this.#queue.length === 0 && this.taken < TURN;
  }

  get isWaiting() {
    return this.#queue.length > 0;
  }

  /**
   * Repeats `attempt` until it returns something; undefined is nothing. `bytes` is what a sender needs space for.
   * `what` is it, for the error of a timeout.
   */
  wait(attempt, what, { timeout, signal } = {}, bytes = () => 0) {
    if (signal?.aborted) return Promise.reject(aborted(signal));
    let wasEmpty = false;
    if (this.isFree) {
      try {
        const found = attempt();
        if (found !== undefined) {
          this.taken += 1;
          return Promise.resolve(found);
        }
      } catch (error) {
        return Promise.reject(error);
      }
      wasEmpty = true;
    }
    const isOnce = timeout <= 0;
    // It was made, or others wait. But if only the turn is over, it is made in the next one.
    if (isOnce && this.taken < TURN) return Promise.reject(timedOut(what));
    return new Promise((resolve, reject) => {
      const entry = { attempt, bytes, what, isOnce, resolve, reject, timer: undefined, signal, abort: undefined };
      if (timeout !== undefined && timeout < 0x7fffffff && !isOnce) {
        // The descriptor keeps the process alive, unless `unref` was called.
        entry.timer = setTimeout(() => this.#leave(entry, timedOut(what)), timeout).unref();
      }
      if (signal !== undefined) {
        entry.abort = () => this.#leave(entry, aborted(signal));
        signal.addEventListener('abort', entry.abort, { once: true });
      }
      this.#queue.push(entry);
      if (this.taken >= TURN) this.#schedule();
      else if (this.#queue.length === 1) this.#serve(wasEmpty);
    });
  }

  #schedule() {
    if (this.#isScheduled) return;
    this.#isScheduled = true;
    setImmediate(() => {
      this.#isScheduled = false;
      this.taken = 0;
      this.#serve();
    });
  }

  /** `wasEmpty`: the first attempt was just made. */
  #serve(wasEmpty = false) {
    const queue = this.#queue;
    let wasReady = false;
    while (queue.length > 0 && this.taken < TURN) {
      const entry = queue[0];
      try {
        const found = wasEmpty ? undefined : entry.attempt();
        wasEmpty = false;
        if (found === undefined) {
          this.#leaveOnce();
          if (queue[0] !== entry) continue;
          if (this.#arm(entry.bytes())) {
            this.#isAwaited = true;
            return;
          }
          // It is ready by now. Once more at once, then in the next turn.
          if (wasReady) break;
          this.taken += POLLED;
          wasReady = true;
          continue;
        }
        this.#end(entry).resolve(found);
      } catch (error) {
        this.#end(entry).reject(error);
      }
      this.taken += 1;
      wasReady = false;
    }
    if (queue.length > 0) this.#schedule();
    else this.#stop();
  }

  /** Ends the waits that make one attempt: nothing is there, for the first wait at least. */
  #leaveOnce() {
    for (const entry of this.#queue.filter((it) => it.isOnce)) this.#end(entry).reject(timedOut(entry.what));
  }

  #stop() {
    if (!this.#isAwaited) return;
    this.#isAwaited = false;
    this.#native.stop();
    this.#idle?.();
  }

  #end(entry) {
    const index = this.#queue.indexOf(entry);
    if (index >= 0) this.#queue.splice(index, 1);
    clearTimeout(entry.timer);
    if (entry.abort !== undefined) entry.signal.removeEventListener('abort', entry.abort);
    return entry;
  }

  #leave(entry, error) {
    const wasFirst = this.#queue[0] === entry;
    this.#end(entry).reject(error);
    if (this.#queue.length === 0) this.#stop();
    // The next one may need less.
    else if (wasFirst) this.#schedule();
  }

  /** Rejects all waits: the endpoint is closed, or taken by a step. */
  rejectAll(error = closedHandle(this.#noun)) {
    for (const entry of [...this.#queue]) this.#end(entry).reject(error);
    this.#rejectStep?.(error);
    this.#rejectStep = undefined;
  }

  /** Runs a step of a thread: `start(callback)`, then `finish()` for its outcome. The endpoint is away meanwhile. */
  step(start, what, { signal } = {}) {
    if (signal?.aborted) return Promise.reject(aborted(signal));
    if (this.isWaiting || this.#rejectStep !== undefined) {
      const text = `something waits at this ${this.#noun}: await that first`;
      return Promise.reject(new PeltonError('wrong_thread', text));
    }
    return new Promise((resolve, reject) => {
      const native = this.#native;
      const cancel = () => native.cancelStep();
      start(() => {
        this.#rejectStep = undefined;
        signal?.removeEventListener('abort', cancel);
        try {
          const isDone = native.finishStep();
          if (isDone) resolve();
          else reject(signal?.aborted ? aborted(signal) : timedOut(what));
        } catch (error) {
          reject(error);
        }
        this.#idle?.();
      });
      this.#rejectStep = reject;
      signal?.addEventListener('abort', cancel, { once: true });
    });
  }
}

/** Waits until an opening has ended: the native endpoint. */
function opened(opening, { signal } = {}) {
  if (signal?.aborted) {
    opening.close();
    return Promise.reject(aborted(signal));
  }
  return new Promise((resolve, reject) => {
    const ended = (settle, value) => {
      signal?.removeEventListener('abort', abort);
      opening.close();
      settle(value);
    };
    const abort = () => ended(reject, aborted(signal));
    const step = () => {
      try {
        const endpoint = opening.tryFinish();
        if (endpoint !== null) ended(resolve, endpoint);
      } catch (error) {
        ended(reject, error);
      }
    };
    opening.watch(step);
    signal?.addEventListener('abort', abort, { once: true });
    step();
  });
}

module.exports = { POLLED, TURN, Waits, opened };
