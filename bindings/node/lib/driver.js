'use strict';
// What clients and services share: `_drive` takes what has come, lets the code run that this made ready, and when
// nothing has come, polls for some microseconds, arms, and leaves the rest to the loop.

const { POLLED, TURN } = require('./waits.js');

/** Completions or requests that are taken before other code has its turn. A guess. */
const BATCH = 128;

class Driver {
  _native;
  // What was taken in this turn of the loop.
  _taken = 0;
  #isClosed = false;
  #isScheduled = false;
  // Whether the loop watches the descriptor, which keeps the process alive.
  #isAwaited = false;
  #arm;
  #busyPoll;
  #rung = () => {
    this.#isAwaited = false;
    this._taken = 0;
    this._drive();
  };

  #run = () => {
    this.#isScheduled = false;
    if (!this.#isClosed) this._drive();
  };

  /** `arm()` has the descriptor watched, unless something is there: then it returns false. */
  constructor(native, busyPoll, arm) {
    this._native = native;
    this.#busyPoll = busyPoll;
    this.#arm = arm;
    native.watch(this.#rung);
  }

  /** Has `_drive` run after the code that is ready now; in the next turn of the loop if this one has had its part. */
  _start() {
    if (this.#isScheduled) return;
    this.#isScheduled = true;
    if (this._taken < TURN) {
      process.nextTick(this.#run);
      return;
    }
    setImmediate(() => {
      this._taken = 0;
      this.#run();
    });
  }

  /** After another call of the addon, also one that threw: it has withdrawn what `_await` had armed. */
  _rearm() {
    if (this.#isAwaited) this._start();
  }

  /** Polls for some microseconds: whether something has come. */
  _poll() {
    if (!this.#busyPoll()) return false;
    this._taken += POLLED;
    return true;
  }

  /** Leaves the rest to the loop; false if something is there. */
  _await() {
    this.#isAwaited = this.#arm();
    if (!this.#isAwaited) this._taken += POLLED;
    return this.#isAwaited;
  }

  /** Nothing is awaited any more. */
  _rest() {
    if (!this.#isAwaited) return;
    this.#isAwaited = false;
    this._native.stop();
  }

  /** A wait keeps the process alive: the default. */
  ref() {
    this._native.setRef(true);
    return this;
  }

  /** A wait does not keep the process alive. */
  unref() {
    this._native.setRef(false);
    return this;
  }

  close() {
    this.#isClosed = true;
    this.#isAwaited = false;
    this._native.close();
  }

  get closed() {
    return this.#isClosed;
  }
}

module.exports = { BATCH, Driver };
