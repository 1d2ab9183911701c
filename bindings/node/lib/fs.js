'use strict';
// Files, as `node:fs/promises` has them, on pelton's engine: what the page cache has is read and written within the
// call; the rest goes to io_uring, or, where the system lacks that, to threads of the engine. None of the pool's.

const { constants } = require('node:fs');
const path = require('node:path');
const { fileURLToPath } = require('node:url');
const { getSystemErrorName } = require('node:util');

const native = require('./native.js');
const { checkSignal } = require('./check.js');
const { PeltonError, invalidType, invalidValue } = require('./errors.js');

/** Operations that end within their calls, before timers and sockets have a turn. A guess. */
const TURN = 64;
/** The bytes of one read of a file of unknown size. A guess. */
const PIECE = 256 << 10;
/** The most that one read can return. */
const READ_MAX = 0x7ffff000;

/** An environment's engine: the operations that have not ended. */
class Engine {
  #files = native.files();
  #pending = new Map();
  #token = 0;
  #taken = 0;
  #isScheduled = false;
  // The native object has only a weak reference to it while nothing waits.
  #rung = () => this.#drive();

  constructor() {
    this.#files.watch(this.#rung);
  }

  /** Begins an operation by `start(files, token)`. `what` and `at` are for its error, as Node's own. */
  run(what, at, start) {
    this.#token += 1;
    const token = this.#token;
    let found;
    try {
      found = start(this.#files, token);
    } catch (error) {
      return Promise.reject(failure(error, what, at));
    }
    // The call may have found the end of another one, which the descriptor no longer reports.
    if (this.#pending.size > 0) this.#schedule();
    if (found !== null) {
      this.#taken += 1;
      if (this.#taken < TURN) return Promise.resolve(found);
      return new Promise((resolve) => {
        setImmediate(() => {
          this.#taken = 0;
          resolve(found);
        });
      });
    }
    return new Promise((resolve, reject) => {
      this.#pending.set(token, { resolve, reject: (error) => reject(failure(error, what, at)) });
      this.#schedule();
    });
  }

  /** Waits once the code that runs now has begun what it wants. */
  #schedule() {
    if (this.#isScheduled) return;
    this.#isScheduled = true;
    process.nextTick(() => {
      this.#isScheduled = false;
      this.#drive();
    });
  }

  #drive() {
    this.#taken = 0;
    try {
      do {
        for (const [token, hasFailed, found] of this.#files.completions()) {
          const entry = this.#pending.get(token);
          // It was rejected by an error of the engine.
          if (entry === undefined) continue;
          this.#pending.delete(token);
          if (hasFailed) entry.reject(found);
          else entry.resolve(found);
        }
        // Nothing is awaited: then the process may end.
        if (this.#pending.size === 0) return this.#files.stop();
      } while (!this.#files.wait());
    } catch (error) {
      for (const entry of this.#pending.values()) entry.reject(error);
      this.#pending.clear();
    }
    return undefined;
  }
}

let engine;

function run(what, at, start) {
  engine ??= new Engine();
  return engine.run(what, at, start);
}

/** An error of the system as Node's own have it: `code` is its name. Others stay as they are. */
function failure(error, what, at = []) {
  if (error?.errno === undefined) return error;
  const code = getSystemErrorName(error.errno);
  const places = at.map((it) => `'${it}'`).join(' -> ');
  const text = `${code}: ${what}${places === '' ? '' : ` ${places}`}: ${error.message}`;
  const made = Object.assign(new PeltonError(code, text, { cause: error }), { errno: error.errno, syscall: what });
  if (at.length > 0) made.path = `${at[0]}`;
  if (at.length > 1) made.dest = `${at[1]}`;
  return made;
}

/** A path's bytes: of a string, a Buffer, or a URL. */
function bytesOf(place, name = 'path') {
  const found = place instanceof URL ? fileURLToPath(place) : place;
  if (typeof found !== 'string' && !(found instanceof Uint8Array)) {
    throw invalidType(name, place, 'a string, a Buffer or a file: URL');
  }
  const bytes = Buffer.from(found);
  if (bytes.includes(0)) throw invalidValue(name, found, 'a path without zero bytes');
  return bytes;
}

const FLAGS = { r: constants.O_RDONLY, w: constants.O_WRONLY | constants.O_CREAT | constants.O_TRUNC,
  a: constants.O_WRONLY | constants.O_CREAT | constants.O_APPEND };

/** The flags of open(2) for Node's letters: r, w or a, with s, x and +. */
function flagsOf(flags) {
  if (Number.isInteger(flags)) return flags | constants.O_CLOEXEC;
  const parts = /^([rwa])([sx]*)(\+?)([sx]*)$/.exec(flags);
  if (parts === null) throw invalidValue('flags', flags, 'r, r+, w, w+, a or a+, with x or s, or a number');
  const more = parts[2] + parts[4];
  if (parts[1] === 'r' && more.includes('x')) throw invalidValue('flags', flags, 'x with w or a only');
  let found = FLAGS[parts[1]];
  if (parts[3] === '+') found = (found & ~constants.O_WRONLY) | constants.O_RDWR;
  if (more.includes('x')) found |= constants.O_EXCL;
  if (more.includes('s')) found |= constants.O_SYNC;
  return found | constants.O_CLOEXEC;
}

function modeOf(mode) {
  const found = typeof mode === 'string' ? Number.parseInt(mode, 8) : mode;
  if (!Number.isInteger(found) || found < 0 || found > 0o7777) throw invalidValue('mode', mode, 'from 0 to 0o7777');
  return found;
}

/** What an option of `encoding` makes of bytes, and of text. */
function settings(options) {
  const given = typeof options === 'string' ? { encoding: options } : (options ?? {});
  if (typeof given !== 'object') throw invalidType('options', options, 'an object or an encoding');
  checkSignal(given.signal);
  given.signal?.throwIfAborted();
  if (given.encoding != null && given.encoding !== 'buffer' && !Buffer.isEncoding(given.encoding)) {
    throw invalidValue('encoding', given.encoding, 'an encoding of Buffer');
  }
  return given;
}

function decoded(bytes, { encoding }) {
  return encoding == null || encoding === 'buffer' ? bytes : bytes.toString(encoding);
}

function dataOf(data, encoding) {
  if (typeof data === 'string') return Buffer.from(data, encoding ?? 'utf8');
  if (ArrayBuffer.isView(data)) return Buffer.from(data.buffer, data.byteOffset, data.byteLength);
  throw invalidType('data', data, 'a string, a Buffer or another view of bytes');
}

/** What has a file's kind in `mode`, as Stats and Dirent of Node do. */
class Kinded {
  isFile() { return this._is(constants.S_IFREG); }
  isDirectory() { return this._is(constants.S_IFDIR); }
  isSymbolicLink() { return this._is(constants.S_IFLNK); }
  isFIFO() { return this._is(constants.S_IFIFO); }
  isSocket() { return this._is(constants.S_IFSOCK); }
  isCharacterDevice() { return this._is(constants.S_IFCHR); }
  isBlockDevice() { return this._is(constants.S_IFBLK); }
}

class Stats extends Kinded {
  constructor({ kind, ...properties }) {
    super();
    Object.assign(this, properties, { blksize: 4096, rdev: 0 });
    for (const name of ['atime', 'mtime', 'ctime', 'birthtime']) this[name] = new Date(Math.round(this[`${name}Ms`]));
  }

  _is(kind) {
    return (this.mode & constants.S_IFMT) === kind;
  }
}

class Dirent extends Kinded {
  #kind;

  constructor(name, parentPath, kind) {
    super();
    this.name = name;
    this.parentPath = parentPath;
    this.#kind = kind;
  }

  _is(kind) {
    return this.#kind === kind;
  }
}

class FileHandle {
  #file;
  #at;
  // Writes at the file's own position are made one after another.
  #last = Promise.resolve();
  #count = 0;
  #closing;

  constructor(file, at) {
    this.#file = file;
    this.#at = at;
  }

  get fd() {
    return this.#file.fd;
  }

  #run(what, start) {
    return run(what, this.#at, start);
  }

  /** At the file's own position: after what was begun before. */
  #inOrder(position, start) {
    if (position != null) return start();
    this.#count += 1;
    const next = (this.#count === 1 ? start() : this.#last.then(start)).finally(() => {
      this.#count -= 1;
    });
    this.#last = next.catch(() => {});
    return next;
  }

  #readSome(bytes, position) {
    return this.#inOrder(position, () => this.#run('read', (files, token) =>
      files.read(token, this.#file, Math.min(bytes, READ_MAX), position ?? null)));
  }

  async read(buffer, offset, length, position) {
    let given = { buffer, offset, length, position };
    if (buffer === undefined || !ArrayBuffer.isView(buffer)) given = { ...buffer };
    else if (offset !== null && typeof offset === 'object') given = { buffer, ...offset };
    const target = given.buffer ?? Buffer.alloc(16_384);
    const view = dataOf(target);
    const from = given.offset ?? 0;
    const most = given.length ?? view.length - from;
    if (!Number.isInteger(from) || from < 0 || from > view.length) {
      throw invalidValue('offset', from, `an integer from 0 to ${view.length}`);
    }
    if (!Number.isInteger(most) || most < 0 || most > view.length - from) {
      throw invalidValue('length', most, `an integer from 0 to ${view.length - from}`);
    }
    const found = await this.#readSome(most, positionOf(given.position));
    found.copy(view, from);
    return { bytesRead: found.length, buffer: target };
  }

  async write(data, offset, length, position) {
    let bytes;
    let at;
    if (typeof data === 'string') {
      // (text, position, encoding)
      bytes = dataOf(data, length);
      at = offset;
    } else {
      const given = offset !== null && typeof offset === 'object' ? offset : { offset, length, position };
      const view = dataOf(data);
      const from = given.offset ?? 0;
      const most = given.length ?? view.length - from;
      if (!Number.isInteger(from) || from < 0 || !Number.isInteger(most) || most < 0 || from + most > view.length) {
        throw invalidValue('offset and length', `${from} and ${most}`, `a part of ${view.length} bytes`);
      }
      bytes = view.subarray(from, from + most);
      at = given.position;
    }
    const checked = positionOf(at);
    // The addon copies it, but later if others are before.
    if (checked == null && this.#count > 0) bytes = Buffer.from(bytes);
    const bytesWritten = await this.#inOrder(checked, () =>
      this.#run('write', (files, token) => files.write(token, this.#file, bytes, checked ?? null)));
    return { bytesWritten, buffer: data };
  }

  /** From the file's own position to its end. */
  async readFile(options) {
    const given = settings(options);
    const { size } = await this.stat();
    const pieces = [];
    let total = 0;
    for (;;) {
      // One byte more than there should be: then a second read is not needed to find the end.
      const wanted = total < size ? Math.min(size - total + 1, READ_MAX) : PIECE;
      const piece = await this.#readSome(wanted);
      given.signal?.throwIfAborted();
      if (piece.length > 0) pieces.push(piece);
      total += piece.length;
      if (piece.length < wanted) break;
    }
    return decoded(pieces.length === 1 ? pieces[0] : Buffer.concat(pieces), given);
  }

  async writeFile(data, options) {
    const given = settings(options);
    if (typeof data !== 'string' && !ArrayBuffer.isView(data)
      && (data?.[Symbol.asyncIterator] ?? data?.[Symbol.iterator]) !== undefined) {
      for await (const piece of data) {
        given.signal?.throwIfAborted();
        await this.write(dataOf(piece, given.encoding));
      }
      return;
    }
    await this.write(dataOf(data, given.encoding));
  }

  appendFile(data, options) {
    return this.writeFile(data, options);
  }

  async stat() {
    return new Stats(await this.#run('fstat', (files, token) => files.onFile(token, 'fstat', this.#file)));
  }

  async truncate(length = 0) {
    const bytes = positionOf(length) ?? 0;
    await this.#run('ftruncate', (files, token) => files.onFile(token, 'ftruncate', this.#file, bytes));
  }

  async sync() {
    await this.#run('fsync', (files, token) => files.onFile(token, 'fsync', this.#file));
  }

  async datasync() {
    await this.#run('fdatasync', (files, token) => files.onFile(token, 'fdatasync', this.#file));
  }

  close() {
    // As Node's, a second close waits for the first.
    this.#closing ??= this.#last.then(() =>
      this.#run('close', (files, token) => files.closeFile(token, this.#file))).then(() => undefined);
    return this.#closing;
  }

  /** For `copyFile` and `readdir`. */
  static file(handle) {
    return handle.#file;
  }
}

if (Symbol.asyncDispose) {
  Object.defineProperty(FileHandle.prototype, Symbol.asyncDispose, { value: FileHandle.prototype.close });
}

function positionOf(position) {
  if (position == null || position === -1) return undefined;
  const found = Number(position);
  if (!Number.isSafeInteger(found) || found < 0) throw invalidValue('position', position, 'a place in a file, or null');
  return found;
}

async function open(place, flags = 'r', mode = 0o666) {
  const bytes = bytesOf(place);
  const [number, checked] = [flagsOf(flags), modeOf(mode)];
  return new FileHandle(await run('open', [bytes], (files, token) => files.open(token, bytes, number, checked)), [bytes]);
}

/** Opens a file for `body`, unless it is one. */
async function opened(place, flags, mode, body) {
  if (place instanceof FileHandle) return body(place);
  const handle = await open(place, flags, mode);
  try {
    return await body(handle);
  } finally {
    await handle.close();
  }
}

async function readFile(place, options) {
  const given = settings(options);
  return opened(place, given.flag ?? 'r', 0o666, (handle) => handle.readFile(given));
}

async function writeFile(place, data, options) {
  const given = settings(options);
  await opened(place, given.flag ?? 'w', given.mode ?? 0o666, async (handle) => {
    await handle.writeFile(data, given);
    if (given.flush) await handle.sync();
  });
}

async function appendFile(place, data, options) {
  await writeFile(place, data, { flag: 'a', ...settings(options) });
}

async function onPath(what, place, mode) {
  const at = bytesOf(place);
  return run(what, [at], (files, token) => files.onPath(token, what, at, undefined, mode));
}

async function onPaths(what, first, second) {
  const [from, to] = [bytesOf(first), bytesOf(second)];
  await run(what, [from, to], (files, token) => files.onPath(token, what, from, to));
}

const stat = async (place) => new Stats(await onPath('stat', place));
const lstat = async (place) => new Stats(await onPath('lstat', place));
const unlink = async (place) => void (await onPath('unlink', place));
const rmdir = async (place) => void (await onPath('rmdir', place));
const rename = (from, to) => onPaths('rename', from, to);
const link = (existing, added) => onPaths('link', existing, added);
const symlink = (target, place) => onPaths('symlink', target, place);

async function readlink(place, options) {
  return decoded(await onPath('readlink', place), { encoding: 'utf8', ...settings(options) });
}

async function truncate(place, length = 0) {
  await opened(place, 'r+', 0o666, (handle) => handle.truncate(length));
}

async function mkdir(place, options) {
  const given = options !== null && typeof options === 'object' ? options : { mode: options };
  const mode = modeOf(given.mode ?? 0o777);
  if (!given.recursive) {
    await onPath('mkdir', place, mode);
    return undefined;
  }
  const text = path.resolve(`${bytesOf(place)}`);
  try {
    await onPath('mkdir', text, mode);
    return text;
  } catch (error) {
    if (error.code === 'ENOENT' && path.dirname(text) !== text) {
      const first = await mkdir(path.dirname(text), { recursive: true, mode });
      return (await mkdir(text, { recursive: true, mode }), first ?? text);
    }
    if (error.code !== 'EEXIST' || !(await stat(text)).isDirectory()) throw error;
    return undefined;
  }
}

async function readdir(place, options) {
  const given = { encoding: 'utf8', ...settings(options) };
  const bytes = bytesOf(place);
  const parent = `${bytes}`;
  const found = await opened(place, constants.O_RDONLY | constants.O_DIRECTORY, 0o666, async (handle) => {
    const all = [];
    for (;;) {
      const some = await run('scandir', [bytes], (files, token) =>
        files.onFile(token, 'scandir', FileHandle.file(handle)));
      if (some.length === 0) return all;
      all.push(...some);
    }
  });
  const entries = [];
  for (const [name, kind] of found) {
    const text = decoded(name, given);
    entries.push(given.withFileTypes ? new Dirent(text, parent, kind) : text);
    if (given.recursive && kind === constants.S_IFDIR) {
      for (const entry of await readdir(path.join(parent, `${name}`), given)) {
        entries.push(given.withFileTypes ? entry : path.join(text, entry));
      }
    }
  }
  return entries;
}

async function copyFile(from, to, mode = 0) {
  if (!Number.isInteger(mode)) throw invalidType('mode', mode, 'COPYFILE_EXCL or 0');
  await opened(from, 'r', 0o666, async (source) => {
    const permissions = (await source.stat()).mode & 0o7777;
    await opened(to, mode & constants.COPYFILE_EXCL ? 'wx' : constants.O_WRONLY | constants.O_CREAT, permissions,
      async (target) => {
        const [ours, theirs] = await Promise.all([source.stat(), target.stat()]);
        // A file is not copied to itself: the copy would truncate it.
        if (ours.ino === theirs.ino && ours.dev === theirs.dev) return;
        await target.truncate(0);
        await run('copyfile', [bytesOf(from), bytesOf(to)], (files, token) =>
          files.copy(token, FileHandle.file(source), FileHandle.file(target)));
      });
  });
}

async function rm(place, { recursive = false, force = false } = {}) {
  try {
    const found = await lstat(place);
    if (!found.isDirectory()) {
      await unlink(place);
      return;
    }
    if (!recursive) {
      throw Object.assign(new PeltonError('ERR_FS_EISDIR',
        `${bytesOf(place)} is a directory: use { recursive: true }`), { path: `${bytesOf(place)}` });
    }
    const parent = bytesOf(place);
    for (const name of await readdir(place, 'buffer')) await rm(Buffer.concat([parent, SLASH, name]), { recursive, force });
    await rmdir(place);
  } catch (error) {
    if (!(force && error.code === 'ENOENT')) throw error;
  }
}

const SLASH = Buffer.from('/');

module.exports = { FileHandle, appendFile, constants, copyFile, link, lstat, mkdir, open, readFile, readdir, readlink,
  rename, rm, rmdir, stat, symlink, truncate, unlink, writeFile };
