'use strict';
// A message in place: a Buffer over shared memory, until it is released.

const { PeltonError } = require('./errors.js');

let hasWarned = false;

const forgotten = new FinalizationRegistry((native) => {
  native.forget();
  if (hasWarned) return;
  hasWarned = true;
  process.emitWarning(
    'a message of peek() was collected before it was released, and delayed its sender until then: call release()',
    'PeltonWarning',
  );
});

class Message {
  #native;
  #memory;
  #data;

  constructor(native) {
    this.#native = native;
    this.#memory = native.buffer();
    // An embedder that permits no memory of others gets a copy.
    this.#data = this.#memory === null ? native.copy() : Buffer.from(this.#memory);
    if (this.#memory === null) native.release();
    else forgotten.register(this.#memory, native, this);
  }

  get data() {
    if (this.#data === undefined) {
      throw new PeltonError('not_received', 'this message is released: copy what you need before that');
    }
    return this.#data;
  }

  get released() {
    return this.#data === undefined;
  }

  get seq() {
    return this.#native.seq;
  }

  get lane() {
    return this.#native.lane;
  }

  get peerPid() {
    return this.#native.peerPid;
  }

  get isRedelivered() {
    return this.#native.isRedelivered;
  }

  get traceparent() {
    return this.#native.traceparent;
  }

  takeDescriptors() {
    return this.#native.takeDescriptors();
  }

  release() {
    if (this.#data === undefined) return;
    this.#data = undefined;
    if (this.#memory === null) return;
    forgotten.unregister(this);
    this.#native.release(this.#memory);
    this.#memory = undefined;
  }
}

if (Symbol.dispose) {
  Object.defineProperty(Message.prototype, Symbol.dispose, { value: Message.prototype.release });
}

module.exports = { Message };
