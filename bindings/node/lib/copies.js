'use strict';
// Copies of what the addon finds, many by one call: messages, completions, requests.

const { Buffer } = require('node:buffer'); // the global one is a getter, which takes some nanoseconds
const { markAsUntransferable } = require('node:worker_threads');

/** Copies of small ones share memory, as Node's own small Buffers do. A larger one has its own. */
const SLAB = 64 << 10;
const SHARED_MAX = SLAB / 4;
let slab = newSlab();
let used = 0;

function newSlab() {
  const made = Buffer.allocUnsafeSlow(SLAB);
  // The transfer of one message would take the others along.
  markAsUntransferable(made.buffer);
  return made;
}

class Copies {
  #read;
  #sizes;
  #memory;
  #offset = 0;
  #next = 0;
  #count = 0;

  /**
   * `read(space, offset, sizes)` copies to the space from the offset on, each to a multiple of 8, at most so many as
   * there are `sizes`, and returns their number; -1 if there is none; -2 less its bytes if the first one does not fit.
   */
  constructor(read, most) {
    this.#read = read;
    this.#sizes = most;
  }

  /** How many have not been handed out. */
  get length() {
    return this.#count - this.#next;
  }

  /** Makes copies, when all others are handed out: how many. */
  fill() {
    if (typeof this.#sizes === 'number') this.#sizes = new Uint32Array(this.#sizes);
    const sizes = this.#sizes;
    let [space, offset] = [slab, used];
    let count = this.#read(space, offset, sizes);
    // A sender that breaks the protocol may change the size meanwhile.
    while (count < -1) {
      const needed = -2 - count;
      offset = 0;
      if (needed > SHARED_MAX) space = Buffer.allocUnsafeSlow(needed);
      else space = slab = newSlab();
      // What has memory of its own may be transferred, so it is alone in it.
      count = this.#read(space, 0, space === slab ? sizes : sizes.subarray(0, 1));
    }
    if (count === -1) return 0;
    this.#memory = space.buffer;
    this.#offset = offset;
    this.#next = 0;
    this.#count = count;
    if (space !== slab) return count;
    used = offset;
    for (let index = 0; index < count; index += 1) used += (sizes[index] + 7) & ~7;
    return count;
  }

  /** The next one. */
  take() {
    const size = this.#sizes[this.#next];
    let message;
    try {
      message = Buffer.from(this.#memory, this.#offset, size);
    } catch (error) {
      // The memory of the copies was detached: the next call makes new ones.
      this.forget();
      throw error;
    }
    this.#next += 1;
    this.#offset += (size + 7) & ~7;
    return message;
  }

  /** Forgets those that were not handed out. */
  forget() {
    this.#next = this.#count = 0;
  }
}

module.exports = { Copies };
