'use strict';
// What clients and services share: `_drive` takes what has come, lets the code run that this made ready, and when
// nothing has come, polls for some microseconds, arms, and leaves the rest to the loop.

/** Completions or requests that are taken before other work of the loop has its turn. A guess. */
const TURN = 128;

class Driver {
  _native;
  #isScheduled = false;
  #rung = () => this._drive();

  constructor(native) {
    this._native = native;
    native.watch(this.#rung);
  }

  /** Has `_drive` run after the code that is ready now. */
  _start() {
    if (this.#isScheduled) return;
    this.#isScheduled = true;
    setImmediate(() => {
      this.#isScheduled = false;
      if (!this._native.closed) this._drive();
    });
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

  get closed() {
    return this._native.closed;
  }
}

module.exports = { Driver, TURN };
